"""How KV gets from a node to others, on a virtual clock: what is chosen from which tables, what running transfers
teach, and when paths change. The other nodes are scripted; choice and steering are the real ones.
"""

import math
import random
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, NetworkError, PeerId, RemoteError, Role, Unreachable
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.link.dialling import DialPath
from p2pserve.kvtransport.link.permits import Permit
from p2pserve.kvtransport.probing.estimates import LinkEstimator
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures, Source
from p2pserve.kvtransport.routing.paths import NoPath
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.links.kv_ways import (
    FRESH_S,
    LIMITED_BYTES,
    MAX_TRANSFER_S,
    PERMIT_MARGIN_S,
    REFUSED_S,
    KvWays,
    LinkSettings,
)
from p2pserve.node.methods import LINK_OPEN, RELAY_OPEN
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.testing import MemoryExchange, Sent

S, T, R, R2 = PeerId("source"), PeerId("target"), PeerId("relay-1"), PeerId("relay-2")
MODEL = ModelInfo(
    service="tiny",
    shape=ModelShape(
        name="tiny", layers=32, hidden=4096, heads=8, kv_heads=8, head_dim=128, intermediate=4096, vocabulary=4096
    ),
    max_model_len=4096,
    weights=WeightSizes(layers=(400_000_000,) * 32, embeddings=33_000_000, head=33_000_000),
)
LONG = 4000  # tokens: half a GB in 16 bit
MB = 1_000_000
LIFE_S = 3600.0


async def elapse(seconds: float) -> None:
    """Let virtual time pass."""
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


WHOLE = protocol.KvSlice(first_layer=0, last_layer=MODEL.layers, first_head=0, last_head=MODEL.kv_heads)
RANK = protocol.WorkerRank()


def part_of(
    peer: PeerId, ticket: TransferTicket, piece: protocol.KvSlice = WHOLE, target: protocol.WorkerRank = RANK
) -> messages.TicketedSlice:
    """What one worker here sends to one worker of another node."""
    found = messages.RankSlice(source_peer=S, source=RANK, target_peer=peer, target=target, slice=piece)
    return messages.TicketedSlice(rank_slice=found, ticket=ticket)


def figures(gbps: float, rtt_s: float = 0.02, **more: Any) -> LinkFigures:
    return LinkFigures(rtt_s=rtt_s, one_stream_gbps=min(gbps, 0.0208 / rtt_s), capacity_gbps=gbps, **more)


