"""Rates from counters that only grow, as boxes tell them: tokens and bytes since their start."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar, final

WINDOW_S: Final = 30.0
LEAST_S: Final = 2.0  # between two readings that a rate is made of

K = TypeVar("K", bound=Hashable)


@final
class CounterRates(Generic[K]):
    """Of counters by name. `learn` them whenever they are read: the last WINDOW_S make their rates."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Mapping[K, float]]] = deque()

    def learn(self, counters: Mapping[K, float], now: float) -> None:
        """What they are at `now`."""
        if self._readings and now - self._readings[-1][0] > WINDOW_S:
            self._readings.clear()  # nobody has looked for a while: what happened meanwhile is not now
        self._readings.append((now, counters))
        while len(self._readings) > 2 and now - self._readings[1][0] > WINDOW_S:
            self._readings.popleft()

    def rates(self) -> dict[K, float]:
        """Of each counter per second. None of one that has begun anew, nor before it was read twice."""
        if not self._readings:
            return {}
        end, after = self._readings[-1]
        first: dict[K, tuple[float, float]] = {}  # the earliest reading of each
        for at, counters in self._readings:
            for name, value in counters.items():
                first.setdefault(name, (at, value))
        return {
            name: (after[name] - value) / (end - at)
            for name, (at, value) in first.items()
            if name in after and end - at >= LEAST_S and after[name] >= value
        }
