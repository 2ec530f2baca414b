"""What replicas carry together, by hand for rates that are given, and how the highest rate is found."""

from collections.abc import Sequence
from math import inf
from types import MappingProxyType

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.behaviour import LOADS, Behaviour, LoadRow
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.lower.flow import FlowProblem, LinkCapacities, LinkDemand, LossCurve, solve_quick
from p2pserve.coordinator.planning.lower.orchestration import ServedShare, carried_rate
from p2pserve.coordinator.planning.lower.parallel import Configuration
from p2pserve.coordinator.planning.lower.replica_pairs import KVHolder
from p2pserve.coordinator.planning.lower.replicas import ConfiguredReplica, count_phases
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice, Solution
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
CARD = gpu_table().find("A40-48GB", Specs.DENSE)
MODEL = model_shape("llama-7b")
TIMES = replica_times(MODEL, [StageHardware(CARD, 1, MODEL.layers, 100.0)])


def replica(phase: Phase, prefill: float = inf, decode: float = inf, mixed: float = inf) -> ConfiguredReplica:
    one = np.ones(1)
    behaves = Behaviour(
        prefill_rate=prefill, decode_rate=decode, mixed_rate=mixed, prefill_s=one, prefill_sd_s=one,
        prefill_rounds=one, prefill_cv2=0.0, max_batch=8.0, table=np.zeros((len(LOADS), len(LoadRow._fields))),
    )  # fmt: skip
    made = Configuration(((0, 1, MODEL.layers),), TIMES, 1000, behaves)
    return ConfiguredReplica(Group((Slice(0, 1),), phase), 0, made, KVHolder(phase, ((0, 0.0, 1.0),)))


def carried(replicas: Sequence[ConfiguredReplica], loads: Sequence[float] | None = None) -> float:
    return carried_rate(replicas, loads or [1.0] * len(replicas))


def test_the_slower_side_limits_what_is_carried() -> None:
    assert carried([replica(P, prefill=5.0), replica(D, decode=3.0)]) == 3.0
    assert carried([replica(P, prefill=5.0), replica(P, prefill=1.0), replica(D, decode=9.0)]) == 6.0
    assert carried([replica(P, prefill=5.0)]) == 0.0


def test_each_replica_counts_up_to_its_usable_load() -> None:
    assert carried([replica(P, prefill=5.0), replica(D, decode=9.0)], [0.5, 1.0]) == 2.5
    assert carried([replica(P, prefill=5.0), replica(D, decode=9.0)], [1.0, 0.25]) == 2.25


def test_mixed_replicas_alone_carry_their_own_requests() -> None:
    assert carried([replica(M, 9.0, 9.0, 4.0), replica(M, 9.0, 9.0, 2.0)], [1.0, 0.5]) == 5.0
    assert carried([]) == 0.0


def test_a_mixed_replica_decodes_for_who_only_prefills() -> None:
    """Five sixths of its time go to the five requests that others have prefilled."""
    helper = replica(M, prefill=6.0, decode=6.0, mixed=3.0)
    assert carried([replica(P, prefill=5.0), helper]) == pytest.approx(5.0 + 0.5)
    assert carried([replica(D, decode=5.0), helper]) == pytest.approx(5.0 + 0.5)


def test_mixed_replicas_help_the_side_that_is_behind_and_keep_the_rest() -> None:
    """A third of its time makes up for the two requests that prefill is behind; two thirds are for its own."""
    helper = replica(M, prefill=6.0, decode=6.0, mixed=3.0)
    assert carried([replica(P, prefill=3.0), replica(D, decode=5.0), helper]) == pytest.approx(5.0 + 2.0)
    assert carried([replica(P, prefill=5.0), replica(D, decode=3.0), helper]) == pytest.approx(5.0 + 2.0)


def test_who_loses_least_helps_first() -> None:
    cheap, dear = replica(M, 4.0, 4.0, 1.0), replica(M, 4.0, 4.0, 3.0)
    assert carried([replica(P, prefill=1.0), replica(D, decode=5.0), cheap, dear]) == pytest.approx(5.0 + 3.0)
    assert carried([replica(P, prefill=1.0), replica(D, decode=5.0), dear, cheap]) == pytest.approx(5.0 + 3.0)


def test_help_that_is_not_enough_leaves_the_other_side_waiting() -> None:
    assert carried([replica(P, prefill=1.0), replica(D, decode=9.0), replica(M, 4.0, 4.0, 3.0)]) == pytest.approx(5.0)


def test_a_mixed_replica_that_is_never_in_time_helps_nobody() -> None:
    found = carried([replica(P, prefill=1.0), replica(D, decode=9.0), replica(M, 4.0, 4.0, 3.0)], [1.0, 1.0, 0.0])
    assert found == pytest.approx(1.0)


