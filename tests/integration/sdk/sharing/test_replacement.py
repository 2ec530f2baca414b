"""Three services on two boxes that host two at once, while clients ask for each: what they ask most changes, services
are placed anew four times, and every request is answered with the same tokens as before."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import pytest

from p2pserve import Client
from p2pserve.sdk.cli import main

from ..test_replicas import Command, ready, wait_until

pytestmark = pytest.mark.timeout(700)

SERVICES = {"chat": "llama-7b", "code": "qwen2-7b", "talk": "opt-6.7b"}
PROMPT = "def fibonacci(n):"
TOKENS = 24
BUSY, QUIET = 0.15, 0.7
"""Seconds between two requests of the service that is asked most, and of the others."""

PLACEMENTS = 4
WITHIN_S = 480.0


class Load:
    """Clients that ask for all services, one far more than the others, and keep every answer."""

    def __init__(self, client: Client) -> None:
        self.busy = "chat"
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[BaseException] = []
        self._client = client
        self._is_over = threading.Event()
        self._asked: list[threading.Thread] = []
        self._askers = [threading.Thread(target=self._go_on, args=(service,)) for service in SERVICES]

    def __enter__(self) -> Self:
        for thread in self._askers:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in (*self._askers, *self._asked):
            thread.join(150)
        assert not any(thread.is_alive() for thread in self._asked)

    def _go_on(self, service: str) -> None:
        while not self._is_over.wait(BUSY if self.busy == service else QUIET):
            thread = threading.Thread(target=self._ask, args=(service,))
            self._asked.append(thread)
            thread.start()

    def _ask(self, service: str) -> None:
        try:
            answer = self._client.generate(PROMPT, max_tokens=TOKENS, service=service, deadline_s=140)
            self.answers[service][answer.text] += 1
        except BaseException as error:
            self.failed.append(error)
            raise


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Command]:
    command = Command(
        tmp_path, "bootstrap", "--home", str(tmp_path / "b"), "--listen", "127.0.0.1:0", "--format", "json",
        "--replace-every", "6s",
    )  # fmt: skip
    try:
        wait_until(lambda: bool(command.greetings()), command)
        yield command
    finally:
        command.end()


@pytest.mark.skipif("P2PSERVE_LONG" not in os.environ, reason="takes minutes: P2PSERVE_LONG=1 runs it")
def test_three_services_are_placed_anew_four_times_and_no_request_fails(tmp_path: Path, first: Command) -> None:
    tokens = first.greetings()[0]["tokens"]
    any_model = ("--emulate", "1xA40", "--max-services", "2", "--kv-cache-mib", "8192", "--sweep-s", "0")
    with ExitStack() as stack:
        for number in range(2):
            home = tmp_path / f"box-{number}"
            home.mkdir()
            box = Command(
                home, "join", "--home", str(home), "--listen", "127.0.0.1:0", "--drain-s", "15", *any_model,
                token=tokens["worker"],
            )  # fmt: skip
            stack.callback(box.end)
        for name, model in SERVICES.items():
            assert main(["models", "add", name, "--model", model, "--bootstrap", tokens["admin"]]) == 0
        client = stack.enter_context(closing(Client(tokens["client"])))
        wait_until(lambda: len(ready(client)) >= 3, first)
        right = {name: client.generate(PROMPT, max_tokens=TOKENS, service=name).text for name in SERVICES}
        with Load(client) as load:
            give_up, turns = time.monotonic() + WITHIN_S, itertools.cycle(("talk", "code", "chat"))
            for number in range(1, PLACEMENTS + 1):
                while placed(first) < number and not load.failed:
                    assert time.monotonic() < give_up, first.err.read_text()
                    time.sleep(0.2)
                load.busy = next(turns)
        assert not load.failed
    assert placed(first) >= PLACEMENTS
    assert {name: set(answers) for name, answers in load.answers.items()} == {n: {text} for n, text in right.items()}
    assert sum(answers.total() for answers in load.answers.values()) > 100


def placed(first: Command) -> int:
    """How often services have been placed anew, and have got there."""
    return first.err.read_text().count("services are where they were placed")
