"""When the coordinator looks for other groups of boxes by itself, and when it begins with what it finds.

Rarely, and never back and forth: boxes that load serve nobody. Groups must serve far more of the
requests that are really asked for, in several looks in a row, and what they cost must be won back.
After that, and for longer after each failure, all stays as it is for a while::

    look ── gains? ──> look ── gains? ──> look ── gains? ──> begin ──> over ──> rest ──> look
      └──────────────────┴─── no: count from the beginning ────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from .steps import RegroupProposal


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionSettings:
    """How ready a coordinator is to move boxes.

    - `look_s`: seconds between two looks. Shorter: a change of traffic is followed sooner, and the
      search takes a processor for some seconds each time.
    - `looks`: so many in a row must find a gain. More: what passes is not followed.
    - `gain`: the least of it, as a share of the requests asked for, beside new phases alone. Lower:
      boxes load for what estimates are off by.
    - `dip`: so much less than before may be served while a step loads, as a share of it.
    - `rest_s`: after a regrouping nothing is looked for; twice as long after each failure in a row, up
      to `most_rest_s`. Longer: a wrong choice lasts; shorter: boxes load more often.
    """

    look_s: float = 300.0
    looks: int = 3
    gain: float = 0.1
    dip: float = 0.05
    rest_s: float = 1800.0
    most_rest_s: float = 86_400.0


@final
class Adoption:
    """Of one coordinator. Times are seconds of one clock, handed in."""

    def __init__(self, settings: AdoptionSettings | None = None) -> None:
        self._settings = settings or AdoptionSettings()
        self._look_at: float | None = None  # None: not before it has led for as long as between two looks
        self._gains = 0  # looks in a row
        self._failures = 0  # regroupings in a row

    def __repr__(self) -> str:
        return f"<Adoption gains={self._gains} failures={self._failures}>"

    def is_due(self, now: float) -> bool:
        """Whether to look for other groups now."""
        if self._look_at is None:
            self._look_at = now + self._settings.look_s
        return now >= self._look_at

    def consider(self, found: RegroupProposal | None, now: float) -> bool:
        """A look has found this: whether to begin with it."""
        self._look_at = now + self._settings.look_s
        self._gains = self._gains + 1 if found is not None and self._is_worth(found) else 0
        if self._gains < self._settings.looks:
            return False
        self._gains = 0
        return True

    def on_ended(self, now: float, *, failed: bool) -> None:
        """A regrouping is over, whoever has ordered it."""
        settings = self._settings
        self._failures = self._failures + 1 if failed else 0
        self._look_at = now + min(settings.most_rest_s, settings.rest_s * 2.0**self._failures)
        self._gains = 0

    def _is_worth(self, found: RegroupProposal) -> bool:
        gain, before = found.regrouping.after - found.light, found.regrouping.before
        is_safe = min(found.meanwhile) >= (1.0 - self._settings.dip) * before
        return found.pays and is_safe and gain >= self._settings.gain * found.rate