def test_a_replica_carries_no_more_than_its_links() -> None:
    replicas = [replica(P, prefill=5.0), replica(D, decode=5.0)]
    between = np.array([[0.0, 4.0], [4.0, 0.0]])
    problem = FlowProblem(
        9.0, np.array([5.0, inf]), np.array([inf, 5.0]), [LossCurve((1.0,), (0.0,))] * 2, np.array([0]), np.array([1]),
        np.ones(1), [(LinkDemand(0, 1, 2.0),)], LinkCapacities(between, np.full(2, 9.0), np.full(2, 9.0)),
    )  # fmt: skip
    assert carried_rate(replicas, [1.0, 1.0], problem) == 2.0
    assert carried_rate(replicas, [1.0, 1.0]) == 5.0


@pytest.mark.parametrize(
    ("phases", "counts"),
    [([], (1, 1)), ([P], (1, 1)), ([P, P, D], (2, 1)), ([M, M], (2, 2)), ([M, P, D, D], (2, 3))],
)
def test_phases_are_counted_by_side_and_no_side_is_empty(phases: list[Phase], counts: tuple[int, int]) -> None:
    assert count_phases(phases) == counts


DEADLINES = Slo(ttft_s=2.0, tpot_s=0.1, e2e_s=10.0)


def lower_level(rate: float, gbps: float = 10.0, slo: Slo = DEADLINES, *, late_token: bool = False) -> LowerLevel:
    cluster = Cluster(
        boxes=(Box(id="a", gpu=CARD, gpus=2), Box(id="b", gpu=CARD, gpus=2)), gbps=np.full((2, 2), gbps),
        rtt_s=np.full((2, 2), 1e-3), usd_per_gb=np.zeros((2, 2)),
    )  # fmt: skip
    workload = Workload(name="even", prompts=np.full(32, 800), outputs=np.full(32, 60), rate=rate)
    service = Service(name="s", model=MODEL, workload=workload, slo=slo, first_token_at_decode=late_token)
    return LowerLevel(Problem(cluster=cluster, services=(service,), pinned={}), MappingProxyType({}))


SPLIT: Solution = (Group((Slice(0, 2),), P), Group((Slice(1, 2),), D))


def test_the_highest_rate_keeps_the_target_and_a_higher_one_does_not() -> None:
    tight = Slo(ttft_s=0.4, tpot_s=0.1)
    level = lower_level(1.0, 1000.0, tight)
    most = level.propose(SPLIT, epoch=0, version=0)[0].max_rate
    (found,) = level.orchestrate(SPLIT)
    assert 0.0 < most < carried_rate(found.replicas, [1.0, 1.0])

    def attainment(rate: float) -> float:
        return lower_level(rate, 1000.0, tight).propose(SPLIT, epoch=0, version=0)[0].attainment

    assert attainment(0.999 * most) >= 0.9 > attainment(1.001 * most)


