"""Tabu search over solutions (ThunderServe, Algorithm 1), with descents before it and chance in what it accepts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import log
from typing import Final

import numpy as np

from ..model.problem import Solution
from .judge import Judge
from .moves import flips, neighbour
from .packing import Packing
from .space import Space

__all__ = ["climb", "flip_climb", "tabu"]

RECUT: Final = 0.3  # of the neighbours, boxes cut anew by their columns
MEMORY: Final = 24  # moves that may not be undone
FRUITLESS: Final = 250  # draws in which nothing is new until a round ends
WARM: Final = 1e-3  # by about how much a step may be worse at the beginning of a round,
COLD: Final = 2e-4  # and at its end
ROUND: Final = 1500  # steps of a round at least, where there are so many
FRESH: Final = 0.5  # of the rounds, those with a new start
STALE: Final = 200  # steps that lead nowhere until a round ends
BARREN: Final = 6  # rounds that see nothing new until the search ends
SPREAD: Final = 0.2  # by about how much its earnings are off


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


def tabu(judge: Judge, packing: Packing, here: Solution, rng: np.random.Generator) -> None:
    """Goes on from `here` until the judge's budget is used up; the judge keeps the best of all.

    In rounds: the first from there, later ones from the best solution so far or from a new packing. After
    some rounds that saw nothing new the space is so small that all of it has been seen.
    """
    barren = 0
    while barren < BARREN and not judge.over():
        seen, left = judge.steps, judge.limit - judge.steps
        _round(judge, packing, here, rng, judge.limit if left < 2 * ROUND else seen + ROUND)
        here = _elsewhere(judge, packing, rng)
        barren = barren + 1 if judge.steps == seen else 0


def _round(judge: Judge, packing: Packing, here: Solution, rng: np.random.Generator, last: int) -> None:
    """Steps until there are `last` in all. Each goes to a random neighbour that is better, or that is worse by no more
    than chance allows, which is less and less (Metropolis); none undoes one of the last moves (brings back groups that
    one of them took away) unless that makes a new best."""
    space, level, first = judge.space, judge.objective(here), judge.steps
    undone: deque[frozenset[object]] = deque(maxlen=MEMORY)
    fruitless, moved = 0, first
    while judge.steps < min(last, moved + STALE) and fruitless < FRUITLESS and not judge.over():
        fruitless += 1
        drawn = packing.recut(here, rng) if rng.random() < RECUT else neighbour(space, here, rng)
        warmth = WARM * (COLD / WARM) ** ((judge.steps - first) / (last - first))
        floor = level + warmth * log(1.0 - rng.random())
        if drawn is None or drawn == here:
            continue
        steps, record = judge.steps, judge.best_score.objective
        objective = judge.objective(drawn) if judge.promise(drawn) > floor else float("-inf")
        fruitless = fruitless if judge.steps == steps else 0
        if objective > record or (objective > floor and _added(space, here, drawn) not in undone):
            undone.append(_added(space, drawn, here))
            level, here, moved = objective, drawn, judge.steps


def _added(space: Space, old: Solution, new: Solution) -> frozenset[object]:
    """The kinds of groups that `new` has and `old` has not."""
    return frozenset(space.kind(group) for group in set(new) - set(old))


def _elsewhere(judge: Judge, packing: Packing, rng: np.random.Generator) -> Solution:
    """Where a round begins: at the best solution, or at a new packing with its phases climbed up."""
    if rng.random() < FRESH:
        start = packing.start(rng, noise=np.exp(rng.normal(0.0, SPREAD, packing.columns)))
        if start:
            return flip_climb(judge, judge.space, start)
    return judge.best
