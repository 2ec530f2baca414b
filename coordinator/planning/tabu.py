"""Tabu search over solutions (ThunderServe, Algorithm 1), with descents before it and restarts in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from .judge import Judge
from .moves import flips, neighbours, retilings
from .problem import Solution
from .space import Space

__all__ = ["climb", "flip_climb", "tabu"]

NEIGHBOURS: Final = 16  # looked at in a step: ThunderServe takes 10; bounds make the others cheap
MEMORY: Final = 24  # moves that may not be undone
PATIENCE: Final = 12  # steps without a new best until the search goes back to one of the good solutions
KEPT: Final = 4  # good solutions to go back to
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


def tabu(judge: Judge, space: Space, starts: Sequence[Solution], rng: np.random.Generator) -> None:
    """Goes on from the best of `starts` until the judge's budget is used up; the judge keeps the best of all.

    A step goes to the best of some random neighbours, be it better or worse, but never undoes one of the last moves
    (brings back groups that one of them took away) unless that makes a new best. After some steps without a new best it
    starts again, a few moves away from one of the best solutions so far, and climbs from there.
    """
    kept = sorted(((judge.objective(start), start) for start in starts), key=lambda item: -item[0])[:KEPT]
    level, here = kept[0]
    undone: deque[frozenset[object]] = deque(maxlen=MEMORY)
    idle = fruitless = 0
    while not judge.over():
        before = judge.steps
        record = judge.best_score.objective
        allowed: list[Solution] = []
        barred: list[Solution] = []
        for solution in neighbours(space, here, rng, NEIGHBOURS):
            (barred if _added(space, here, solution) in undone else allowed).append(solution)
        found = judge.leader(barred, record) or judge.leader(allowed)
        fruitless = fruitless + 1 if judge.steps == before else 0
        if fruitless > PATIENCE * KEPT:
            break  # a space so small that everything near has been seen
        if found is None:
            idle = PATIENCE
        else:
            undone.append(_added(space, found[1], here))
            level, here = found
        if judge.best_score.objective > record:
            idle = 0
            kept = _with(kept, (judge.best_score.objective, judge.best))
        else:
            idle += 1
        if idle >= PATIENCE:
            idle = 0
            kept = _with(kept, (level, here))
            here = _kicked(space, kept[int(rng.integers(len(kept)))][1], rng)
            here = climb(judge, here, lambda point: retilings(space, point))
            here = flip_climb(judge, space, here)
            level = judge.objective(here)
            undone.clear()


def _added(space: Space, old: Solution, new: Solution) -> frozenset[object]:
    """The kinds of groups that `new` has and `old` has not."""
    return frozenset(space.kind(group) for group in set(new) - set(old))


def _with(kept: list[tuple[float, Solution]], one: tuple[float, Solution]) -> list[tuple[float, Solution]]:
    different = {solution: objective for objective, solution in (*kept, one)}
    ordered = sorted(((objective, solution) for solution, objective in different.items()), key=lambda item: -item[0])
    return ordered[:KEPT]


def _kicked(space: Space, solution: Solution, rng: np.random.Generator) -> Solution:
    for _ in range(KICK):
        near = neighbours(space, solution, rng, 1)
        solution = near[0] if near else solution
    return solution