def test_attainment_falls_with_the_rate_and_rises_with_the_links() -> None:
    shares = [lower_level(rate).score(SPLIT).attainment for rate in (1.0, 4.0, 16.0, 64.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.95 > shares[-1]
    assert lower_level(4.0, gbps=0.5).score(SPLIT).attainment <= lower_level(4.0, gbps=40.0).score(SPLIT).attainment


def test_capacity_is_over_the_rate_that_is_asked_for() -> None:
    one, two = (lower_level(rate).score(SPLIT).capacity for rate in (1.0, 2.0))
    assert one == pytest.approx(2.0 * two, rel=0.05)


def test_an_upper_bound_is_no_less_than_the_objective() -> None:
    solutions: list[Solution] = [
        SPLIT, (Group((Slice(0, 2),), M), Group((Slice(1, 2),), M)), (Group((Slice(0, 1), Slice(1, 1)), M),),
        (Group((Slice(0, 1),), P), Group((Slice(0, 1),), D), Group((Slice(1, 2),), M)),
    ]  # fmt: skip
    for rate in (1.0, 8.0, 40.0):
        level = lower_level(rate)
        for solution in solutions:
            assert level.upper_bound(solution) >= level.score(solution).objective - 0.01


def test_what_a_group_can_do_goes_by_its_phase() -> None:
    level = lower_level(1.0)
    prefill, decode, mixed = (level.max_rates(Group((Slice(0, 2),), phase), 1) for phase in (P, D, M))
    assert prefill[0] > 0.0 == prefill[1]
    assert decode[1] > 0.0 == decode[0]
    assert mixed[0] > 0.0
    assert mixed[1] > 0.0
    assert level.can_hold((Slice(0, 2),), 0)
    assert level.stages_of(SPLIT).keys() == {(Slice(0, 2),), (Slice(1, 2),)}


def test_without_deadlines_the_highest_rate_is_what_replicas_carry() -> None:
    level = lower_level(1.0, gbps=1000.0, slo=Slo())
    (found,) = level.orchestrate(SPLIT, solver=solve_quick)
    rates = found.replicas[0].behaviour.prefill_rate, found.replicas[1].behaviour.decode_rate
    assert level.propose(SPLIT, epoch=0, version=0)[0].max_rate == pytest.approx(min(rates))


@pytest.mark.parametrize("rate", [1.0, 12.0])
def test_attainment_is_of_all_that_are_asked_for(rate: float) -> None:
    (found,) = lower_level(rate, slo=Slo()).orchestrate(SPLIT, solver=solve_quick)
    assert found.attainment == pytest.approx(found.flow.served / rate)
    assert found.capacity * rate == pytest.approx(carried_rate(found.replicas, [1.0, 1.0], found.network))


def two_speeds(rate: float) -> LowerLevel:
    """A box with twice the GPUs of another, and a third that decodes; links are no limit."""
    boxes = Box(id="fast", gpu=CARD, gpus=4), Box(id="slow", gpu=CARD, gpus=2), Box(id="c", gpu=CARD, gpus=4)
    cluster = Cluster(
        boxes=boxes, gbps=np.full((3, 3), 1000.0), rtt_s=np.full((3, 3), 1e-3), usd_per_gb=np.zeros((3, 3))
    )
    workload = Workload(name="even", prompts=np.full(32, 3000), outputs=np.full(32, 10), rate=rate)
    service = Service(name="s", model=MODEL, workload=workload, slo=DEADLINES)
    return LowerLevel(Problem(cluster=cluster, services=(service,), pinned={}))


TWO_SPEEDS: Solution = (Group((Slice(0, 4),), P), Group((Slice(1, 2),), P), Group((Slice(2, 4),), D))


@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_of_few_requests_and_of_many_each_replica_gets_as_many_as_it_is_fast(rate: float) -> None:
    """All could be served by the faster one alone, and in less time; then its queue would grow while the other is
    idle."""
    (proposal,) = two_speeds(rate).propose(TWO_SPEEDS, epoch=0, version=0)
    fast, slow, _ = (item.utilisation for item in proposal.replicas)
    assert slow == pytest.approx(fast, rel=0.15)
    shares = {pair.prefill: pair.weight for pair in proposal.plan.pairings}
    assert 1.7 < shares["fast"] / shares["slow"] < 2.3


def test_shares_are_the_same_at_every_rate() -> None:
    plans = [two_speeds(rate).propose(TWO_SPEEDS, epoch=0, version=0)[0].plan for rate in (0.1, 1.0, 5.0, 30.0)]
    assert len({tuple(round(pair.weight, 9) for pair in plan.pairings) for plan in plans}) == 1


SHARE = ServedShare(np.array([1.0, 2.0, 4.0]), np.array([1.0, 0.9, 0.5]))


def test_the_highest_rate_is_where_the_line_between_two_levels_crosses_the_target() -> None:
    assert SHARE.highest_rate(0.9) == pytest.approx(2.0)
    assert SHARE.highest_rate(0.7) == pytest.approx(3.0)
    assert SHARE.highest_rate(0.4) == 4.0
    assert ServedShare(np.array([1.0, 2.0]), np.array([0.8, 0.7])).highest_rate(0.9) == 0.0


def test_so_many_are_served_that_most_are_in_time() -> None:
    """0.9 of two requests is 1.8; of three 0.7, which is more; half of four is less."""
    assert SHARE.best_rate(1.5) == 1.5
    assert SHARE.best_rate(3.0) == 3.0
    assert SHARE.best_rate(4.0) == pytest.approx(4.0)
    assert ServedShare(np.array([1.0, 2.0, 4.0]), np.array([1.0, 0.9, 0.4])).best_rate(9.0) == 2.0


def test_a_rate_that_misses_the_target_by_a_hundredth_counts_for_a_little_less() -> None:
    missed = ServedShare(np.array([1.0, 2.0]), np.array([1.0, 0.99 * 0.9]))
    assert missed.value(0.9) == pytest.approx(2.0 * 0.99**8)
    assert SHARE.value(0.9) == pytest.approx(2.0)
    assert SHARE.value(None) == pytest.approx(2.0)  # half of four
    assert (SHARE.reaches(1.0), missed.reaches(1.0)) == (True, True)
    assert not ServedShare(np.ones(1), np.array([0.8])).reaches(0.9)
