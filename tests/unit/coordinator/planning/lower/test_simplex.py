"""The simplex method with pieces, on programmes small enough to solve by hand, and against HiGHS."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from p2pserve.coordinator.planning.lower.simplex import Segments, maximise

Array = NDArray[np.float64]

FREE = Segments((inf,), (0.0,))
"""What is left of something, and worth nothing."""


def plain(gains: list[float]) -> list[Segments]:
    return [Segments((inf,), (gain,)) for gain in gains]


def solved(rows: list[list[float]], left: list[float], free: list[Segments], basic: list[Segments]) -> Array:
    return maximise(np.array(rows, dtype=np.float64), np.array(left, dtype=np.float64), free, basic)


def test_the_best_corner() -> None:
    # 3 x + 2 y where x + y <= 4, x + 3 y <= 6, x <= 3
    assert solved([[1, 1], [1, 3], [1, 0]], [4, 6, 3], plain([3, 2]), [FREE] * 3) == pytest.approx([3.0, 1.0])


def test_a_free_variable_stops_at_its_bound() -> None:
    # 2 x + y where x + y <= 5 and y <= 2: x does not care for what y stops at
    assert solved([[1, 1]], [5], [*plain([1]), Segments((2.0,), (2.0,))], [FREE]) == pytest.approx([3.0, 2.0])


def test_a_basic_variable_stops_at_its_bound() -> None:
    # s = 2 x, which may be 3; and x <= 9
    assert solved([[-2], [1]], [0, 9], plain([1]), [Segments((3.0,), (0.0,)), FREE]) == pytest.approx([1.5])


def test_a_load_goes_as_far_as_it_pays() -> None:
    # a request is worth 1 and loads by 1/2; load costs 1 up to 0.5, then 1.5, then 3: the second piece still pays
    costly = Segments((0.5, 0.8, 1.0), (-1.0, -1.5, -3.0))
    assert solved([[-0.5]], [0], plain([1]), [costly]) == pytest.approx([1.6])


def test_what_enters_may_have_pieces_too() -> None:
    assert solved([[1]], [5], [Segments((1.0, 2.0, 9.0), (3.0, 1.0, -1.0))], [FREE]) == pytest.approx([2.0])


def test_what_is_worth_nothing_stays_at_nothing() -> None:
    assert solved([[1, 1]], [5], plain([0, -1]), [FREE]).tolist() == [0.0, 0.0]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_no_other_solver_finds_more(seed: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    body, limits = rng.uniform(0.1, 1.0, (rows, columns)), rng.uniform(0.0, 3.0, rows)
    gains = rng.uniform(-0.5, 1.0, columns)
    found = maximise(body.copy(), limits.copy(), plain(gains.tolist()), [FREE] * rows)
    best = linprog(-gains, A_ub=body, b_ub=limits)
    assert (found >= -1e-9).all()
    assert (body @ found <= limits + 1e-9).all()
    assert gains @ found == pytest.approx(-best.fun, abs=1e-7)


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_no_other_solver_finds_more_in_pieces(seed: int, rows: int, columns: int, pieces: int) -> None:
    """Every variable worth less and less, as variables of their own for the other solver."""
    rng = np.random.default_rng(seed)

    def bent(low: float, high: float) -> Segments:
        ends = np.cumsum(rng.uniform(0.1, 1.0, pieces))
        return Segments(tuple(ends.tolist()), tuple(sorted(rng.uniform(low, high, pieces).tolist(), reverse=True)))

    costs = rng.uniform(-1.0, 0.2, (rows, columns)) * (rng.random((rows, columns)) < 0.7)
    free = [bent(-0.2, 1.0) for _ in range(columns)]
    basic = [bent(-1.0, 0.2) for _ in range(rows)]
    found = maximise(costs.copy(), np.zeros(rows), free, basic)
    levels = -costs @ found
    each = [*free, *basic]
    widths = np.concatenate([np.diff((0.0, *one.ends)) for one in each])
    worth = np.concatenate([one.worth for one in each])
    # what a basic variable is, less what the free ones make of it, is nothing
    equal = np.kron(np.hstack((costs, np.eye(rows))), np.ones(pieces))
    best = linprog(-worth, A_eq=equal, b_eq=np.zeros(rows), bounds=[(0.0, width) for width in widths])

    def value(one: Segments, level: float) -> float:
        steps = np.concatenate(([0.0], np.cumsum(np.diff((0.0, *one.ends)) * np.array(one.worth))))
        return float(np.interp(level, (0.0, *one.ends), steps))

    assert all(-1e-9 <= level <= one.ends[-1] + 1e-9 for one, level in zip(each, [*found, *levels], strict=True))
    reached = sum(value(one, level) for one, level in zip(each, [*found, *levels], strict=True))
    assert reached == pytest.approx(-best.fun, abs=1e-7)
