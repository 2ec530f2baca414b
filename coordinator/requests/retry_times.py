"""When a request that was refused for want of a place may be tried again. Pure: time is a parameter.

Places become free one after the other, and everyone refused is told the time of another one: as many come back as there
are places, and not all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import final


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """Seconds. `gap_s`: between two places while none has become free yet; longer spares the gateway, shorter fills
    places sooner. `memory_s`: of the rate at which they do; longer is steadier, shorter follows sooner. `least_s`,
    `most_s`: what is told is between these; a higher `most_s` spreads more of those who come back.
    """

    gap_s: float = 0.1
    memory_s: float = 10.0
    least_s: float = 0.2
    most_s: float = 30.0


@final
class RetryTimes:
    """How fast places become free, and up to when they have been told."""

    __slots__ = ("_at", "_freed", "_settings", "_told_until")

    def __init__(self, settings: RetrySettings) -> None:
        self._settings = settings
        self._freed = 0.0  # places that became free within about `memory_s`, as of `_at`
        self._at = 0.0
        self._told_until = 0.0

    def __repr__(self) -> str:
        return f"<RetryTimes {self._freed:.1f} places in {self._settings.memory_s:g} s>"

    def freed(self, now: float) -> None:
        """A place has become free at `now` (seconds), which must not go back."""
        self._freed = self._freed_lately(now) + 1.0
        self._at = now

    def next(self, now: float) -> float:
        """Seconds until the next place that nobody has been told of, or `most_s`."""
        settings = self._settings
        freed = self._freed_lately(now)
        gap_s = settings.memory_s / freed if freed >= 1.0 else settings.gap_s
        until = max(self._told_until, now) + min(gap_s, settings.most_s)
        if until - now > settings.most_s:
            return settings.most_s
        self._told_until = until
        return max(settings.least_s, until - now)

    def _freed_lately(self, now: float) -> float:
        return self._freed * exp((self._at - now) / self._settings.memory_s)
