"""A process of several engines of which one runs ahead while nobody else has anything to compute."""

from __future__ import annotations

import faulthandler
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from p2pserve.node.engine import protocol
from p2pserve.node.engine.mailbox import Outbox
from p2pserve.node.engine.process import AgentSockets
from p2pserve.node.engine.settings import Sharing
from p2pserve.node.engine.sharing.process import Arrival, Blame, MakeProgram, SharedProcess
from p2pserve.node.engine.sharing.turns import ProcessTurns, ServiceTurns, expect_requests


class AheadEngine:
    """Of each request it knows how many tokens are to come. A step's output comes with the step after it, or when that
    is settled; one that is the last of a request is passed over. `log` is that of the process: what was done, in order.
    """

    poll_s = 60.0

    def __init__(self, service: str, log: list[str]) -> None:
        self.service = service
        self.turns: ServiceTurns | None = None
        self.wanted: dict[str, int] = {}
        self.awaited: list[str] = []
        self.awaits = False
        self.has_room = True
        self.choices = 0
        self._log = log
        self._flight: list[tuple[str, ...]] = []

    def __getattr__(self, name: str) -> Any:
        """What else a program and an engine have is done, and is nothing."""
        return lambda *given: None

    def load(self) -> AheadEngine:
        self._log.append(f"{self.service} loads")
        return self

    def ready(self, load_s: float) -> protocol.EngineMessage:
        return protocol.Beat()

    def expect(self, lengths: tuple[int, int] | None) -> Any:
        return expect_requests(0.0001, 0.01)

    def begin(self, turns: ServiceTurns) -> None:
        self.turns = turns

    def ask(self, request: str, tokens: int) -> None:
        assert self.turns is not None
        self.wanted[request] = tokens
        self.turns.add(request, 100)

    def cancel(self, request: str) -> None:
        assert self.turns is not None
        del self.wanted[request]
        self.turns.remove(request)

    def begin_choice(self) -> None:
        """What was awaited is here."""
        self.choices += 1
        for request in self.awaited:
            self.ask(request, 1)
        self.awaited.clear()

    def take(self, request: str) -> bool:
        return True

    def has_room_again(self, decodes: int) -> bool:
        return self.has_room and decodes == len(self.wanted)

    def awaits_news(self) -> bool:
        return self.awaits

    def can_lose_kv(self, request: str) -> bool:
        return False

    @property
    def is_ahead(self) -> bool:
        return bool(self._flight)

    def run_turn(self, requests: tuple[str, ...], *, may_run_ahead: bool = False) -> int:
        assert self.turns is not None
        if not requests:
            return 0
        coming = [each for step in self._flight for each in step]
        step = tuple(each for each in requests if coming.count(each) < self.wanted[each])
        if step:
            self._log.append(f"{self.service} schedules {' '.join(step)}")
        if self._flight:
            self._finish_step()
        if step:
            self._flight.append(step)
        if not (may_run_ahead and step):
            while self._flight:
                self._finish_step()
        for request in requests:
            if request in self.wanted:
                self.turns.hold_kv(request)
                self.turns.begin_decode(request)
        return len(step)

    def settle(self) -> None:
        self._log.append(f"{self.service} settles")
        while self._flight:
            self._finish_step()

    def _finish_step(self) -> None:
        assert self.turns is not None
        for request in self._flight.pop(0):
            if request not in self.wanted:
                continue  # cancelled
            self.wanted[request] -= 1
            if not self.wanted[request]:
                del self.wanted[request]
                self._log.append(f"{self.service} ends {request}")
                self.turns.finish(request, 1)


class World:
    """A process in this one, with the engines `one` and `other`."""

    def __init__(self) -> None:
        self.control, self._peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log: list[str] = []
        self.engines: dict[str, AheadEngine] = {}
        self.blame = Blame()
        self._turns: ProcessTurns | None = None
        self.process = SharedProcess(Sharing(service=""), self.control, self.blame, self._share)
        self._ends: list[socket.socket] = []
        self.one, self.other = self.join("one"), self.join("other")
        self.log.clear()

    def _share(self, turns: ProcessTurns) -> MakeProgram:
        self._turns = turns

        def make(config: protocol.EngineConfig, outbox: Outbox, news: threading.Event) -> Any:
            assert config.sharing is not None
            return self.engines.setdefault(config.sharing.service, AheadEngine(config.sharing.service, self.log))

        return make

    def join(self, service: str) -> AheadEngine:
        ours, ends = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)), strict=True)
        self._ends += [*ours, *ends]
        config = protocol.EngineConfig(model="", sharing=Sharing(service=service))
        self.process._add(Arrival(len(self._ends), config, AgentSockets(*ends)))
        return self.engines[service]

    def step(self, times: int = 1) -> list[str]:
        """What has been done in so many turns; a turn that is none is told."""
        self.log.clear()
        for _ in range(times):
            if not self.process._take_turn():
                self.log.append("rests")
        return list(self.log)

    @property
    def ahead(self) -> set[str]:
        """The engines with a step whose output is not known."""
        return {service for service, engine in self.engines.items() if engine.is_ahead}

    def charged(self, service: str) -> float:
        assert self._turns is not None
        return self._turns.profiles[service].decode_step.mean

    def close(self) -> None:
        for end in (*self._ends, self.control, self._peer):
            end.close()
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_an_engine_that_is_asked_alone_runs_ahead(world: World) -> None:
    """Its prompts do not, and what it is asked for last is known as soon as nothing else can be scheduled."""
    world.one.ask("a", 3)
    assert world.step() == ["one schedules a"]
    assert "one" not in world.ahead
    assert world.step(2) == ["one schedules a", "one schedules a"]
    assert "one" in world.ahead
    assert world.one.wanted == {"a": 1}
    assert world.step() == ["one ends a"]
    assert "one" not in world.ahead
    assert world.step() == ["rests"]
    assert world.blame.get() == 0


