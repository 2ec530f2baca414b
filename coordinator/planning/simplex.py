"""The simplex method for variables with upper bounds, on one dense table.

Made for programmes of some dozens of rows that are solved by the hundred: those take it a third of the time that HiGHS
takes, most of which goes into getting ready. What it has after any number of steps is feasible.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["maximise"]

Array = NDArray[np.float64]

SMALL: Final = 1e-9
"""Gains and pivots below this are none."""

PIVOTS: Final = 1000
"""At most, against going in circles; sixty pairs take about a hundred."""


def maximise(table: Array, most_basic: Array, most: Array) -> Array:
    """The free variables [column] without an upper bound at the optimum; 0 for all with one. Uses up its arguments.

    Every row of the table but the last is a basic variable, between 0 and `most_basic` [row]: in the last column what
    it is when all free ones, between 0 and `most` [column], are 0, and in the others how much less of it there is for
    one unit of each. The last row says what one unit of each is worth.
    """
    rows, columns = len(most_basic), len(most)
    free, basic = np.where(np.isinf(most), np.arange(columns), columns), np.full(rows, columns)
    gains, values = table[rows, :columns], table[:rows, columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(PIVOTS):
            enters = int(gains.argmax())
            if gains[enters] <= SMALL:
                break
            column = table[:, enters].copy()
            falls = column[:rows]
            room = np.where(falls > 0.0, values, values - most_basic) / falls
            room[np.abs(falls) <= SMALL] = np.inf
            leaves = int(room.argmin())
            if most[enters] <= room[leaves]:  # goes to its upper bound, and is counted down from there from now on
                table[:, columns] -= column * most[enters]
                table[:, enters] = -column
                continue
            if falls[leaves] < 0.0:  # likewise the one that leaves
                table[leaves] *= -1.0
                values[leaves] += most_basic[leaves]
                column[leaves] *= -1.0
            pivot = column[leaves]
            row = table[leaves] / pivot
            table -= column[:, None] * row
            table[:, enters] = column / -pivot
            row[enters] = 1.0 / pivot
            table[leaves] = row
            most_basic[leaves], most[enters] = most[enters], most_basic[leaves]
            basic[leaves], free[enters] = free[enters], basic[leaves]
    found = np.zeros(columns + 1)
    found[basic] = values
    return found[:columns]
