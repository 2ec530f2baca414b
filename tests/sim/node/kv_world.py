"""How KV gets from a node to others, on a virtual clock: what is chosen from which tables, what running transfers
teach, and when paths change. The other nodes are scripted; choice and steering are the real ones.
"""

import random
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio
from trio.testing import MockClock

from p2pserve.bootstrap import Address, NetworkError, PeerId, Role
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.kvtransport.probing.estimates import LinkEstimator
from p2pserve.kvtransport.probing.figures import BoxFigures, LinkFigures
from p2pserve.kvtransport.routing.paths import PathChoice
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.permits import Permit
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.links.kv_outlets import KvOutlets
from p2pserve.node.links.link_knowledge import LinkKnowledge
from p2pserve.node.links.path_selection import PathSelector
from p2pserve.node.methods import LINK_OPEN, RELAY_OPEN
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.settings import BoxLinkSettings
from p2pserve.node.testing import MemoryExchange, Sent, dial_at

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
    """A node's outlets, and the others: what they advertise, and how they answer."""

    nursery: trio.Nursery
    settings: BoxLinkSettings = field(default_factory=BoxLinkSettings)
    tables: dict[PeerId, messages.LinkTable] = field(default_factory=dict)
    lives: dict[PeerId, int] = field(default_factory=dict)
    addresses: dict[PeerId, Address] = field(default_factory=dict)
    links: dict[PeerId, LinkTicket] = field(default_factory=dict)
    faults: dict[PeerId, NetworkError] = field(default_factory=dict)
    hung: set[PeerId] = field(default_factory=set)  # never answer for a permit
    paths: list[tuple[bytes, tuple[DialPath, ...]]] = field(default_factory=list)
    relay_clock: float = 0.0  # what it says at the start

    def __post_init__(self) -> None:
        self.rng = random.Random(3)
        self.exchange = MemoryExchange(latency_s=0.01, before=self._before)
        self.estimators: dict[PeerId, LinkEstimator] = {}
        self.knowledge = LinkKnowledge(S, self.settings, estimators=self.estimators)
        self.selector = PathSelector(self.knowledge, self.addresses.__contains__)
        self.outlets = KvOutlets(
            MODEL,
            self.selector,
            messenger=self.exchange.join(S),
            path_to=dial_at(self.addresses.get),
            starts=lambda peer: self.lives.get(peer, 0),
            nursery=self.nursery,
        )
        self.outlets.set_paths = lambda link, paths: self.paths.append((link, paths))
        self.member(T)

    def member(self, peer: PeerId, **box: Any) -> None:
        """A node that can be dialled and advertises this of itself."""
        self.addresses[peer] = Address(f"{peer}.example", 7000)
        if peer not in self.exchange.nodes:
            others = self.exchange.join(peer)
            others.handle(LINK_OPEN, partial(self._open_link, peer))
            others.handle(RELAY_OPEN, partial(self._permit, peer))
        self.links.setdefault(peer, issue_link(600.0, self.rng.randbytes))
        self.lives.setdefault(peer, 1)
        known = self.tables.get(peer, messages.LinkTable())
        self.tables[peer] = messages.LinkTable(box=BoxFigures(**box), links=known.links)
        self.learn()

    def link(self, source: PeerId, target: PeerId, found: LinkFigures) -> None:
        """What is known of a link, wherever it is known."""
        if source == S:
            self.estimators[target] = LinkEstimator(found)
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
        self.knowledge.learn(self.tables, self.lives)

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

    async def _permit(self, peer: PeerId, source: PeerId, role: Role, body: messages.RelayOpen) -> messages.RelayOpened:
        if peer in self.hung:
            await trio.sleep_forever()
        address = self.addresses[PeerId(body.target)]
        permit = Permit(
            permit=self.rng.randbytes(16),
            secret=self.rng.randbytes(32),
            next_host=address.host,
            next_port=address.port,
            byte_budget=1 << 40,
            bytes_per_s=1e9,
            expires_at=self.relay_clock + trio.current_time() + LIFE_S,
        )
        return messages.RelayOpened(permit=permit)

    def ticket(self, peer: PeerId = T, codec: str = "kv4", deadline_s: float = 30.0) -> TransferTicket:
        return issue_transfer(self.links[peer].link, codec, deadline_s, self.rng.randbytes)

    async def outlet(self, peer: PeerId = T, tokens: int = LONG, codec: str = "kv4") -> protocol.Outlet:
        return await self.outlets.open(part_of(peer, self.ticket(peer, codec)), tokens)

    def choice(self, peer: PeerId) -> PathChoice | None:
        """What holds for a peer, if KV has gone there."""
        return next((known.choice for known in self.selector.links_to(peer)), None)

    def bytes_of(self, peer: PeerId) -> list[int]:
        """What is left to send over each link to a peer."""
        return [known.controller.remaining for known in self.selector.links_to(peer)]

    def table(self, told: messages.LinkTable | None) -> messages.LinkTable:
        return self.knowledge.table(told, trio.current_time())

    def report(self, moved: dict[str, int], waiting: int, *, blocked: bool = False, peer: PeerId = T) -> None:
        """What the engine says of a link."""
        paths = tuple(protocol.PathReport(label, 4, size, waiting, 0.0, None) for label, size in moved.items())
        link = self.links[peer].link
        self.outlets.on_link_report(
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
        return self.outlets.end_transfer(
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


def open_world(settings: BoxLinkSettings | None = None) -> AbstractAsyncContextManager[World]:
    @asynccontextmanager
    async def opened() -> Any:
        async with trio.open_nursery() as nursery:
            yield World(nursery, settings or BoxLinkSettings())
            nursery.cancel_scope.cancel()

    return opened()


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def labels(outlet: protocol.Outlet) -> set[str]:
    return {path.label for path in outlet.paths}
