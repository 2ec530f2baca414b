"""Counts and remembers evaluations: the budget, the best solution so far, and how it was come
by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..model.problem import Score, Solution
from .search_space import SearchSpace

Progress = Callable[[int, int, float], None]
"""Told after each evaluation: the steps that there were, those that there will be at most, the best
objective."""


def never() -> bool:
    """No deadline."""
    return False


class Improvement(NamedTuple):
    """A best objective, and the steps that it took."""

    step: int
    objective: float


def mean_boxes_per_replica(solution: Solution) -> float:
    """Mean over GPUs: for each, how many boxes can take its replica with them."""
    gpus = sum(count for group in solution for _, count in group.slices)
    return sum(len(group.slices) * count for group in solution for _, count in group.slices) / gpus


class Scorer:
    """Scores solutions; equal up to an exchange of boxes that are alike, they are scored once.

    A step is one evaluation that the memory did not have, or one upper bound, which takes about as
    long where groups are new. Where they are not (`same_groups`), an upper bound is cheap and
    counts for nothing. The search goes on until `limit` steps are done or `spent()` says that time
    is up; at least one solution is always scored.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        limit: int,
        spent: Callable[[], bool] = never,
        progress: Progress | None = None,
        same_groups: bool = False,
    ) -> None:
        self.space = space
        self._spent = spent
        self._progress = progress
        self._same_groups = same_groups
        self._keys: dict[Solution, Solution] = {}
        self._memory: dict[Solution, Score] = {}
        self._upper_bounds: dict[Solution, float] = {}
        self.limit = limit
        self.best: Solution = ()
        self.best_score = Score(float("-inf"), 0.0, 0.0)
        self.history: list[Improvement] = []

    @property
    def steps(self) -> int:
        """So far."""
        return len(self._memory) + (0 if self._same_groups else len(self._upper_bounds))

    @property
    def evaluated(self) -> Mapping[Solution, Score]:
        """All solutions that were scored so far."""
        return MappingProxyType(self._memory)

    def is_exhausted(self) -> bool:
        """Whether the budget is used up."""
        return bool(self._memory) and (self.steps >= self.limit or self._spent())

    def objective(self, solution: Solution) -> float:
        """Of a solution, which becomes the best if it is."""
        return self.score(solution).objective

    def score(self, solution: Solution) -> Score:
        """Of a solution, which becomes the best if it is."""
        key = self._key(solution)
        known = self._memory.get(key)
        if known is None:
            known = self._memory[key] = self.space.evaluator.score(key)
            if known.objective > self.best_score.objective:
                self.best, self.best_score = key, known
                self.history.append(Improvement(self.steps, known.objective))
            if self._progress is not None:
                self._progress(self.steps, self.limit, self.best_score.objective)
        return known

    def upper_bound(self, solution: Solution) -> float:
        """About the most that a solution's objective can be; the objective itself where it is
        known."""
        key = self._key(solution)
        if key in self._memory:
            return self._memory[key].objective
        if key not in self._upper_bounds:
            self._upper_bounds[key] = self.space.evaluator.upper_bound(key)
        return self._upper_bounds[key]

    def find_best_above(self, solutions: list[Solution], floor: float = float("-inf")) -> tuple[float, Solution] | None:
        """The best whose objective is above `floor`, highest upper bounds first; bounds below the
        best are not scored. None if there is none, or the budget ends first."""
        upper_bounds = [(self.upper_bound(one), one) for one in solutions if not self.is_exhausted()]
        found: tuple[float, Solution] | None = None
        for upper_bound, solution in sorted(upper_bounds, key=lambda item: -item[0]):
            if upper_bound <= floor or self.is_exhausted():
                break
            objective = self.objective(solution)
            if objective > floor:
                floor, found = objective, (objective, solution)
        return found

    def pick_most_robust(self, floor: float, away: float) -> Solution:
        """Of the solutions that were scored no lower than `floor`, the one with the best objective
        when each box is away for that part of the time."""

        def expected(solution: Solution) -> float:
            return self._memory[solution].objective - away * mean_boxes_per_replica(solution)

        return max((one for one, score in self._memory.items() if score.objective >= floor), key=expected)

    def _key(self, solution: Solution) -> Solution:
        """What equal solutions have in common."""
        if solution not in self._keys:
            self._keys[solution] = self.space.canonical(solution)
        return self._keys[solution]
