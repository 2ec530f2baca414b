"""The choice among the best few plans: which are tried, and that what was seen decides."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

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
from p2pserve.coordinator.planning.upper import trials as trials_room
from p2pserve.coordinator.planning.upper.search import SearchResult, search
from p2pserve.coordinator.planning.upper.settings import SearchSettings
from p2pserve.coordinator.planning.upper.trials import AHEAD, SURER, PlanTrials, TrialOutcome


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole plans and neighbours take time: a handful shows as much."""
    monkeypatch.setattr(trials_room, "LIKELY", 6)
    monkeypatch.setattr(trials_room, "NEIGHBOURS", 8)


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
    settings = SearchSettings(steps=60)
    return search(evaluator.problem, evaluator, rng=np.random.default_rng(0), settings=settings)


def phases(proposal: Proposal) -> set[Phase]:
    return {replica.phase for replica in proposal.plan.replicas}


class Judge:
    """Plans carry what it says of their phases; `asked`: the factors that challengers were tried at."""

    def __init__(self, outcome: Callable[[set[Phase]], TrialOutcome], best: float = 0.0) -> None:
        self._outcome, self._best = outcome, best
        self.asked: list[float] = []

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        return self._outcome(phases(proposals[0]))

    def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
        self.asked.append(factor)
        return self._best >= factor


def contest(evaluator: LowerLevel, judge: Judge, **told: Any) -> PlanTrials:
    return PlanTrials(problem=evaluator.problem, evaluator=evaluator, trial=judge, **told)


ALIKE = Judge(lambda _: TrialOutcome(1.0, 2.0))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_best_and_the_colocated_one_are_tried_and_others_of_another_kind(
    evaluator: LowerLevel, found: SearchResult, count: int
) -> None:
    picked = contest(evaluator, ALIKE).pick_candidates(found, count)
    assert picked[0] == found.solution
    assert found.colocated in picked
    assert len(picked) == len(set(picked)) == max(count, len({found.solution, found.colocated}))
    kinds = [tuple(sorted(group.phase for group in solution)) for solution in picked]
    assert len(set(kinds)) == len(kinds)


def test_those_are_picked_of_which_whole_plans_are_expected_to_carry_most(
    evaluator: LowerLevel, found: SearchResult
) -> None:
    trials = contest(evaluator, ALIKE, rank=attrgetter("capacity"))
    ranked = trials.rank_expected([found.colocated, *sorted(found.evaluated)[:8], found.solution])
    carried = [evaluator.propose(one, epoch=0, version=1)[0].max_rate for one in ranked]
    assert min(carried) > 0.0, "nothing is expected of others: they are left out"
    assert len(ranked) == len(set(ranked))
    mixed = [all(group.phase is Phase.MIXED for group in one) for one in ranked]
    worth = [rate * (SURER if alone else 1.0) for rate, alone in zip(carried, mixed, strict=True)]
    assert worth == sorted(worth, reverse=True)
    assert len(ranked) > 3


def test_a_colocated_plan_that_does_better_in_the_trial_is_chosen(evaluator: LowerLevel, found: SearchResult) -> None:
    """Whatever was expected of the others."""
    judge = Judge(lambda seen: TrialOutcome(0.95, 1.5) if seen == {Phase.MIXED} else TrialOutcome(0.9, 3.0))
    trials = contest(evaluator, judge, epoch=3, version=7)
    tried = trials.try_all(trials.pick_candidates(found, 4))
    assert tried[0].is_colocated
    assert phases(tried[0].proposals[0]) == {Phase.MIXED}
    assert {(plan.proposals[0].plan.epoch, plan.proposals[0].plan.version) for plan in tried} == {(3, 7)}
    assert [plan.outcome.attainment for plan in tried] == [0.95, 0.9, 0.9, 0.9]


@pytest.mark.parametrize(("capacity", "stays"), [(2.0, True), (2.03, True), (2.05, False), (4.0, False)])
def test_a_colocated_plan_stays_unless_another_carries_two_percent_more(
    evaluator: LowerLevel, found: SearchResult, capacity: float, stays: bool
) -> None:
    """A trial does not tell apart what differs by less, and nothing of that plan depends on links."""
    judge = Judge(lambda seen: TrialOutcome(1.0, 2.0 if seen == {Phase.MIXED} else capacity))
    tried = contest(evaluator, judge).try_all([found.solution, found.colocated])
    assert tried[0].is_colocated is stays
    mixed, split = sorted(tried, key=lambda plan: not plan.is_colocated)
    expected = 0.01 * (capacity / (1.0 + capacity) - 2.0 * SURER / (1.0 + 2.0 * SURER))
    assert split.objective - mixed.objective == pytest.approx(expected)
    assert (mixed.capacity, split.capacity) == (2.0 * SURER, capacity)


def test_when_time_is_up_one_plan_has_been_tried(evaluator: LowerLevel, found: SearchResult) -> None:
    solutions = [found.solution, found.colocated]
    trials = contest(evaluator, Judge(lambda _: TrialOutcome(1.0, 2.0), best=9.0))
    tried = trials.try_all(solutions, lambda: True)
    assert [plan.solution for plan in tried] == [found.solution]
    assert trials.challenge(tried, found, 5, np.random.default_rng(0), lambda: True) == tried


def test_challengers_have_one_run_at_more_than_the_best_carries(evaluator: LowerLevel, found: SearchResult) -> None:
    judge = Judge(lambda _: TrialOutcome(1.0, 2.0), best=2.0)
    trials = contest(evaluator, judge)
    tried = trials.try_all([found.solution])
    assert trials.challenge(tried, found, 5, np.random.default_rng(0)) == tried, "none carries three percent more"
    assert judge.asked == [AHEAD * 2.0] * 5


def test_a_challenger_that_wins_is_challenged_in_turn(evaluator: LowerLevel, found: SearchResult) -> None:
    carried = iter([2.0, 2.5, 3.0, 3.0, 3.0])
    judge = Judge(lambda _: TrialOutcome(1.0, next(carried)), best=2.6)
    trials = contest(evaluator, judge, rank=attrgetter("capacity"))
    tried = trials.challenge(trials.try_all([found.colocated]), found, 4, np.random.default_rng(0))
    assert [plan.outcome.capacity for plan in tried] == [3.0, 2.5, 2.0]
    assert judge.asked == [AHEAD * factor for factor in (2.0, 2.5, 3.0, 3.0)]
    assert len({plan.solution for plan in tried}) == 3


def test_nobody_challenges_a_plan_that_carries_nothing(evaluator: LowerLevel, found: SearchResult) -> None:
    judge = Judge(lambda _: TrialOutcome(0.5, 0.0), best=9.0)
    trials = contest(evaluator, judge)
    tried = trials.try_all([found.solution])
    assert trials.challenge(tried, found, 3, np.random.default_rng(0)) == tried
    assert judge.asked == []
