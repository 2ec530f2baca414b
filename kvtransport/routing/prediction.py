"""How long bytes take over one path or two: the `alpha + bytes / beta` of ThunderServe's Eq. 1,
with alpha worked out.

A warm path sends at its rate from the first byte, and the acknowledgement comes a round trip after
the last: alpha = rtt. A cold one first shakes hands (TCP, then hello and welcome: two round trips)
and then doubles its rate every round trip from an initial window of ten segments, as TCP's slow
start does; the bytes missed meanwhile belong to alpha as well. Everything here is monotone: a
shorter round trip or a higher rate never makes a time longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2, inf, log, log2

from ..probing.figures import WINDOW_BYTES

_INITIAL_WINDOW_BYTES = 14_480.0
_HANDSHAKE_RTTS = 2.0
_LN2 = log(2.0)
_HALVINGS = 26


@dataclass(frozen=True, slots=True)
class ArrivalCurve:
    """Bytes that have arrived over a path by time t: none until `start_s`, then growing from
    `first` bytes/s, doubling every `rtt_s`, up to `rate` bytes/s."""

    start_s: float
    rtt_s: float
    first: float
    rate: float

    def bytes_by(self, seconds: float) -> float:
        """Bytes that have arrived after so many seconds."""
        rest = seconds - self.start_s
        if rest <= 0.0:
            return 0.0
        ramp_s = self._ramp_s
        if rest >= ramp_s:
            return (self.rate - self.first) * self.rtt_s / _LN2 + (rest - ramp_s) * self.rate
        return self.first * self.rtt_s / _LN2 * (exp2(rest / self.rtt_s) - 1.0)

    def seconds_for(self, size: float) -> float:
        """When `size` bytes have arrived; infinite on a path that moves nothing."""
        if self.rate <= 0.0:
            return inf
        ramped = (self.rate - self.first) * self.rtt_s / _LN2
        if size >= ramped:
            return self.start_s + self._ramp_s + (size - ramped) / self.rate
        return self.start_s + self.rtt_s * log2(1.0 + size * _LN2 / (self.first * self.rtt_s))

    @property
    def steady_s(self) -> float:
        """From when on they arrive at the full rate."""
        return self.start_s + self._ramp_s

    @property
    def _ramp_s(self) -> float:
        return self.rtt_s * log2(self.rate / self.first) if self.rate > self.first else 0.0


def arrival_curve(rate: float, alpha_s: float, *, warm: bool) -> ArrivalCurve:
    """The curve of a path of `rate` bytes/s and round trips of `alpha_s` in all. A relay's shorter
    slow starts are not counted: connections are kept warm."""
    if warm or rate <= 0.0:
        return ArrivalCurve(alpha_s, alpha_s, rate, rate)
    # Each stream grows from its initial window to its share of what is under way, all of them at once.
    window = min(WINDOW_BYTES, rate * alpha_s)
    first = rate * min(1.0, _INITIAL_WINDOW_BYTES / window) if window > 0.0 else rate
    return ArrivalCurve(alpha_s * (1.0 + _HANDSHAKE_RTTS), alpha_s, first, rate)


def striped_seconds(one: ArrivalCurve, two: ArrivalCurve, size: float, cap: float) -> float:
    """When `size` bytes have come over two paths that end together and share `cap` bytes/s."""
    best = min(one.seconds_for(size), two.seconds_for(size))
    start = min(one.start_s, two.start_s)
    floor = start + size / cap if cap > 0.0 else inf
    if best == inf or floor >= best:
        return max(best, floor)
    low, high = max(start, floor), best
    if one.bytes_by(low) + two.bytes_by(low) >= size:
        return low
    steady = max(one.steady_s, two.steady_s)
    rest = size - (one.bytes_by(steady) + two.bytes_by(steady))  # the same, whichever of the two comes first
    if rest >= 0.0:
        return min(max(steady + rest / (one.rate + two.rate), low), high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if one.bytes_by(middle) + two.bytes_by(middle) >= size:
            high = middle
        else:
            low = middle
    return high
