"""A box that prefills and one that decodes, each in a process of its own, asked over HTTP, at one of them or through a
gateway: what answers tell of both, who disconnects, and what becomes of answers when boxes or an engine are lost.

The tests run in their order: later ones go on without the box that decodes, and the last one loses both.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest

from ...conftest import WAIT_LIMIT_S, make_random_model
from ..engine.figures import ATTEMPTS
from .servers import Server, events_of, start_gateway, start_join, start_p2pserve, wait_ready

pytestmark = [pytest.mark.beside, pytest.mark.timeout(500)]

LAYERS, KV_HEADS, HEAD_DIM = 8, 2, 64
LONGEST: Final = 6144  # tokens: prefill of so many takes a core seconds, so that one can leave meanwhile
MODEL: Final = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_hidden_layers": LAYERS}
OPTIONS: Final = ("--codec", "raw", "--usd-per-hour", "0.4", "--served-model-name", "noise")
FLOAT_BYTES: Final = 4
FRAMING_BYTES: Final = 20_000  # at most, of the KV of one prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """The two boxes, and a gateway of their network, which is none of them. Their API servers are asked; what each says
    of itself is the first to know."""

    prefill: Server
    decode: Server
    gateway: Server
    prefill_id: str
    decode_id: str
    model: str
    worker_token: str


def fetch(server: Server, path: str) -> Any:
    """What its admin API says."""
    return server.ask("GET", f"/p2p/v1/{path}").raise_for_status().json()


def wait_for(look: Callable[[], T | None], what: str) -> T:
    """What it sees, once that is something."""
    give_up = time.monotonic() + WAIT_LIMIT_S
    while time.monotonic() < give_up:
        if seen := look():
            return seen
        time.sleep(0.1)
    raise AssertionError(f"{what}: not after {WAIT_LIMIT_S:g} s")


def find_pairing(server: Server) -> tuple[str, str] | None:
    """Which box prefills for which, by the plan that it follows; None while none prefills for another."""
    answer = server.ask("GET", "/p2p/v1/plan")
    pairings = answer.json()["pairings"] if answer.status_code == 200 else []
    heads = {replica["id"]: replica["stages"][0]["peer"] for replica in answer.json().get("replicas", ())}
    return next(((heads[p["prefill"]], heads[p["decode"]]) for p in pairings if p["prefill"] != p["decode"]), None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both follow one plan, by which all requests go from the one to the other."""
    folder = tmp_path_factory.mktemp("two-boxes")
    model = str(make_random_model(folder / "model", head_dim=HEAD_DIM, max_position_embeddings=LONGEST, **MODEL))
    with ExitStack() as stack:
        prefill = stack.enter_context(start_p2pserve(folder / "one", "--phase", "prefill", *OPTIONS, model=model))
        token = wait_for(lambda: re.search(r"p2p_worker_[\w-]+", prefill.said), "the token of the first box")[0]
        joined = start_join(folder / "two", token, "--phase", "decode", *OPTIONS, model=model)
        decode = stack.enter_context(joined)
        client = re.findall(r"p2p_client_[\w-]+", prefill.said)[0]
        gateway = stack.enter_context(start_gateway(folder / "laptop", client))
        for server in (prefill, decode, gateway):
            wait_ready(server)
        ids = wait_for(lambda: find_pairing(prefill), "a plan of both boxes")
        wait_for(lambda: find_pairing(decode) == ids, "the same plan at the other box")
        # Prefilled by the box that decodes: so it measures how long that takes it, and for how long KV is worth waiting
        # for.
        learnt = prefill.post("/v1/completions", make_body(1000, 1, max_tokens=2, prompt_logprobs=1))
        assert (learnt.headers["x-p2p-prefill-node"], learnt.headers["x-p2p-decode-node"]) == (ids[1], ids[1])
        yield Pair(prefill, decode, gateway, *ids, model, token)


def make_body(prompt_tokens: int, seed: int, **fields: object) -> dict[str, object]:
    """A request whose prompt no other begins as: nothing of it is cached anywhere."""
    prompt = random.Random(seed).choices(range(100, 4000), k=prompt_tokens)
    return {"model": "noise", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}


def find_newest(server: Server) -> dict[str, Any]:
    """The latest request at this gateway; empty if there was none."""
    found: list[dict[str, Any]] = fetch(server, "requests?limit=1")["data"]
    return found[0] if found else {}