@dataclass
class World:
    """A node's ways, and the others: what they advertise, and how they answer."""

    nursery: trio.Nursery
    settings: LinkSettings = field(default_factory=LinkSettings)
    tables: dict[PeerId, messages.LinkTable] = field(default_factory=dict)
    lives: dict[PeerId, int] = field(default_factory=dict)
    addresses: dict[PeerId, Address] = field(default_factory=dict)
    links: dict[PeerId, LinkTicket] = field(default_factory=dict)
    faults: dict[PeerId, NetworkError] = field(default_factory=dict)
    paths: list[tuple[bytes, tuple[DialPath, ...]]] = field(default_factory=list)
    wall: float = 1e9

    def __post_init__(self) -> None:
        self.rng = random.Random(3)
        self.exchange = MemoryExchange(latency_s=0.01, before=self._before)
        self.ways = KvWays(
            messenger=self.exchange.join(S),
            settings=self.settings,
            where=self.addresses.get,
            set_paths=lambda link, paths: self.paths.append((link, paths)),
            nursery=self.nursery,
            wall=lambda: self.wall + trio.current_time(),
        )
        self.ways.serve(MODEL)
        self.member(T)

    def member(self, peer: PeerId, **box: Any) -> None:
        """A node that can be dialled and advertises this of itself."""
        self.addresses[peer] = Address(f"{peer}.example", 7000)
        if peer not in self.exchange.nodes:
            others = self.exchange.join(peer)
            others.handle(LINK_OPEN, partial(self._open_link, peer))
            others.handle(RELAY_OPEN, self._permit)
        self.links.setdefault(peer, issue_link(600.0, self.rng.randbytes))
        self.lives.setdefault(peer, 1)
        known = self.tables.get(peer, messages.LinkTable())
        self.tables[peer] = messages.LinkTable(box=BoxFigures(**box), links=known.links)
        self.learn()

    def link(self, source: PeerId, target: PeerId, found: LinkFigures) -> None:
        """What is known of a link, wherever it is known."""
        if source == S:
            self.ways._estimators[target] = LinkEstimator(found)
        else:
            table = self.tables[source]
            self.tables[source] = messages.LinkTable(box=table.box, links={**table.links, target: found})
        self.learn()

    def triangle(self, direct: float = 0.1, hop: float = 2.0, relay: PeerId = R) -> None:
        """A slow direct link, and a relay with two fast ones."""
        self.member(relay)
        self.link(S, T, figures(direct))
        self.link(S, relay, figures(hop))
        self.link(relay, T, figures(hop))

    def learn(self) -> None:
        self.ways.learn(self.tables, self.lives)

    @property
    def asked(self) -> list[tuple[PeerId, str]]:
        return [(sent.target, sent.method) for sent in self.exchange.asked]

    def _before(self, sent: Sent) -> None:
        if sent.target in self.faults:
            raise self.faults[sent.target]

    async def _open_link(
        self, peer: PeerId, source: PeerId, role: Role, body: messages.LinkOpen
    ) -> messages.LinkOpened:
        assert body.service == "tiny"
        return messages.LinkOpened(link=self.links[peer])

    async def _permit(self, source: PeerId, role: Role, body: messages.RelayOpen) -> messages.RelayOpened:
        address = self.addresses[PeerId(body.target)]
        permit = Permit(
            permit=self.rng.randbytes(16),
            secret=self.rng.randbytes(32),
            next_host=address.host,
            next_port=address.port,
            byte_budget=1 << 40,
            bytes_per_s=1e9,
            expires_at=self.wall + trio.current_time() + LIFE_S,
        )
        return messages.RelayOpened(permit=permit)

    def ticket(self, peer: PeerId = T, codec: str = "kv4", deadline_s: float = 30.0) -> TransferTicket:
        return issue_transfer(self.links[peer].link, codec, deadline_s, self.rng.randbytes)

    async def outlet(self, peer: PeerId = T, tokens: int = LONG, codec: str = "kv4") -> protocol.Outlet:
        return await self.ways.outlet(part_of(peer, self.ticket(peer, codec)), "tiny", tokens)

    def report(self, moved: dict[str, int], waiting: int, *, blocked: bool = False, peer: PeerId = T) -> None:
        """What the engine says of a link."""
        paths = tuple(protocol.PathReport(label, 4, size, waiting, 0.0, None) for label, size in moved.items())
        link = self.links[peer].link
        self.ways.on_link_report(
            protocol.LinkReport(link=link, paths=paths, transfers=1, waiting_bytes=waiting, blocked=blocked)
        )

    async def run(
        self,
        seconds: float,
        bytes_s: Callable[[float], float],
        *,
        label: str = "direct",
        waiting: int = 100 * MB,
        blocked: bool = False,
        start: int = 0,
    ) -> int:
        """Reports four times a second while a path moves bytes at this rate, until other paths are set."""
        begun, moved, before = trio.current_time(), float(start), len(self.paths)
        while (at := trio.current_time() - begun) < seconds and len(self.paths) == before:
            self.report({label: int(moved)}, waiting, blocked=blocked)
            await elapse(0.25)
            moved += bytes_s(at) * 0.25
        return int(moved)

    def done(self, paths: dict[str, int], peer: PeerId = T) -> float:
        """The engine reports the end of a transfer; returns its price."""
        return self.ways.on_transfer(
            peer,
            protocol.TransferReport(
                transfer=b"t" * 16,
                delivered=True,
                reason="",
                frames=1,
                raw_bytes=1,
                wire_bytes=1,
                span_s=1.0,
                visible_s=0.1,
                hidden_fraction=0.9,
                link=self.links[peer].link,
                mode="layerwise",
                paths=paths,
                resent_bytes=0,
                blocked_s=0.0,
            ),
        )


def open_world(settings: LinkSettings | None = None) -> AbstractAsyncContextManager[World]:
    @asynccontextmanager
    async def opened() -> Any:
        async with trio.open_nursery() as nursery:
            yield World(nursery, settings or LinkSettings())
            nursery.cancel_scope.cancel()

    return opened()


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def labels(outlet: protocol.Outlet) -> set[str]:
    return {path.label for path in outlet.paths}


# ---- what is chosen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "given"), [(30.0, 30.0), (MAX_TRANSFER_S + 1, MAX_TRANSFER_S), (3600.0, MAX_TRANSFER_S)]
)
def test_a_receiver_cannot_have_blocks_held_for_as_long_as_it_likes(asked: float, given: float) -> None:
    async def main() -> None:
        async with open_world() as world:
            ticket = world.ticket(deadline_s=asked)
            outlet = await world.ways.outlet(part_of(T, ticket), "tiny", LONG)
            assert outlet.ticket.deadline_s == given
            assert outlet.ticket.transfer == ticket.transfer

    play(main)


