"""Measuring links, on a virtual clock: bursts that are refused, fail or succeed, and what each leaves behind. The
schedule is the real one; the sockets of a burst are not.
"""

import itertools
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import NetworkError, PeerId, RequestTimeout, Role
from p2pserve.kvtransport.errors import ConnectionClosed, TransferTimeout
from p2pserve.kvtransport.probing.burst import BurstGate
from p2pserve.kvtransport.probing.burst_ticket import BurstTicket, issue_burst, pack_hello
from p2pserve.kvtransport.probing.estimates import BurstSample
from p2pserve.kvtransport.probing.figures import BoxFigures, Source
from p2pserve.kvtransport.probing.probe import Activity, BurstRequest, ProbeSettings
from p2pserve.node import messages
from p2pserve.node.links.link_knowledge import LinkKnowledge
from p2pserve.node.links.prober import BurstCarrier, Neighbour, Prober
from p2pserve.node.methods import PROBE_OPEN
from p2pserve.node.settings import BoxLinkSettings
from p2pserve.node.testing import MemoryExchange

ME, A, B = PeerId("me"), PeerId("a"), PeerId("b")
CROWD = tuple(PeerId(f"n{i}") for i in range(6))
SETTINGS = ProbeSettings()
BURST_S = 0.5
BOUNDS: dict[str, Any] = {"streams": 4, "seconds": 1.0, "max_bytes": 1000}
MB = 1_000_000
ASKED = BurstRequest(peer=ME, streams=4, seconds=1.0, max_bytes=100 * MB, overdue=False)


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


def sample_of(gbps: float = 0.8, size: int = 50 * MB) -> BurstSample:
    return BurstSample(
        bytes=size,
        seconds=BURST_S,
        streams=4,
        gbps=gbps,
        per_stream_gbps=(gbps / 4,) * 4,
        stable=True,
        ended="stable",
    )