def test_what_is_ahead_is_known_before_another_has_its_turn(world: World) -> None:
    world.one.ask("a", 9)
    world.step(3)
    assert "one" in world.ahead
    world.other.ask("b", 1)
    done = world.step(12)
    assert done[0] == "one settles"
    assert "other ends b" in done
    assert "one ends a" in done
    assert done.count("one settles") == 1  # beside others it does not run ahead


def test_what_was_awaited_and_is_here_ends_running_ahead(world: World) -> None:
    world.one.ask("a", 9)
    world.step(3)
    world.other.awaited.append("b")
    world.process._news.set()
    assert world.step()[0] == "one settles"
    assert "other ends b" in world.step(12)


def test_two_never_run_ahead(world: World) -> None:
    """One is cancelled, and the other decodes at once."""
    world.one.ask("a", 9)
    world.step(3)
    world.one.cancel("a")
    world.other.ask("b", 9)
    assert world.other.turns is not None
    world.other.turns.begin_decode("b")
    assert world.step(2) == ["one settles", "other schedules b", "other schedules b"]
    assert "one" not in world.ahead
    assert "other" in world.ahead


def test_a_prompt_of_its_own_is_computed_with_all_outputs_known(world: World) -> None:
    world.one.ask("a", 9)
    world.step(3)
    world.one.ask("c", 2)
    done = world.step(12)
    assert done[0] == "one settles"
    assert {"one ends a", "one ends c"} < {*done}


def test_nothing_is_left_ahead_when_all_requests_are_cancelled(world: World) -> None:
    world.one.ask("a", 9)
    world.step(3)
    world.one.cancel("a")
    assert world.step() == ["one settles", "rests"]
    assert "one" not in world.ahead


@pytest.mark.parametrize("service", ["other", "one"])
def test_what_is_ahead_is_known_before_an_engine_leaves_or_comes(world: World, service: str) -> None:
    world.one.ask("a", 9)
    world.step(3)
    world.log.clear()
    world.process._dismiss(world.process._members[service])
    assert world.log == ["one settles"]
    if service == "other":
        world.step()
        world.log.clear()
        world.join("other")
        assert world.log == ["one settles", "other loads"]


def test_steps_ahead_are_charged_as_those_that_are_not(world: World) -> None:
    """Each for the time until its output, so that what is learned of a step is neither that of scheduling it alone, nor
    of two."""
    expected = world.charged("one")
    world.one.ask("a", 2)
    world.step(2)
    assert world.charged("one") == expected  # nothing is known of its first step ahead
    world.step()
    assert world.charged("one") < expected  # steps take no time here


def test_a_turn_is_not_chosen_anew_while_nothing_has_changed(world: World) -> None:
    world.one.ask("a", 9)
    world.step(2)
    choices = world.one.choices
    assert world.step(3) == ["one schedules a"] * 3
    assert world.one.choices == choices
    world.one.ask("c", 2)
    assert "one ends c" in world.step(4)
    assert world.one.choices > choices


@pytest.mark.parametrize("reason", ["room", "news", "look"])
def test_a_turn_is_chosen_anew_where_room_may_be_short_or_something_has_come(world: World, reason: str) -> None:
    world.one.ask("a", 9)
    world.step(2)
    choices = world.one.choices
    match reason:
        case "room":
            world.one.has_room = False
        case "news":
            world.process._news.set()
        case "look":
            world.other.awaits, world.other.poll_s = True, 0.0
            world.step()  # looks at it when the turn is over
    assert "one schedules a" in world.step()
    assert world.one.choices == choices + 1


def test_who_fails_when_asked_for_room_is_to_blame(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(decodes: int) -> bool:
        raise RuntimeError(str(decodes))

    world.one.ask("a", 9)
    world.step(2)
    monkeypatch.setattr(world.one, "has_room_again", fail)
    with pytest.raises(RuntimeError):
        world.step()
    assert world.blame.get() == world.process._members["one"].number
