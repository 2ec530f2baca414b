"""Keys and limits, and what clients see when processes die."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from .servers import Server, events_of, start_p2pserve, wait_ready

pytestmark = pytest.mark.beside

ALICE, BOB, CAROL = "sk-alice-0123456789", "sk-bob-9876543210", "sk-carol-0011223344"
DAVE, ERIN = "sk-dave-5566778899", "sk-erin-9988776655"
PROMPT = {"model": "bundled", "prompt": "def f(", "max_tokens": 4, "temperature": 0}
SLOW = {**PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose keys have limits."""
    home = tmp_path_factory.mktemp("guarded")
    keys = home / "keys.txt"
    keys.write_text(
        f"{ALICE} name=alice tokens_min=4000\n{BOB} name=bob\n{CAROL} name=carol concurrent=1\n"
        f"{DAVE} name=dave cache=both\n{ERIN} name=erin cache=both\n"
    )
    with start_p2pserve(home, "--api-key-file", str(keys)) as server:
        wait_ready(server)
        yield server


def ask(server: Server, key: str, body: object = PROMPT) -> httpx.Response:
    return server.post("/v1/completions", body, Authorization=f"Bearer {key}")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/tokenize", "/docs", "/version", "/health?generate=1"])
def test_everything_but_health_wants_a_key(guarded: Server, path: str) -> None:
    assert guarded.ask("GET", path).status_code == 401
    assert guarded.ask("GET", path, headers={"authorization": "Bearer sk-another-one"}).status_code == 401
    assert guarded.ask("GET", path, headers={"x-api-key": BOB}).status_code in (200, 405)


def test_a_wrong_key_is_refused_before_the_body_is_read(guarded: Server) -> None:
    answer = ask(guarded, "wrong", "x" * 1000)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["type"] == "authentication_error"


def test_a_key_has_what_its_line_says(guarded: Server) -> None:
    assert ask(guarded, ALICE).status_code == 200
    too_much = ask(guarded, ALICE, {**SLOW, "n": 3, "temperature": 1, "stream": False})
    assert too_much.status_code == 429, too_much.text
    assert int(too_much.headers["retry-after"]) >= 1
    assert "alice" in too_much.json()["error"]["message"]
    assert ask(guarded, BOB).status_code == 200


def cached_tokens(server: Server) -> float:
    """Of prompts, that the box has found in its prefix cache; it tells within a second or two."""
    time.sleep(2.5)
    text = server.ask("GET", "/metrics", headers={"authorization": f"Bearer {BOB}"}).text
    return float(re.findall(r'^p2pserve:prefill_tokens_total\{source="prefix cache"\} (\S+)$', text, re.MULTILINE)[0])


def test_keys_share_no_prefix_cache_unless_their_owner_lets_them(guarded: Server) -> None:
    """DAVE and ERIN have `cache=`, BOB and CAROL have not; a request may ask for a cache of its own as well."""
    body = {**PROMPT, "prompt": "def f(x):\n    return x\n" * 60, "max_tokens": 1}
    grown: list[bool] = []
    before = cached_tokens(guarded)
    for key, more in (
        (BOB, {}), (CAROL, {}), (BOB, {"cache_salt": "mine"}), (BOB, {}), (DAVE, {}), (ERIN, {}),
        (BOB, {"cache_salt": "mine"}),
    ):  # fmt: skip
        assert ask(guarded, key, {**body, **more}).status_code == 200
        after = cached_tokens(guarded)
        grown.append(after > before)
        before = after
    assert grown == [False, False, False, True, False, True, True]


def test_a_stream_that_is_refused_has_a_status_of_its_own(guarded: Server) -> None:
    with httpx.stream(
        "POST", f"{guarded.url}/v1/completions", json=SLOW, headers={"x-api-key": CAROL}, timeout=60
    ) as first:
        assert first.status_code == 200, first.read()
        lines = first.iter_lines()  # kept: without it the connection is closed
        next(lines)
        assert ask(guarded, CAROL, {**PROMPT, "stream": True}).status_code == 429


def test_a_new_api_process_takes_over_the_port(guarded: Server) -> None:
    (pid,) = guarded.pids("api.log")
    os.kill(pid, signal.SIGKILL)
    answer = ask(guarded, BOB)  # it waits at the port, which the agent holds
    assert answer.status_code == 200
    assert guarded.pids("api.log") != [pid]


def test_a_stream_goes_on_when_its_engine_dies(guarded: Server) -> None:
    """One box: its request waits for the engine's next life, and the client sees no gap."""
    engine = guarded.engine_pid
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(ask(guarded, BOB, SLOW)))
    thread.start()
    time.sleep(0.5)
    os.kill(engine, signal.SIGKILL)
    thread.join(90)
    events = events_of(answers[0])
    assert events[-1] == "[DONE]"
    last = events[-2]
    assert "error" in last or last["choices"][0]["finish_reason"] == "length"
    wait_ready(guarded)
    assert ask(guarded, BOB).status_code == 200
