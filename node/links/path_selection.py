"""Which paths a node's KV takes, for each transfer and while it runs. No I/O, no clock. Keeps each
link's choice and what has moved, and measures links by transfers; `KvOutlets` carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from ...bootstrap import PeerId
from ...kvtransport.probing.estimates import TransferSample
from ...kvtransport.probing.figures import MAX_STREAMS
from ...kvtransport.routing.choices import ChoiceCache
from ...kvtransport.routing.costs import transfer_usd
from ...kvtransport.routing.paths import PathChoice, PathQuery, RunningTransfer
from ...kvtransport.routing.steering import PathController
from ..engine import protocol
from ..settings import WAN, NodeTuning
from .kv_links import Ends
from .link_knowledge import LinkKnowledge

DIRECT = "direct"


@final
@dataclass(slots=True, eq=False)
class LinkFlow:
    """How a link flows, by its reports. What it moves tells its rate once something has arrived of what is under way:
    until then streams are dialled and get going, and the first bytes are on their way."""

    is_going: bool = False
    is_empty: bool = True  # at the last report nothing was under way
    still_s: float = 0.0  # for so long nothing has arrived though it was going: what arrives next took that, too

    def note(self, seconds: float, moved: int, limited: bool, in_flight: int) -> float | None:
        """A report says what was moved since the last one; `limited`: much was waiting all the time. Returns how long
        that took, if the link's rate follows from it."""
        took_s = seconds + self.still_s if limited and self.is_going else None
        self.still_s = took_s or 0.0 if moved == 0 else 0.0
        self.is_going = (self.is_going and limited) or (moved > 0 and not self.is_empty)
        self.is_empty = in_flight == 0
        return took_s


@final
@dataclass(slots=True, eq=False)
class LinkInUse:
    """A link to a worker of another node: its choices, and what its paths had moved at the last report."""

    ends: Ends
    query: PathQuery
    cache: ChoiceCache
    choice: PathChoice
    controller: PathController
    base: dict[str, int]  # what the paths had moved when the controller began
    seen: dict[str, int] = field(default_factory=dict)
    waiting_bytes: int = 0
    reported_at: float = 0.0
    used_at: float = 0.0
    is_changing: bool = False  # other paths are being made ready
    flow: LinkFlow = field(default_factory=LinkFlow)

    def is_moving(self, now: float, fresh_s: float) -> bool:
        """Whether something was under way lately; an engine that has nothing more to send just falls silent."""
        return self.waiting_bytes > 0 and now - self.reported_at < fresh_s


class NewPaths(NamedTuple):
    """Other paths for what a link is sending. Answer with `confirm` or `reject`."""

    link: bytes
    of: LinkInUse
    choice: PathChoice
    reason: str

    @property
    def peer(self) -> PeerId:
        """Where the link leads."""
        return self.of.ends.peer


