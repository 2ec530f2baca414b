"""Tabu search over solutions (ThunderServe, Algorithm 1), with descents before it and restarts in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from .judge import Judge
from .moves import flips, neighbour
from .packing import Packing
from .problem import Solution
from .space import Space

__all__ = ["climb", "flip_climb", "tabu"]

DRAWS: Final = 120  # of neighbours for a step, at most: ThunderServe takes 10; bounds make most of them cheap
RECUT: Final = 0.5  # of them, boxes cut in another way: many meet boxes that share replicas with others
MEMORY: Final = 24  # moves that may not be undone
FRUITLESS: Final = 50  # steps in which nothing is new until the search ends
PATIENCE: Final = 2  # steps without a new best until the search goes back to one of the good solutions
KEPT: Final = 4  # good solutions to go back to
FRESH: Final = 0.7  # of the new starts, those at a new packing
SPREAD: Final = 0.2  # by about how much its rates are off
KICK: Final = 2  # random moves away from one of those


def climb(judge: Judge, start: Solution, around: Callable[[Solution], Iterable[Solution]]) -> Solution:
    """The steepest way up from `start`, until no neighbour is better or the budget is used up."""
    here, level = start, judge.objective(start)
    while not judge.over():
        found = judge.leader(list(around(here)), level)
        if found is None:
            break
        level, here = found
    return here


def flip_climb(judge: Judge, space: Space, start: Solution) -> Solution:
    """Up by changing phases only."""
    return climb(judge, start, lambda here: (solution for _, solution in flips(space, here)))


def tabu(judge: Judge, packing: Packing, starts: Sequence[Solution], rng: np.random.Generator) -> None:
    """Goes on from the best of `starts` until the judge's budget is used up; the judge keeps the best of all.

    A step goes to the best of some random neighbours, be it better or worse, but never undoes one of the last moves
    (brings back groups that one of them took away) unless that makes a new best. After some steps without a new best it
    starts again, a few moves away from one of the best solutions so far, and climbs from there.
    """
    space = judge.space
    kept = sorted(((judge.objective(start), start) for start in starts), key=lambda item: -item[0])[:KEPT]
    level, here = kept[0]
    undone: deque[frozenset[object]] = deque(maxlen=MEMORY)
    idle = fruitless = 0
    while not judge.over():
        before, record = judge.steps, judge.best_score.objective
        found = _step(judge, _around(packing, space, here, rng), here, level, undone)
        fruitless = fruitless + 1 if judge.steps == before else 0
        if fruitless > FRUITLESS:
            break  # a space so small that everything near has been seen
        if found is not None:
            undone.append(_added(space, found[1], here))
            level, here = found
        idle = 0 if judge.best_score.objective > record else idle + 1
        if idle >= PATIENCE or found is None:
            kept = _with(kept, (level, here))
            idle = 0
            here = _elsewhere(judge, packing, kept, rng)
            level = judge.objective(here)
            undone.clear()


def _step(
    judge: Judge, around: Iterable[Solution], here: Solution, level: float, undone: deque[frozenset[object]]
) -> tuple[float, Solution] | None:
    """The first neighbour that is better than `level`, else the best of those that might have been or, if none might,
    of the most promising. What undoes a move counts only as a new best."""
    found: tuple[float, Solution] | None = None
    hopeless: list[tuple[float, Solution]] = []
    for solution in around:
        if judge.over():
            break
        limit = judge.space.evaluator.bound(solution)
        if limit <= level:
            hopeless.append((limit, solution))
            continue
        record = judge.best_score.objective
        objective = judge.objective(solution)
        if objective <= record and _added(judge.space, here, solution) in undone:
            continue
        if found is None or objective > found[0]:
            found = (objective, solution)
        if objective > level:
            break
    if found is None and hopeless:
        limit, solution = max(hopeless, key=lambda item: item[0])
        found = (judge.objective(solution), solution)
    return found


def _around(packing: Packing, space: Space, here: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """Different random neighbours, one by one: groups that a step does not get to need no configuration."""
    seen = {here}
    for _ in range(DRAWS):
        drawn = packing.recut(here, rng) if rng.random() < RECUT else neighbour(space, here, rng)
        if drawn and drawn not in seen:
            seen.add(drawn)
            yield drawn


def _added(space: Space, old: Solution, new: Solution) -> frozenset[object]:
    """The kinds of groups that `new` has and `old` has not."""
    return frozenset(space.kind(group) for group in set(new) - set(old))


def _with(kept: list[tuple[float, Solution]], one: tuple[float, Solution]) -> list[tuple[float, Solution]]:
    different = {solution: objective for objective, solution in (*kept, one)}
    ordered = sorted(((objective, solution) for solution, objective in different.items()), key=lambda item: -item[0])
    return ordered[:KEPT]


def _elsewhere(
    judge: Judge, packing: Packing, kept: list[tuple[float, Solution]], rng: np.random.Generator
) -> Solution:
    """Where to start again: a few moves from a good solution, or at a new packing, its phases climbed up."""
    if rng.random() < FRESH:
        start = packing.start(rng, noise=np.exp(rng.normal(0.0, SPREAD, packing.columns)))
        if start:
            return flip_climb(judge, judge.space, start)
    solution = kept[int(rng.integers(len(kept)))][1]
    for _ in range(KICK):
        solution = next(_around(packing, judge.space, solution, rng), solution)
    return solution
