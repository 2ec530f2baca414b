"""What is believed of one directed link, from pings, bursts and every real transfer: with history,
decay, confidence.

*Decay.* A sample's weight halves every `half_life_s`. *Confidence* is N / (N + 1) for the weight N
that is left, lowered by the spread of the samples, so it grows with evidence and fades with age.
*Change.* A sample far from the rest changes nothing by itself; two slow ones in a row (three fast
ones) replace what was believed: a link that has got worse is believed quickly, a single slow
transfer is not.

*What a rate proves.* A transfer that the link did not hold up only shows that the link carries at
least that much. One that moved n windows per round trip was held up by its windows: it tells what
one stream carries, and of the capacity again only a lower bound. All others, and bursts of enough
streams, measure the capacity.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, isfinite, log, sqrt
from typing import final

import msgspec

from ..errors import FiguresError
from .figures import MAX_STREAMS, LinkFigures, Source, gbps_of, one_stream_gbps, require_counts, require_positive

_MAX_BYTES = 1 << 50
_DOUBT_SHARE = 0.7  # of the confidence, while samples contradict what is believed


class SampleKind(StrEnum):
    """What was observed."""

    PING = "ping"
    LOST_PING = "lost ping"
    ONE_STREAM = "one stream"
    CAPACITY = "capacity"
    AT_LEAST = "capacity at least"
    UNREACHABLE = "unreachable"
    CHANGED = "changed"


class TransferSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stretch of a transfer: bytes that arrived in so many seconds over so many streams.
    `link_limited`: the link set the pace, not data or room."""

    bytes: int
    seconds: float
    streams: int
    link_limited: bool

    def __post_init__(self) -> None:
        if not 0 < self.bytes <= _MAX_BYTES:
            raise FiguresError(f"sample.bytes is {self.bytes}; it must be in [1, 2**50]")
        if not (isfinite(self.seconds) and self.seconds > 0.0):
            raise FiguresError(f"sample.seconds is {self.seconds}; it must be positive")
        if not 1 <= self.streams <= 4 * MAX_STREAMS:
            raise FiguresError(f"sample.streams is {self.streams}; it must be in [1, {4 * MAX_STREAMS}]")


class BurstSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a burst of `streams` measured at the receiver. `gbps`: steady rate without slow start,
    `per_stream_gbps` of each; `stable`: settled; `ended`: why it stopped."""

    bytes: int
    seconds: float
    streams: int
    gbps: float
    per_stream_gbps: tuple[float, ...] = ()
    stable: bool = True
    ended: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.bytes <= _MAX_BYTES:
            raise FiguresError(f"burst.bytes is {self.bytes}; it must be in [0, 2**50]")
        if not 1 <= self.streams <= MAX_STREAMS or len(self.per_stream_gbps) > MAX_STREAMS:
            raise FiguresError(f"burst.streams is {self.streams}; it must be in [1, {MAX_STREAMS}]")
        for value in (self.seconds, self.gbps, *self.per_stream_gbps):
            if not (isfinite(value) and value >= 0.0):
                raise FiguresError(f"burst has a figure of {value}; seconds and rates must not be negative")


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One observation: seconds for pings, Gb/s for rates."""

    at: float
    kind: SampleKind
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateSettings:
    """How an estimate follows its samples.

    `half_life_s`: how soon a rate loses half its weight; shorter follows drift faster and is less
    sure. `rtt_half_life_s`: the same for pings. `rtt_window_s`: how long the least round trip
    counts. `slow_in_a_row`, `fast_in_a_row`: samples that replace what was believed. `least_bytes`,
    `least_s`: transfers below either, or below three round trips, are too short to tell a rate.
    `far_s`: from this round trip on a lost packet costs a stream dear, so that one is not taken to
    fill its window before it has. Lower: more streams on near links, which cost CPU there.
    `window_share`: a transfer at this share of n windows per round trip is taken to be held up by
    its windows. `lossy`: at this loss one stream may fall short of its window without the link
    being full. `join_s`: stretches of a transfer with no longer gap between them count as one.
    `stable_s`, `stable_within`: figures that moved by less within that time are told unchanged, so
    that what was chosen by them is kept. Larger saves work and follows later. `history`:
    observations kept for whoever looks."""

    half_life_s: float = 600.0
    rtt_half_life_s: float = 60.0
    rtt_window_s: float = 300.0
    slow_in_a_row: int = 2
    fast_in_a_row: int = 3
    least_bytes: int = 1_000_000
    least_s: float = 0.05
    far_s: float = 0.005
    failures_to_unreachable: int = 3
    window_share: float = 0.85
    lossy: float = 1e-3
    join_s: float = 0.1
    stable_s: float = 5.0
    stable_within: float = 0.1
    history: int = 256

    def __post_init__(self) -> None:
        require_positive(self, "estimates", ("half_life_s", "rtt_half_life_s", "rtt_window_s", "far_s"))
        require_counts(self, "estimates", ("slow_in_a_row", "fast_in_a_row", "failures_to_unreachable", "history"))


