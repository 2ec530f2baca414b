"""ThunderServe's Algorithm 1 to the letter, as what the planner's search is compared with.

Each of a hundred steps goes to the best of ten random neighbours, better or worse, unless it is one
of the last five solutions. There are no upper bounds, no ascents and no new starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor
from typing import Final, TypeVar

import numpy as np

from ...coordinator.plan import Phase
from ...coordinator.planning.model.problem import Group, Slice, Solution
from ...coordinator.planning.upper.clustering import all_gpus, colocated_starts
from ...coordinator.planning.upper.search_space import SearchSpace, make_group, make_solution

STEPS: Final = 100
NEIGHBOURS: Final = 10
MEMORY: Final = 5
PHASES: Final = (Phase.PREFILL, Phase.DECODE)
"""The paper has no mixed replicas."""

X = TypeVar("X")
Move = Callable[[Solution, Sequence[Phase], np.random.Generator], Solution | None]


def run_algorithm_1(
    start: X,
    construct: Callable[[X], Iterable[X]],
    objective: Callable[[X], float],
    *,
    steps: int = STEPS,
    memory: int = MEMORY,
) -> X:
    """The best solution that was stepped on. `construct`: neighbours of a solution. A step without a
    neighbour that is allowed, of which the paper says nothing, stays where it is."""
    here = best = start
    tabu: list[X] = []
    for _ in range(steps):
        allowed = [neighbour for neighbour in construct(here) if neighbour not in tabu]
        if not allowed:
            continue
        here = max(allowed, key=objective)
        if objective(here) > objective(best):
            best = here
        tabu = [*tabu, here][-memory:]
    return best


def make_start(space: SearchSpace, phases: Sequence[Phase], rng: np.random.Generator) -> Solution:
    """A group for each cluster of the fastest links, which are those inside boxes (small boxes
    joined until they hold the model), in random phases."""
    clusters = min(colocated_starts(space, [all_gpus(space, space.usable)]), key=len)
    return make_solution(group._replace(phase=_pick(phases, rng)) for group in clusters)


def construct_neighbours(
    space: SearchSpace, solution: Solution, phases: Sequence[Phase], rng: np.random.Generator
) -> Iterator[Solution]:
    """NEIGHBOURS random ones, of which those are left out whose groups do not hold the model."""
    for _ in range(NEIGHBOURS):
        drawn = MOVES[int(rng.integers(len(MOVES)))](solution, phases, rng)
        if drawn is not None and all(space.can_hold(group.slices, group.service) for group in drawn):
            yield drawn


def split_group(group: Group, ratio: float, phases: tuple[Phase, Phase]) -> tuple[Group, Group]:
    """Of each box (the paper: of each type of GPU) the share `ratio`, rounded down, and the rest."""
    first = [Slice(box, floor(gpus * ratio)) for box, gpus in group.slices]
    rest = [Slice(box, gpus - less.gpus) for (box, gpus), less in zip(group.slices, first, strict=True)]
    return make_group(first, phases[0], group.service), make_group(rest, phases[1], group.service)


def merge_groups(one: Group, two: Group, phase: Phase) -> Group:
    """All GPUs of both."""
    return make_group((*one.slices, *two.slices), phase, one.service)


def move_gpus(one: Group, two: Group, moved: Slice) -> tuple[Group, Group]:
    """Some GPUs of a box from the first group to the second; both keep their phases."""
    less = make_group((*one.slices, moved._replace(gpus=-moved.gpus)), one.phase, one.service)
    return less, make_group((*two.slices, moved), two.phase, two.service)


def _flip(solution: Solution, phases: Sequence[Phase], rng: np.random.Generator) -> Solution:
    group = _pick(solution, rng)
    other = _pick([phase for phase in phases if phase is not group.phase], rng)
    return _replace(solution, [group], [group._replace(phase=other)])


def _split(solution: Solution, phases: Sequence[Phase], rng: np.random.Generator) -> Solution:
    group = _pick(solution, rng)
    return _replace(solution, [group], split_group(group, rng.random(), (_pick(phases, rng), _pick(phases, rng))))


def _merge(solution: Solution, phases: Sequence[Phase], rng: np.random.Generator) -> Solution | None:
    if len(solution) < 2:
        return None
    one, two = _pick_two(solution, rng)
    return _replace(solution, [one, two], [merge_groups(one, two, _pick(phases, rng))])


def _move(solution: Solution, phases: Sequence[Phase], rng: np.random.Generator) -> Solution | None:
    if len(solution) < 2:
        return None
    one, two = _pick_two(solution, rng)
    box, gpus = _pick(one.slices, rng)
    return _replace(solution, [one, two], move_gpus(one, two, Slice(box, int(rng.integers(1, gpus + 1)))))


MOVES: Final[tuple[Move, ...]] = (_flip, _split, _merge, _move)


def _pick(values: Sequence[X], rng: np.random.Generator) -> X:
    return values[int(rng.integers(len(values)))]


def _pick_two(solution: Solution, rng: np.random.Generator) -> tuple[Group, Group]:
    one, other = int(rng.integers(len(solution))), int(rng.integers(1, len(solution)))
    return solution[one], solution[(one + other) % len(solution)]


def _replace(solution: Solution, gone: Iterable[Group], come: Iterable[Group]) -> Solution:
    rest = list(solution)
    for group in gone:
        rest.remove(group)
    return make_solution((*rest, *come))
