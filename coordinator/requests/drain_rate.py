"""How fast a queue gets shorter: what has been given turns per second, while something waited. Pure."""

from __future__ import annotations

from math import exp
from typing import Final, final

MEMORY_S: Final = 20.0
"""Of how many seconds of waiting the rate is the mean. Longer: long prompts that come one by one do not make it jump;
shorter: it follows boxes that come and go."""


@final
class DrainRate:
    """Of a queue, in its unit of size per second."""

    __slots__ = ("_at", "_is_waiting", "_seconds", "_since", "_taken")

    def __init__(self) -> None:
        self._taken = self._seconds = 0.0  # sizes, and the time with something waiting; both fade
        self._at = self._since = 0.0  # of the latest note; when something began to wait
        self._is_waiting = False

    def __repr__(self) -> str:
        return f"<DrainRate {self._taken:.3g} in {self._seconds:.3g} s>"

    def note(self, now: float, taken: float, is_waiting: bool) -> None:
        """So much has been given a turn at `now`, which does not go back; whether something waits from now on."""
        if self._is_waiting and now > self._at:
            kept = exp((self._at - now) / MEMORY_S)
            self._taken *= kept
            self._seconds = self._seconds * kept + MEMORY_S * (1.0 - kept)
        if self._is_waiting and now > self._since:  # what need not wait says nothing of how fast others get on
            self._taken += taken
        if not self._is_waiting:
            self._since = now
        self._at, self._is_waiting = now, is_waiting

    def rate(self, now: float, prior: float) -> float:
        """As seen, and as far as little was seen, as it is expected: `prior`."""
        self.note(now, 0.0, self._is_waiting)
        seen = min(1.0, self._seconds / (MEMORY_S / 2.0))
        measured = self._taken / self._seconds if self._seconds > 0.0 else 0.0
        return seen * measured + (1.0 - seen) * prior
