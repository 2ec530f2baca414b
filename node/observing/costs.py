"""What serving costs: boxes' time at their prices by the hour, and traffic.

A box's time is shared equally among the requests that are in its engine at a time, so that what requests are billed
for adds up to the time in which it has any. What a box costs while it has none is its owner's, and in `cost_usd_total`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

from .values import Cost

HOUR_S = 3600.0


@final
class ShareClock:
    """Divides a box's time among the requests that are there: a clock that runs n times slower while there are n."""

    def __init__(self) -> None:
        self._at: float | None = None
        self.shares_s = 0.0
        """What one request would have been billed for that was there all the time. The difference between two moments
        is the share of one that was there from the one to the other."""

    def advance(self, now: float, present: int) -> float:
        """Since the last call so many requests were there; returns `shares_s`."""
        if self._at is not None and present > 0:
            self.shares_s += max(0.0, now - self._at) / present
        self._at = now
        return self.shares_s


def price_request(
    busy: Iterable[tuple[tuple[str, ...], float]], usd_per_hour: Callable[[str], float], traffic_usd: float
) -> Cost:
    """What a request cost: `busy` are its shares of time, each with the boxes of the replica that it was at."""
    by_node: dict[str, float] = {}
    for boxes, seconds in busy:
        for box in boxes:
            by_node[box] = by_node.get(box, 0.0) + seconds * usd_per_hour(box) / HOUR_S
    return Cost(box_usd=sum(by_node.values()), traffic_usd=traffic_usd, by_node=by_node)


def usd_per_million(hourly_usd: float, tokens_s: float) -> float | None:
    """What a million tokens cost at this rate; None while there are none."""
    return hourly_usd / HOUR_S / tokens_s * 1e6 if tokens_s > 0.0 else None
