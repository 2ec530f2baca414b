"""What becomes of a node of several on a box that has ended. No I/O, no clock.

Alone, a node that ends is ended with its command, and whoever has started that may start it again. Of several, one that
fails is started again by its command, since the others serve on; what a second try cannot mend ends them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from ...node.settings import NodeTuning
from ..failures import EXIT_FAILED, EXIT_REFUSED, EXIT_USAGE

INTERRUPTED: Final = 130
_FOR_GOOD: Final = (EXIT_USAGE, EXIT_REFUSED)


class AfterEnd(Enum):
    """LEFT: nothing, it was to end. AGAIN: it is started again. GIVEN_UP: the others go on without it. ALL: the others
    leave, too."""

    LEFT = "left"
    AGAIN = "again"
    GIVEN_UP = "given up"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """How a node has ended. `code`: its exit code, below 0 for a signal. `was_member`: it has been admitted, now or
    before. `failures`: how often it has failed in a row, with this time. `leaves`: all are leaving."""

    code: int
    was_member: bool
    failures: int
    leaves: bool


def decide_after(end: NodeEnd, tuning: NodeTuning) -> AfterEnd:
    """The first rule that fits."""
    if end.leaves or end.code in (0, INTERRUPTED):
        return AfterEnd.LEFT
    if end.code in _FOR_GOOD or not end.was_member:  # what is wrong with one is wrong with all
        return AfterEnd.ALL
    return AfterEnd.GIVEN_UP if end.failures >= tuning.max_failures else AfterEnd.AGAIN


def combine_codes(codes: list[int]) -> int:
    """The exit code of the command whose nodes have ended with these: the first that is not 0; signals that ended a
    node count as a failure."""
    if INTERRUPTED in codes:
        return INTERRUPTED
    failed = next((code for code in codes if code), 0)
    return failed if failed >= 0 else EXIT_FAILED
