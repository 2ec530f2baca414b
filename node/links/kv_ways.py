"""How KV gets from this node's engine to others: which link, over which paths, and what it cost.

Decides nothing itself: `kvtransport.paths` chooses, from what this node has measured of its own links and what the
others say of theirs; `kvtransport.steering` watches what is under way. This module keeps the books between them:
estimators, permits of relays, paths in use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

import msgspec
import trio

from ...bootstrap import Address, NetworkError, PeerId, Unreachable
from ...bootstrap.methods import Messenger
from ...kernels.codecs import codec_named
from ...kernels.format import WireDtype, payload_bytes
from ...kvtransport.errors import TicketError
from ...kvtransport.link.dialling import DialPath
from ...kvtransport.link.permits import Permit
from ...kvtransport.probing.estimates import LinkEstimator, TransferSample
from ...kvtransport.probing.figures import MAX_STREAMS, BoxFigures, LinkFigures, Source, one_stream_gbps, prior
from ...kvtransport.probing.sites import infer
from ...kvtransport.routing.choices import ChoiceCache
from ...kvtransport.routing.costs import transfer_cost
from ...kvtransport.routing.paths import KVPath, NetworkView, PathChoice, PathQuery, RunningTransfer
from ...kvtransport.routing.steering import PathController
from ...kvtransport.wire.tickets import LinkTicket
from .. import messages
from ..engine import protocol
from ..methods import LINK_OPEN, RELAY_OPEN
from ..models import ModelInfo
from .kv_links import Ends, OutgoingLinks

__all__ = ["MAX_TRANSFER_S", "KvWays", "LinkSettings"]

_log = logging.getLogger(__name__)

MAX_TRANSFER_S = 120.0
"""For so long KV is waited for, and a prompt's blocks are held for it; then the prompt is computed where it goes."""

ASK_TIMEOUT_S = 5.0
UNMEASURED_RTT_S = 0.05
UNMEASURED_GBPS = 1.0
"""What a link is taken for before anything is known of it: an ordinary rental's."""

PERMIT_MARGIN_S = 30.0
REFUSED_S = 60.0  # a relay that has refused is not asked again for so long
FRESH_S = 2.0  # an engine reports several times a second while something moves
LIMITED_BYTES = 2 << 20
"""With so much waiting at both ends of an interval, it was the link that set the pace."""

