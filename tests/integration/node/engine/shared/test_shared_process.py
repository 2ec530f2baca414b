"""The process of several engines and the fork server's end of it: who is to blame, and what is left of who has gone."""

from __future__ import annotations

import faulthandler
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from p2pserve.node.engine import protocol
from p2pserve.node.engine.mailbox import Outbox
from p2pserve.node.engine.process import AgentSockets
from p2pserve.node.engine.settings import Sharing
from p2pserve.node.engine.sharing.children import SharedChildren, SharingEngine
from p2pserve.node.engine.sharing.process import Arrival, Blame, MakeProgram, SharedProcess
from p2pserve.node.engine.sharing.turns import ProcessTurns, ServiceTurns, expect_requests

BUDGET = 100
CHANNEL = cast("socket.socket", object())  # of whoever has asked for an engine


class FailingEngine:
    """Its requests hold ten bytes each. It fails where `fails` says."""

    poll_s = 1.0

    def __init__(self, service: str, process_turns: ProcessTurns) -> None:
        self.service = service
        self.fails = ""
        self.turns: ServiceTurns | None = None
        process_turns.open_memory(BUDGET).open_service(service, 10)
        self._process_turns = process_turns

    def __getattr__(self, name: str) -> Any:
        """What else a program and an engine have is done, and is nothing."""
        return lambda *given: None

    def load(self) -> FailingEngine:
        return self

    def ready(self, load_s: float) -> protocol.EngineMessage:
        return protocol.Beat()

    def expect(self, lengths: tuple[int, int] | None) -> Any:
        return expect_requests(0.0001, 0.001 if self.service == "asks" else 0.01)

    def begin(self, turns: ServiceTurns) -> None:
        self.turns = turns

    def hold(self, *names: str) -> None:
        shares = self._process_turns.shares
        assert shares is not None
        assert self.turns is not None
        for name in names:
            self.turns.add(name, 100)
            self.turns.hold_kv(name)
            shares.take(self.service, 10)

    def take(self, request: object) -> bool:
        if self.fails == "take":
            raise RuntimeError(self.service)
        assert self.turns is not None
        return self.service != "asks" or self.turns.make_room(str(request), 30)

    def can_lose_kv(self, request: str) -> bool:
        return True

    def freed_bytes(self, requests: Sequence[str], *, for_others: bool) -> int:
        return 10 * len(requests)

    def evict(self, request: str) -> None:
        raise RuntimeError(self.service)

    def leave(self) -> None:
        assert self._process_turns.shares is not None
        self._process_turns.shares.close_service(self.service)


class World:
    """A process in this one."""

    def __init__(self, control: socket.socket, children: SharedChildren) -> None:
        self.children = children
        self.engines: dict[str, FailingEngine] = {}
        self.blame = Blame()
        self.process = SharedProcess(Sharing(service=""), control, self.blame, self._share)
        self.pairs: dict[str, Sequence[socket.socket]] = {}
        self.numbers = 0

    def _share(self, turns: ProcessTurns) -> MakeProgram:
        def make(config: protocol.EngineConfig, outbox: Outbox, news: threading.Event) -> Any:
            assert config.sharing is not None
            service = config.sharing.service
            return self.engines.setdefault(service, FailingEngine(service, turns))

        return make

    def join(self, service: str) -> FailingEngine:
        ours, ends = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)), strict=True)
        self.pairs[service] = ours
        self.numbers += 1
        config, sockets = protocol.EngineConfig(model="", sharing=Sharing(service=service)), AgentSockets(*ends)
        engine = SharingEngine(CHANNEL, protocol.Spawn(engine=70 + self.numbers, config=config))
        if self.numbers == 1:
            self.children.add(1, engine)
        else:
            assert self.children.pass_on(engine, sockets)
        self.process._add(Arrival(self.numbers, config, sockets))
        return self.engines[service]

    def dismiss(self, service: str) -> None:
        member = self.process._members[service]
        self.process._dismiss(member)
        member.arrival.sockets.close()
        for end in self.pairs.pop(service):
            end.close()
        del self.engines[service]


@contextmanager
def worlds() -> Iterator[tuple[World, SharedChildren]]:
    """A process, and the other end of its control socket."""
    children = SharedChildren()
    with children.prepare() as control:
        world = World(control, children)
        yield world, children
        for service in tuple(world.engines):
            world.dismiss(service)
        children.end(0)
        faulthandler.cancel_dump_traceback_later()


def test_who_fails_to_give_room_for_another_is_to_blame() -> None:
    with worlds() as (world, _):
        loses, asks = world.join("loses"), world.join("asks")
        loses.hold(*"abcdefgh")
        asks.hold("x")
        with pytest.raises(RuntimeError, match="loses"):
            world.process._choose()
        assert world.blame.get() == 1


def test_who_fails_while_a_turn_is_chosen_is_to_blame() -> None:
    with worlds() as (world, _):
        fine, fails = world.join("fine"), world.join("fails")
        fine.hold("a")
        assert world.process._choose() is not None
        assert world.blame.get() == 0
        fails.hold("b")
        fails.fails = "take"
        fine.fails = "take"
        with pytest.raises(RuntimeError) as caught:
            world.process._choose()
        assert world.blame.get() == {"fine": 1, "fails": 2}[str(caught.value)]


def test_nothing_is_left_of_engines_that_have_gone() -> None:
    """One stays, and others come and go under ever new names."""
    with worlds() as (world, children):
        turns = world.process._turns
        for number in range(1, 6):
            world.join(f"{number}").hold("a")
            assert children.look() == []
            if number > 1:
                world.dismiss(f"{number}")
                assert children.look() == [(CHANNEL, protocol.EngineExited(engine=70 + number, status=0))]
        assert turns.profiles.keys() == turns._services.keys() == world.process._members.keys() == {"1"}
        assert turns._queue is not None
        assert {service for service, _ in turns._queue._lines} == {*turns._queue._waits} == {"1"}
        assert children._engines.keys() == {1}
        assert children.end(1).exits == [(CHANNEL, protocol.EngineExited(engine=71, status=1))]


@pytest.mark.timeout(300)
def test_engines_of_vllm_that_have_left_are_collected(random_model: Path) -> None:
    """And what vLLM has once for a process is still there."""
    script = Path(__file__).with_name("leaving_engines.py")
    command = [sys.executable, str(script), str(random_model)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout.splitlines()
    told = [line for line in found if line.startswith(("left:", "stages:"))]
    assert told[-1] == "stages: 1"
    assert [int(line.split()[1]) for line in told[:-1]][-1] <= 1, "all but the last, which goes when another comes"
    assert told[-2].endswith("of 3")
