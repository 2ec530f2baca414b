"""A box whose GPUs are divided anew while clients ask: `join --replicas auto`, as processes with emulated engines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from p2pserve import Client
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import BoxRecut, Plan
from p2pserve.node.messages import NodeStatus
from p2pserve.node.planning.messages import RegroupOrder
from p2pserve.sdk.actions.status_view import regrouping_lines
from p2pserve.sdk.errors import RequestFailed

from .test_replicas import Command, ready, tokens, wait_until

__all__ = ["tokens"]

pytestmark = [pytest.mark.beside, pytest.mark.timeout(400)]

MODEL = ("--model", "llama-7b", "--format", "json")
AUTO = ("--emulate", "4xA40", "--replicas", "auto", "--drain-s", "20", *MODEL)
TOKENS = 120
PROMPT = "def fibonacci(n):"


def order(admin: Client, head: str, was: int, replicas: int) -> None:
    status = admin.status()
    assert status.plan is not None
    assert status.coordinator is not None
    recut = BoxRecut(head=head, replicas=replicas, was=was)
    begun = admin.regroup(RegroupOrder(service=status.plan.service, recuts=(recut,)), status.coordinator)
    assert (begun.steps, begun.boxes) == (1, was)


def settled(client: Client) -> Plan | None:
    """The plan, where it is on its way to no other."""
    plan = client.status().plan
    return plan if plan is not None and plan.regrouping is None else None


def gpus_of(nodes: list[NodeStatus]) -> list[int]:
    return sorted(len(node.advert.hardware.gpus) for node in nodes if node.advert is not None)


@contextmanager
def asking(client_token: str) -> Iterator[list[tuple[str, int]]]:
    """Three clients that ask one request after the other while the body runs; text and attempts of each answer."""
    answers: list[tuple[str, int]] = []
    is_over = threading.Event()
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            with closing(Client(client_token)) as client:
                while not is_over.is_set():
                    found = client.generate(PROMPT, max_tokens=TOKENS, deadline_s=120)
                    answers.append((found.text, found.figures.attempts if found.figures is not None else 0))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join(150)
    assert not failed


def test_a_box_is_divided_anew_while_clients_ask_and_back_again(tmp_path: Path, tokens: dict[str, str]) -> None:
    box = Command(
        tmp_path, "join", "--home", str(tmp_path / "n"), "--listen", "127.0.0.1:0", "--recut-every", "1s", *AUTO,
        token=tokens["worker"],
    )  # fmt: skip
    (tmp_path / "o").mkdir()
    other = Command(
        tmp_path / "o", "join", "--emulate", "4xA40", "--home", str(tmp_path / "m"), "--listen", "127.0.0.1:0", *MODEL,
        token=tokens["worker"],
    )  # fmt: skip
    try:
        wait_until(lambda: len(box.greetings()) == 2, box)
        head = next(each["peer"] for each in box.greetings() if each["node"] == "node")
        with closing(Client(tokens["client"])) as client, closing(Client(tokens["admin"])) as admin:
            wait_until(lambda: gpus_of(ready(client)) == [2, 2, 4], box)
            wait_until(lambda: (plan := settled(client)) is not None and len(plan.replicas) == 3, box)
            with pytest.raises(RequestFailed, match="not among 3"):
                order(admin, head, 2, 3)
            with asking(tokens["client"]) as answers:
                wait_until(lambda: len(answers) >= 3, box)
                order(admin, head, 2, 4)
                shown = f"{name_of(head)}: its box is divided anew, 2 -> 4 nodes: "
                wait_until(lambda: any(shown in line for line in regrouping_lines(client.status())), box)
                wait_until(lambda: gpus_of(ready(client)) == [1, 1, 1, 1, 4], box)
                wait_until(lambda: (plan := settled(client)) is not None and len(plan.replicas) == 5, box)
                since = len(answers)
                wait_until(lambda: len(answers) >= since + 6, box)
                order(admin, head, 4, 1)
                wait_until(lambda: gpus_of(ready(client)) == [4, 4], box)
                wait_until(lambda: (plan := settled(client)) is not None and len(plan.replicas) == 2, box)
            assert len({text for text, _ in answers}) == 1  # each whole, and the same whoever has written it
            assert client.status().plan is not None
        said = box.err.read_text()
        assert "box    | the network wants 4 nodes: those that run finish their requests" in said
        assert "box    | divided among 1 node from now on" in said
    finally:
        other.end()
        box.end()


def hold_third_of_ports() -> tuple[int, socket.socket]:
    """A port whose next is free and whose next but one is taken, and what takes it."""
    while True:
        with closing(socket.socket()) as one, closing(socket.socket()) as two:
            held = socket.socket()
            with suppress(OSError, OverflowError):
                one.bind(("127.0.0.1", 0))
                port = one.getsockname()[1]
                two.bind(("127.0.0.1", port + 1))
                held.bind(("127.0.0.1", port + 2))
                held.listen()
                return port, held
            held.close()


def test_a_box_that_cannot_take_a_cut_goes_back_and_says_why(tmp_path: Path, tokens: dict[str, str]) -> None:
    port, held = hold_third_of_ports()
    box = Command(
        tmp_path, "join", "--home", str(tmp_path / "n"), "--listen", f"127.0.0.1:{port}", *AUTO, token=tokens["worker"]
    )
    try:
        wait_until(lambda: len(box.greetings()) == 2, box)
        head = next(each["peer"] for each in box.greetings() if each["node"] == "node")
        with closing(Client(tokens["client"])) as client, closing(Client(tokens["admin"])) as admin:
            wait_until(lambda: (plan := settled(client)) is not None and len(plan.replicas) == 2, box)
            order(admin, head, 2, 4)
            wait_until(lambda: bool((plan := settled(client)) and plan.refused), box)
            wait_until(lambda: gpus_of(ready(client)) == [2, 2], box)
            plan = client.status().plan
            assert plan is not None
            (refused,) = plan.refused
            assert refused.peer == head
            assert refused.reason.startswith("node-3: ")
            assert str(port + 2) in refused.reason
            assert client.generate(PROMPT, max_tokens=4).text
            # It was divided anew a moment ago: not again so soon, whoever wants it.
            order(admin, head, 2, 1)
            wait_until(lambda: any("a short while ago" in line for line in why(client)), box)
            assert gpus_of(ready(client)) == [2, 2]
        assert "box    | cannot be 4 nodes, goes back to 2: " in box.err.read_text()
    finally:
        held.close()
        box.end()


def why(client: Client) -> tuple[str, ...]:
    plan = client.status().plan
    return plan.why if plan is not None else ()
