"""The simplex method with upper bounds, on programmes small enough to solve by hand."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from p2pserve.coordinator.planning.simplex import maximise


def table(rows: list[list[float]], most: list[float], gains: list[float]) -> np.ndarray:
    """Rows of `a x <= b`."""
    return np.array([[*row, limit] for row, limit in zip(rows, most, strict=True)] + [[*gains, 0.0]])


def test_the_best_corner() -> None:
    # 3 x + 2 y where x + y <= 4, x + 3 y <= 6, x <= 3
    found = maximise(table([[1, 1], [1, 3], [1, 0]], [4, 6, 3], [3, 2]), np.full(3, inf), np.full(2, inf))
    assert found == pytest.approx([3.0, 1.0])


def test_a_free_variable_stops_at_its_bound() -> None:
    # 2 x + y where x + y <= 5 and y <= 2: x does not care for what y stops at
    found = maximise(table([[1, 1]], [5], [1, 2]), np.full(1, inf), np.array([inf, 2.0]))
    assert found == pytest.approx([3.0, 0.0])  # what has a bound is not told


def test_a_basic_variable_stops_at_its_bound() -> None:
    # s = 2 x, which may be 3; and x <= 9
    found = maximise(table([[-2], [1]], [0, 9], [1]), np.array([3.0, inf]), np.full(1, inf))
    assert found == pytest.approx([1.5])


def test_what_is_worth_nothing_stays_at_nothing() -> None:
    found = maximise(table([[1, 1]], [5], [0, -1]), np.full(1, inf), np.full(2, inf))
    assert found.tolist() == [0.0, 0.0]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_no_other_solver_finds_more(seed: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    body, limits = rng.uniform(0.1, 1.0, (rows, columns)), rng.uniform(0.0, 3.0, rows)
    gains = rng.uniform(-0.5, 1.0, columns)
    found = maximise(table(body.tolist(), limits.tolist(), gains.tolist()), np.full(rows, inf), np.full(columns, inf))
    best = linprog(-gains, A_ub=body, b_ub=limits)
    assert (found >= -1e-9).all()
    assert (body @ found <= limits + 1e-9).all()
    assert gains @ found == pytest.approx(-best.fun, abs=1e-7)
