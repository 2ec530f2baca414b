"""Boxes that say when they end: spot boxes, and boxes that were rented until a fixed time.

A box says for how many seconds it will still be there, never at what time it ends: clocks of boxes differ. What it
said is read later, by whoever joins later even hours after, so a box says it anew before it becomes wrong. What is
told is rounded down to a step of an eighth, and told again when the next step is due::

    left, s          3725    3590    3333     100      61      17       9
    told, s          3584    3584    3328      96      60      16       9

So what was heard last is less than the truth by an eighth (or a second) at most while its box is alive, and never more
but for the second that news may take.
"""

from __future__ import annotations

from math import floor, frexp
from typing import Final

LONGEST_S: Final = 1e6
"""What is told at most, eleven days: who has longer says that."""

PLAN_WITHOUT_S: Final = 60.0
"""Plans are made without a box that ends sooner than this. Longer: the others take over earlier, and the box does less
of what it was rented for; shorter: a plan may come when requests on it can no longer finish."""

_STEPS: Final = 8
"""To which a power of two is cut: what is told is less than the truth by one of them at most."""


def round_remaining(remaining_s: float) -> float:
    """What a box tells that will be there for so many seconds still."""
    left = min(max(0.0, remaining_s), LONGEST_S)
    step = max(1.0, 2.0 ** (frexp(left)[1] - 1) / _STEPS)
    return floor(left / step) * step


def is_planned_without(ends_in_s: float | None) -> bool:
    """Whether plans are to do without a box that said so."""
    return ends_in_s is not None and ends_in_s <= PLAN_WITHOUT_S


def can_finish(ends_in_s: float | None, needed_s: float) -> bool:
    """Whether a request that needs so many seconds would finish on a box that said so."""
    return ends_in_s is None or needed_s <= ends_in_s
