"""Workers and the agent find each other, whichever process a worker is in, and lose each other cleanly."""

import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import eq
from typing import Any, cast

import pytest

from p2pserve.kvtransport.wire.channel import NONCE_BYTES, LinkHello, LinkRole
from p2pserve.node.engine.kv.switchboard import Switchboard, WorkerLine
from p2pserve.node.engine.protocol import AbortTransfer, CloseLink, LinkReport
from p2pserve.node.engine.transfers.hub import TransferHub
from p2pserve.node.engine.transfers.open_transfers import Tell

pytestmark = pytest.mark.beside

WORKER = """
import sys, threading
from types import SimpleNamespace
from p2pserve.node.engine.kv.switchboard import WorkerLine
line = WorkerLine(sys.argv[1], lambda tell, tell_news: SimpleNamespace())
line.claim_links((b"l" * 16,))
threading.Event().wait()
"""


class Hub:
    """In place of a worker's `TransferHub`: what it has been given."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.given: list[Any] = []
        self.news = threading.Condition()

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        self.carry_out((hello, connection.recv(5)))
        connection.close()

    def carry_out(self, order: object) -> None:
        with self.news:
            self.given.append(order)
            self.news.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(condition, 30), self.given


@contextmanager
def joined(workers: int) -> Iterator[tuple[Switchboard, list[WorkerLine], list[Hub], Hub]]:
    """A switchboard, its workers' lines and hubs, and one more that stands for the agent and holds the reports."""
    agent = Hub(lambda report: None)
    switchboard = Switchboard(workers, agent.carry_out)
    lines = [WorkerLine(switchboard.name, lambda tell, tell_news: cast(TransferHub, Hub(tell))) for _ in range(workers)]
    hubs = [cast(Hub, line.hub) for line in lines]
    for number, hub in enumerate(hubs):  # what a worker says shows that it has been let in
        hub.tell(report_of(number))
    agent.until(lambda: len(agent.given) == workers)
    agent.given.clear()
    yield switchboard, lines, hubs, agent
    switchboard.close()


def report_of(number: int) -> LinkReport:
    return LinkReport(link=bytes([number]) * 16, paths=(), transfers=1, waiting_bytes=0, blocked=False)


def hello_of(link: bytes) -> bytes:
    return LinkHello(link, random.Random(1).randbytes(NONCE_BYTES), LinkRole.SENDER).pack()


def connection(text: bytes) -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    near.sendall(text)
    return near, far


def test_what_the_agent_wants_reaches_every_worker_in_order() -> None:
    with joined(3) as (switchboard, _, hubs, _agent):
        orders = [AbortTransfer(transfer=bytes([n]) * 16, reason="x") for n in range(20)]
        for order in orders:
            switchboard.carry_out(order)
        for hub in hubs:
            hub.until(partial(eq, hub.given, orders))


def test_what_workers_report_reaches_the_agent() -> None:
    with joined(2) as (_, _, hubs, agent):
        for number, hub in enumerate(hubs):
            hub.tell(report_of(number))
        agent.until(lambda: len(agent.given) == 2)
        assert {report.link for report in agent.given} == {b"\0" * 16, b"\1" * 16}


@pytest.mark.parametrize("order", ["link first", "connection first"])
def test_a_connection_reaches_the_worker_whose_link_it_is_of(order: str) -> None:
    links = [b"a" * 16, b"b" * 16]
    with joined(2) as (switchboard, lines, hubs, agent):
        if order == "link first":
            lines[1].claim_links((links[1],))
            hubs[1].tell(report_of(9))
            agent.until(lambda: len(agent.given) == 1)  # it came after what the worker holds
        near, far = connection(b"hello")
        switchboard.attach(hello_of(links[1]), far)
        assert far.fileno() == -1 or order == "connection first"
        if order == "connection first":
            lines[0].claim_links((links[0],))
            lines[1].claim_links((links[1],))
        hubs[1].until(lambda: len(hubs[1].given) == 1)
        assert hubs[1].given == [(hello_of(links[1]), b"hello")]
        assert hubs[0].given == []
        near.close()


def test_a_single_worker_takes_every_connection() -> None:
    """Its own endpoint keeps those that come before their links."""
    with joined(1) as (switchboard, _, hubs, _agent):
        near, far = connection(b"hello")
        switchboard.attach(hello_of(b"?" * 16), far)
        hubs[0].until(lambda: len(hubs[0].given) == 1)
        near.close()


def test_a_link_that_is_closed_is_forgotten() -> None:
    link = b"a" * 16
    with joined(2) as (switchboard, lines, hubs, agent):
        lines[0].claim_links((link,))
        hubs[0].tell(report_of(9))
        agent.until(lambda: len(agent.given) == 1)
        assert "1 links" in repr(switchboard)
        switchboard.carry_out(CloseLink(link=link, reason="gone"))
        assert "0 links" in repr(switchboard)


def test_a_hello_that_is_none_closes_its_connection() -> None:
    with joined(2) as (switchboard, _, _hubs, _agent):
        near, far = connection(b"hello")
        switchboard.attach(b"nonsense", far)
        assert far.fileno() == -1
        near.close()


def test_a_worker_process_ends_with_the_engine_and_one_in_its_process_does_not() -> None:
    switchboard = Switchboard(2, lambda report: None)
    here = WorkerLine(switchboard.name, lambda tell, tell_news: cast(TransferHub, Hub(tell)))
    worker = subprocess.Popen([sys.executable, "-c", WORKER, switchboard.name])
    try:
        while "1 links" not in repr(switchboard):
            assert worker.poll() is None
            threading.Event().wait(0.01)
        switchboard.close()
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.wait()
    here.close()