@final
class PathSelector:
    """One per node with an engine. `can_dial(peer)`: whether a member has an address."""

    def __init__(self, knowledge: LinkKnowledge, can_dial: Callable[[PeerId], bool], tuning: NodeTuning = WAN) -> None:
        self._knowledge = knowledge
        self._can_dial = can_dial
        self._tuning = tuning
        self._links: dict[bytes, LinkInUse] = {}
        self._refused: dict[tuple[PeerId, PeerId], float] = {}  # relay and target -> when
        self._hung: set[PeerId] = set()  # members that do not answer

    def __repr__(self) -> str:
        return f"<PathSelector links={len(self._links)} refused={len(self._refused)}>"

    def query(self, peer: PeerId, size: int) -> PathQuery:
        """What is asked of the choice for so many bytes to a peer."""
        settings = self._knowledge.settings
        return PathQuery(
            source=self._knowledge.own,
            target=peer,
            bytes=size,
            usd_per_s=settings.usd_per_s,
            max_usd_per_gb=settings.max_usd_per_gb,
        )

    def cache_of(self, link: bytes) -> ChoiceCache:
        """The choices made for a link so far; a new one has none."""
        known = self._links.get(link)
        return known.cache if known is not None else ChoiceCache()

    def choose(self, query: PathQuery, link: bytes, cache: ChoiceCache, now: float) -> PathChoice:
        """The best paths as of now. Raises NoPath."""
        peer, known = PeerId(query.target), self._links.get(link)
        self._knowledge.estimator(peer)  # so that the tables have the link itself
        current = known.choice.vias if known is not None else None
        is_warm = known is not None and now - known.used_at < self._tuning.warm_s
        return cache.choose(
            replace(query, relays=self._usable_relays(peer, now)),
            self._knowledge.network(self._running(link, now), now),
            current=current,
            warm=current if is_warm and current else frozenset(),
        )

    def refuse(self, relay: PeerId, target: PeerId, now: float) -> None:
        """A relay does not forward to the target: leave it out for a while."""
        self._refused[relay, target] = now

    def begin(
        self, link: bytes, ends: Ends, query: PathQuery, cache: ChoiceCache, choice: PathChoice, now: float
    ) -> None:
        """A transfer of the queried size begins over the chosen paths."""
        # What the link is still sending goes over the new choice too.
        known = self._links.get(link)
        is_moving = known is not None and known.is_moving(now, self._tuning.fresh_s)
        waiting = known.waiting_bytes if known is not None and is_moving else 0
        seen, reported_at = (known.seen, known.reported_at) if known is not None else ({}, now)
        query = replace(query, bytes=query.bytes + waiting, relays=self._usable_relays(ends.peer, now))
        controller = PathController(query, choice, now=now)
        self._links[link] = LinkInUse(ends, query, cache, choice, controller, seen, seen, waiting, reported_at, now)
        if known is not None:
            self._links[link].flow = known.flow

    def replace_links(self, ends: Ends, link: bytes) -> list[bytes]:
        """Forget the links of these ends but this one; returns them."""
        old = [each for each, known in self._links.items() if known.ends == ends and each != link]
        for each in old:
            del self._links[each]
        return old

    def on_report(self, report: protocol.LinkReport, now: float) -> NewPaths | None:
        """The engine says what its link has moved: measure, and find other paths where it does not get on."""
        known = self._links.get(report.link)
        if known is None:
            return None
        self._knowledge.estimator(known.ends.peer)  # a member that is suspected to be gone may have been forgotten
        if any(path.bytes_acknowledged < known.seen.get(path.label, 0) for path in report.paths):
            known.base, known.seen = {}, {}  # the link was over, and has begun anew
        enough = self._tuning.limited_bytes
        limited = min(known.waiting_bytes, report.waiting_bytes) >= enough and not report.blocked
        self._measure(known, report, limited, now)
        moved = {path.label: path.bytes_acknowledged for path in report.paths}
        # Prefill may be what is slow. A path is only blamed for what waits in plain sight, or for silence.
        is_blamed = limited or (moved == known.seen and not report.blocked)
        for path in report.paths:
            backlog = path.bytes_in_flight if is_blamed else 0
            since = path.bytes_acknowledged - known.base.get(path.label, 0)
            known.controller.on_progress(_via(path.label), since, backlog, now=now)
        known.waiting_bytes, known.reported_at, known.used_at, known.seen = report.waiting_bytes, now, now, moved
        if known.is_changing:
            return None
        network = self._knowledge.network(self._running(report.link, now), now)
        decision = known.controller.step(network, now=now)
        if decision is None:
            return None
        known.is_changing = True
        return NewPaths(report.link, known, decision.choice, decision.explain())

    def confirm(self, new: NewPaths) -> bool:
        """The new paths can be dialled. False when a newer transfer has chosen for all meanwhile."""
        new.of.is_changing = False
        if self._links.get(new.link) is not new.of:
            return False
        new.of.choice = new.choice
        return True

    def reject(self, new: NewPaths, now: float) -> None:
        """They cannot: watch the paths there are, and look again without the relay that refused."""
        known = new.of
        known.is_changing = False
        if self._links.get(new.link) is known and known.controller.remaining:
            relays = self._usable_relays(known.ends.peer, now)
            query = replace(known.query, bytes=known.controller.remaining, relays=relays)
            known.controller, known.base = PathController(query, known.choice, now=now), dict(known.seen)

    def end_transfer(self, peer: PeerId, report: protocol.TransferReport, now: float) -> float:
        """A transfer has ended; returns what the boxes on its paths are billed for it, in dollars."""
        known = self._links.get(report.link)
        if known is not None:
            known.waiting_bytes = 0
        network = self._knowledge.network((), now)
        sent = {_via(label): size for label, size in report.paths.items()}
        return transfer_usd(network.boxes, network.links, (self._knowledge.own, peer), sent)

    def links_to(self, peer: PeerId) -> list[LinkInUse]:
        """The links in use to a peer."""
        return [known for known in self._links.values() if known.ends.peer == peer]

    def moving(self, now: float) -> int:
        """How many links move something now."""
        return sum(known.is_moving(now, self._tuning.fresh_s) for known in self._links.values())

    def limit_streams(self, streams: int, now: float) -> int:
        """As many of these as a link may have: MAX_STREAMS for all that are warm. Each takes threads of the engines at
        both ends. A box that is busy measures long round trips, and slow streams: without a limit it would have more
        and more of them, and be busier."""
        warm = sum(now - known.used_at < self._tuning.warm_s for known in self._links.values())
        return max(1, min(streams, MAX_STREAMS // max(1, warm)))

    def peer_hung(self, peer: PeerId, hung: bool) -> None:
        """A member does not answer (`hung`), or does again. What hangs forwards nothing."""
        if hung:
            self._hung.add(peer)
        else:
            self._hung.discard(peer)

    def forget_peer(self, peer: PeerId) -> None:
        """A node is gone."""
        self._hung.discard(peer)
        self._links = {link: known for link, known in self._links.items() if known.ends.peer != peer}

    def forget_all(self) -> None:
        """This node's engine, and the sending end of every link, is gone."""
        self._links.clear()

    def _running(self, without: bytes, now: float) -> tuple[RunningTransfer, ...]:
        """What flows from here, but for one link's own."""
        return tuple(
            RunningTransfer(self._knowledge.own, known.ends.peer, path.gbps, path.via)
            for link, known in self._links.items()
            if link != without and known.is_moving(now, self._tuning.fresh_s)
            for path in known.choice.paths
        )

    def _usable_relays(self, target: PeerId, now: float) -> frozenset[str]:
        """Relays that can be dialled, answer, and have not refused lately."""
        refused_s = self._tuning.relay_refused_s
        self._refused = {pair: at for pair, at in self._refused.items() if now - at < refused_s}
        return frozenset(
            relay
            for relay in self._knowledge.relays_to(target)
            if self._can_dial(relay) and relay not in self._hung and (relay, target) not in self._refused
        )

    def _measure(self, known: LinkInUse, report: protocol.LinkReport, limited: bool, now: float) -> None:
        """What moved directly since the last report measures the link; `limited`: much was waiting at both."""
        seconds, peer = now - known.reported_at, known.ends.peer
        for path in report.paths:
            if _via(path.label) is not None:
                continue  # a relay's links are its own to measure
            estimator = self._knowledge.estimator(peer)
            if path.rtt_s is not None and path.connections and not limited:  # else it is what waits before the link
                estimator.on_ping(path.rtt_s, now=now)
            moved = path.bytes_acknowledged - known.seen.get(path.label, 0)
            took_s = known.flow.note(seconds, moved, limited, path.bytes_in_flight)
            if moved > 0 and seconds > 0 and known.seen:
                streams = max(1, path.connections)
                sample = TransferSample(
                    bytes=moved, seconds=took_s or seconds, streams=streams, link_limited=took_s is not None
                )
                if estimator.on_transfer(sample, now=now):
                    self._knowledge.note_measured(peer)


def _via(label: str) -> str | None:
    return None if label == DIRECT else label
