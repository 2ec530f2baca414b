"""What is known of a box and of a directed link at one moment: frozen values that travel in gossip,
and the two formulas that every estimate rests on.

Units: seconds, bytes, US dollars, and Gb/s of 10**9 bits, as links are sold. GB is 10**9 bytes, as
traffic is billed.

One TCP stream moves a window per round trip, and a sender in a container cannot raise that window:
about 2.6 MB (Linux's default `tcp_wmem`; measured between clouds and reproduced on an emulated
link). So between continents

    one stream  = min(capacity, 2.6 MB / rtt)          n streams = min(capacity, n * one stream)
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from math import ceil, inf, isfinite
from typing import Annotated, Self

import msgspec

from ..errors import FiguresError

GB = 1e9
"""Bytes that are billed as one gigabyte."""

WINDOW_BYTES = 2.6e6
"""Bytes that one stream has under way with the kernel's default buffers."""

MAX_STREAMS = 64

_STREAM_GBPS_MS = 20.0  # 2.6 MB is 20.8 Gb/s * ms; the margin keeps the last stream from being the limit
_MAX_GBPS = 1e5
_MAX_RTT_S = 60.0
_MAX_UNIX_S = 1e11
_MAX_USD_PER_GB = 1e3
_MAX_REASON = 200
_SMALLEST_RTT_S = 1e-6
_SAME_RTT_S = 0.002


class Source(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    INFERRED = "inferred"
    PRIOR = "prior"


def bytes_per_s(gbps: float) -> float:
    return gbps * 1.25e8


def gbps_of(size: float, seconds: float) -> float:
    """The rate at which `size` bytes pass in `seconds`."""
    return size / seconds / 1.25e8


def one_stream_gbps(rtt_s: float) -> float:
    """What the window lets one stream carry at this round trip, if the link carries as much."""
    return WINDOW_BYTES * 8e-9 / max(rtt_s, _SMALLEST_RTT_S)


def streams_for(target_gbps: float, rtt_s: float, single_gbps: float | None = None) -> int:
    """Streams that carry the target: clamp(ceil(target_gbps * rtt_ms / 20), 1, 64); more where one
    stream carries less than its window (loss): `single_gbps`."""
    wanted = ceil(target_gbps * rtt_s * 1e3 / _STREAM_GBPS_MS)
    if single_gbps is not None and single_gbps > 0:
        wanted = max(wanted, ceil(target_gbps / single_gbps - 1e-9))
    return min(max(wanted, 1), MAX_STREAMS)


class LinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A directed link: what it does, how sure that is, and why it is believed.

    `rtt_s` is smoothed, `rtt_min_s` the least seen lately. `one_stream_gbps` and `capacity_gbps` (n
    streams) are payload rates. `usd_per_gb` is what a gigabyte costs over this link alone, where
    that is not what its boxes are billed otherwise (0 inside a site, say); None for the boxes' own
    prices. `rtt_confidence` and `rate_confidence` lie in [0, 1]. `capacity_is_floor`: no transfer
    was ever held up by the link, so it may carry more. `measured_at`: when its rate was last
    measured, in unix seconds of the box that tells it; 0 where it was not, or that is not told."""

    rtt_s: float
    one_stream_gbps: float
    capacity_gbps: float
    rtt_min_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    usd_per_gb: float | None = None
    rtt_confidence: float = 1.0
    rate_confidence: float = 1.0
    capacity_is_floor: bool = False
    reachable: bool = True
    source: Source = Source.MEASURED
    reason: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    measured_at: float = 0.0

    def __post_init__(self) -> None:
        _within("link.measured_at", self.measured_at, 0.0, _MAX_UNIX_S)
        _within("link.rtt_s", self.rtt_s, 0.0, _MAX_RTT_S)
        _within("link.rtt_min_s", self.rtt_min_s, 0.0, _MAX_RTT_S)
        _within("link.jitter_s", self.jitter_s, 0.0, _MAX_RTT_S)
        _within("link.loss", self.loss, 0.0, 1.0)
        _within("link.one_stream_gbps", self.one_stream_gbps, 0.0, _MAX_GBPS)
        _within("link.capacity_gbps", self.capacity_gbps, 0.0, _MAX_GBPS)
        if self.usd_per_gb is not None:
            _within("link.usd_per_gb", self.usd_per_gb, 0.0, _MAX_USD_PER_GB)
        _within("link.rtt_confidence", self.rtt_confidence, 0.0, 1.0)
        _within("link.rate_confidence", self.rate_confidence, 0.0, 1.0)
        if len(self.reason) > _MAX_REASON:
            raise FiguresError(f"link.reason has {len(self.reason)} characters; at most {_MAX_REASON} are allowed")

    @property
    def window_rtt_s(self) -> float:
        """The round trip that windows are filled for: of what is above twice the least, boxes that are busy are the
        cause, and more streams would make them busier."""
        return min(self.rtt_s, 2.0 * self.rtt_min_s) if self.rtt_min_s > 0.0 else self.rtt_s

    def capacity_within(self, up_gbps: float | None, down_gbps: float | None) -> float:
        """Its rate between capped boxes: at most min(up of one, down of the other)."""
        return min(self.capacity_gbps, inf if up_gbps is None else up_gbps, inf if down_gbps is None else down_gbps)

    def bounded(self, up_gbps: float | None, down_gbps: float | None) -> Self:
        """The same link between capped boxes."""
        limit = self.capacity_within(up_gbps, down_gbps)
        return msgspec.structs.replace(self, capacity_gbps=limit, one_stream_gbps=min(self.one_stream_gbps, limit))

    def alike(self, other: LinkFigures, within: float) -> bool:
        """Whether it makes no difference which of the two is believed: rates, round trip and
        confidence are as good as the same, up to that fraction (or, of the round trip, to its
        jitter and what scheduling on busy boxes adds), and the rest of what paths are chosen by is equal."""
        pairs = ((self.one_stream_gbps, other.one_stream_gbps), (self.capacity_gbps, other.capacity_gbps))
        close = self.as_far(other, within) and all(abs(a - b) <= within * max(a, b) for a, b in pairs)
        return close and abs(self.rate_confidence - other.rate_confidence) <= within and self._kind == other._kind

    def as_far(self, other: LinkFigures, within: float) -> bool:
        """Whether the two round trips are alike, up to their jitter."""
        usual = max(_SAME_RTT_S, self.jitter_s, other.jitter_s)
        return abs(self.rtt_s - other.rtt_s) <= max(within * max(self.rtt_s, other.rtt_s), usual)

    @property
    def _kind(self) -> tuple[object, ...]:
        return self.reachable, self.source, self.capacity_is_floor, self.usd_per_gb


class BoxFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A box's own limits and prices, shared by everything it sends or receives. None: not known, so
    no limit.

    `relay_gbps`: what it forwards for others at most (its CPU, or its owner's will); 0 for a box
    that does not relay. `relay_budget_bytes`: bytes that it may still forward today; None without
    limit."""

    up_gbps: float | None = None
    down_gbps: float | None = None
    up_usd_per_gb: float = 0.0
    down_usd_per_gb: float = 0.0
    relay_gbps: float | None = None
    relay_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("up_gbps", self.up_gbps), ("down_gbps", self.down_gbps), ("relay_gbps", self.relay_gbps)):
            if value is not None:
                _within(f"box.{name}", value, 0.0, _MAX_GBPS)
        _within("box.up_usd_per_gb", self.up_usd_per_gb, 0.0, _MAX_USD_PER_GB)
        _within("box.down_usd_per_gb", self.down_usd_per_gb, 0.0, _MAX_USD_PER_GB)
        if self.relay_budget_bytes is not None and not 0 <= self.relay_budget_bytes < 1 << 62:
            raise FiguresError(f"box.relay_budget_bytes is {self.relay_budget_bytes}; it must be in [0, 2**62)")


