"""Orchestration: convex losses, the fast path, and the exact one against samples of everything that is allowed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from p2pserve.coordinator.planning.lower.flow import (
    MAX_SIMPLEX_PAIRS,
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

Array = NDArray[np.float64]

OPEN = LinkCapacities(np.full((4, 4), 1e9), np.full(4, 1e9), np.full(4, 1e9))
FLAT = LossCurve((1.0,), (0.0,))


def split(
    rate: float, prefill_rate: Sequence[float], decode_rate: Sequence[float], worth: Sequence[Sequence[float]],
    *, curves: Sequence[LossCurve] | None = None, capacities: LinkCapacities = OPEN, gigabits: float = 0.0,
) -> FlowProblem:  # fmt: skip
    """Prefill replicas in boxes 0, 1, ..., decode replicas in the boxes behind; every pair has transfers."""
    prefills, decodes = len(prefill_rate), len(decode_rate)
    pairs = list(product(range(prefills), range(prefills, prefills + decodes)))
    return FlowProblem(
        rate, np.array([*prefill_rate, *[inf] * decodes]), np.array([*[inf] * prefills, *decode_rate]),
        curves or [FLAT] * (prefills + decodes),
        np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs]), np.array(worth).ravel(),
        [(LinkDemand(i, j, gigabits),) if gigabits else () for i, j in pairs], capacities,
    )  # fmt: skip


def value(network: FlowProblem, flow: RequestFlow) -> float:
    """The objective of the linear programme."""
    lost = 0.0
    for load, curve in zip(flow.loads, network.curves, strict=True):
        for slope, width in zip(curve.slopes, curve.widths, strict=True):
            lost += slope * min(max(load, 0.0), width)
            load -= width
    return float(network.worth @ flow.pair_rates) - lost


def allowed(network: FlowProblem, flow: RequestFlow) -> bool:
    tops = np.array([curve.loads[-1] for curve in network.curves])
    capacities = network.capacities
    return bool(
        flow.served <= network.rate + 1e-6
        and (flow.loads <= tops + 1e-6).all()
        and (flow.used_gbps <= capacities.between + 1e-6).all()
        and (flow.used_gbps.sum(axis=1) <= capacities.out + 1e-6).all()
        and (flow.used_gbps.sum(axis=0) <= capacities.into + 1e-6).all()
    )


def random_network(seed: int, *, narrow: bool, side: int = 2) -> FlowProblem:
    """`side` replicas prefill, and as many decode."""
    rng, mixed_rate = np.random.default_rng(seed), 2 * side
    loads = np.linspace(0.0, 1.0, 6)
    curves = [
        build_loss_curve(loads, rng.uniform(0.1, 2.0) * loads ** rng.uniform(1.5, 6.0)) for _ in range(mixed_rate)
    ]
    capacities = LinkCapacities(
        np.full((mixed_rate, mixed_rate), 1e9), np.full(mixed_rate, 1e9), np.full(mixed_rate, 1e9)
    )
    if narrow:
        capacities = LinkCapacities(
            rng.uniform(0.2, 1.5, (mixed_rate, mixed_rate)),
            rng.uniform(0.5, 2.0, mixed_rate),
            rng.uniform(0.5, 2.0, mixed_rate),
        )
    return split(
        rng.uniform(0.5, 4.0), rng.uniform(0.5, 2.0, side).tolist(), rng.uniform(0.5, 2.0, side).tolist(),
        rng.uniform(0.6, 1.0, (side, side)).tolist(), curves=curves, capacities=capacities, gigabits=1.0,
    )  # fmt: skip


def test_a_curve_is_the_convex_one_below_the_points() -> None:
    curve = build_loss_curve(np.array([0.0, 0.5, 0.8, 1.0]), np.array([0.0, 0.0, 0.6, 0.7]))
    assert curve.loads == (0.5, 1.0)
    assert curve.slopes == pytest.approx((0.0, 1.4))
    assert curve.widths == pytest.approx((0.5, 0.5))


@given(st.lists(st.floats(0, 5), min_size=2, max_size=8))
def test_slopes_rise_and_no_point_is_below(losses: list[float]) -> None:
    loads, lost = np.linspace(0.0, 1.0, len(losses)), np.array([0.0, *losses[1:]])
    curve = build_loss_curve(loads, lost)
    assert (np.diff(curve.slopes) >= -1e-9).all()
    below = np.concatenate(([0.0], np.cumsum(np.array(curve.slopes) * np.array(curve.widths))))
    assert (np.interp(loads, (0.0, *curve.loads), below) <= lost + 1e-9).all()


def test_without_capacities_all_went_to_the_best_pair_and_with_them_it_does_not() -> None:
    network = split(3.0, [2.0, 2.0], [2.0, 2.0], [[1.0, 0.5], [0.4, 0.9]])
    for flow in (solve_greedy(network), solve_exact(network), solve_quick(network)):
        assert flow.pair_rates.reshape(2, 2)[0, 0] == pytest.approx(2.0)
        assert flow.pair_rates.reshape(2, 2)[1, 1] == pytest.approx(1.0)
        assert flow.served == pytest.approx(3.0)


def test_what_cannot_be_in_time_is_not_sent() -> None:
    steep = LossCurve((0.5, 1.0), (0.0, 9.0))  # beyond half load a request costs more than it brings
    network = split(3.0, [2.0], [8.0], [[1.0]], curves=[steep, FLAT])
    assert solve_greedy(network).served == pytest.approx(1.0)
    assert solve_exact(network).served == pytest.approx(1.0)
    assert solve_quick(network).served == pytest.approx(1.0)


def test_equal_replicas_share_alike() -> None:
    even = build_loss_curve(np.linspace(0.0, 1.0, 11), 0.001 * np.linspace(0.0, 1.0, 11) ** 2)
    network = split(2.0, [2.0, 2.0], [4.0], [[1.0], [1.0]], curves=[even] * 3)
    assert solve_greedy(network).loads[:2] == pytest.approx([0.5, 0.5])
    assert solve_exact(network).loads[:2] == pytest.approx([0.5, 0.5])
    assert solve_quick(network).loads[:2] == pytest.approx([0.5, 0.5])


def test_a_mixed_replica_keeps_its_requests_and_helps_out() -> None:
    # one that does both (2 and 2 per second), one that only prefills (5 per second)
    network = FlowProblem(
        9.0, np.array([2.0, 5.0]), np.array([2.0, inf]), [FLAT, FLAT], np.array([0, 1]), np.array([0, 0]),
        np.array([0.9, 1.0]), [(), ()], OPEN,
    )  # fmt: skip
    assert solve_exact(network).served == pytest.approx(2.0)
    assert solve_greedy(network).served == pytest.approx(2.0)
    alone = solve_exact(
        FlowProblem(
            9.0,
            network.prefill_rate[:1],
            network.decode_rate[:1],
            [FLAT],
            np.array([0]),
            np.array([0]),
            np.array([1.0]),
            [()],
            OPEN,
        )
    )
    assert alone.served == pytest.approx(1.0)
    assert alone.loads.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("narrow", [False, True])
def test_nothing_that_is_allowed_is_better(narrow: bool) -> None:
    for seed in range(12):
        network = random_network(seed, narrow=narrow)
        best = solve_exact(network)
        assert allowed(network, best)
        rng = np.random.default_rng(seed)
        tried = 0
        for pairs in rng.uniform(0.0, 1.0, (400, 4)) * rng.uniform(0.0, 1.5, (400, 1)):
            flow = flow_from_rates(network, pairs)
            if allowed(network, flow):
                tried += 1
                assert value(network, flow) <= value(network, best) + 1e-6
        assert tried > 10


def test_the_fast_path_is_allowed_and_close() -> None:
    ratios = []
    for seed, narrow in product(range(40), (False, True)):
        network = random_network(seed, narrow=narrow)
        quick, best = solve_greedy(network), solve_exact(network)
        assert allowed(network, quick)
        assert value(network, quick) <= value(network, best) + 1e-6
        ratios.append(value(network, quick) / value(network, best))
    assert min(ratios) > 0.8
    assert np.mean(ratios) > 0.98


@pytest.mark.parametrize(("side", "seeds"), [(1, 10), (2, 40), (4, 20), (7, 6)])
def test_the_quick_exact_path_is_exact(side: int, seeds: int) -> None:
    for seed, narrow in product(range(seeds), (False, True)):
        network = random_network(seed, narrow=narrow, side=side)
        quick, best = solve_quick(network), solve_exact(network)
        assert allowed(network, quick)
        assert value(network, quick) == pytest.approx(value(network, best), abs=1e-6)


def test_of_many_pairs_the_quick_path_takes_the_fast_one() -> None:
    network = random_network(0, narrow=True, side=9)
    assert len(network.worth) > MAX_SIMPLEX_PAIRS
    assert solve_quick(network).pair_rates.tolist() == solve_greedy(network).pair_rates.tolist()


def test_links_and_boxes_have_limits_of_their_own() -> None:
    between = np.full((4, 4), 10.0)
    between[0, 2] = 3.0
    capacities = LinkCapacities(between, np.array([8.0, 10.0, 10.0, 10.0]), np.array([10.0, 10.0, 10.0, 2.0]))
    network = split(99.0, [50.0, 50.0], [50.0, 50.0], [[1.0, 0.9], [0.2, 0.1]], capacities=capacities, gigabits=2.0)
    flow = solve_exact(network)
    assert allowed(network, flow)
    assert flow.used_gbps[0, 2] == pytest.approx(3.0)
    assert flow.used_gbps[:, 3].sum() == pytest.approx(2.0)
    assert flow.served == pytest.approx((10.0 + 2.0) / 2.0)
    assert solve_greedy(network).served == pytest.approx(6.0)
    assert solve_quick(network).served == pytest.approx(6.0)
    left = capacities.less(flow.used_gbps)
    assert left.between[0, 2] == pytest.approx(0.0)
    assert left.into[3] == pytest.approx(0.0)


def test_a_pair_with_two_links_out_of_one_box_takes_both_from_it() -> None:
    link_demands = (LinkDemand(0, 1, 1.0), LinkDemand(0, 2, 1.0))
    capacities = LinkCapacities(np.full((4, 4), 9.0), np.full(4, 4.0), np.full(4, 9.0))
    network = FlowProblem(
        9.0, np.array([50.0, inf]), np.array([inf, 50.0]), [FLAT, FLAT], np.array([0]), np.array([1]), np.array([1.0]),
        [link_demands], capacities,
    )  # fmt: skip
    assert solve_greedy(network).served == pytest.approx(2.0)
    assert solve_exact(network).served == pytest.approx(2.0)
    assert solve_quick(network).served == pytest.approx(2.0)


def test_without_pairs_nothing_is_served() -> None:
    nobody = np.zeros(0, dtype=np.intp)
    network = FlowProblem(1.0, np.array([2.0]), np.array([inf]), [FLAT], nobody, nobody, np.zeros(0), [], OPEN)
    assert solve_greedy(network).served == 0.0
    assert solve_exact(network).served == 0.0
    assert solve_quick(network).served == 0.0
    assert solve_greedy(network).loads.tolist() == [0.0]


def test_requests_that_are_kept_cost_what_both_phases_take_together() -> None:
    kept = FlowProblem(
        inf, np.array([2.0]), np.array([3.0]), [FLAT], np.array([0]), np.array([0]), np.ones(1), [()], OPEN,
    )  # fmt: skip
    assert solve_greedy(kept).served == pytest.approx(1.2)
    together = replace(kept, mixed_rate=np.array([1.5]))
    for solver in (solve_greedy, solve_exact, solve_quick):
        found = solver(together)
        assert found.served == pytest.approx(1.5)
        assert found.loads[0] == pytest.approx(1.0)


def test_links_are_given_back() -> None:
    used_gbps = np.zeros((4, 4))
    used_gbps[1, 2] = 3.0
    back = OPEN.less(used_gbps).more(used_gbps)
    assert (back.between == OPEN.between).all()
    assert (back.out == OPEN.out).all()
    assert (back.into == OPEN.into).all()
