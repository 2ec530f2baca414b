"""The lower level as a whole: what solutions are worth, bounds, and finished plans."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.dev.bench_clusters import bench_problem
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.lower.flow import solve_quick
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.errors import UnservedError
from p2pserve.coordinator.planning.model.problem import Group, Problem, Proposal, Slice, Solution
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
A40 = gpu_table().find("A40-48GB", Specs.TABLE1)
TI = gpu_table().find("RTX-3090TI-24GB", Specs.TABLE1)


def group(phase: Phase, *slices: tuple[int, int], service: int = 0) -> Group:
    return Group(tuple(Slice(*part) for part in slices), phase, service)


def boxes(gbps: float, rtt_s: float = 5e-4, usd_per_gb: float = 0.0) -> Cluster:
    """Appendix H: four A40 in one box, four 3090 Ti in another."""
    return Cluster(
        boxes=(Box(id="a40", gpu=A40, gpus=4, usd_per_hour=1.6), Box(id="ti", gpu=TI, gpus=4, usd_per_hour=1.2)),
        gbps=np.full((2, 2), gbps), rtt_s=np.full((2, 2), rtt_s), usd_per_gb=np.full((2, 2), usd_per_gb),
    )  # fmt: skip


def service(
    rate: float, slo: Slo | None = None, *, output: int = 32, name: str = "s", model: str = "llama-30b"
) -> Service:
    workload = Workload(name="even", prompts=np.full(64, 1024), outputs=np.full(64, output), rate=rate)
    return Service(name=name, model=model_shape(model), workload=workload, slo=slo or Slo())


def problem(gbps: float, rate: float, slo: Slo | None = None, *, output: int = 32) -> Problem:
    return Problem(cluster=boxes(gbps), services=(service(rate, slo, output=output),), pinned={})


BY_BOX = (group(M, (0, 4)), group(M, (1, 4)))
SPLIT = (group(P, (0, 4)), group(D, (1, 4)))
ACROSS = (group(D, (0, 2), (1, 2)), group(P, (0, 2), (1, 2)))
SLO = Slo(ttft_s=2.0, tpot_s=0.15)


def mixed_lengths(rate: float, slo: Slo) -> Problem:
    rng = np.random.default_rng(2)
    workload = Workload(
        name="drawn", prompts=rng.integers(50, 3000, 500), outputs=rng.integers(1, 400, 500), rate=rate
    )  # fmt: skip
    given = Service(name="s", model=model_shape("llama-13b"), workload=workload, slo=slo)
    return Problem(cluster=boxes(10.0), services=(given,), pinned={})


def some_solutions() -> list[Solution]:
    """All phases for two ways to cut the boxes."""
    four = [((0, 2),), ((0, 2),), ((1, 2),), ((1, 2),)]
    two = [((0, 2), (1, 2)), ((0, 2), (1, 2))]
    found: list[Solution] = []
    for cut in (four, two):
        found += [
            tuple(group(phase, *slices) for phase, slices in zip(phases, cut, strict=True))
            for phases in product(Phase, repeat=len(cut))
        ]
    return found


def test_appendix_h_the_fast_link_splits_and_the_slow_one_does_not() -> None:
    fast, slow = (LowerLevel(problem(gbps, 20.0)) for gbps in (40.0, 5.0))
    assert fast.score(SPLIT).capacity > 1.1 * fast.score(BY_BOX).capacity
    assert fast.score(SPLIT).capacity > 1.1 * fast.score((group(D, (0, 4)), group(P, (1, 4)))).capacity
    assert slow.score(SPLIT).capacity < 0.5 * slow.score(ACROSS).capacity
    assert slow.score(SPLIT).capacity < 0.5 * slow.score(BY_BOX).capacity
    # inside of the boxes KV does not need the link
    assert slow.score(ACROSS).capacity == pytest.approx(fast.score(ACROSS).capacity, rel=0.05)


def test_smaller_kv_makes_a_slow_link_do() -> None:
    asked = service(20.0)
    coded, raw = (
        LowerLevel(Problem(cluster=boxes(20.0), services=(replace(asked, kv_bits=bits),), pinned={})).score(SPLIT)
        for bits in (4.5, 16.0)
    )
    assert coded.attainment > 2.0 * raw.attainment


@pytest.mark.parametrize(
    "slo", [Slo(), SLO, Slo(e2e_s=20.0), Slo(ttft_s=1.0, tpot_s=0.06, e2e_s=15.0), Slo(ttft_s=0.01)]
)
def test_nothing_is_much_better_than_its_upper_bound(slo: Slo) -> None:
    for rate in (1.0, 8.0):
        lower = LowerLevel(mixed_lengths(rate, slo))
        for solution in some_solutions()[::2]:
            assert lower.upper_bound(solution) >= lower.score(solution).objective - 0.03


@pytest.mark.parametrize("rate", [1.0, 8.0, 20.0])
def test_where_links_are_fast_plans_reach_their_upper_bound(rate: float) -> None:
    lower = LowerLevel(problem(400.0, rate, SLO))
    for solution in (BY_BOX, SPLIT, ACROSS):
        assert lower.upper_bound(solution) == pytest.approx(lower.score(solution).objective, abs=0.005)


def test_more_requests_are_worth_less_and_overload_has_a_slope() -> None:
    scores = [LowerLevel(problem(40.0, rate, SLO)).score(BY_BOX) for rate in (1.0, 4.0, 16.0, 32.0, 64.0)]
    assert scores[0].attainment > 0.98
    attainments = [score.attainment for score in scores]
    assert attainments == sorted(attainments, reverse=True)
    assert attainments[-1] == pytest.approx(attainments[-2] / 2, rel=1e-6)
    assert attainments[-1] > 0.0
    carried = [score.capacity * rate for score, rate in zip(scores, (1.0, 4.0, 16.0, 32.0, 64.0), strict=True)]
    assert carried == pytest.approx([carried[0]] * 5)


def test_of_equally_good_plans_the_one_that_carries_more_wins() -> None:
    lower = LowerLevel(problem(40.0, 0.01))
    both, one = lower.score(BY_BOX), lower.score(BY_BOX[:1])
    assert both.attainment == one.attainment == pytest.approx(1.0)
    assert both.objective > one.objective


def test_money_counts_when_it_is_asked_to() -> None:
    free = problem(40.0, 0.01)
    dear = Problem(cluster=boxes(40.0, usd_per_gb=0.5), services=free.services, pinned={}, price_weight=0.1)
    lower = LowerLevel(dear)
    assert lower.score(BY_BOX[:1]).objective > lower.score(BY_BOX).objective
    assert lower.score(BY_BOX).objective - LowerLevel(free).score(BY_BOX).objective == pytest.approx(-0.28)
    gigabytes = 1024 * 60 * 2 * 6656 * 4.5 / 8 * 1e-9 * 0.01 * 3600  # in an hour
    assert LowerLevel(free).score(SPLIT).objective - lower.score(SPLIT).objective == pytest.approx(
        0.1 * (2.8 + 0.5 * gigabytes), rel=1e-6
    )
    assert lower.upper_bound(SPLIT) >= lower.score(SPLIT).objective


def test_groups_hold_the_model_or_not() -> None:
    lower = LowerLevel(problem(40.0, 1.0))
    assert lower.can_hold((Slice(0, 2),), 0)
    assert not lower.can_hold((Slice(0, 1),), 0)
    assert not lower.can_hold((Slice(1, 2),), 0)
    assert lower.can_hold((Slice(0, 1), Slice(1, 2)), 0)
    # what does not hold it is no replica, and the rest goes on
    some = (group(M, (0, 4)), group(M, (1, 2)))
    assert lower.score(some) == lower.score(some[:1])
    assert lower.stages_of(some) == lower.stages_of(some[:1])
    assert lower.max_rates(some[1], 1) == (0.0, 0.0)


def test_what_replicas_can_do_in_time_is_the_capacity_of_a_pair_of_them() -> None:
    lower = LowerLevel(problem(400.0, 4.0, SLO))
    prefill, decode = lower.max_rates(SPLIT[0], 1)[0], lower.max_rates(SPLIT[1], 1)[1]
    assert lower.score(SPLIT).capacity == pytest.approx(min(prefill, decode) / 4.0)
    free = LowerLevel(problem(400.0, 4.0))
    assert prefill < free.max_rates(SPLIT[0], 1)[0]  # deadlines leave no replica its full load


def test_capacity_beyond_what_is_asked_for_is_worth_a_hundredth_at_most() -> None:
    lower = LowerLevel(problem(400.0, 2.0))
    found = lower.score(BY_BOX)
    headroom = 0.01 * found.capacity / (1.0 + found.capacity)
    assert found.attainment == pytest.approx(1.0)
    assert found.objective == pytest.approx(1.0 + headroom, rel=1e-9)
    assert lower.upper_bound(BY_BOX) == pytest.approx(1.0 + headroom, rel=1e-9)


def test_an_atomic_box_works_as_one() -> None:
    cluster = boxes(40.0)
    whole = Cluster(
        boxes=tuple(replace(box, atomic=True) for box in cluster.boxes),
        gbps=cluster.gbps, rtt_s=cluster.rtt_s, usd_per_gb=cluster.usd_per_gb,
    )  # fmt: skip
    lower = LowerLevel(Problem(cluster=whole, services=(service(1.0),), pinned={}))
    assert not lower.can_hold((Slice(0, 2),), 0)
    (proposal,) = lower.propose(SPLIT, epoch=0, version=0)
    assert [[stage.tp for stage in replica.stages] for replica in proposal.plan.replicas] == [[4], [4]]


def check(proposal: Proposal) -> None:
    """What holds for every proposal; `Plan` checks itself."""
    plan, asked = proposal.plan, proposal.score
    assert 0.0 <= asked.attainment <= 1.0 + 1e-9
    for figures in (proposal.ttft_s, proposal.tpot_s, proposal.e2e_s):
        assert 0.0 <= figures.p50 <= figures.p90 <= figures.p99
    assert proposal.e2e_s.p50 >= proposal.ttft_s.p50
    assert {estimate.id for estimate in proposal.replicas} == {replica.id for replica in plan.replicas}
    assert all(0.0 <= estimate.utilisation <= 1.0 + 1e-6 for estimate in proposal.replicas)
    assert all(line and "\n" not in line for line in plan.why)
    assert proposal.limits in plan.why


def test_finished_plans_use_every_gpu_once() -> None:
    lower = LowerLevel(problem(40.0, 1.0, SLO))
    solution = (group(M, (0, 2)), group(P, (0, 2)), group(D, (1, 4)))
    (proposal,) = lower.propose(solution, epoch=3, version=7)
    check(proposal)
    plan = proposal.plan
    assert plan.number == (3, 7)
    assert sorted(gpu for replica in plan.replicas for gpu in replica.gpus) == sorted(
        (box, gpu) for box in ("a40", "ti") for gpu in range(4)
    )
    assert [replica.id for replica in plan.replicas] == ["a40/0", "a40/2", "ti"]
    assert [replica.phase for replica in plan.replicas] == [M, P, D]
    assert plan.layers == 60
    served: defaultdict[str, float] = defaultdict(float)
    for pair in plan.pairings:
        served[pair.prefill] += pair.weight
    assert sum(served.values()) == pytest.approx(1.0)
    assert proposal.usd_per_hour == pytest.approx(2.8)
    assert proposal.tokens_s == pytest.approx(32.0)
    assert proposal.usd_per_million_tokens == pytest.approx(2.8 / (32 * 3600) * 1e6)
    assert proposal.max_rate > 1.0


def test_every_solution_has_a_plan_that_carries_what_any_shares_do() -> None:
    for slo in (SLO, Slo(e2e_s=12.0)):
        lower = LowerLevel(mixed_lengths(2.0, slo))
        for solution in some_solutions()[::11]:
            phases = {item.phase for item in solution}
            if phases in ({P}, {D}):
                with pytest.raises(UnservedError, match="service s"):
                    lower.propose(solution, epoch=0, version=0)
                continue
            (proposal,) = lower.propose(solution, epoch=0, version=0)
            check(proposal)
            for planned in (0.9, 1.0):
                (plain,) = lower.orchestrate(solution, solver=solve_quick, planned=planned)
                assert proposal.max_rate >= 0.95 * plain.served_share.highest_rate(slo.target)


@pytest.mark.parametrize("tight", [False, True])
def test_attainment_falls_with_the_rate_on_every_solution(tight: bool) -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.06, e2e_s=8.0) if tight else SLO
    for solution in some_solutions()[::17]:
        if {item.phase for item in solution} in ({P}, {D}):
            continue
        rates = (0.05, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 20.0)
        lowers = [LowerLevel(mixed_lengths(rate, slo)) for rate in rates]
        found = [lower.propose(solution, epoch=0, version=0)[0].attainment for lower in lowers]
        assert found == sorted(found, reverse=True)


def test_the_highest_rate_is_where_the_target_is_lost_also_where_links_are_short() -> None:
    """A filling that takes no way back ends a sixth below it here, and may end anywhere below."""
    given = bench_problem(32, "conversation")
    solution = (
        group(D, (0, 4), (3, 4)), group(D, (1, 4), (2, 4)), group(D, (4, 2)),
        group(M, (4, 3)), group(M, (4, 3)), group(M, (5, 4), (6, 4)),
    )  # fmt: skip

    def at(rate: float) -> Proposal:
        asked = given.services[0]
        again = replace(asked, workload=replace(asked.workload, rate=rate))
        return LowerLevel(replace(given, services=(again,))).propose(solution, epoch=0, version=0)[0]

    most = at(5.0).max_rate
    assert at(0.97 * most).attainment >= given.services[0].slo.target > at(1.05 * most).attainment


def test_deadlines_that_nobody_meets_still_have_a_plan() -> None:
    lower = LowerLevel(problem(40.0, 1.0, Slo(ttft_s=1e-3)))
    assert lower.score(SPLIT).attainment == 0.0
    (proposal,) = lower.propose(SPLIT, epoch=0, version=0)
    check(proposal)
    assert proposal.score.attainment < 1e-6
    assert "deadlines" in proposal.limits
    assert proposal.tokens_s == pytest.approx(32.0)


def test_boxes_that_cannot_reach_each_other_cannot_split() -> None:
    lower = LowerLevel(problem(0.0, 1.0, SLO))
    assert lower.score(SPLIT).attainment == 0.0
    assert lower.score(BY_BOX).attainment > 0.9
    with pytest.raises(UnservedError, match="service s: no prefill replica"):
        lower.propose(SPLIT, epoch=0, version=0)


def test_the_limits_are_named() -> None:
    assert "limit: the links" in LowerLevel(problem(2.0, 1.0)).propose(SPLIT, epoch=0, version=0)[0].limits
    prefill = LowerLevel(problem(40.0, 1.0, output=2)).propose(SPLIT, epoch=0, version=0)[0].limits
    decode = LowerLevel(problem(40.0, 1.0, output=400)).propose(SPLIT, epoch=0, version=0)[0].limits
    assert "limit: prefill (" in prefill
    assert "limit: decode (" in decode
    assert "all of them mixed" in LowerLevel(problem(40.0, 1.0)).propose(BY_BOX, epoch=0, version=0)[0].limits


def test_services_share_links_and_boxes() -> None:
    first, second = service(2.0, SLO, name="one"), service(2.0, SLO, name="two", model="llama-7b")
    alone = LowerLevel(Problem(cluster=boxes(10.0), services=(second,), pinned={}))
    both = LowerLevel(Problem(cluster=boxes(10.0), services=(first, second), pinned={}))
    solution = (
        group(P, (0, 2)), group(D, (1, 3)), group(P, (0, 2), service=1), group(D, (1, 1), service=1)
    )  # fmt: skip
    by_itself = alone.score((group(P, (0, 2)), group(D, (1, 1))))
    together = both.score(solution)
    assert together.attainment < by_itself.attainment
    proposals = both.propose(solution, epoch=1, version=1)
    assert [proposal.plan.service for proposal in proposals] == ["one", "two"]
    gpus = [gpu for proposal in proposals for replica in proposal.plan.replicas for gpu in replica.gpus]
    assert len(gpus) == len(set(gpus)) == 8
    assert sum(proposal.usd_per_hour for proposal in proposals) == pytest.approx(2.8)


def test_of_several_services_none_is_left_without_replicas_for_the_others_sake() -> None:
    many, few = service(50.0, SLO, name="many", model="llama-7b"), service(0.01, SLO, name="few")
    both = LowerLevel(Problem(cluster=boxes(10.0), services=(many, few), pinned={}))
    greedy = both.score((group(M, (0, 4)), group(M, (1, 4))))
    fair = both.score((group(M, (0, 4), service=1), group(M, (1, 4))))
    half = both.score((group(P, (0, 4), service=1), group(M, (1, 4))))
    assert fair.attainment < greedy.attainment
    assert fair.objective > greedy.objective
    assert greedy.objective < half.objective + 1.0  # who only prefills serves nobody either
    assert half.objective < 0.0 < fair.objective


def test_the_first_token_can_wait_for_the_kv() -> None:
    asked = service(0.2, Slo(ttft_s=1.0))
    papers, ours = (
        LowerLevel(
            Problem(cluster=boxes(3.0), services=(replace(asked, first_token_at_decode=late),), pinned={})
        ).propose(SPLIT, epoch=0, version=0)[0]
        for late in (False, True)
    )
    assert ours.ttft_s.p50 > papers.ttft_s.p50 + 0.5
    assert ours.tpot_s.p50 < papers.tpot_s.p50
    assert ours.e2e_s.p50 == pytest.approx(papers.e2e_s.p50, rel=0.05)


def test_the_same_question_has_the_same_answer() -> None:
    given = mixed_lengths(3.0, SLO)
    one, other = LowerLevel(given), LowerLevel(given)
    solutions = some_solutions()[::3]
    forwards = [one.score(solution) for solution in solutions]
    backwards = [other.score(solution) for solution in reversed(solutions)]
    assert forwards == backwards[::-1]
    assert forwards == [one.score(solution) for solution in solutions]