@dataclass(slots=True)
class _DecayedSeries:
    """A positive quantity seen again and again: decayed mean and spread of its logarithm, and who
    contradicts it."""

    half_life_s: float
    slow_in_a_row: int
    fast_in_a_row: int
    floor: bool = False
    weight: float = 0.0
    mean: float = 0.0
    square: float = 0.0  # weighted sum of squared distances from the mean
    at: float = 0.0
    doubts: list[tuple[float, float]] = field(default_factory=list)

    def add(self, value: float, weight: float, now: float) -> bool:
        """Take a sample in. True if it made the series start anew."""
        self._age(now)
        x = log(value)
        if self.weight > 0.0 and abs(x - self.mean) > self._tolerance():
            if self.doubts and (self.doubts[-1][0] > self.mean) != (x > self.mean):
                self.doubts.clear()
            self.doubts.append((x, weight))
            if len(self.doubts) < (self.fast_in_a_row if x > self.mean else self.slow_in_a_row):
                return False
            contradicting = list(self.doubts)
            self.reset()
            for other, its_weight in contradicting:
                self._merge(other, its_weight)
            return True
        self.doubts.clear()
        self._merge(x, weight)
        return False

    def add_lower_bound(self, value: float, weight: float, now: float) -> None:
        """Take in a lower bound: it says nothing unless it is more than was believed."""
        if self.weight <= 0.0:
            self.floor = True
            self.add(value, weight, now)
        elif value > self.value:
            if self.floor:
                self.reset()
                self.floor = True
            self.add(value, weight, now)

    def reset(self) -> None:
        self.weight = self.square = 0.0
        self.floor = False
        self.doubts.clear()

    @property
    def known(self) -> bool:
        return self.weight > 0.0

    @property
    def value(self) -> float:
        return exp(self.mean)

    def confidence(self, now: float) -> float:
        """In [0, 1]: by weight left, spread, and whether the latest samples contradict it."""
        if self.weight <= 0.0:
            return 0.0
        left = self.weight * self._fade_factor(now)
        variance = self.square / self.weight
        doubted = _DOUBT_SHARE if self.doubts else 1.0
        return left / (left + 1.0) / (1.0 + variance / 0.25) * doubted

    def _tolerance(self) -> float:
        """How far from the mean is still of a kind: a factor 1.35, more where samples spread."""
        return min(max(log(1.35), 2.5 * sqrt(self.square / self.weight)), log(3.0))

    def _merge(self, x: float, weight: float) -> None:
        total = self.weight + weight
        step = x - self.mean
        self.mean = x if self.weight <= 0.0 else self.mean + step * weight / total
        self.square += weight * step * (x - self.mean) if self.weight > 0.0 else 0.0
        self.weight = total

    def _age(self, now: float) -> None:
        factor = self._fade_factor(now)
        self.weight *= factor
        self.square *= factor
        self.at = max(self.at, now)

    def _fade_factor(self, now: float) -> float:
        return float(0.5 ** (max(now - self.at, 0.0) / self.half_life_s))


