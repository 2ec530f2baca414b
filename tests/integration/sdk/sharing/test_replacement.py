"""Three services on two boxes that host two at once, while clients ask for each: what they ask most is always what has
to share its box, services are placed anew four times, and every request is answered with the same tokens as before."""

from __future__ import annotations

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
TOKENS = 4
BOX = "1xA40/6"
BUSY, QUIET = 0.2, 0.65
"""Seconds between two requests of the service that is asked most, and of the others. Where the former shares its box
most of its requests are late, and with a box for itself hardly any: what it costs is ten times as much, where a tenth
is gain enough, and still is enough where a busy machine asks less than half as often. A gateway tells of another rate
after 48 requests, which these are often enough for; they are short, and on a slow card, so that all of them are a small
part of what two cores carry."""

MOST_OPEN = 24
"""Requests of a service at once: a machine that does not get on is asked less, and refuses nobody for want of time."""

PLACEMENTS = 4
ALL_S = 480.0
"""For all placements, which take 150 s on two cores that have other work, too."""


class Load:
    """Clients that ask for all services, one far more than the others, and keep every answer."""

    def __init__(self, client: Client, busy: str) -> None:
        self.busy = busy
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[BaseException] = []
        self._client = client
        self._is_over = threading.Event()
        self._asked: list[threading.Thread] = []
        self._free = {service: threading.Semaphore(MOST_OPEN) for service in SERVICES}
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
            if self._free[service].acquire(blocking=False):
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
        finally:
            self._free[service].release()


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Command]:
    command = Command(
        tmp_path, "bootstrap", "--home", str(tmp_path / "b"), "--listen", "127.0.0.1:0", "--format", "json",
        "--replace-every", "5s",
    )  # fmt: skip
    try:
        wait_until(lambda: bool(command.greetings()), command)
        yield command
    finally:
        command.end()


def test_three_services_are_placed_anew_four_times_and_no_request_fails(tmp_path: Path, first: Command) -> None:
    tokens = first.greetings()[0]["tokens"]
    any_model = ("--emulate", BOX, "--max-services", "2", "--kv-cache-mib", "8192", "--sweep-s", "0")
    with ExitStack() as stack:
        for number in range(2):
            home = tmp_path / f"box-{number}"
            home.mkdir()
            box = Command(
                home, "join", "--home", str(home), "--listen", "127.0.0.1:0", "--drain-s", "10", *any_model,
                token=tokens["worker"],
            )  # fmt: skip
            stack.callback(box.end)
        for name, model in SERVICES.items():
            assert main(["models", "add", name, "--model", model, "--bootstrap", tokens["admin"]]) == 0
        client = stack.enter_context(closing(Client(tokens["client"])))
        wait_until(lambda: len(ready(client)) >= 3, first)
        right = {name: client.generate(PROMPT, max_tokens=TOKENS, service=name).text for name in SERVICES}
        with Load(client, busy=find_poorest(client, "")) as load:
            give_up = time.monotonic() + ALL_S
            while placed(first) < PLACEMENTS and not load.failed:
                assert time.monotonic() < give_up, f"{load.busy} is asked most\n{first.err.read_text()}"
                load.busy = find_poorest(client, load.busy)
                time.sleep(1.0)
        assert not load.failed
    assert placed(first) >= PLACEMENTS
    assert {name: set(answers) for name, answers in load.answers.items()} == {n: {text} for n, text in right.items()}
    assert sum(answers.total() for answers in load.answers.values()) > 100


def find_poorest(client: Client, busy: str) -> str:
    """The service with the smallest part of the boxes, where those that share one have equal parts of it; of several
    the one that is asked most already."""
    boxes: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for node in ready(client):
        if node.advert is not None and node.advert.hosting is not None:
            boxes[node.advert.hosting.beside].add(node.advert.hosting.hosts)
    parts = {name: sum(1 / len(hosted) for hosted in boxes.values() if name in hosted) for name in SERVICES}
    return min(parts, key=lambda name: (parts[name], name != busy))


def placed(first: Command) -> int:
    """How often services have been placed anew, and have got there."""
    return first.err.read_text().count("services are where they were placed")