def wait_newer(server: Server, before: dict[str, Any], is_at: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The request that came after that one, once it is so far."""

    def look() -> dict[str, Any] | None:
        newest = find_newest(server)
        return newest if newest.get("id") != before.get("id") and is_at(newest) else None

    return wait_for(look, "the request at its gateway")


def list_events(server: Server, request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What this box's log has of a request: facts by kind."""
    events = fetch(server, f"events?request={request['id']}")["data"]
    return {event["kind"]: event["facts"] for event in events}


def has_nothing(server: Server, box: str) -> bool:
    """Whether this box's engine has no request, by its own word."""
    node = fetch(server, f"nodes/{box}")
    return (node["running"], node["waiting"], node["kv_usage"]) == (0, 0, 0.0)


def wait_empty(pair: Pair) -> None:
    """Wait until neither engine has a request."""
    wait_for(lambda: has_nothing(pair.prefill, pair.prefill_id), "no request in the engine that prefills")
    wait_for(lambda: has_nothing(pair.decode, pair.decode_id), "no request in the engine that decodes")


def comments_of(answer: httpx.Response) -> dict[str, str]:
    """What a stream says before its end."""
    lines = [line.removeprefix(": ") for line in answer.text.splitlines() if line.startswith(": X-")]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def ask_until_split(asked: Server, tokens: int, seed: int, *, stream: bool) -> Mapping[str, str]:
    """What an answer tells. On a busy machine KV may come too late, and is then computed again: then it asks again."""
    told: Mapping[str, str] = {}
    for attempt in range(ATTEMPTS):
        body = make_body(tokens, seed + attempt, max_tokens=8, stream=stream)
        answer = asked.post("/v1/completions", body, X_Request_Id="split.1")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] == "split.1"
        told = comments_of(answer) if stream else answer.headers
        if told["x-p2p-kv-bytes"] != "0":
            break
    return told


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("through", ["a box", "a gateway"])
def test_an_answer_tells_of_both_boxes(pair: Pair, through: str, stream: bool) -> None:
    tokens = 300
    asked, seed = {"a box": (pair.prefill, 100), "a gateway": (pair.gateway, 200)}[through]
    told = ask_until_split(asked, tokens, seed + 50 * stream, stream=stream)
    assert (told["x-p2p-prefill-node"], told["x-p2p-decode-node"]) == (pair.prefill_id, pair.decode_id)
    raw_bytes = tokens * LAYERS * 2 * KV_HEADS * HEAD_DIM * FLOAT_BYTES
    assert raw_bytes < int(told["x-p2p-kv-bytes"]) < raw_bytes + FRAMING_BYTES
    assert float(told["x-p2p-cost-usd"]) > 0


def test_who_disconnects_is_forgotten_at_both_boxes(pair: Pair) -> None:
    before = find_newest(pair.prefill)
    body = make_body(500, 20, max_tokens=3000, stream=True)
    with httpx.stream("POST", f"{pair.prefill.url}/v1/completions", json=body, timeout=WAIT_LIMIT_S) as answer:
        lines = answer.iter_lines()  # kept: without it the connection is closed
        for _ in range(6):
            next(lines)
        request = wait_newer(pair.prefill, before, lambda newest: newest["state"] == "answering")
        wait_for(lambda: "decode.first_token" in list_events(pair.decode, request), "a token of the box that decodes")
        wait_for(lambda: not has_nothing(pair.decode, pair.decode_id), "the request in its engine")
    ended = wait_for(lambda: list_events(pair.decode, request).get("decode.ended"), "the end of its decode")
    assert ended["finish"] == "cancelled"
    assert ended["tokens"] < 3000
    assert "prefill.ended" in list_events(pair.prefill, request)
    wait_newer(pair.prefill, before, lambda newest: newest["state"] == "cancelled")
    wait_empty(pair)