@final
class LinkEstimator:
    """One directed link. `prior`: believed until measured (`figures.prior`, or inferred)."""

    def __init__(self, prior: LinkFigures, settings: EstimateSettings | None = None) -> None:
        self.settings = one = settings or EstimateSettings()
        self._prior = prior
        self._rtt = _DecayedSeries(one.rtt_half_life_s, one.fast_in_a_row, one.fast_in_a_row)
        self._lost = self._pings = 0.0
        self._pinged_at = 0.0
        self._jitter_s = prior.jitter_s
        self._least: deque[tuple[float, float]] = deque()  # (at, rtt), both rising: the minimum of a window
        self._single = _DecayedSeries(one.half_life_s, one.slow_in_a_row, one.fast_in_a_row)
        self._capacity = _DecayedSeries(one.half_life_s, one.slow_in_a_row, one.fast_in_a_row)
        self._stretch: tuple[float, TransferSample] | None = None
        self._failures = 0
        self._samples = 0
        self._history: deque[HistoryEntry] = deque(maxlen=one.history)
        self._stable: LinkFigures | None = None
        self._stable_at = 0.0
        self._heard = False  # something, since then

    def __repr__(self) -> str:
        return f"<LinkEstimator {self._samples} rates, {len(self._history)} in history, prior {self._prior.reason!r}>"

    def set_prior(self, prior: LinkFigures) -> None:
        """A better guess has been made, such as one inferred from other links."""
        self._heard = True
        self._prior = prior

    def on_ping(self, rtt_s: float | None, *, now: float) -> None:
        """A small probe came back after `rtt_s`, or, None, did not."""
        self._heard = True
        factor = 0.5 ** (max(now - self._pinged_at, 0.0) / self.settings.rtt_half_life_s)
        self._pings = self._pings * factor + 1.0
        self._lost = self._lost * factor + (rtt_s is None)
        self._pinged_at = max(self._pinged_at, now)
        if rtt_s is None:
            self._record(now, SampleKind.LOST_PING, 0.0)
            return
        if not (isfinite(rtt_s) and rtt_s > 0.0):
            raise FiguresError(f"ping.rtt_s is {rtt_s}; it must be positive")
        self._failures = 0
        self._record(now, SampleKind.PING, rtt_s)
        before = self._rtt.value if self._rtt.known else rtt_s
        self._jitter_s += (abs(rtt_s - before) - self._jitter_s) / 4.0
        if self._rtt.add(rtt_s, 1.0, now):
            # Another path through the internet: what one stream carries follows from the round trip.
            self._record(now, SampleKind.CHANGED, self._rtt.value)
            self._least.clear()
            self._single.reset()
        while self._least and self._least[-1][1] >= rtt_s:
            self._least.pop()
        self._least.append((now, rtt_s))
        self._drop_old_least(now)

    def on_transfer(self, sample: TransferSample, *, now: float) -> bool:
        """A real transfer, or a stretch of one, has moved bytes over the link. Returns whether it has measured the
        link as a burst would: the link set its pace, for long enough to tell a rate."""
        self._failures, self._heard = 0, True
        gbps = gbps_of(sample.bytes, sample.seconds)
        if sample.link_limited:
            sample = self._join_stretch(sample, now)
            least_s = max(self.settings.least_s, 3.0 * self._empty_rtt(now))
            if sample.bytes < self.settings.least_bytes or sample.seconds < least_s:
                # Too short: it tells neither what the link carries nor what it does not. What follows may join it.
                self._stretch = (now, sample)
                return False
            gbps = gbps_of(sample.bytes, sample.seconds)
        self._stretch = None
        weight = min(max(sample.seconds / 0.5, 0.25), 2.0)
        self._on_rate(gbps, sample.streams, weight, limited=sample.link_limited, now=now)
        return sample.link_limited

    def on_burst(self, sample: BurstSample, *, now: float) -> None:
        """A bandwidth burst has ended. One that moved nothing counts as a failure."""
        if sample.gbps <= 0.0:
            self.on_unreachable(now=now)
            return
        self._failures, self._heard = 0, True
        self._on_rate(sample.gbps, sample.streams, 3.0 if sample.stable else 1.0, limited=True, now=now)

    def on_unreachable(self, *, now: float) -> None:
        """The target could not be dialled over this link."""
        self._failures, self._heard = self._failures + 1, True
        self._record(now, SampleKind.UNREACHABLE, float(self._failures))

    def figures(self, now: float) -> LinkFigures:
        """What is believed now."""
        prior, measured = self._prior, self._capacity.known
        rtt_s = self._rtt.value if self._rtt.known else prior.rtt_s
        capacity, confidence, floor = self._capacity_now(now)
        source = Source.MEASURED if measured else Source.INFERRED if self._rtt.known else prior.source
        least = [rtt for at, rtt in self._least if at >= now - self.settings.rtt_window_s]
        return LinkFigures(
            rtt_s=rtt_s,
            rtt_min_s=min(least, default=rtt_s),
            jitter_s=self._jitter_s,
            loss=self._loss,
            one_stream_gbps=min(self._one_stream_now(), capacity),
            capacity_gbps=capacity,
            usd_per_gb=prior.usd_per_gb,
            rtt_confidence=max(self._rtt.confidence(now), prior.rtt_confidence if not self._rtt.known else 0.0),
            rate_confidence=confidence,
            capacity_is_floor=floor,
            reachable=self._failures < self.settings.failures_to_unreachable,
            source=source,
            reason=self._reason(now)[:200],
        )

    def stable_figures(self, now: float) -> LinkFigures:
        """The figures, and the same object again until they are news: what follows from them still
        holds then. They are up to a tenth off what `figures` says."""
        before = self._stable
        if before is None or self._heard or now - self._stable_at >= self.settings.stable_s:
            found = self.figures(now)
            if before is None or not before.alike(found, self.settings.stable_within):
                before = self._stable = found
            self._stable_at, self._heard = now, False
        return before

    def history(self) -> tuple[HistoryEntry, ...]:
        """The latest observations, oldest first."""
        return tuple(self._history)

    @property
    def measured_at(self) -> float | None:
        """When its rate was last measured; None before that."""
        return self._capacity.at if self._capacity.known else None

    @property
    def _loss(self) -> float:
        return self._lost / self._pings if self._pings else self._prior.loss

    def _one_stream_now(self) -> float:
        if self._single.known and not self._single.floor:
            return self._single.value
        modelled = one_stream_gbps(self._rtt.value) if self._rtt.known else self._prior.one_stream_gbps
        if not self._single.known:
            return modelled
        if self._capacity.known and not self._capacity.floor and self._rtt_now >= self.settings.far_s:
            # Streams that fill a link together may each fall short of their windows because the link is full, or
            # because it loses packets, of which TCP says nothing here. The best that one has shown serves both: it
            # asks for as many streams as filled the link, and the next burst tries twice as many.
            return self._single.value
        return max(modelled, self._single.value)

    @property
    def _rtt_now(self) -> float:
        return self._rtt.value if self._rtt.known else self._prior.rtt_s

    def _empty_rtt(self, now: float) -> float:
        """The round trip when nothing waits before the link: what a transfer queues up there takes part in all others,
        seconds where the link has become slow, and says nothing of windows nor of when a stream has got going."""
        self._drop_old_least(now)
        return self._least[0][1] if self._least else self._rtt_now

    def _drop_old_least(self, now: float) -> None:
        while self._least and self._least[0][0] < now - self.settings.rtt_window_s:
            self._least.popleft()

    def _capacity_now(self, now: float) -> tuple[float, float, bool]:
        """Gb/s, confidence, and whether it may be more."""
        prior = self._prior
        if not self._capacity.known:
            return prior.capacity_gbps, prior.rate_confidence, prior.capacity_is_floor
        value = max(self._capacity.value, self._single.value) if self._single.known else self._capacity.value
        if not self._capacity.floor:
            return value, self._capacity.confidence(now), False
        if value < prior.capacity_gbps:
            return prior.capacity_gbps, prior.rate_confidence, prior.capacity_is_floor
        return value, max(self._capacity.confidence(now), prior.rate_confidence), True

    def _join_stretch(self, sample: TransferSample, now: float) -> TransferSample:
        """The sample, joined with the one before if that was too short and this continues it."""
        if self._stretch is None:
            return sample
        ended, before = self._stretch
        if before.streams != sample.streams or now - sample.seconds - ended > self.settings.join_s:
            return sample
        return TransferSample(
            bytes=before.bytes + sample.bytes,
            seconds=before.seconds + sample.seconds,
            streams=sample.streams,
            link_limited=True,
        )

    def _on_rate(self, gbps: float, streams: int, weight: float, *, limited: bool, now: float) -> None:
        self._samples += 1
        each = gbps / streams
        rtt_s = self._empty_rtt(now)
        window = self._single.value if self._single.known and not self._single.floor else one_stream_gbps(rtt_s)
        by_window = each >= self.settings.window_share * window or (streams == 1 and self._loss >= self.settings.lossy)
        if limited and (streams == 1 or by_window):
            self._record(now, SampleKind.ONE_STREAM, each)
            if self._single.floor:
                self._single.reset()
            if self._single.add(each, weight, now):
                self._record(now, SampleKind.CHANGED, self._single.value)
        else:
            self._single.add_lower_bound(each, weight, now)
        if not limited or by_window:
            self._record(now, SampleKind.AT_LEAST, gbps)
            self._capacity.add_lower_bound(gbps, weight, now)
            return
        self._record(now, SampleKind.CAPACITY, gbps)
        if self._capacity.floor:
            self._capacity.reset()
        if self._capacity.add(gbps, weight, now):
            self._record(now, SampleKind.CHANGED, self._capacity.value)
            if self._single.known and self._single.value > self._capacity.value:
                self._single.reset()  # one stream was seen to carry more than all do now

    def _reason(self, now: float) -> str:
        if self._capacity.known:
            age = max(now - self._capacity.at, 0.0)
            kind = "never held up by the link; " if self._capacity.floor else ""
            return f"{kind}{self._samples} measured rates, the last {age:.0f} s ago"
        if self._rtt.known:
            return f"round trip measured, capacity of {self._prior.source}: {self._prior.reason}"
        return self._prior.reason

    def _record(self, now: float, kind: SampleKind, value: float) -> None:
        self._history.append(HistoryEntry(now, kind, value))
