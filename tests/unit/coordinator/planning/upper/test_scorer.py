"""The budget of a search: what counts as a step, what is scored at all, and which solution is the choice in the end."""

from collections.abc import Callable
from typing import Any

import pytest

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.scorer import Improvement, Scorer, mean_boxes_per_replica, never

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def on(box: int, gpus: int, phase: Phase = M) -> Solution:
    return (Group((Slice(box, gpus),), phase),)


ONE, TWO, THREE = on(0, 2), on(0, 3), on(0, 4)
WORTH = {ONE: 0.1, TWO: 0.2, THREE: 0.3}


def worth(solution: Solution) -> float:
    return WORTH.get(solution, 0.0)


def test_each_solution_is_scored_once_and_counts_one_step(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(worth)
    scorer = Scorer(space, limit=10)
    assert [scorer.objective(one) for one in (ONE, TWO, ONE)] == [0.1, 0.2, 0.1]
    assert evaluator.scored == [ONE, TWO]
    assert scorer.steps == 2
    assert (scorer.best, scorer.best_score.objective) == (TWO, 0.2)
    assert scorer.history == [Improvement(1, 0.1), Improvement(2, 0.2)]


def test_boxes_that_are_alike_are_the_same_solution(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(worth)
    scorer = Scorer(space, limit=10)
    assert scorer.objective(on(1, 2)) == scorer.objective(on(0, 2)) == 0.1
    assert len(evaluator.scored) == 1


def test_an_upper_bound_costs_a_step_unless_groups_are_known(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(worth)
    new, known = Scorer(space, limit=10), Scorer(space, limit=10, same_groups=True)
    for scorer in (new, known):
        assert scorer.upper_bound(ONE) == pytest.approx(0.6)
        assert scorer.upper_bound(ONE) == pytest.approx(0.6)
        scorer.objective(ONE)
        assert scorer.upper_bound(ONE) == 0.1  # now it is known
    assert (new.steps, known.steps) == (2, 1)


def test_the_budget_ends_by_steps_or_by_time_but_never_before_the_first_score(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(worth)
    late = Scorer(space, limit=10, spent=lambda: True)
    assert not late.is_exhausted()
    late.objective(ONE)
    assert late.is_exhausted()
    short = Scorer(space, limit=2)
    short.objective(ONE)
    assert not short.is_exhausted()
    short.objective(TWO)
    assert short.is_exhausted()
    assert not never()


def test_the_best_above_a_floor_is_found_without_scoring_what_is_bounded_below_it(
    make_space: Callable[..., Any],
) -> None:
    space, evaluator = make_space(worth, slack=0.05)
    scorer = Scorer(space, limit=100)
    assert scorer.find_best_above([ONE, TWO, THREE]) == (0.3, THREE)
    assert evaluator.scored == [THREE]  # the bounds of the others are 0.15 and 0.25
    assert scorer.find_best_above([ONE, TWO], 0.25) is None  # a bound of just the floor is not above it
    assert scorer.find_best_above([], 0.0) is None
    assert scorer.find_best_above([TWO], 0.2) is None  # as good as the floor is not above it
    assert scorer.find_best_above([TWO], 0.19) == (0.2, TWO)


def test_the_search_for_a_better_one_ends_with_the_budget(make_space: Callable[..., Any]) -> None:
    space, evaluator = make_space(worth)
    scorer = Scorer(space, limit=4)
    assert scorer.find_best_above([ONE, TWO, THREE]) == (0.3, THREE)
    assert evaluator.scored == [THREE]  # three bounds and one score
    assert scorer.find_best_above([ONE, TWO]) is None


def test_progress_is_told_after_each_evaluation(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(worth)
    told: list[tuple[int, int, float]] = []
    scorer = Scorer(space, limit=7, progress=lambda *figures: told.append(figures))
    for one in (TWO, ONE, TWO):
        scorer.score(one)
    assert told == [(1, 7, 0.2), (2, 7, 0.2)]


def test_the_choice_weighs_what_is_lost_with_a_box(make_space: Callable[..., Any]) -> None:
    across: Solution = (Group((Slice(0, 2), Slice(2, 2)), M),)
    apart: Solution = (Group((Slice(0, 2),), P), Group((Slice(2, 2),), D))
    space, _ = make_space({across: 0.50, apart: 0.49, ONE: 0.2}.__getitem__)
    scorer = Scorer(space, limit=10)
    for one in (across, apart, ONE):
        scorer.score(one)
    assert (mean_boxes_per_replica(across), mean_boxes_per_replica(apart)) == (2.0, 1.0)
    assert scorer.pick_most_robust(0.2, 0.005) == across
    assert scorer.pick_most_robust(0.2, 0.02) == apart
    assert scorer.pick_most_robust(0.5, 0.02) == across  # the other is below what is to be kept


def test_boxes_per_replica_is_a_mean_over_gpus() -> None:
    solution: Solution = (Group((Slice(0, 3), Slice(1, 3)), M), Group((Slice(2, 2),), M))
    assert mean_boxes_per_replica(solution) == (2 * 6 + 2) / 8
