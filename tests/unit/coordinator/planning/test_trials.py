"""The choice among the best few plans: which are tried, and that what was seen decides."""

from collections.abc import Sequence

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster_file import packaged_cluster
from p2pserve.coordinator.planning.model.problem import Problem, Proposal
from p2pserve.coordinator.planning.model.slo import parse_slo
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.planning.upper.search import SearchResult, search
from p2pserve.coordinator.planning.upper.settings import SearchSettings
from p2pserve.coordinator.planning.upper.trials import TrialOutcome, pick_candidates, try_plans


@pytest.fixture(scope="module")
def evaluator() -> LowerLevel:
    rng = np.random.default_rng(0)
    prompts, outputs = (1 + rng.geometric(1.0 / mean, 200) for mean in (1000, 100))
    workload, model = Workload(name="w", prompts=prompts, outputs=outputs, rate=2.0), model_shape("llama-13b")
    service = Service(name="s", model=model, workload=workload, slo=parse_slo("5x", model, workload))
    cluster = packaged_cluster("thunderserve-cloud-16", Specs.MEASURED)
    return LowerLevel(Problem(cluster=cluster, services=(service,), pinned={}))


@pytest.fixture(scope="module")
def found(evaluator: LowerLevel) -> SearchResult:
    settings = SearchSettings(steps=80)
    return search(evaluator.problem, evaluator, rng=np.random.default_rng(0), settings=settings)


def phases(proposal: Proposal) -> set[Phase]:
    return {replica.phase for replica in proposal.plan.replicas}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_best_and_the_colocated_one_are_tried_and_others_of_another_kind(found: SearchResult, count: int) -> None:
    picked = pick_candidates(found, count)
    assert picked[0] == found.solution
    assert found.colocated in picked
    assert len(picked) == len(set(picked)) == max(count, len({found.solution, found.colocated}))
    kinds = [tuple(sorted(group.phase for group in solution)) for solution in picked]
    assert len(set(kinds)) == len(kinds)


def test_a_colocated_plan_that_does_better_in_the_trial_is_chosen(evaluator: LowerLevel, found: SearchResult) -> None:
    """Whatever was expected of the others."""

    def trial(proposals: Sequence[Proposal]) -> TrialOutcome:
        return TrialOutcome(0.95, 1.5) if phases(proposals[0]) == {Phase.MIXED} else TrialOutcome(0.9, 3.0)

    tried = try_plans(pick_candidates(found, 4), evaluator, trial, epoch=3, version=7)
    assert phases(tried[0].proposals[0]) == {Phase.MIXED}
    assert tried[0].solution == found.colocated
    assert {(plan.proposals[0].plan.epoch, plan.proposals[0].plan.version) for plan in tried} == {(3, 7)}
    assert [plan.outcome.attainment for plan in tried] == [0.95, 0.9, 0.9, 0.9]


def test_of_plans_that_are_all_in_time_the_one_that_carries_more_is_chosen(
    evaluator: LowerLevel, found: SearchResult
) -> None:
    def trial(proposals: Sequence[Proposal]) -> TrialOutcome:
        return TrialOutcome(1.0, 2.0 if phases(proposals[0]) == {Phase.MIXED} else 4.0)

    tried = try_plans([found.colocated, found.solution], evaluator, trial, epoch=0, version=1)
    assert [plan.solution for plan in tried] == [found.solution, found.colocated]
    assert tried[0].objective - tried[1].objective == pytest.approx(0.01 * (4.0 / 5.0 - 2.0 / 3.0))
