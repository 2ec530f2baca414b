"""What a burst has shown: bytes per stream in 50 ms bins, steady rate without slow start. Pure."""

from __future__ import annotations

from statistics import median
from typing import final

from .estimates import BurstSample
from .figures import gbps_of

BIN_S = 0.05
_RAMPED = 0.85
"""Slow start is over at this share of the rate that the burst has come to."""

_STEADY = 0.10
"""A rate is stable when the two halves of its steady part differ by less."""


@final
class BurstMeter:
    """Counts from the first byte on. `rtt_s` is what the link's round trip is thought to be: a
    stream that its window holds up sends one window per round trip, so nothing shorter than two of
    them says what it carries."""

    def __init__(self, streams: int, rtt_s: float) -> None:
        self._bins: list[list[int]] = []  # per bin, bytes of each stream
        self._streams = streams
        self._rtt_bins = max(1.0, rtt_s / BIN_S)
        self._smooth = max(4, round(2.0 * self._rtt_bins))
        self._first_at: float | None = None
        self.last_at = 0.0
        """When the latest byte came; 0 before the first."""
        self.bytes = 0

    def add(self, stream: int, size: int, now: float) -> None:
        """`size` bytes have arrived over `stream`."""
        if self._first_at is None:
            self._first_at = now
        index = max(int((now - self._first_at) / BIN_S), 0)
        self._fill(index + 1)
        self._bins[index][stream] += size
        self.last_at = max(self.last_at, now)
        self.bytes += size

    def seconds(self, now: float) -> float:
        """Since the first byte."""
        return 0.0 if self._first_at is None else max(now - self._first_at, 0.0)

    def is_stable(self, now: float) -> bool:
        """Whether more of the burst would tell nothing new."""
        begin, end = self._steady(now)
        if end - begin < 2 * self._smooth:
            return False
        middle = (begin + end) // 2
        early, late = self._rate(begin, middle), self._rate(middle, end)
        return late > 0.0 and abs(late - early) <= _STEADY * late

    def sample(self, now: float, ended: str) -> BurstSample:
        """The result, if the burst ends now."""
        begin, end = self._steady(now)
        stable = self.is_stable(now)
        if end <= begin:  # over within a bin or two: all there is
            seconds = max(self.last_at - (self._first_at or 0.0), BIN_S / 10.0) if self.bytes else 0.0
            gbps = gbps_of(self.bytes, seconds) if self.bytes else 0.0
            per_stream = [gbps_of(sum(bin_[i] for bin_ in self._bins), seconds or 1.0) for i in range(self._streams)]
        else:
            gbps = self._rate(begin, end)
            seconds = (end - begin) * BIN_S
            per_stream = [
                gbps_of(sum(bin_[i] for bin_ in self._bins[begin:end]), seconds) for i in range(self._streams)
            ]
        return BurstSample(
            bytes=self.bytes,
            seconds=self.seconds(now),
            streams=self._streams,
            gbps=gbps,
            per_stream_gbps=tuple(per_stream),
            stable=stable,
            ended=ended,
        )

    def _steady(self, now: float) -> tuple[int, int]:
        """The bins after slow start, without the one that is still filling: `[begin, end)`."""
        end = int(self.seconds(now) / BIN_S)
        self._fill(end)  # silence counts as well
        totals = [sum(bin_) for bin_ in self._bins[:end]]
        width = min(self._smooth, max(end // 2, 1))
        if end < 2:
            return 0, end
        smoothed = [sum(totals[i : i + width]) for i in range(end - width + 1)]
        reached = median(smoothed[len(smoothed) // 2 :])
        begin = next((i for i, value in enumerate(smoothed) if value >= _RAMPED * reached), 0)
        # Whole round trips: what is sent in clumps, one per round trip, must not be counted one too many.
        trips = int((end - begin) / self._rtt_bins)
        return (end - round(trips * self._rtt_bins), end) if trips else (begin, end)

    def _fill(self, count: int) -> None:
        while len(self._bins) < count:
            self._bins.append([0] * self._streams)

    def _rate(self, begin: int, end: int) -> float:
        return gbps_of(sum(sum(bin_) for bin_ in self._bins[begin:end]), (end - begin) * BIN_S)
