"""Flap damping: a box that fails again and again is trusted less for a while, as BGP does with routes (RFC 2439).

Each fault adds 1 to the penalty of its box, and the penalty halves every `half_life_s`. A box whose penalty reaches
`suppress_at` is held: it gets no requests until the penalty has fallen to `reuse_at`. So a single fault holds nobody,
each further one holds longer, and what was long ago is forgotten::

    faults at once      1      2      3      4      8
    held for, s         0    170    240    290    410      (half-life 120 s, reuse at 0.75)

Never more than half of the boxes are held, the worst first, as Envoy ejects no more than a part of its hosts: a box
that flaps is better than none, and when half of a network seems to fail at once, the fault is in the network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import exp2, inf, log2
from typing import Final, NamedTuple, final

from ..names import name_of

MAX_NAMED_FAULT: Final = 200
"""Characters of a reason: some of it is another box's."""

FORGOTTEN: Final = 0.01
"""A penalty below this counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DampingSettings:
    """How long faults are remembered.

    - `half_life_s`: seconds in which a penalty halves. Longer: a box that flaps is held longer, and one that was
      mended waits longer.
    - `suppress_at`: the penalty from which on a box is held. Higher: more faults are borne.
    - `reuse_at`: the penalty at which it is used again; below `suppress_at`. Lower: held longer.
    - `most`: a penalty grows no further, so that no box is held for more than `half_life_s * log2(most / reuse_at)`,
      eight minutes.
    """

    half_life_s: float = 120.0
    suppress_at: float = 1.5
    reuse_at: float = 0.75
    most: float = 12.0

    def held_for_s(self, penalty: float) -> float:
        """Seconds until a penalty has fallen to `reuse_at`."""
        return self.half_life_s * log2(penalty / self.reuse_at) if penalty > self.reuse_at else 0.0


class BoxSign(NamedTuple):
    """What a box shows of itself: whether it `serves`, how often its engine has been `started`, and whether it is
    `leaving`, so that its absence is no fault."""

    serves: bool
    started: int
    leaving: bool


class _FaultRecord(NamedTuple):
    """What is remembered of a box: its penalty as of `at`, whether it is held, and its latest fault."""

    penalty: float
    at: float
    is_held: bool
    fault: str


_GONE: Final = "it was lost"
_ENDED: Final = "its engine stopped serving"


@final
class FlapDamping:
    """Which boxes are trusted less. Times are seconds of one clock, handed in."""

    def __init__(self, settings: DampingSettings | None = None) -> None:
        self._settings = settings or DampingSettings()
        self._records: dict[str, _FaultRecord] = {}
        self._seen: dict[str, BoxSign] = {}

    def __repr__(self) -> str:
        return f"<FlapDamping boxes={len(self._records)}>"

    def observe(self, signs: Mapping[str, BoxSign], now: float) -> None:
        """Take in what all boxes show now; a box that is not among them is away."""
        for box, before in self._seen.items():
            fault = _find_fault(before, signs.get(box))
            if fault:
                self.note_fault(box, fault, now)
        self._seen = dict(signs)
        self._records = {
            box: record
            for box, record in self._records.items()
            if self._at(box, now).is_held or self._penalty(record, now) > FORGOTTEN
        }

    def note_fault(self, box: str, fault: str, now: float) -> None:
        """This box has failed, as `fault` says."""
        settings, record = self._settings, self._at(box, now)
        penalty = min(settings.most, record.penalty + 1.0)
        is_held = record.is_held or penalty >= settings.suppress_at
        self._records[box] = _FaultRecord(penalty, now, is_held, fault[:MAX_NAMED_FAULT])

    def held(self, boxes: Collection[str], now: float) -> frozenset[str]:
        """Those of the boxes that get no requests at `now`: at most half of them, those with the highest penalty."""
        suspects = [box for box in boxes if self._at(box, now).is_held]
        suspects.sort(key=lambda box: (-self._at(box, now).penalty, box))
        return frozenset(suspects[: len(boxes) // 2])

    def held_for_s(self, box: str, now: float) -> float:
        """Seconds for which it is held still if it does not fail again; 0: it is not."""
        record = self._at(box, now)
        return self._settings.held_for_s(record.penalty) if record.is_held else 0.0

    def wake_at(self, now: float) -> float:
        """When the next box is held no longer; infinite: none is held."""
        ends = (now + held_s for box in self._records if (held_s := self.held_for_s(box, now)) > 0.0)
        return min(ends, default=inf)

    def explain(self, boxes: Collection[str], now: float) -> tuple[str, ...]:
        """A line for people on each of these boxes: why it is held, and for how long."""
        return tuple(
            f"{name_of(box)} gets no requests for {self.held_for_s(box, now):.0f} s: it failed repeatedly, at last: "
            f"{self._at(box, now).fault}"
            for box in sorted(boxes)
        )

    def _penalty(self, record: _FaultRecord, now: float) -> float:
        return record.penalty * exp2(-max(0.0, now - record.at) / self._settings.half_life_s)

    def _at(self, box: str, now: float) -> _FaultRecord:
        """The record as of `now`: a hold ends when the penalty has fallen far enough."""
        record = self._records.get(box)
        if record is None:
            return _FaultRecord(0.0, now, False, "")
        penalty = self._penalty(record, now)
        # At the moment that `wake_at` has said, rounding must not hold it any longer.
        is_held = record.is_held and penalty > self._settings.reuse_at * (1.0 + 1e-9)
        return record._replace(penalty=penalty, at=now, is_held=is_held)


def _find_fault(before: BoxSign, after: BoxSign | None) -> str:
    """What has gone wrong with a box between two looks, "" for nothing."""
    if before.leaving:
        return ""
    if after is None:
        return _GONE
    if after.leaving:
        return ""
    if before.serves and not after.serves:
        return _ENDED
    # An engine that was up at both looks and has been started in between had ended unseen.
    return _ENDED if before.serves and after.started > before.started else ""
