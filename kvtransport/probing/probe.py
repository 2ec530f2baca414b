"""When a box measures which of its links: small pings all the time, short bursts now and then.
Pure: no socket, no clock; the rim asks `step` what is due, does it (`burst`), and says how it went.

Bursts measure what n streams carry, so they must not meet each other, nor serving, nor the wallet:

- A box takes part in one burst at a time. Whoever wants one reserves itself, then asks the other
  side, which may
  refuse and say when to ask again.
- While KV moves or the engine works, bursts wait, but never longer than `postpone_s` past their
  time; then they run
  shortened. Real transfers over a link count as its burst, so a link in use is hardly ever probed.
- Their bytes are paid from a daily allowance. It is never overdrawn, whatever is overdue.

In a large network only representatives measure: of each site the same few boxes in everybody's eyes
(those with the least hash), and every other box just its link to one of its own site. `sites.infer`
fills in the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from math import inf
from random import Random
from typing import Annotated, final

import msgspec

from ..errors import FiguresError
from .figures import GB, MAX_STREAMS, LinkFigures, bytes_per_s, require_counts, require_positive, streams_for

MAX_BURST_S = 10.0
MAX_BURST_BYTES = 4_000_000_000
_DAY_S = 86_400.0


class DeferReason(StrEnum):
    """Why a burst that is due does not run."""

    BUSY = "transfers or the engine are at work"
    RESERVED = "takes part in another burst"
    BUDGET = "the day's allowance is spent"
    UNREACHABLE = "does not answer pings"
    TOO_MUCH = "asks for more bytes than a burst may have"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How much measuring there is. The defaults are those of `wan`.

    ping_every_s              seconds between two pings on a link, stretched so that a box never
    pings_per_s               sends more than this. More sees changes sooner and wakes more boxes.
    backoff_limit_s           the longest gap between pings to a peer that does not answer.
    failures_to_unreachable   pings in a row without an answer that put bursts off.
    burst_every_s             seconds between two bursts on a link that no transfer has measured.
                              Shorter follows drift sooner and costs traffic.
    retry_s                   seconds until a burst that was refused or put off is tried again.
    postpone_s                how long past its time serving may put a burst off.
    burst_s, burst_rtts       a burst takes burst_s and so many round trips, at most
    burst_limit_s             this. Longer is surer behind slow start and disturbs longer.
    burst_bytes               what a burst may move at most,
    least_burst_bytes         and below this it is not worth starting.
    least_streams             streams of a burst at least: one shows its window, not the link.
    usd_per_day               what this box may spend on bursts; never overdrawn.
    representatives           boxes of a site that measure for all of it, in a network of more than
    everybody_below           so many peers. Up to that every link is measured.
    """

    ping_every_s: float = 5.0
    pings_per_s: float = 20.0
    backoff_limit_s: float = 300.0
    failures_to_unreachable: int = 3
    burst_every_s: float = 900.0
    retry_s: float = 20.0
    postpone_s: float = 1800.0
    burst_s: float = 0.5
    burst_rtts: float = 10.0
    burst_limit_s: float = 3.0
    burst_bytes: int = 256_000_000
    least_burst_bytes: int = 4_000_000
    least_streams: int = 4
    usd_per_day: float = 0.10
    representatives: int = 2
    everybody_below: int = 8

    def __post_init__(self) -> None:
        require_positive(self, "probe", ("ping_every_s", "pings_per_s", "burst_every_s", "retry_s"))
        if not 0.0 <= self.usd_per_day < inf or not 0.0 <= self.postpone_s < inf:
            raise FiguresError("probe.usd_per_day and probe.postpone_s must not be negative")
        if not 0 < self.least_burst_bytes <= self.burst_bytes:
            raise FiguresError(
                f"probe.least_burst_bytes is {self.least_burst_bytes}; it must be in [1, burst_bytes] "
                f"({self.burst_bytes})"
            )
        require_counts(self, "probe", ("representatives", "failures_to_unreachable", "least_streams"))
        if not 0.0 < self.burst_s <= self.burst_limit_s <= MAX_BURST_S:
            raise FiguresError(f"probe.burst_s is {self.burst_s}; it must be in (0, burst_limit_s <= {MAX_BURST_S:g}]")

    def burst_seconds(self, rtt_s: float) -> float:
        """How long a burst is on a link with this round trip."""
        return min(self.burst_s + self.burst_rtts * rtt_s, self.burst_limit_s)

    @classmethod
    def wan(cls) -> ProbeSettings:
        """Boxes in different places, whose traffic is billed."""
        return cls()

    @classmethod
    def lan(cls) -> ProbeSettings:
        """Boxes in one place: free traffic, steady links; a lost box should be seen soon."""
        return cls(ping_every_s=1.0, backoff_limit_s=30.0, burst_every_s=3600.0, burst_s=0.2, usd_per_day=0.0)


