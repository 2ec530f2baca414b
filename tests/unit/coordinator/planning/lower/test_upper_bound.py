"""Bounds by duality: never below what can be served, tight where there is nothing to trade, and monotone in links."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import LOADS, Behaviour, LoadRow
from p2pserve.coordinator.planning.lower.flow import (
    FlowProblem,
    LinkCapacities,
    LossCurve,
    solve_exact,
    solve_greedy,
    solve_quick,
)
from p2pserve.coordinator.planning.lower.upper_bound import (
    PREFILL_SHARES,
    TOTAL_PRICES,
    bound_components,
    bound_served_rate,
    replica_values,
)

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
NO_LOSS = np.zeros_like(LOADS)


def replica(prefill: float = inf, decode: float = inf, mixed: float = inf) -> Behaviour:
    one = np.ones(1)
    return Behaviour(
        prefill_rate=prefill, decode_rate=decode, mixed_rate=mixed, prefill_s=one, prefill_sd_s=0.0 * one,
        prefill_rounds=0.0 * one, prefill_cv2=0.0, max_batch=8.0, table=np.zeros((len(LOADS), len(LoadRow._fields))),
    )  # fmt: skip


def bound(values: Sequence[np.ndarray], rate: float) -> float:
    return bound_served_rate(np.sum(values, axis=0), rate, 1.0)


def test_a_replica_is_worth_its_rate_at_the_price_of_its_phase() -> None:
    at = len(PREFILL_SHARES) // 2
    assert PREFILL_SHARES[at] == 0.5
    assert replica_values(replica(prefill=4.0), P, NO_LOSS)[0, at] == pytest.approx(2.0)
    assert replica_values(replica(decode=6.0), D, NO_LOSS)[0, at] == pytest.approx(3.0)
    assert replica_values(replica(decode=6.0), D, NO_LOSS)[0, -1] == 0.0  # all of the price is for prefill
    assert replica_values(replica(3.0, 3.0, 2.0), M, NO_LOSS)[0, at] == pytest.approx(2.0)
    assert replica_values(replica(9.0, 3.0, 2.0), M, NO_LOSS)[0, -1] == pytest.approx(9.0)  # it would only prefill


def test_a_replica_takes_the_load_that_suits_it_best() -> None:
    lost = np.where(LOADS > 0.5, 100.0, 0.0)
    assert replica_values(replica(prefill=4.0), P, lost)[0, -1] == pytest.approx(2.0)
    assert replica_values(replica(prefill=4.0), P, 100.0 + NO_LOSS)[0, -1] == -96.0


def test_the_bound_of_a_prefill_and_a_decode_replica_is_the_slower_of_them() -> None:
    both = [replica_values(replica(prefill=4.0), P, NO_LOSS), replica_values(replica(decode=3.0), D, NO_LOSS)]
    assert bound(both, 100.0) == pytest.approx(3.0)
    assert bound(both, 2.0) == pytest.approx(0.6 * 2.0 + 0.4 * 3.0)  # the least price is 0.4
    assert bound([both[0]], 100.0) == 0.0  # nobody decodes


@given(
    st.lists(st.floats(0.5, 9.0), min_size=1, max_size=3), st.lists(st.floats(0.5, 9.0), min_size=1, max_size=3),
    st.floats(0.5, 20.0),
)  # fmt: skip
def test_no_solver_serves_more_than_the_bound(prefill: list[float], decode: list[float], rate: float) -> None:
    values = [replica_values(replica(prefill=one), P, NO_LOSS) for one in prefill]
    values += [replica_values(replica(decode=one), D, NO_LOSS) for one in decode]
    size = len(prefill) + len(decode)
    pairs = [(i, j) for i in range(len(prefill)) for j in range(len(prefill), size)]
    flow = FlowProblem(
        rate, np.array([*prefill, *[inf] * len(decode)]), np.array([*[inf] * len(prefill), *decode]),
        [LossCurve((1.0,), (0.0,))] * size, np.array([i for i, _ in pairs]), np.array([j for _, j in pairs]),
        np.ones(len(pairs)), [()] * len(pairs),
        LinkCapacities(np.full((1, 1), inf), np.full(1, inf), np.full(1, inf)),
    )  # fmt: skip
    most = bound(values, rate)
    for solver in (solve_greedy, solve_quick, solve_exact):
        assert solver(flow).served <= most + 1e-6
    # with more requests than anybody can serve, the bound is what the slower side does
    assert solve_exact(replace(flow, rate=1e4)).served == pytest.approx(bound(values, 1e4))
    faster = replace(flow, prefill_rate=2.0 * flow.prefill_rate)
    assert solve_exact(faster).served >= solve_exact(flow).served - 1e-9


def test_a_component_without_links_serves_what_its_slower_side_does() -> None:
    values = replica_values(replica(prefill=4.0), P, NO_LOSS) + replica_values(replica(decode=1.0), D, NO_LOSS)
    alone = bound_components(values[None], np.zeros(1), np.zeros(1))
    free = bound_components(values[None], np.full(1, 1e9), np.full(1, 1e9))
    assert np.allclose(free[0], values)  # links that carry everything change nothing
    assert (alone <= free + 1e-12).all()
    assert alone[0, 0].max() == pytest.approx(1.0)  # at no price more than the requests that it serves by itself
    some = bound_components(values[None], np.full(1, 2.0), np.zeros(1))
    assert (alone <= some + 1e-12).all()
    assert (some <= free + 1e-12).all()
    assert some[0, 0, -1] == pytest.approx(3.0)  # one that it decodes itself, and two that leave


def test_links_in_are_for_components_that_decode_more() -> None:
    values = replica_values(replica(decode=4.0), D, NO_LOSS)
    out = bound_components(values[None], np.full(1, 2.0), np.zeros(1))
    into = bound_components(values[None], np.zeros(1), np.full(1, 2.0))
    assert out[0, 0].max() == pytest.approx(0.0)
    assert into[0, 0, 0] == pytest.approx(2.0)


def test_a_request_that_may_be_worth_more_raises_the_bound() -> None:
    values = replica_values(replica(2.0, 2.0, 1.0), M, NO_LOSS)
    assert bound_served_rate(values, 100.0, 1.5) >= bound_served_rate(values, 100.0, 1.0)
    assert bound_served_rate(values, 0.5, 1.0) == pytest.approx(0.6 * 0.5 + 0.4 * 1.0)
    assert len(TOTAL_PRICES) == len(values)
