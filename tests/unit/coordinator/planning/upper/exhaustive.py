"""All solutions of a small cluster, for measuring a search against the best there is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.planning.model.problem import Evaluator, Group, Problem, Score, Slice, Solution
from p2pserve.coordinator.planning.upper.scorer import Scorer
from p2pserve.coordinator.planning.upper.search_space import SearchSpace, make_solution

__all__ = ["all_solutions", "best_of_all"]

Deal = tuple[tuple[int, ...], ...]


def all_solutions(space: SearchSpace) -> Iterator[Solution]:
    """Each solution once, except that boxes that are alike count as different; idle GPUs are
    allowed."""
    slots = [(box, space.boxes[box].gpus, space.gpu_units[box]) for box in space.usable]
    largest = tuple(gpus for _, gpus, _ in slots)
    for deal in _deals(tuple(largest), largest, tuple(unit for *_, unit in slots)):
        groups = [
            tuple(Slice(box, count) for (box, *_), count in zip(slots, counts, strict=True) if count) for counts in deal
        ]
        yield from {make_solution(chosen) for chosen in product(*(list(_choices(space, slices)) for slices in groups))}


def _choices(space: SearchSpace, slices: tuple[Slice, ...]) -> Iterator[Group]:
    for service in range(len(space.problem.services)):
        if space.can_hold(slices, service):
            yield from (Group(slices, phase, service) for phase in space.phases_of(slices))


def _deals(left: tuple[int, ...], largest: tuple[int, ...], gpu_units: tuple[int, ...]) -> Iterator[Deal]:
    """Ways to deal some of `left` GPUs of each box into groups, none larger than the one before it
    in lexical order."""
    yield ()
    for first in product(*(range(0, count + 1, unit) for count, unit in zip(left, gpu_units, strict=True))):
        if any(first) and first <= largest:
            rest = tuple(count - taken for count, taken in zip(left, first, strict=True))
            yield from ((first, *others) for others in _deals(rest, first, gpu_units))


def best_of_all(problem: Problem, evaluator: Evaluator) -> tuple[Solution, Score]:
    """The best solution and its score. The number of solutions grows like the partitions of the
    GPUs times three to the number of groups: some thousand at 6 GPUs in 3 boxes. Raises NoPlan
    where there is none."""
    space = SearchSpace.of(problem, evaluator)
    scorer = Scorer(space, limit=1 << 62)
    for solution in all_solutions(space):
        if solution:
            scorer.score(solution)
    if not scorer.best:
        raise NoPlan("no group of these boxes holds its model")
    return scorer.best, scorer.best_score