@dataclass(frozen=True, slots=True)
class PeerLink:
    """A peer, its site, its link as believed, and what this box pays for a GB sent there."""

    peer: str
    site: str
    figures: LinkFigures
    usd_per_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """What a burst would disturb now."""

    transfers: int = 0
    engine_busy: bool = False

    @property
    def idle(self) -> bool:
        return self.transfers == 0 and not self.engine_busy


class BurstRequest(msgspec.Struct, frozen=True):
    """Ask `peer` for a burst towards it. `overdue`: it has waited for as long as it may."""

    peer: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    streams: int
    seconds: float
    max_bytes: int
    overdue: bool

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= MAX_STREAMS:
            raise FiguresError(f"burst.streams is {self.streams}; it must be in [1, {MAX_STREAMS}]")
        if not 0.0 < self.seconds <= MAX_BURST_S:
            raise FiguresError(f"burst.seconds is {self.seconds}; it must be in (0, {MAX_BURST_S:g}]")
        if not 0 < self.max_bytes <= MAX_BURST_BYTES:
            raise FiguresError(f"burst.max_bytes is {self.max_bytes}; it must be in [1, {MAX_BURST_BYTES}]")


@dataclass(frozen=True, slots=True)
class DeferredBurst:
    """A burst that is due and waits."""

    peer: str
    reason: DeferReason


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """What is due: ping these peers; ask for this burst, if any. The box is reserved for the burst
    until `on_burst_done` or `on_refused`."""

    pings: tuple[str, ...] = ()
    burst: BurstRequest | None = None
    deferred: tuple[DeferredBurst, ...] = ()


@dataclass(frozen=True, slots=True)
class BurstRefusal:
    """No, because of `reason`; ask again in `retry_s`."""

    reason: DeferReason
    retry_s: float


@dataclass(frozen=True, slots=True)
class ProbeStatistics:
    """How the measuring goes. `usd_left` of today's allowance."""

    peers: int
    bursts_to: int
    pings: int
    bursts: int
    refused: int
    burst_bytes: int
    usd_left: float
    reserved_with: str | None


@dataclass(slots=True)
class _Peer:
    link: PeerLink
    ping_at: float
    burst_at: float  # the next try
    due_since: float  # its time: what postpone_s counts from
    failures: int = 0


@dataclass(slots=True)
class _Reservation:
    peer: str
    until: float
    usd: float
    usd_per_gb: float


def representatives(sites: Mapping[str, str], count: int) -> dict[str, tuple[str, ...]]:
    """Site -> its representatives, given box -> site; the same for all with the same boxes."""
    by_site: dict[str, list[str]] = {}
    for box, site in sites.items():
        by_site.setdefault(site, []).append(box)
    return {
        site: tuple(sorted(boxes, key=lambda box: sha256(f"{site}\0{box}".encode()).digest())[:count])
        for site, boxes in sorted(by_site.items())
    }


