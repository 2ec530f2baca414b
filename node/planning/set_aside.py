"""Which boxes planning goes on without, because it fails with what they say of themselves. Pure.

Planning takes figures from every box, and a box is another person's machine. When planning fails
(an error, no memory, no end), it is tried with half of the boxes, and the cause is sought where it
fails until one box is left. That one is set aside by name, everybody else is planned with again,
and what it says is tried again after a time that doubles with each failure::

    abcdefgh fail, abcd planned: one of efgh.  abcd ef fail: e or f.  abcd e planned: f is set aside
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, final

from ...coordinator.names import name_of

FIRST_HOLD_S: Final = 60.0
LONGEST_HOLD_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _Held:
    until: float
    hold_s: float
    reason: str


@final
class SetAside:
    """What the coordinator remembers of planning that failed."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._suspects: tuple[str, ...] = ()  # one of these is a cause
        self._half: frozenset[str] = frozenset()  # those of them that the next attempt leaves out
        self._unknown: frozenset[str] = frozenset()  # left out as well: they may be causes, too
        self._reason = ""

    def left_out(self, now: float) -> frozenset[str]:
        """The boxes to plan without at `now` (seconds): those held, and those left out to find another."""
        return self._half | self._unknown | {box for box, held in self._held.items() if now < held.until}

    def explain(self, now: float) -> tuple[str, ...]:
        """A line for `status` on each box that is held."""
        return tuple(
            f"{name_of(box)} is set aside: planning fails with what it says ({held.reason}); tried again in "
            f"{held.until - now:.0f} s"
            for box, held in sorted(self._held.items())
            if now < held.until
        )

    def on_planned(self, now: float) -> None:
        """Planning has ended well with everybody but :meth:`left_out`: so the cause is in the half left out."""
        if self._suspects:
            self._narrow(self._half, now)

    def on_failed(self, boxes: Collection[str], reason: str, now: float) -> bool:
        """Planning has failed with these boxes. Returns whether there is anything else to try: not if it fails with
        none of the suspects, as it does when the fault is the planner's own."""
        suspects = [box for box in self._suspects if box in boxes] if self._suspects else sorted(boxes)
        self._reason = reason
        if not suspects:
            self._end_search()
            return False
        self._unknown |= self._half
        self._narrow(suspects, now)
        return True

    def forget(self, boxes: Collection[str], now: float) -> None:
        """Keep nothing of boxes other than these, which have left; but leaving does not shorten the time that one is
        held."""
        self._held = {box: held for box, held in self._held.items() if box in boxes or now < held.until}
        self._unknown &= set(boxes)
        if not set(self._suspects) <= set(boxes):
            self._end_search()  # it begins anew if planning still fails

    def _narrow(self, suspects: Iterable[str], now: float) -> None:
        self._suspects = tuple(sorted(suspects))
        # Of an odd number the larger half stays in: planning goes on with as many boxes as it can.
        self._half = frozenset(self._suspects[(len(self._suspects) + 1) // 2 :])
        if len(self._suspects) == 1:
            self._hold(self._suspects[0], now)
            self._end_search()

    def _end_search(self) -> None:
        self._suspects, self._half, self._unknown = (), frozenset(), frozenset()

    def _hold(self, box: str, now: float) -> None:
        before = self._held.get(box)
        hold_s = min(2.0 * before.hold_s, LONGEST_HOLD_S) if before is not None else FIRST_HOLD_S
        self._held[box] = _Held(now + hold_s, hold_s, self._reason)