def test_a_link_that_nothing_is_known_of_is_dialled_directly() -> None:
    async def main() -> None:
        async with open_world() as world:
            outlet = await world.outlet()
            assert outlet.link == world.links[T]
            (path,) = outlet.paths
            assert (path.host, path.port, path.label, path.relay) == ("target.example", 7000, "direct", None)
            assert path.streams >= 1
            assert outlet.gbps > 0
            assert outlet.rtt_s > 0
            assert world.asked == [(T, "link.open")]
            again = await world.outlet()
            assert again.link == outlet.link
            assert world.asked == [(T, "link.open")]
            choice = world.ways.choice(T)
            assert choice is not None
            assert choice.vias == {None}
            assert world.ways.choice(R) is None

    play(main)


def test_a_choice_is_kept_until_figures_are_news() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.triangle(direct=1.0, hop=0.1)
            world.ways.estimator(T).on_ping(0.02, now=trio.current_time())
            await world.outlet()  # from now on there are paths in use
            await world.outlet()
            kept = world.ways.choice(T)
            await elapse(1.0)
            world.ways.estimator(T).on_ping(0.02, now=trio.current_time())
            assert labels(await world.outlet()) == {"direct"}
            assert world.ways.choice(T) is kept
            world.link(R, T, figures(9.0))  # as the relay says
            world.link(S, R, figures(9.0))  # as it was measured here
            assert R in labels(await world.outlet())

    play(main)


def test_a_long_link_gets_the_streams_that_fill_it() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.link(S, T, LinkFigures(rtt_s=0.1, one_stream_gbps=0.2, capacity_gbps=1.0))
            (path,) = (await world.outlet()).paths
            assert path.streams >= 5

    play(main)


def test_a_relay_is_taken_where_it_is_the_better_way_and_its_permit_is_kept() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            outlet = await world.outlet()
            path = next(path for path in outlet.paths if path.label == R)
            assert (path.host, path.port) == ("relay-1.example", 7000)
            assert path.relay is not None
            assert (path.relay.next_host, path.relay.next_port) == ("target.example", 7000)
            assert outlet.gbps > 0.5
            assert (await world.outlet()).paths == outlet.paths
            assert world.asked.count((R, "relay.open")) == 1
            await elapse(LIFE_S - PERMIT_MARGIN_S + 1)
            later = next(path for path in (await world.outlet()).paths if path.label == R)
            assert later.relay != path.relay
            assert world.asked.count((R, "relay.open")) == 2
            world.ways.peer_lost(R)  # and comes back: it knows nothing of what it promised
            world.triangle()
            await world.outlet()
            assert world.asked.count((R, "relay.open")) == 3

    play(main)


@pytest.mark.parametrize("case", ["as good directly", "does not relay", "no address", "no figures", "unknown here"])
def test_no_relay_without_a_reason_and_the_means(case: str) -> None:
    async def main() -> None:
        async with open_world(LinkSettings(box=BoxFigures(up_gbps=2.0))) as world:
            world.triangle(direct=2.0 if case == "as good directly" else 0.1)
            if case == "does not relay":
                world.member(R, relay_gbps=0.0)
            elif case == "no address":
                del world.addresses[R]
            elif case == "no figures":
                world.tables[R] = messages.LinkTable()
                world.learn()
            elif case == "unknown here":
                del world.ways._estimators[R]
            assert labels(await world.outlet()) == {"direct"}
            assert (R, "relay.open") not in world.asked

    play(main)


def test_a_relay_that_refuses_is_left_out_for_a_while() -> None:
    """The direct path gets what it needs then, not a single stream; and another relay has its chance."""

    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            world.link(S, T, LinkFigures(rtt_s=0.1, one_stream_gbps=0.02, capacity_gbps=0.1))
            world.faults[R] = RemoteError("no-relay", "this node forwards nothing for others")
            (path,) = (await world.outlet()).paths
            assert (path.label, path.relay) == ("direct", None)
            assert path.streams >= 5
            choice = world.ways.choice(T)
            assert choice is not None
            assert choice.vias == {None}
            await world.outlet()
            assert world.asked.count((R, "relay.open")) == 1
            world.triangle(relay=R2)
            assert R2 in labels(await world.outlet())
            del world.faults[R]
            world.ways.peer_lost(R2)
            del world.addresses[R2]
            await elapse(REFUSED_S)
            assert R in labels(await world.outlet())

    play(main)