NEWS = 0.2  # figures are worth telling again when one has moved by this fraction
DIRECT = "direct"
_WARM_S = 60.0
_DTYPES = {"float32": WireDtype.FP32, "float16": WireDtype.FP16, "bfloat16": WireDtype.BF16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What the box's owner says of it: its site, its caps and prices, and what a path may cost."""

    site: str = ""
    box: BoxFigures = field(default_factory=BoxFigures)
    usd_per_s: float | None = None
    max_usd_per_gb: float | None = None


@dataclass(slots=True)
class _Way:
    """A link in use: where it leads, the choice that holds, and what its paths had moved at the last look."""

    ends: Ends
    job: PathQuery
    choices: ChoiceCache
    choice: PathChoice
    controller: PathController
    base: dict[str, int]  # what the paths had moved when the controller began
    seen: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    at: float = 0.0
    used_at: float = 0.0
    steering: bool = False

    @property
    def peer(self) -> PeerId:
        """The node it leads to."""
        return self.ends.peer

    def moving(self, now: float) -> bool:
        """Whether something was under way lately; an engine that has nothing more to send just falls silent."""
        return self.waiting > 0 and now - self.at < FRESH_S


@final
class KvWays:
    """One per node. `where` gives the address of a member (None: unknown).

    `set_paths(link, paths)` tells the engine; `wall` is seconds since 1970, by which permits expire.
    """

    def __init__(
        self,
        *,
        settings: LinkSettings,
        messenger: Messenger,
        where: Callable[[PeerId], Address | None],
        set_paths: Callable[[bytes, tuple[DialPath, ...]], None],
        nursery: trio.Nursery,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.own = messenger.peer_id
        self.settings = settings
        self._messenger = messenger
        self._where = where
        self._set_paths = set_paths
        self._nursery = nursery
        self._clock = trio.current_time
        self._wall = wall
        self._model: ModelInfo | None = None
        self._dtype = WireDtype.BF16
        self._links = OutgoingLinks(self._open_link)
        self._service = ""
        self._estimators: dict[PeerId, LinkEstimator] = {}
        self._tables: Mapping[PeerId, messages.LinkTable] = {}
        self._own_links: Mapping[PeerId, LinkFigures] = {}
        self._known: NetworkView | None = (
            None  # the tables and the own links, which paths are chosen by while they last
        )
        self._lives: Mapping[PeerId, int] = {}
        self._permits: dict[tuple[PeerId, PeerId], Permit] = {}
        self._refused: dict[tuple[PeerId, PeerId], float] = {}  # relay and target -> when
        self._measured: set[PeerId] = set()
        self._ways: dict[bytes, _Way] = {}

    def __repr__(self) -> str:
        return f"<KvWays links={len(self._ways)} measured={len(self._estimators)} permits={len(self._permits)}>"

    # ---- what is known --------------------------------------------------------------------------------------

    def serve(self, model: ModelInfo) -> None:
        """KV is that of this model."""
        self._model = model

    def engine_ready(self, dtype: str) -> None:
        """This node's engine keeps KV in that dtype, by torch's name for it."""
        self._dtype = _DTYPES.get(dtype, WireDtype.BF16)

    def learn(self, tables: Mapping[PeerId, messages.LinkTable], lives: Mapping[PeerId, int]) -> None:
        """What other nodes say of their links, and how often each engine has been started."""
        if tables != self._tables:
            self._tables, self._known = dict(tables), None
        self._lives = lives
        for peer in [peer for peer in self._estimators if peer not in tables and peer not in lives]:
            del self._estimators[peer]

    def estimator(self, peer: PeerId) -> LinkEstimator:
        """What is believed of the link to a peer."""
        known = self._estimators.get(peer)
        if known is None:
            rtt = UNMEASURED_RTT_S
            belief = prior(rtt * 1e3, one_stream_gbps(rtt), UNMEASURED_GBPS, reason="nothing measured yet")
            known = self._estimators[peer] = LinkEstimator(belief)
        return known

    def fill_in(self, peers: Iterable[PeerId]) -> None:
        """Believe of links that this node has not measured what nodes of the same sites have measured of theirs."""
        now = self._clock()
        known: dict[tuple[str, str], LinkFigures] = {}
        sites: dict[str, str] = {self.own: self.settings.site or self.own}
        boxes: dict[str, BoxFigures] = {self.own: self.settings.box}
        for source, table in self._tables.items():
            if source != self.own:
                known |= {(source, target): figures for target, figures in table.links.items()}
                sites[source], boxes[source] = self.site_of(source), table.box
        known |= {(self.own, peer): estimator.figures(now) for peer, estimator in self._estimators.items()}
        measured = {pair: figures for pair, figures in known.items() if figures.source is Source.MEASURED}
        for (_, target), inferred in infer(measured, sites, boxes, [(self.own, peer) for peer in peers]).items():
            self.estimator(PeerId(target)).set_prior(inferred)

    def site_of(self, peer: PeerId) -> str:
        """Where a node says it is; a node that says nothing is a site of its own."""
        table = self._tables.get(peer)
        return (table.site if table is not None else "") or peer

    @property
    def transfers(self) -> int:
        """Links that move something now."""
        now = self._clock()
        return sum(way.moving(now) for way in self._ways.values())

    def take_measured(self) -> set[PeerId]:
        """Peers whose links real transfers have measured since the last call, as a burst would."""
        measured, self._measured = self._measured, set()
        return measured

    def table(self, told: messages.LinkTable | None) -> messages.LinkTable:
        """What this node tells the others. Figures that have hardly moved since `told` stay as they were told: every
        change travels to every node."""
        now = self._clock()
        before = told.links if told is not None else {}
        links: dict[str, LinkFigures] = {}
        for peer, estimator in sorted(self._estimators.items()):
            figures, old = estimator.figures(now), before.get(peer)
            if figures.source is not Source.PRIOR:
                links[peer] = old if old is not None and old.alike(figures, NEWS) else figures
        return messages.LinkTable(site=self.settings.site, box=self.settings.box, links=links)

    def network(self, without: bytes = b"") -> NetworkView:
        """Everything known, and what flows from here now; `without` leaves one link's own flow out."""
        now = self._clock()
        own = {peer: estimator.stable_figures(now) for peer, estimator in self._estimators.items()}
        if self._known is None or own != self._own_links:
            self._own_links, self._known = own, self._known_with(own)
        flows = tuple(
            RunningTransfer(self.own, way.peer, path.gbps, path.via)
            for link, way in self._ways.items()
            if link != without and way.moving(now)
            for path in way.choice.paths
        )
        return NetworkView(self._known.links, self._known.boxes, flows)

    # ---- a transfer -----------------------------------------------------------------------------------------

    async def outlet(self, ticketed: messages.TicketedSlice, service: str, tokens: int) -> protocol.Outlet:
        """The link for a part of a prompt of so many tokens, and the paths to take.

        Raises NetworkError when the link cannot be had, TransferError when there is no path.
        """
        self._service = service
        rank_slice, ticket = ticketed.rank_slice, ticketed.ticket
        ends = Ends(PeerId(rank_slice.target_peer), rank_slice.source, rank_slice.target)
        link = await self._link(ends, ticket.link)
        job = PathQuery(
            source=self.own,
            target=ends.peer,
            bytes=self._kv_bytes(ticket.codec, tokens, rank_slice.slice),
            usd_per_s=self.settings.usd_per_s,
            max_usd_per_gb=self.settings.max_usd_per_gb,
        )
        way = self._ways.get(link.link)
        choices = way.choices if way is not None else ChoiceCache()
        choice, paths = await self._choose(job, link.link, choices)
        now = self._clock()
        way = self._ways.get(link.link)  # as it is now: others may have used it meanwhile
        waiting = way.waiting if way is not None and way.moving(now) else 0
        seen, at = (way.seen, way.at) if way is not None else ({}, now)
        job = replace(job, bytes=job.bytes + waiting, relays=self._relays(ends.peer))
        controller = PathController(job, choice, now=now)
        self._ways[link.link] = _Way(ends, job, choices, choice, controller, seen, seen, waiting, at, now)
        return protocol.Outlet(
            rank=rank_slice.source,
            slice=rank_slice.slice,
            # What the receiver may ask for is bounded here too: our engine holds the prompt's blocks for so long.
            ticket=msgspec.structs.replace(ticket, deadline_s=min(ticket.deadline_s, MAX_TRANSFER_S)),
            link=link,
            paths=paths,
            gbps=choice.taken.gbps,
            rtt_s=max(path.rtt_s for path in choice.paths),
        )

    def on_link_report(self, report: protocol.LinkReport) -> None:
        """What is under way moves: measure it, and steer where it does not."""
        way, now = self._ways.get(report.link), self._clock()
        if way is None:
            return
        self.estimator(way.peer)  # a member that is suspected to be gone may have been forgotten
        if any(path.bytes_acknowledged < way.seen.get(path.label, 0) for path in report.paths):
            way.base, way.seen = {}, {}  # the link was over, and has begun anew
        limited = min(way.waiting, report.waiting_bytes) >= LIMITED_BYTES and not report.blocked
        self._measure(way, report, limited, now)
        moved = {path.label: path.bytes_acknowledged for path in report.paths}
        # Prefill may be what is slow. A path is only blamed for what waits in plain sight, or for silence.
        blamed = limited or (moved == way.seen and not report.blocked)
        for path in report.paths:
            backlog = path.bytes_in_flight if blamed else 0
            since = path.bytes_acknowledged - way.base.get(path.label, 0)
            way.controller.on_progress(_via(path.label), since, backlog, now=now)
        way.waiting, way.at, way.used_at, way.seen = report.waiting_bytes, now, now, moved
        if way.steering:
            return
        decision = way.controller.step(self.network(report.link), now=now)
        if decision is not None:
            way.steering = True
            _log.info("link to %s: %s", way.peer, decision.explain())
            self._nursery.start_soon(self._steer, report.link, way, decision.choice)

    def on_transfer(self, peer: PeerId, report: protocol.TransferReport) -> float:
        """A transfer has ended; returns what the boxes on its way are billed for it, in dollars."""
        way = self._ways.get(report.link)
        if way is not None:
            way.waiting = 0
        network = self.network()
        sent = {_via(label): size for label, size in report.paths.items()}
        return transfer_cost(network.boxes, network.links, (self.own, peer), sent).usd

    def choice(self, peer: PeerId) -> PathChoice | None:
        """The choice that holds for a peer, if KV has gone there."""
        return next((way.choice for way in self._ways.values() if way.peer == peer), None)

    def engine_lost(self) -> None:
        """This node's engine, and the sending end of every link, is gone."""
        self._links.forget_all()
        self._ways.clear()

    def peer_lost(self, peer: PeerId) -> list[LinkTicket]:
        """A node is gone; returns the links that ended with it."""
        for pair in [pair for pair in self._permits if peer in pair]:
            del self._permits[pair]
        self._ways = {link: way for link, way in self._ways.items() if way.peer != peer}
        return self._links.forget_peer(peer)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _known_with(self, own: Mapping[PeerId, LinkFigures]) -> NetworkView:
        """The links of other nodes as they tell them, this node's own, and all boxes."""
        links: dict[tuple[str, str], LinkFigures] = {(self.own, peer): figures for peer, figures in own.items()}
        boxes: dict[str, BoxFigures] = {self.own: self.settings.box}
        for peer, table in self._tables.items():
            if peer != self.own:
                boxes[peer] = table.box
                links.update({(peer, target): figures for target, figures in table.links.items()})
        return NetworkView(links, boxes)

    async def _link(self, ends: Ends, wanted: bytes) -> LinkTicket:
        """The link that the ticket is for. The one known here may be of an earlier life of either end: the next
        question is then answered with the present one."""
        link = await self._links.to(ends, self._lives.get(ends.peer, 0))
        if link.link != wanted:
            self._links.forget(ends)
            link = await self._links.to(ends, self._lives.get(ends.peer, 0))
        if link.link != wanted:
            raise TicketError(f"link {wanted.hex()} of the ticket is not the one that {ends.peer} has opened")
        for old in [old for old, way in self._ways.items() if way.ends == ends and old != link.link]:
            del self._ways[old]
            self._set_paths(old, ())  # nobody answers there any more
        return link

    async def _choose(
        self, job: PathQuery, link: bytes, choices: ChoiceCache
    ) -> tuple[PathChoice, tuple[DialPath, ...]]:
        """The best paths of which every relay forwards, with addresses and permits."""
        peer = PeerId(job.target)
        while True:
            self.estimator(peer)
            way = self._ways.get(link)
            current = way.choice.vias if way is not None else None
            warm = current if way is not None and current and self._clock() - way.used_at < _WARM_S else frozenset()
            job = replace(job, relays=self._relays(peer))
            choice = choices.choose(job, self.network(link), current=current, warm=warm)
            paths = await self._dialable(peer, choice)
            if paths is not None:
                return choice, paths

    async def _open_link(self, ends: Ends) -> LinkTicket:
        body = messages.LinkOpen(service=self._service, source=ends.source, target=ends.target)
        opened = await self._messenger.request(ends.peer, LINK_OPEN, body, ASK_TIMEOUT_S)
        return opened.link

    def _kv_bytes(self, codec: str, tokens: int, held: protocol.KvSlice) -> int:
        model = self._model
        if model is None:
            return max(1, tokens)
        one = payload_bytes(
            codec_named(codec),
            self._dtype,
            start=0,
            tokens=tokens,
            heads=len(held.heads),
            head_dim=model.head_dim,
        )
        return one * len(held.layers)

    def _relays(self, target: PeerId) -> frozenset[str]:
        """Members that forward, that both ends have figures of, and that have not refused lately."""
        now = self._clock()
        self._refused = {pair: at for pair, at in self._refused.items() if now - at < REFUSED_S}
        return frozenset(
            peer
            for peer, table in self._tables.items()
            if peer not in (self.own, target)
            and table.box.relay_gbps != 0
            and target in table.links
            and peer in self._estimators
            and self._where(peer) is not None
            and (peer, target) not in self._refused
        )

    async def _dialable(self, peer: PeerId, choice: PathChoice) -> tuple[DialPath, ...] | None:
        """The chosen paths with addresses and permits; None when a relay refuses, which is then left out for a while.

        Raises Unreachable when it is the peer that cannot be dialled.
        """
        found: list[DialPath] = []
        for path in choice.paths:
            try:
                found.append(await self._dial(peer, path))
            except NetworkError as error:
                if path.via is None:
                    raise
                _log.info("no way to %s through %s for now: %s", peer, path.via, error)
                self._refused[PeerId(path.via), peer] = self._clock()
                return None
        return tuple(found)

    async def _dial(self, peer: PeerId, path: KVPath) -> DialPath:
        streams = max(1, min(path.streams, MAX_STREAMS))
        if path.via is None:
            address = self._address(peer)
            return DialPath(address.host, address.port, label=DIRECT, streams=streams)
        relay = PeerId(path.via)
        address = self._address(relay)
        permit = await self._permit(relay, peer)
        return DialPath(address.host, address.port, label=path.via, streams=streams, relay=permit)

    async def _permit(self, relay: PeerId, target: PeerId) -> Permit:
        known = self._permits.get((relay, target))
        if known is None or known.expires_at - self._wall() < PERMIT_MARGIN_S:
            body = messages.RelayOpen(target=target)
            opened = await self._messenger.request(relay, RELAY_OPEN, body, ASK_TIMEOUT_S)
            known = self._permits[relay, target] = opened.permit
        return known

    def _address(self, peer: PeerId) -> Address:
        address = self._where(peer)
        if address is None or not address.port:
            raise Unreachable(f"{peer} has no address that could be dialled for KV")
        return address

    async def _steer(self, link: bytes, way: _Way, choice: PathChoice) -> None:
        paths: tuple[DialPath, ...] | None = None
        try:
            paths = await self._dialable(way.peer, choice)
        except NetworkError as error:
            _log.info("link to %s stays as it is: %s", way.peer, error)
        finally:
            way.steering = False
        if self._ways.get(link) is not way:
            return  # a newer transfer has chosen for all
        if paths is not None:
            way.choice = choice
            self._set_paths(link, paths)
        elif way.controller.remaining:
            # What was to be done could not be: watch what there is, and look again without that relay.
            job = replace(way.job, bytes=way.controller.remaining, relays=self._relays(way.peer))
            way.controller, way.base = PathController(job, way.choice, now=self._clock()), dict(way.seen)

    def _measure(self, way: _Way, report: protocol.LinkReport, limited: bool, now: float) -> None:
        """Passive measurement: what moved since the last look; `limited`: the link set the pace."""
        seconds = now - way.at
        for path in report.paths:
            moved = path.bytes_acknowledged - way.seen.get(path.label, 0)
            if _via(path.label) is None and path.rtt_s is not None and path.connections:
                self.estimator(way.peer).on_ping(path.rtt_s, now=now)
            if _via(path.label) is None and moved > 0 and seconds > 0 and way.seen:
                sample = TransferSample(
                    bytes=moved, seconds=seconds, streams=max(1, path.connections), link_limited=limited
                )
                self.estimator(way.peer).on_transfer(sample, now=now)
                if limited:
                    self._measured.add(way.peer)


def _via(label: str) -> str | None:
    return None if label == DIRECT else label