def rate_gbps(link: LinkFigures, streams: int) -> float:
    """What `streams` streams carry together: min(capacity, n * one stream)."""
    return min(link.capacity_gbps, streams * link.one_stream_gbps)


def prior(rtt_ms: float, single_gbps: float, multi_gbps: float, *, reason: str = "prior") -> LinkFigures:
    """What to believe of a link before anything is measured: a plain row (round trip, one stream, n
    streams), such as the classes of `sims/data/wan_links.csv`."""
    return LinkFigures(
        rtt_s=rtt_ms / 1e3,
        rtt_min_s=rtt_ms / 1e3,
        one_stream_gbps=min(single_gbps, multi_gbps),
        capacity_gbps=multi_gbps,
        rtt_confidence=0.2,
        rate_confidence=0.2,
        source=Source.PRIOR,
        reason=reason,
    )


def require_positive(settings: object, called: str, names: Iterable[str]) -> None:
    """Raise FiguresError for the first of these fields that is not positive and finite."""
    for name in names:
        if not 0.0 < getattr(settings, name) < inf:
            raise FiguresError(f"{called}.{name} is {getattr(settings, name)}; it must be positive")


def require_counts(settings: object, called: str, names: Iterable[str]) -> None:
    """Raise FiguresError for the first of these fields that is less than 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise FiguresError(f"{called}.{name} is {getattr(settings, name)}; it must be at least 1")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise FiguresError(f"{name} is {value}; it must be in [{low:g}, {high:g}]")