def test_a_node_without_an_address_cannot_be_pushed_to() -> None:
    async def main() -> None:
        async with open_world() as world:
            for gone in (None, Address("", 0)):
                world.addresses.pop(T) if gone is None else world.addresses.update({T: gone})
                with pytest.raises(Unreachable, match="address"):
                    await world.outlet()

    play(main)


def test_a_node_that_does_not_answer_is_said_so_and_asked_again() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.faults[T] = Unreachable("nobody answers")
            with pytest.raises(Unreachable):
                await world.outlet()
            del world.faults[T]
            assert (await world.outlet()).link == world.links[T]

    play(main)


def test_a_path_that_costs_too_much_is_not_taken() -> None:
    async def main() -> None:
        async with open_world(LinkSettings(box=BoxFigures(up_usd_per_gb=0.02), max_usd_per_gb=0.01)) as world:
            world.link(S, T, figures(1.0))
            with pytest.raises(NoPath):
                await world.outlet()

    play(main)


def test_what_flows_already_counts() -> None:
    """A second transfer over the same relay gets what the first one leaves."""

    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            await world.outlet()
            world.report({"direct": 0}, 50 * MB)
            assert [(flow.source, flow.target) for flow in world.ways.network().flows][:1] == [(S, T)]
            assert world.ways.network(world.links[T].link).flows == ()
            assert world.ways.transfers == 1
            await elapse(FRESH_S + 0.1)  # its engine has fallen silent: whatever it was, it is over
            assert world.ways.network().flows == ()
            assert world.ways.transfers == 0

    play(main)


# ---- links --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advert", ["has come", "is late"])
def test_an_engine_that_has_been_restarted_is_asked_for_its_new_link(advert: str) -> None:
    """Its ticket may be here before gossip tells of the restart."""

    async def main() -> None:
        async with open_world() as world:
            old = (await world.outlet()).link
            world.links[T] = issue_link(600.0, world.rng.randbytes)
            if advert == "has come":
                world.lives[T] = 2
                world.learn()
            found = await world.outlet()
            assert found.link == world.links[T] != old
            assert world.paths == [(old.link, ())]  # nobody dials there any more
            assert world.ways.choice(T) is not None
            assert len(world.ways._ways) == 1

    play(main)


def test_a_ticket_of_a_link_that_its_node_does_not_know_is_refused() -> None:
    async def main() -> None:
        async with open_world() as world:
            forged = issue_transfer(b"?" * 16, "kv4", 30.0, world.rng.randbytes)
            with pytest.raises(TransferError, match="not the one"):
                await world.ways.outlet(part_of(T, forged), "tiny", LONG)
            assert len(world.asked) == 2
            assert (await world.outlet()).link == world.links[T]

    play(main)