@dataclass
class World:
    """A prober among neighbours: how they answer, and how bursts go."""

    nursery: trio.Nursery
    settings: BoxLinkSettings = field(default_factory=BoxLinkSettings)
    neighbours: list[Neighbour] = field(default_factory=lambda: [Neighbour(A, 0.02)])
    answers: list[messages.ProbeOpened | NetworkError] = field(default_factory=list)
    outcomes: list[BurstSample | Exception] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)
    asked: list[tuple[float, PeerId, BurstRequest]] = field(default_factory=list)
    bursts: list[tuple[float, BurstTicket, PeerId]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(4)
        self.exchange = MemoryExchange(latency_s=0.02)
        messenger = self.exchange.join(ME)
        for peer in (A, B, *CROWD):
            self.exchange.join(peer).handle(PROBE_OPEN, partial(self._answer, peer))
        self.knowledge = LinkKnowledge(ME, self.settings)
        self.prober = Prober(
            self.knowledge,
            messenger=messenger,
            neighbours=lambda: self.neighbours,
            activity=lambda: self.activity,
            nursery=self.nursery,
            rng=random.Random(5),
            carrier=ScriptedCarrier(self),
        )
        self.nursery.start_soon(self.prober.run)

    def ticket(self, request: BurstRequest, **changes: Any) -> BurstTicket:
        fields = {"streams": request.streams, "seconds": request.seconds, "max_bytes": request.max_bytes, **changes}
        return issue_burst(rtt_s=0.02, random=self.rng.randbytes, **fields)

    async def _answer(self, peer: PeerId, source: PeerId, role: Role, body: messages.ProbeOpen) -> messages.ProbeOpened:
        self.asked.append((trio.current_time(), peer, body.burst))
        found = self.answers.pop(0) if self.answers else messages.ProbeOpened(ticket=self.ticket(body.burst))
        if isinstance(found, NetworkError):
            raise found
        return found

    def outcome(self) -> BurstSample:
        found = self.outcomes.pop(0) if self.outcomes else sample_of()
        if isinstance(found, Exception):
            raise found
        return found

    def table(self) -> messages.LinkTable:
        return self.knowledge.table(None, trio.current_time())

    @property
    def reserved(self) -> str | None:
        return self.prober.statistics().reserved_with

    async def until(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        with trio.fail_after(seconds):
            while not condition():
                await elapse(0.05)


class ScriptedCarrier(BurstCarrier):
    """Bursts take `BURST_S`, and end as the world says."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def send(self, ticket: BurstTicket, target: PeerId, dial_s: float) -> BurstSample:
        await elapse(BURST_S)
        self._world.bursts.append((trio.current_time(), ticket, target))
        return self._world.outcome()

    async def receive(self, gate: BurstGate) -> BurstSample:
        await elapse(BURST_S)
        return self._world.outcome()


@pytest.fixture
def play() -> Callable[..., None]:
    """Run a scenario in virtual time."""

    @asynccontextmanager
    async def opened(settings: BoxLinkSettings) -> AsyncIterator[World]:
        async with trio.open_nursery() as nursery:
            yield World(nursery, settings)
            nursery.cancel_scope.cancel()

    def run(scenario: Callable[[World], Coroutine[Any, Any, None]], settings: BoxLinkSettings | None = None) -> None:
        async def main() -> None:
            async with opened(settings or BoxLinkSettings()) as world:
                await scenario(world)

        trio.run(main, clock=MockClock(autojump_threshold=0))

    return run


# ---- sending ------------------------------------------------------------------------------------------------


def test_a_burst_measures_the_link_and_is_not_repeated_soon(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        await world.until(lambda: world.prober.statistics().bursts == 1)
        ((_, peer, request),) = world.asked
        assert (peer, request.peer) == (A, A)
        ((_, ticket, target),) = world.bursts
        assert (ticket.streams, ticket.max_bytes, target) == (request.streams, request.max_bytes, A)
        found = world.table().links[A]
        assert found.source is Source.MEASURED
        assert found.capacity_gbps == pytest.approx(0.8, rel=0.05)
        assert found.rtt_s == pytest.approx(0.02)
        assert world.reserved is None
        await elapse(SETTINGS.burst_every_s * 0.8)
        assert len(world.asked) == 1
        await world.until(lambda: len(world.asked) == 2, SETTINGS.burst_every_s)

    play(scenario)


def test_bursts_do_not_meet_each_other(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        world.neighbours = [Neighbour(peer, 0.01) for peer in CROWD]
        await world.until(lambda: world.prober.statistics().bursts == 6)
        times = sorted(at for at, _, _ in world.bursts)
        assert len(times) == 6
        assert all(b - a >= BURST_S for a, b in itertools.pairwise(times))
        assert set(world.table().links) == {neighbour.peer for neighbour in world.neighbours}

    play(scenario)


def test_a_refused_burst_is_asked_for_again_when_it_was_said(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        world.answers = [messages.ProbeOpened(refused="transfers or the engine are at work", retry_s=50.0)]
        await world.until(lambda: world.prober.statistics().refused == 1)
        assert world.reserved is None
        assert world.bursts == []
        await world.until(lambda: world.prober.statistics().bursts == 1)
        first, second = (at for at, _, _ in world.asked)
        assert 40 < second - first < 60

    play(scenario)


@pytest.mark.parametrize(
    "failure",
    [RequestTimeout("no answer"), ConnectionClosed("refused"), TransferTimeout("the receiver did not say")],
    ids=lambda failure: type(failure).__name__,
)
def test_a_burst_that_fails_frees_the_box_and_is_tried_again(play: Callable[..., None], failure: Exception) -> None:
    async def scenario(world: World) -> None:
        if isinstance(failure, NetworkError):
            world.answers = [failure]
        else:
            world.outcomes = [failure]
        await world.until(lambda: world.prober.statistics().bursts == 1)
        assert world.reserved is None
        assert world.table().links.get(A) is None or world.table().links[A].rate_confidence < 0.5
        await world.until(lambda: len(world.asked) == 2, 2 * SETTINGS.retry_s + 5)
        await world.until(lambda: A in world.table().links)

    play(scenario)


@pytest.mark.parametrize("more", [{"max_bytes": 4_000_000_000}, {"seconds": 10.0}, {"streams": 64}])
def test_nobody_makes_this_box_send_more_than_it_wants(play: Callable[..., None], more: dict[str, Any]) -> None:
    """The answer's ticket says how much; its bytes are billed here."""

    async def scenario(world: World) -> None:
        small = BurstRequest(peer=A, streams=4, seconds=0.1, max_bytes=MB, overdue=False)
        world.answers = [messages.ProbeOpened(ticket=world.ticket(small, **more))]
        await world.until(lambda: world.prober.statistics().bursts == 1)
        assert world.bursts == []
        assert world.prober.statistics().burst_bytes == 0

    play(scenario)


def test_serving_comes_first(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        world.activity = Activity(transfers=1)
        await elapse(300)
        assert world.asked == []
        world.activity = Activity(engine_busy=True)
        await elapse(300)
        assert world.asked == []
        world.activity = Activity()
        await world.until(lambda: world.prober.statistics().bursts == 1)

    play(scenario)


def test_a_link_that_a_real_transfer_has_measured_needs_no_burst(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        world.activity = Activity(transfers=1)
        await elapse(60)
        world.knowledge.note_measured(A)
        await elapse(2)
        world.activity = Activity()
        await elapse(SETTINGS.burst_every_s * 0.8)
        assert world.asked == []
        await world.until(lambda: world.asked, SETTINGS.burst_every_s)

    play(scenario)


def test_neighbours_come_and_go_and_one_that_is_silent_is_not_probed(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        world.neighbours = [Neighbour(B, None)]
        await elapse(100)
        assert world.prober.statistics().pings > 3
        assert len(world.asked) <= 1  # until it was found out
        world.neighbours = []
        await elapse(5)
        assert world.prober.statistics().peers == 0
        world.neighbours = [Neighbour(A, 0.01)]
        await world.until(lambda: world.prober.statistics().bursts >= 1 and A in world.table().links)

    play(scenario)


# ---- receiving ----------------------------------------------------------------------------------------------


def attaches(world: World, ticket: BurstTicket) -> bool:
    """Whether a connection of this burst is taken over."""
    near, far = socket.socketpair()
    with near, far:
        return world.prober.attach(pack_hello(ticket, 0), near)


def test_a_burst_that_is_agreed_to_has_a_gate_until_it_is_over(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        world.neighbours = []
        opened = await world.prober.on_open(A, Role.WORKER, messages.ProbeOpen(burst=ASKED))
        assert opened.refused == ""
        ticket = opened.ticket
        assert ticket is not None
        assert (ticket.streams, ticket.seconds, ticket.max_bytes) == (4, 1.0, 100 * MB)
        assert attaches(world, ticket)
        assert not attaches(world, issue_burst(**BOUNDS, rtt_s=0.0, random=world.rng.randbytes))
        assert world.reserved == A
        refused = await world.prober.on_open(B, Role.WORKER, messages.ProbeOpen(burst=ASKED))
        assert refused.ticket is None
        assert "another burst" in refused.refused
        assert 0 < refused.retry_s <= SETTINGS.retry_s * 1.1
        await world.until(lambda: world.reserved is None, 5)
        assert not attaches(world, ticket)
        assert world.prober.statistics().burst_bytes == 50 * MB
        assert (await world.prober.on_open(B, Role.WORKER, messages.ProbeOpen(burst=ASKED))).ticket is not None

    play(scenario)


def test_a_sender_that_never_comes_frees_box_and_gate(play: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        world.neighbours = []
        world.outcomes = [TransferTimeout("0 of 4 burst connections came")]
        opened = await world.prober.on_open(A, Role.WORKER, messages.ProbeOpen(burst=ASKED))
        assert opened.ticket is not None
        await world.until(lambda: world.reserved is None, 5)
        assert not attaches(world, opened.ticket)
        assert world.prober.statistics().burst_bytes == 0

    play(scenario)


@pytest.mark.parametrize(
    ("case", "said"),
    [("too much", "more bytes"), ("busy", "at work"), ("no money", "allowance"), ("busy, overdue", "")],
)
def test_what_is_refused_is_said_with_its_reason(play: Callable[..., None], case: str, said: str) -> None:
    async def scenario(world: World) -> None:
        world.neighbours = []
        burst = ASKED
        if case == "too much":
            burst = BurstRequest(peer=ME, streams=4, seconds=1.0, max_bytes=SETTINGS.burst_bytes + 1, overdue=False)
        elif case.startswith("busy"):
            world.activity = Activity(engine_busy=True)
            overdue = case.endswith("overdue")
            burst = BurstRequest(peer=ME, streams=4, seconds=1.0, max_bytes=MB, overdue=overdue)
        found = await world.prober.on_open(A, Role.WORKER, messages.ProbeOpen(burst=burst))
        assert said in found.refused
        assert (found.ticket is None) == bool(said)
        assert world.reserved == (None if said else A)

    price = BoxLinkSettings(box=BoxFigures(down_usd_per_gb=500.0)) if case == "no money" else None
    play(scenario, price)
