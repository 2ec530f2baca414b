"""Rounds of the search: within the budget, out of local optima, and over when there is nothing new."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.coordinator.planning.upper.scorer import Scorer
from p2pserve.coordinator.planning.upper.search_space import make_solution
from p2pserve.coordinator.planning.upper.settings import SearchSettings
from p2pserve.coordinator.planning.upper.tabu import climb, tabu_search

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
START = make_solution([Group((Slice(0, 2),), M), Group((Slice(0, 2),), M)])


class NoPacking:
    """Knows no cuts: all neighbours come from the moves."""

    columns = 0

    def recut(self, solution: Solution, rng: np.random.Generator) -> Solution | None:
        return None

    def start(self, rng: np.random.Generator, **_: Any) -> Solution:
        return ()


def search(
    make_space: Callable[..., Any], objective: Callable[[Solution], float], limit: int, **settings: Any
) -> Scorer:
    space, _ = make_space(objective)
    space = replace(space, settings=SearchSettings(**settings))
    scorer = Scorer(space, limit=limit)
    tabu_search(scorer, NoPacking(), START, np.random.default_rng(0))  # type: ignore[arg-type]
    return scorer


def by_gpus(solution: Solution) -> float:
    """More GPUs are better, in small steps."""
    return 0.01 * sum(gpus for group in solution for _, gpus in group.slices)


def test_the_best_of_all_that_was_seen_is_kept(make_space: Callable[..., Any]) -> None:
    scorer = search(make_space, by_gpus, 400)
    assert scorer.best_score.objective == by_gpus(scorer.best) >= 0.1
    assert [step for step, _ in scorer.history] == sorted(step for step, _ in scorer.history)
    assert scorer.history[-1].objective == scorer.best_score.objective


def test_a_search_ends_with_its_budget(make_space: Callable[..., Any]) -> None:
    for limit in (1, 5, 60):
        assert limit <= search(make_space, by_gpus, limit).steps <= limit + 1


def test_a_search_of_a_small_space_ends_when_all_of_it_is_seen(make_space: Callable[..., Any]) -> None:
    """Two boxes are excluded by what they are worth: moves come back to what was scored."""
    space, evaluator = make_space(by_gpus, excluded=frozenset({"a1", "t0", "t1"}))
    scorer = Scorer(replace(space, settings=SearchSettings(barren_rounds=2, fruitless_draws=50)), limit=10**6)
    tabu_search(scorer, NoPacking(), START, np.random.default_rng(0))  # type: ignore[arg-type]
    assert scorer.steps < 100
    assert len(set(evaluator.scored)) == len(evaluator.scored)


def test_an_ascent_goes_up_only(make_space: Callable[..., Any]) -> None:
    space, _ = make_space(by_gpus)
    scorer = Scorer(space, limit=100)
    steps = [START, make_solution([*START, Group((Slice(1, 4),), M)]), make_solution([Group((Slice(0, 2),), M)])]

    def around(here: Solution) -> list[Solution]:
        return [one for one in steps if one != here]

    assert climb(scorer, steps[2], around) == steps[1]
    assert climb(scorer, steps[1], around) == steps[1]


def test_hotter_rounds_leave_a_local_optimum(make_space: Callable[..., Any]) -> None:
    """Only with all boxes and both phases it is better than at the start, and no single move gets there."""

    def valley(solution: Solution) -> float:
        used = {box for group in solution for box, _ in group.slices}
        phases = {group.phase for group in solution}
        return 1.0 if len(used) == 4 and {P, D} <= phases else 0.5 if solution == START else 0.45

    cold = search(make_space, valley, 150, warm=1e-6, cold=1e-7, fresh_share=0.0)
    hot = search(make_space, valley, 1500, warm=0.5, cold=0.1, fresh_share=0.0)
    assert cold.best_score.objective == 0.5
    assert hot.best_score.objective == 1.0


def test_short_rounds_follow_each_other_until_the_budget_is_used_up(make_space: Callable[..., Any]) -> None:
    scorer = search(make_space, by_gpus, 120, round_steps=20)
    assert scorer.steps >= 100