@final
class ProbeScheduler:
    """The schedule of one box, `me` at `site`."""

    def __init__(self, me: str, site: str, rng: Random, *, now: float, settings: ProbeSettings | None = None) -> None:
        self.settings = settings or ProbeSettings()
        self._me, self._site, self._rng = me, site, rng
        self._peers: dict[str, _Peer] = {}
        self._targets: frozenset[str] = frozenset()
        self._reserved: _Reservation | None = None
        self._usd = self.settings.usd_per_day
        self._usd_at = now
        self._overdue_granted: dict[str, float] = {}
        self._pings = self._bursts = self._refused = self._burst_bytes = 0

    def __repr__(self) -> str:
        held = f"reserved with {self._reserved.peer}" if self._reserved else "free"
        return f"<ProbeScheduler {self._me}: {len(self._peers)} peers, bursts to {len(self._targets)}, {held}>"

    def set_peers(self, links: Iterable[PeerLink], *, now: float) -> None:
        """All other boxes, as they are known now. New ones get their first times spread at random."""
        known = {link.peer: link for link in links if link.peer != self._me}
        self._peers = {peer: one for peer, one in self._peers.items() if peer in known}
        self._overdue_granted = {peer: at for peer, at in self._overdue_granted.items() if peer in known}
        fresh: list[_Peer] = []
        for peer, link in sorted(known.items()):
            if peer in self._peers:
                self._peers[peer].link = link
            else:
                ping_at = now + self._rng.random() * self.settings.ping_every_s
                fresh.append(_Peer(link, ping_at, inf, inf))
                self._peers[peer] = fresh[-1]
        self._targets = self._choose_targets()
        # All boxes of a large network may have come at once, each with as many links to measure.
        spread_s = self.settings.retry_s * max(1.0, len(self._targets) / self.settings.everybody_below)
        for one in fresh:
            one.burst_at = one.due_since = one.ping_at + self._rng.random() * spread_s

    def step(self, activity: Activity, *, now: float) -> ProbeStep:
        """What is due. Call it at `wake_at` or later; pings and the burst returned count as begun."""
        self._expire_reservation(now)
        pings = tuple(sorted(peer for peer, one in self._peers.items() if one.ping_at <= now))
        for peer in pings:
            self._peers[peer].ping_at = now + self._ping_gap(self._peers[peer])
        self._pings += len(pings)
        due = [peer for peer in self._targets if self._peers[peer].burst_at <= now]
        burst: BurstRequest | None = None
        deferred: list[DeferredBurst] = []
        for peer in sorted(due, key=lambda peer: (self._peers[peer].due_since, peer)):
            reason = self._find_obstacle(peer, activity, now)
            if reason is None:
                burst = self._begin_burst(peer, activity, now)
            else:
                deferred.append(DeferredBurst(peer, reason))
                self._put_off(self._peers[peer], reason, now)
        return ProbeStep(pings, burst, tuple(deferred))

    def wake_at(self) -> float:
        """When the next ping or burst is due, or a reservation ends; infinite if there is nobody."""
        times = [one.ping_at for one in self._peers.values()]
        if self._reserved is not None:
            times.append(self._reserved.until)
        else:
            times.extend(self._peers[peer].burst_at for peer in self._targets)
        return min(times, default=inf)

    def on_ping(self, peer: str, answered: bool, *, now: float) -> None:
        """A ping was answered, or was not."""
        if (one := self._peers.get(peer)) is None:
            return
        one.failures = 0 if answered else one.failures + 1
        one.ping_at = now + self._ping_gap(one)

    def on_measured(self, peer: str, *, now: float) -> None:
        """A real transfer has just measured the link to `peer`: no burst is needed for a while."""
        if (one := self._peers.get(peer)) is not None:
            one.burst_at = one.due_since = now + self._jitter(self.settings.burst_every_s)

    def on_burst_done(self, peer: str, size: int, *, succeeded: bool, now: float) -> None:
        """The burst with `peer` is over, on either side of it; `size` bytes were sent."""
        held = self._reserved
        if held is None or held.peer != peer:
            return
        self._reserved = None
        # The allowance was charged for all the bytes it might have taken.
        self._usd = min(self._usd + held.usd - size / GB * held.usd_per_gb, self.settings.usd_per_day)
        self._bursts += 1
        self._burst_bytes += size
        if (one := self._peers.get(peer)) is not None and peer in self._targets:
            gap = self.settings.burst_every_s if succeeded else self.settings.retry_s
            one.burst_at = one.due_since = now + self._jitter(gap)

    def on_refused(self, peer: str, retry_s: float, *, now: float) -> None:
        """The other side cannot take part now. Its time to wait is kept within reason."""
        held = self._reserved
        if held is None or held.peer != peer:
            return
        self._reserved = None
        self._usd += held.usd
        self._refused += 1
        if (one := self._peers.get(peer)) is not None:
            one.burst_at = now + self._jitter(min(max(retry_s, 1.0), self.settings.burst_every_s))

    def on_asked(
        self, request: BurstRequest, peer: str, activity: Activity, *, usd_per_gb: float, now: float
    ) -> BurstRefusal | None:
        """`peer` wants to send this box a burst, for which the box pays `usd_per_gb`. None reserves
        it: the burst may begin."""
        self._expire_reservation(now)
        if request.max_bytes > self.settings.burst_bytes:
            return BurstRefusal(DeferReason.TOO_MUCH, self.settings.burst_every_s)
        if self._reserved is not None:
            wait = max(self._reserved.until - now, 0.1)
            return BurstRefusal(DeferReason.RESERVED, self._jitter(min(wait, self.settings.retry_s)))
        # A peer may say that every burst of its is overdue. It disturbs serving once in `postpone_s` all the same.
        last = self._overdue_granted.get(peer, -inf)
        may_disturb = request.overdue and now - last >= self.settings.postpone_s
        if not activity.idle and not may_disturb:
            return BurstRefusal(DeferReason.BUSY, self._jitter(self.settings.retry_s))
        usd = request.max_bytes / GB * usd_per_gb
        self._add_allowance(now)
        if usd > self._usd:
            # Until the allowance has flowed in, but no longer than the peer would wait for its next burst anyway.
            missing = (usd - self._usd) / max(self.settings.usd_per_day, 1e-12) * _DAY_S
            return BurstRefusal(
                DeferReason.BUDGET, min(max(missing, self.settings.retry_s), self.settings.burst_every_s)
            )
        if not activity.idle:
            self._overdue_granted[peer] = now
        self._usd -= usd
        self._reserved = _Reservation(peer, now + request.seconds + self.settings.retry_s, usd, usd_per_gb)
        return None

    def statistics(self) -> ProbeStatistics:
        """Counts since the start, and what is left of the allowance."""
        return ProbeStatistics(
            peers=len(self._peers),
            bursts_to=len(self._targets),
            pings=self._pings,
            bursts=self._bursts,
            refused=self._refused,
            burst_bytes=self._burst_bytes,
            usd_left=self._usd,
            reserved_with=self._reserved.peer if self._reserved else None,
        )

    def _choose_targets(self) -> frozenset[str]:
        if len(self._peers) <= self.settings.everybody_below:
            return frozenset(self._peers)
        sites = {peer: one.link.site for peer, one in self._peers.items()} | {self._me: self._site}
        chosen = representatives(sites, self.settings.representatives)
        if self._me in chosen[self._site]:
            return frozenset(peer for some in chosen.values() for peer in some if peer != self._me)
        return frozenset(chosen[self._site][:1])

    def _find_obstacle(self, peer: str, activity: Activity, now: float) -> DeferReason | None:
        one = self._peers[peer]
        if one.failures >= self.settings.failures_to_unreachable:
            return DeferReason.UNREACHABLE
        if self._reserved is not None:
            return DeferReason.RESERVED
        if not activity.idle and now < one.due_since + self.settings.postpone_s:
            return DeferReason.BUSY
        if self._affordable_bytes(one.link, now) < self.settings.least_burst_bytes:
            return DeferReason.BUDGET
        return None

    def _begin_burst(self, peer: str, activity: Activity, now: float) -> BurstRequest:
        one = self._peers[peer]
        figures = one.link.figures
        # Twice what is believed, so that a link that has become better shows it.
        streams = max(
            streams_for(2.0 * figures.capacity_gbps, figures.rtt_s, figures.one_stream_gbps),
            self.settings.least_streams,
        )
        seconds = self.settings.burst_seconds(figures.rtt_s)
        size = min(2.0 * bytes_per_s(figures.capacity_gbps) * seconds, self._affordable_bytes(one.link, now))
        if not activity.idle:
            seconds, size = seconds / 2.0, size / 2.0
        max_bytes = int(max(size, self.settings.least_burst_bytes))
        usd = max_bytes / GB * one.link.usd_per_gb
        self._usd -= usd
        until = now + seconds + self.settings.retry_s
        self._reserved = _Reservation(peer, until, usd, one.link.usd_per_gb)
        return BurstRequest(peer, streams, seconds, max_bytes, overdue=now >= one.due_since + self.settings.postpone_s)

    def _put_off(self, one: _Peer, reason: DeferReason, now: float) -> None:
        """Set the next try, to wake for something; a reserved box tries again when it is free."""
        wait = self._jitter(self.settings.retry_s)
        if reason is DeferReason.BUSY:
            one.burst_at = min(now + wait, one.due_since + self.settings.postpone_s)
        elif reason is not DeferReason.RESERVED:
            one.burst_at = now + wait

    def _affordable_bytes(self, link: PeerLink, now: float) -> float:
        self._add_allowance(now)
        if link.usd_per_gb <= 0.0:
            return float(self.settings.burst_bytes)
        return min(float(self.settings.burst_bytes), self._usd / link.usd_per_gb * GB)

    def _add_allowance(self, now: float) -> None:
        """The allowance flows in evenly and is kept for a day at most."""
        allowed = max(now - self._usd_at, 0.0) / _DAY_S * self.settings.usd_per_day
        self._usd = min(self._usd + allowed, self.settings.usd_per_day)
        self._usd_at = max(self._usd_at, now)

    def _expire_reservation(self, now: float) -> None:
        held = self._reserved
        if held is not None and now >= held.until:
            # Whoever held it has vanished. What it may have sent stays paid for.
            self._reserved = None
            if (one := self._peers.get(held.peer)) is not None:
                one.burst_at = now + self._jitter(self.settings.retry_s)

    def _ping_gap(self, one: _Peer) -> float:
        gap = max(self.settings.ping_every_s, len(self._peers) / self.settings.pings_per_s)
        return self._jitter(min(gap * 2.0 ** min(one.failures, 16), max(self.settings.backoff_limit_s, gap)))

    def _jitter(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.9, 1.1)
