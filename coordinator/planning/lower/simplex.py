"""The simplex method for variables whose worth bends, on one dense table.

What a variable is worth is concave and in straight pieces, as a replica's load is that costs more
the higher it is. The pieces are no variables of their own (Fourer, "A simplex algorithm for
piecewise-linear programming I", 1985): a variable outside of the basis rests at an end of one of
its pieces, and what enters the basis goes on through the ends that others come to for as long as
that is worth something. Made for programmes of some dozens of rows that are solved by the hundred:
those take it a third of the time that HiGHS takes, most of which goes into getting ready. What it
has after any number of steps is feasible.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SMALL: Final = 1e-9
"""Gains and pivots below this are none."""

PIVOTS: Final = 1000
"""At most, against going in circles; twenty-five pairs take about twenty."""


class Segments(NamedTuple):
    """What a variable is worth: the upper ends of its pieces, from 0, and what a unit in each is
    worth, falling."""

    ends: tuple[float, ...]
    worth: tuple[float, ...]

    def start(self, segment: int) -> float:
        """The lower end of a piece."""
        return self.ends[segment - 1] if segment else 0.0

    def more(self, place: int) -> float:
        """What one unit more is worth, at the end before piece `place`."""
        return self.worth[place] if place < len(self.worth) else -inf

    def less(self, place: int) -> float:
        """What one unit is worth that is there, at the end before piece `place`; it cannot be given
        up at 0."""
        return self.worth[place - 1] if place else inf


def maximise(table: Array, values: Array, free: Sequence[Segments], basic: Sequence[Segments]) -> Array:
    """The free variables [column] at the optimum. Uses up its arguments.

    `table` [row, column]: how much less there is of a basic variable for one unit of a free one;
    `values` [row]: what the basic ones are when all free ones are 0, which must be in their first
    pieces. There must be an optimum.
    """
    return _SimplexTable(table, values, free, basic).solve()


class _SimplexTable:
    """Variables are numbered, free ones first, then basic. A non-basic one is at the lower end of
    piece `_segment` (one past the last: its upper end), a basic one in that piece."""

    def __init__(self, table: Array, values: Array, free: Sequence[Segments], basic: Sequence[Segments]) -> None:
        self._table, self._values = table, values
        self._all = [*free, *basic]
        self._segment = [0] * len(self._all)
        self._outside = list(range(len(free)))
        self._inside = list(range(len(free), len(self._all)))
        self._more = np.array([one.more(0) for one in free], dtype=np.float64)
        self._less = np.full(len(free), inf)
        self._low, self._high = np.zeros(len(basic)), np.array([one.ends[0] for one in basic], dtype=np.float64)
        self._worth = np.array([one.worth[0] for one in basic], dtype=np.float64)
        self._others = -(self._worth @ table)  # what a unit of each free variable does to the worth of the basic ones

    def solve(self) -> Array:
        for _ in range(PIVOTS):
            rises, falls = self._more + self._others, -(self._less + self._others)
            up, down = int(rises.argmax()), int(falls.argmax())
            gain = float(max(rises[up], falls[down]))
            if not gain > SMALL:
                break
            if rises[up] >= falls[down]:
                self._enter(up, 1.0, gain)
            else:
                self._enter(down, -1.0, gain)
        return self._read_free_variables()

    def _enter(self, column: int, way: float, gain: float) -> None:
        """Changes a free variable for as long as that is worth something; then it or a basic one
        rests."""
        variable, step = self._outside[column], int(way)
        segments, place = self._all[variable], self._segment[variable]
        here, at = place if step > 0 else place - 1, segments.start(place)
        falls = self._table[:, column] * way
        speed = np.abs(falls)
        room = np.maximum(np.where(falls > 0.0, self._values - self._low, self._high - self._values), 0.0)
        moves = speed > SMALL
        due = np.divide(room, speed, out=np.full(len(room), inf), where=moves).tolist()  # the way until a piece ends
        # Past the end of a piece it may still pay to go on: the gain falls with every end, the variable's own or a
        # basic one's, and only where nothing is left of it does the step end. One pivot does the work of many.
        while True:
            soonest = min(due)
            row = due.index(soonest)
            end = segments.ends[here] if step > 0 else segments.start(here)
            if (end - at) * way <= soonest:
                after = here + step
                if not 0 <= after < len(segments.worth):
                    break
                gain -= (segments.worth[here] - segments.worth[after]) * way
                if not gain > SMALL:
                    break
                here = after
                continue
            ahead = -1 if falls[row] > 0.0 else 1
            pace = float(speed[row])
            gain -= self._drop(row, ahead) * pace
            if not gain > SMALL:
                self._values -= falls * soonest
                self._pivot(row, column, ahead, here, at + way * soonest)
                return
            due[row] += self._cross(row, ahead) / pace
        self._values -= falls * ((end - at) * way)
        self._rest(column, variable, here + 1 if step > 0 else here)
        self._others = -(self._worth @ self._table)

    def _drop(self, row: int, step: int) -> float:
        """How much less a unit of a basic variable is worth in the next piece."""
        variable = self._inside[row]
        segments, here = self._all[variable], self._segment[variable]
        after = here + step
        return (segments.worth[here] - segments.worth[after]) * step if 0 <= after < len(segments.worth) else inf

    def _cross(self, row: int, step: int) -> float:
        """Into the next piece, whose width is told."""
        variable = self._inside[row]
        self._segment[variable] += step
        segments, here = self._all[variable], self._segment[variable]
        low, high = segments.start(here), segments.ends[here]
        self._low[row], self._high[row], self._worth[row] = low, high, segments.worth[here]
        return high - low

    def _rest(self, column: int, variable: int, place: int) -> None:
        segments = self._all[variable]
        self._outside[column], self._segment[variable] = variable, place
        self._more[column], self._less[column] = segments.more(place), segments.less(place)

    def _pivot(self, row: int, column: int, step: int, here: int, value: float) -> None:
        """The basic variable of a row, which has come to the end of its piece, for that of a
        column."""
        leaves, enters = self._inside[row], self._outside[column]
        self._rest(column, leaves, self._segment[leaves] + (step > 0))
        segments = self._all[enters]
        self._inside[row], self._segment[enters] = enters, here
        self._values[row], self._worth[row] = value, segments.worth[here]
        self._low[row], self._high[row] = segments.start(here), segments.ends[here]
        table = self._table
        falls, pivot = table[:, column].copy(), float(table[row, column])
        new = table[row] / pivot
        table -= falls[:, None] * new
        table[:, column] = falls / -pivot
        new[column] = 1.0 / pivot
        table[row] = new
        self._others = -(self._worth @ table)

    def _read_free_variables(self) -> Array:
        found = np.zeros(len(self._all))
        found[self._inside] = self._values
        for variable in self._outside:
            found[variable] = self._all[variable].start(self._segment[variable])
        return found[: len(self._outside)]