def leave_before_a_token(pair: Pair, seed: int, *, stream: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask, and disconnect while one box prefills; how both boxes' parts have ended."""
    before = find_newest(pair.prefill)
    body = json.dumps(make_body(LONGEST - 96, seed, max_tokens=8, stream=stream)).encode()
    url = urlsplit(pair.prefill.url)
    with socket.create_connection((url.hostname, url.port or 80)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        request = wait_newer(pair.prefill, before, lambda newest: bool(newest["decode"]))
        wait_for(lambda: "prefill.begun" in list_events(pair.prefill, request), "the beginning of its prefill")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # no token has come
            client.recv(1)
    prefill = wait_for(lambda: list_events(pair.prefill, request).get("prefill.ended"), "the end of its prefill")
    decode = wait_for(lambda: list_events(pair.decode, request).get("decode.ended"), "the end of its decode")
    return prefill, decode


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_disconnects_before_the_first_token_is_forgotten_at_both_boxes(pair: Pair, stream: bool) -> None:
    failed: list[str] = []
    for attempt in range(ATTEMPTS):  # on a busy machine the box that decodes may have begun to prefill itself
        prefill, decode = leave_before_a_token(pair, 30 + 2 * attempt + stream, stream=stream)
        assert (decode["finish"], decode["tokens"]) == ("cancelled", 0)
        wait_empty(pair)
        failed.append(prefill.get("failed", ""))
        if failed[-1] == "cancelled":
            break
    assert failed[-1] == "cancelled", failed


def tokens_of(events: list[Any]) -> list[int]:
    """Of an answer that came as a stream."""
    return [token for event in events if event != "[DONE]" for token in event["choices"][0].get("token_ids") or ()]


def test_a_stream_goes_on_without_the_box_that_decoded(pair: Pair) -> None:
    before = find_newest(pair.prefill)
    body = make_body(200, 40, max_tokens=200, stream=True, return_token_ids=True)
    lines = []
    with httpx.stream("POST", f"{pair.prefill.url}/v1/completions", json=body, timeout=WAIT_LIMIT_S) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) > 8:  # of which the box that decodes has said some: only the first token is the other's
                pair.decode.lose()
    text = "\n".join(lines)
    events = events_of(httpx.Response(200, text=text))
    assert events[-1] == "[DONE]", text
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    request = wait_newer(pair.prefill, before, lambda newest: newest["state"] == "length")
    assert request["attempts"] > 1
    assert request["recovered"]
    assert request["decode"] == pair.prefill_id
    again = events_of(pair.prefill.post("/v1/completions", body))
    assert tokens_of(events) == tokens_of(again)
    assert len(tokens_of(again)) == 200


def test_a_box_without_an_engine_says_so_and_when_to_ask_again(pair: Pair) -> None:
    """The other box is lost, and the engine of this one cannot be started for a while."""
    pair.decode.lose()
    server = pair.prefill
    wait_for(lambda: server.post("/v1/completions", make_body(20, 50, max_tokens=2)).is_success, "an answer of one box")
    forks = server.fork_server_pid
    os.kill(forks, signal.SIGSTOP)
    try:
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_ready(server, 503)
        for stream in (False, True):
            refused = server.post("/v1/completions", make_body(20, 51, max_tokens=2, stream=stream))
            assert refused.status_code == 503, refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-request-id"]
            error = refused.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("overloaded_error", None, 503)
            assert error["message"].startswith("no engine of this network serves ")
        message = {"model": "noise", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        refused = server.post("/v1/messages", message)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        assert server.ask("GET", "/live").status_code == 200
    finally:
        os.kill(forks, signal.SIGCONT)
    wait_ready(server)
    assert server.post("/v1/completions", make_body(20, 52, max_tokens=2)).is_success


def test_a_stream_ends_with_an_error_event_when_both_boxes_are_lost(pair: Pair, tmp_path: Path) -> None:
    pair.decode.lose()  # the other of the two is a new one
    joined = start_join(tmp_path / "three", pair.worker_token, "--phase", "decode", *OPTIONS, model=pair.model)
    with joined as decode:
        wait_ready(decode)
        wait_for(lambda: (find_pairing(pair.prefill) or ("", ""))[1] not in ("", pair.decode_id), "a plan of two boxes")
        body = make_body(200, 60, max_tokens=4000, stream=True)
        lines: list[str] = []
        with httpx.stream("POST", f"{pair.gateway.url}/v1/completions", json=body, timeout=WAIT_LIMIT_S) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 8:
                    decode.lose()
                    pair.prefill.lose()
        *tokens, error, done = events_of(httpx.Response(200, text="\n".join(lines)))
        assert (len(tokens) > 0, done) == (True, "[DONE]")
        assert (error["error"]["type"], error["error"]["code"]) == ("api_error", 502), error
        assert error["error"]["message"].startswith("the box that answered was lost")
        refused = pair.gateway.post("/v1/completions", make_body(20, 61, max_tokens=2))
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
