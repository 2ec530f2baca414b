"""What the solvers are given and give back: loads of pairs, links that are left, and rates on problems done by hand."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from p2pserve.coordinator.planning.lower.flow import (
    FlowProblem,
    LinkCapacities,
    LinkDemand,
    LossCurve,
    RequestFlow,
    build_loss_curve,
    flow_from_rates,
    solve_exact,
    solve_greedy,
    solve_quick,
)

SOLVERS = (solve_greedy, solve_quick, solve_exact)
Solve = Callable[[FlowProblem], RequestFlow]
every_solver = pytest.mark.parametrize("solve", SOLVERS)


def problem(
    rate: float = 10.0,
    *,
    gbps: float = 100.0,
    out: float = 100.0,
    worth: Sequence[float] = (1.0, 1.0, 1.0),
    slopes: Sequence[float] = (0.0, 0.0, 0.0),
) -> FlowProblem:
    """A prefill replica of 4 requests/s, a decode replica of 8, and a mixed one of 2 for its own; a request sends
    0.5 Gb from box 0 to box 1. Pairs: prefill with decode, prefill with mixed, and mixed for itself."""
    return FlowProblem(
        rate, np.array([4.0, inf, 6.0]), np.array([inf, 8.0, 6.0]),
        [LossCurve((1.0,), (slope,)) for slope in slopes], np.array([0, 0, 2]), np.array([1, 2, 2]), np.array(worth),
        [(LinkDemand(0, 1, 0.5),), (), ()],
        LinkCapacities(np.full((2, 2), gbps), np.full(2, out), np.full(2, 100.0)), np.array([inf, inf, 2.0]),
    )  # fmt: skip


def test_a_request_that_is_kept_loads_by_its_own_rate() -> None:
    prefill, decode = problem().pair_loads()
    assert prefill.tolist() == [1 / 4, 1 / 4, 1 / 4]
    assert decode.tolist() == [1 / 8, 1 / 6, 1 / 4]


def test_rates_become_loads_and_traffic() -> None:
    flow = flow_from_rates(problem(), np.array([2.0, 1.0, 0.5]))
    assert flow.served == 3.5
    assert flow.loads == pytest.approx([3 / 4, 2 / 8, 1 / 6 + 0.5 / 2])
    assert flow.used_gbps.tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_links_are_taken_and_given_back() -> None:
    all_of_it = LinkCapacities(np.full((2, 2), 3.0), np.array([4.0, 5.0]), np.array([6.0, 7.0]))
    used = np.array([[0.0, 2.0], [0.5, 0.0]])
    left = all_of_it.less(used)
    assert left.between.tolist() == [[3.0, 1.0], [2.5, 3.0]]
    assert (left.out.tolist(), left.into.tolist()) == ([2.0, 4.5], [5.5, 5.0])
    again = left.more(used)
    assert again.between.tolist() == all_of_it.between.tolist()
    assert (again.out.tolist(), again.into.tolist()) == ([4.0, 5.0], [6.0, 7.0])
    assert all_of_it.less(10 * used).between.min() == 0.0  # never below nothing


def test_pieces_of_a_curve_have_widths() -> None:
    assert LossCurve((0.25, 1.0), (0.0, 3.0)).widths == (0.25, 0.75)


def test_a_curve_of_losses_is_the_convex_one_below_the_points() -> None:
    found = build_loss_curve(np.array([0.0, 0.5, 1.0]), np.array([0.0, 1.0, 4.0]))
    assert found.loads == (0.5, 1.0)
    assert found.slopes == pytest.approx((2.0, 6.0))
    assert all(one <= two for one, two in zip(found.slopes, found.slopes[1:], strict=False))


def test_points_in_a_line_are_one_piece() -> None:
    found = build_loss_curve(np.array([0.0, 0.25, 0.5, 1.0]), np.array([0.0, 0.5, 1.0, 2.0]))
    assert (found.loads, found.slopes) == ((1.0,), (2.0,))


@every_solver
def test_without_pairs_nothing_is_served(solve: Solve) -> None:
    none = np.zeros(0, dtype=np.intp)
    flow = solve(replace(problem(), prefill=none, decode=none, worth=np.zeros(0), link_demands=[]))
    assert (flow.pair_rates.tolist(), flow.served, flow.loads.tolist()) == ([], 0.0, [0.0, 0.0, 0.0])


@every_solver
def test_all_that_replicas_can_take_is_served(solve: Solve) -> None:
    """4 prefilled elsewhere and 2 of its own: the mixed replica has nothing left for others' outputs."""
    flow = solve(problem())
    assert flow.served == pytest.approx(6.0)
    assert flow.pair_rates == pytest.approx([4.0, 0.0, 2.0])
    assert flow.loads == pytest.approx([1.0, 0.5, 1.0])


@every_solver
def test_no_more_is_served_than_is_asked_for(solve: Solve) -> None:
    assert solve(problem(rate=1.5)).served == pytest.approx(1.5)
    assert solve(problem(rate=inf)).served == pytest.approx(6.0)


@every_solver
@pytest.mark.parametrize(("gbps", "out"), [(1.0, 100.0), (100.0, 1.0)])
def test_a_link_or_the_way_out_of_a_box_limits_a_pair(solve: Solve, gbps: float, out: float) -> None:
    """Two requests of half a Gb go over it."""
    flow = solve(problem(rate=inf, gbps=gbps, out=out, worth=(1.0, 0.0, 0.0)))
    assert flow.pair_rates[0] == pytest.approx(2.0)
    assert flow.used_gbps[0, 1] == pytest.approx(1.0)


@every_solver
def test_a_pair_that_is_worth_less_than_it_costs_gets_nothing(solve: Solve) -> None:
    # a request of the first pair is a quarter of the prefill replica's load, of which all is 4.4 requests lost
    flow = solve(problem(slopes=(4.4, 0.0, 0.0)))
    assert flow.pair_rates == pytest.approx([0.0, 0.0, 2.0])
    assert solve(problem(slopes=(3.6, 0.0, 0.0))).served == pytest.approx(6.0)


@every_solver
def test_the_better_pair_is_served_first(solve: Solve) -> None:
    assert solve(problem(rate=1.0, worth=(0.5, 0.4, 0.9))).pair_rates == pytest.approx([0.0, 0.0, 1.0])
    assert solve(problem(rate=1.0, worth=(0.9, 0.4, 0.5))).pair_rates == pytest.approx([1.0, 0.0, 0.0])


@every_solver
def test_without_losses_loads_are_bounded_and_worths_forgotten(solve: Solve) -> None:
    free = problem(worth=(0.1, 0.1, 0.1), slopes=(9.0, 9.0, 9.0)).without_losses(inf, [0.5, 1.0, 0.25])
    assert solve(free).served == pytest.approx(2.0 + 0.5)