def test_each_two_workers_have_a_link_of_their_own_and_a_part_of_the_bytes() -> None:
    async def main() -> None:
        async with open_world() as world:
            half = protocol.KvSlice(first_layer=0, last_layer=MODEL.layers // 2, first_head=0, last_head=1)
            whole = await world.outlet(tokens=100, codec="raw")
            expected = world.ways._ways[whole.link.link].job.bytes * len(half.layers) * len(half.heads)
            first, second = whole.link, issue_link(600.0, world.rng.randbytes)
            world.links[T] = second  # what the other worker's question is answered with
            part = part_of(T, world.ticket(codec="raw"), half, protocol.WorkerRank(tp=1))
            outlet = await world.ways.outlet(part, "tiny", 100)
            assert (outlet.link, outlet.slice, outlet.ticket) == (second, half, part.ticket)
            sent = world.ways._ways[second.link].job.bytes
            assert sent == pytest.approx(expected / (MODEL.layers * MODEL.kv_heads), rel=0.01)
            assert world.asked == [(T, "link.open"), (T, "link.open")]
            assert world.paths == []  # the first link is no earlier life of the second
            assert world.ways.peer_lost(T) == [first, second]

    play(main)


def test_transfers_that_begin_at_once_share_the_link_and_its_books() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.triangle()
            found: list[protocol.Outlet] = []

            async def one() -> None:
                found.append(await world.outlet())

            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(one)
            assert len(found) == 4
            assert {outlet.link for outlet in found} == {world.links[T]}
            assert world.asked.count((T, "link.open")) == 1
            assert len(world.ways._ways) == 1

    play(main)


def test_what_ends_with_a_node_or_with_this_nodes_engine() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.outlet()
            assert world.ways.peer_lost(T) == [world.links[T]]
            assert world.ways.peer_lost(T) == []
            assert world.ways.choice(T) is None
            world.report({"direct": 1}, 1)  # on its way when the node was lost
            await world.outlet()
            world.ways.engine_lost()
            assert world.ways.choice(T) is None
            await world.outlet()
            assert world.asked.count((T, "link.open")) == 3

    play(main)


# ---- measuring ----------------------------------------------------------------------------------------------


def test_a_transfer_that_the_link_holds_up_measures_it() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.outlet()
            before = world.ways.table(None).links
            assert before == {}  # nothing measured, nothing told
            await world.run(4, lambda at: 0.6 * 1.25e8)
            found = world.ways.table(None).links[T]
            assert found.source is Source.MEASURED
            assert found.capacity_gbps == pytest.approx(0.6, rel=0.1)
            assert world.ways.take_measured() == {T}
            assert world.ways.take_measured() == set()

    play(main)


@pytest.mark.parametrize("why", ["prefill is slow", "the receiver has no blocks"])
def test_a_transfer_that_something_else_holds_up_measures_no_more_than_a_floor(why: str) -> None:
    async def main() -> None:
        async with open_world() as world:
            world.link(S, T, figures(2.0))
            await world.outlet()
            slow = why == "prefill is slow"
            await world.run(8, lambda at: 0.05 * 1.25e8, waiting=100_000 if slow else 100 * MB, blocked=not slow)
            found = world.ways.estimator(T).figures(trio.current_time())
            assert found.capacity_gbps >= 1.9
            assert world.ways.take_measured() == set()

    play(main)


def test_round_trips_of_connections_are_measured_too() -> None:
    async def main() -> None:
        async with open_world() as world:
            await world.outlet()
            path = protocol.PathReport("direct", 2, 0, 0, 0.0, 0.123)
            report = protocol.LinkReport(
                link=world.links[T].link, paths=(path,), transfers=1, waiting_bytes=0, blocked=False
            )
            for _ in range(20):
                world.ways.on_link_report(report)
                await elapse(0.25)
            assert world.ways.estimator(T).figures(trio.current_time()).rtt_s == pytest.approx(0.123, rel=0.05)

    play(main)


# ---- steering -----------------------------------------------------------------------------------------------


UP = LinkSettings(box=BoxFigures(up_gbps=2.0))  # so that two paths carry no more than one


async def on_its_way(world: World, tokens: int = 10 * LONG) -> None:
    """A transfer that goes directly, although a good relay is there."""
    world.triangle(direct=1.9)
    assert labels(await world.outlet(tokens=tokens)) == {"direct"}


@pytest.mark.parametrize(("case", "part"), [("stalled", 0.0), ("degraded", 0.05)])
def test_a_transfer_leaves_a_path_that_fails_it(case: str, part: float) -> None:
    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            rate = 1.9 * 1.25e8
            moved = await world.run(2, lambda at: rate * 0.9)
            assert world.paths == []
            begun = trio.current_time()
            await world.run(15, lambda at: rate * part, start=moved)
            ((link, paths),) = world.paths
            assert link == world.links[T].link
            assert R in {path.label for path in paths}
            assert any(path.relay is not None for path in paths)
            assert trio.current_time() - begun < 8
            choice = world.ways.choice(T)
            assert choice is not None
            assert R in choice.vias

    play(main)


@pytest.mark.parametrize(
    ("waiting", "blocked", "rate"),
    [
        (100_000, False, 0.02),  # a layer now and then
        (0, False, 0.0),  # no layer yet
        (100 * MB, True, 0.0),  # the receiver's engine has no blocks yet
        (100 * MB, True, 0.02),
        (LIMITED_BYTES - 1, False, 0.02),
    ],
)
def test_no_path_is_blamed_for_what_is_slow_elsewhere(waiting: int, blocked: bool, rate: float) -> None:
    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            await world.run(30, lambda at: rate * 1.25e8, waiting=waiting, blocked=blocked)
            assert world.paths == []

    play(main)


def test_a_link_that_has_begun_anew_is_not_taken_for_a_stalled_one() -> None:
    """Its counters start at nothing, below what they were at the last transfer."""

    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            rate = 1.9 * 1.25e8
            await world.run(2, lambda at: rate)
            world.done({"direct": 400 * MB})
            await elapse(700)
            assert labels(await world.outlet()) == {"direct"}
            await world.run(3, lambda at: rate * 0.9)
            assert world.paths == []

    play(main)


def test_steering_onto_a_relay_that_refuses_stays_and_tries_the_next_one() -> None:
    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            world.faults[R] = RemoteError("busy", "4096 permits are in use")
            moved = await world.run(10, lambda at: 0.0)
            assert world.paths == []
            assert world.asked.count((R, "relay.open")) == 1
            choice = world.ways.choice(T)
            assert choice is not None
            assert choice.vias == {None}
            world.triangle(direct=1.9, relay=R2)
            way = world.ways._ways[world.links[T].link]
            assert not way.steering
            assert labels(await world.outlet()) <= {"direct", R2}
            await world.run(15, lambda at: 0.0, start=moved)
            assert (
                any(R2 in {path.label for path in paths} for _, paths in world.paths)
                or R2 in (world.ways.choice(T) or choice).vias
            )

    play(main)


def test_reports_of_a_member_that_was_just_forgotten_do_no_harm() -> None:
    """It is suspected to be gone, and KV still moves to it."""

    async def main() -> None:
        async with open_world(UP) as world:
            await on_its_way(world)
            moved = await world.run(2, lambda at: 1.9 * 1.25e8 * 0.2)
            del world.tables[T]
            del world.lives[T]
            world.learn()
            assert T not in world.ways._estimators
            await world.run(10, lambda at: 0.0, start=moved)

    play(main)


@pytest.mark.parametrize("codec", ["raw", "kv4"])
def test_a_transfer_is_watched_to_its_last_byte(codec: str) -> None:
    """Engines on CPUs keep KV in 32 bit: `raw` then has twice the bytes."""

    async def main() -> None:
        async with open_world(UP) as world:
            world.ways.engine_ready("float32")
            await world.outlet(tokens=100, codec=codec)
            size = world.ways._ways[world.links[T].link].controller.remaining
            values = 100 * MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim
            assert size >= values * 4 if codec == "raw" else values // 2 <= size < values

    play(main)


# ---- telling ------------------------------------------------------------------------------------------------


def test_what_a_transfer_cost_by_the_boxes_own_prices() -> None:
    async def main() -> None:
        async with open_world(LinkSettings(box=BoxFigures(up_usd_per_gb=0.01))) as world:
            world.triangle()
            world.member(T, down_usd_per_gb=0.02)
            world.member(R, up_usd_per_gb=0.05, down_usd_per_gb=0.03)
            await world.outlet()
            assert world.done({"direct": 10**9}) == pytest.approx(0.03)
            assert world.done({R: 10**9}) == pytest.approx(0.01 + 0.03 + 0.05 + 0.02)
            assert world.done({"direct": 10**8, R: 10**9}) == pytest.approx(0.003 + 0.11)
            assert world.done({}) == 0.0
            assert world.done({"nobody": 10**9}) == pytest.approx(0.03)  # prices that nobody told are none

    play(main)


def test_the_table_says_what_was_measured_and_hardly_ever_changes() -> None:
    async def main() -> None:
        settings = LinkSettings(site="fra", box=BoxFigures(up_gbps=1.0))
        async with open_world(settings) as world:
            world.link(S, T, figures(1.0))
            world.ways.estimator(R)  # nothing measured: not told
            told = world.ways.table(None)
            assert (told.site, told.box, set(told.links)) == ("fra", settings.box, {T})
            world.link(S, T, figures(1.1, rtt_s=0.021))
            assert world.ways.table(told) == told
            world.link(S, T, figures(1.4))
            assert world.ways.table(told).links[T].capacity_gbps == 1.4
            world.link(S, T, figures(1.0, rate_confidence=0.5))
            assert world.ways.table(told) != told
            world.link(S, T, figures(1.0))
            for _ in range(3):
                world.ways.estimator(T).on_unreachable(now=trio.current_time())
            assert not world.ways.table(told).links[T].reachable
            world.link(S, T, figures(math.nextafter(1.0, 2.0)))
            assert world.ways.table(told) == told

    play(main)


def test_a_node_that_names_no_site_is_one_of_its_own() -> None:
    async def main() -> None:
        async with open_world() as world:
            world.tables[R] = messages.LinkTable(site="fra")
            world.learn()
            assert [world.ways.site_of(peer) for peer in (T, R, R2)] == [T, "fra", R2]

    play(main)
