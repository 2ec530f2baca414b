"""What a gateway has refused for want of a place, by class. Pure: time is a parameter."""

from __future__ import annotations

from math import exp
from typing import Final, final

from ...coordinator.requests.admission import CLASS_LABELS, PriorityClass

MEMORY_S: Final = 30.0
"""Of how many seconds the rate is the mean."""


@final
class RefusalCounts:
    """`total` by the class of the requests, since the node was started."""

    def __init__(self) -> None:
        self.total = dict.fromkeys(CLASS_LABELS, 0)
        self._lately = 0.0  # of about MEMORY_S, as of `_at`
        self._at = 0.0

    def __repr__(self) -> str:
        return f"<RefusalCounts {self.total}>"

    def note(self, kind: PriorityClass, now: float) -> None:
        """A request of this class has been refused at `now` (seconds), which does not go back."""
        self.total[kind.label] += 1
        self._lately = self._faded(now) + 1.0
        self._at = now

    def per_s(self, now: float) -> float:
        """Lately, of all classes; 0 where it was none for some minutes."""
        rate = self._faded(now) / MEMORY_S
        return rate if rate >= 0.01 / MEMORY_S else 0.0

    def _faded(self, now: float) -> float:
        return self._lately * exp((self._at - now) / MEMORY_S)
