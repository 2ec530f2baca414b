"""Tabu search over solutions (ThunderServe, Algorithm 1), with descents before it and chance in
what it accepts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import log
from typing import Final

import numpy as np

from ..model.problem import Solution
from .moves import flips, random_neighbour
from .packing import Packing
from .scorer import Scorer
from .search_space import SearchSpace

__all__ = ["climb", "climb_by_flips", "tabu"]

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


def climb(scorer: Scorer, start: Solution, around: Callable[[Solution], Iterable[Solution]]) -> Solution:
    """The steepest way up from `start`, until no neighbour is better or the budget is used up."""
    here, level = start, scorer.objective(start)
    while not scorer.is_exhausted():
        found = scorer.find_best_above(list(around(here)), level)
        if found is None:
            break
        level, here = found
    return here


def climb_by_flips(scorer: Scorer, space: SearchSpace, start: Solution) -> Solution:
    """Up by changing phases only."""
    return climb(scorer, start, lambda here: (solution for _, solution in flips(space, here)))


def tabu(scorer: Scorer, packing: Packing, here: Solution, rng: np.random.Generator) -> None:
    """Goes on from `here` until the judge's budget is used up; the judge keeps the best of all.

    In rounds: the first from there, later ones from the best solution so far or from a new packing.
    After some rounds that saw nothing new the space is so small that all of it has been seen.
    """
    barren = 0
    while barren < BARREN and not scorer.is_exhausted():
        seen, left = scorer.steps, scorer.limit - scorer.steps
        _run_round(scorer, packing, here, rng, scorer.limit if left < 2 * ROUND else seen + ROUND)
        here = _next_start(scorer, packing, rng)
        barren = barren + 1 if scorer.steps == seen else 0


def _run_round(scorer: Scorer, packing: Packing, here: Solution, rng: np.random.Generator, last: int) -> None:
    """Steps until there are `last` in all. Each goes to a random neighbour that is better, or that
    is worse by no more than chance allows, which is less and less (Metropolis); none undoes one of
    the last moves (brings back groups that one of them took away) unless that makes a new best."""
    space, level, first = scorer.space, scorer.objective(here), scorer.steps
    recent: deque[frozenset[object]] = deque(maxlen=MEMORY)
    fruitless, moved = 0, first
    while scorer.steps < min(last, moved + STALE) and fruitless < FRUITLESS and not scorer.is_exhausted():
        fruitless += 1
        drawn = packing.recut(here, rng) if rng.random() < RECUT else random_neighbour(space, here, rng)
        warmth = WARM * (COLD / WARM) ** ((scorer.steps - first) / (last - first))
        floor = level + warmth * log(1.0 - rng.random())
        if drawn is None or drawn == here:
            continue
        steps, record = scorer.steps, scorer.best_score.objective
        objective = scorer.objective(drawn) if scorer.upper_bound(drawn) > floor else float("-inf")
        fruitless = fruitless if scorer.steps == steps else 0
        if objective > record or (objective > floor and _new_signatures(space, here, drawn) not in recent):
            recent.append(_new_signatures(space, drawn, here))
            level, here, moved = objective, drawn, scorer.steps


def _new_signatures(space: SearchSpace, old: Solution, new: Solution) -> frozenset[object]:
    """The kinds of groups that `new` has and `old` has not."""
    return frozenset(space.signature(group) for group in set(new) - set(old))


def _next_start(scorer: Scorer, packing: Packing, rng: np.random.Generator) -> Solution:
    """Where a round begins: at the best solution, or at a new packing with its phases climbed
    up."""
    if rng.random() < FRESH:
        start = packing.start(rng, noise=np.exp(rng.normal(0.0, SPREAD, packing.columns)))
        if start:
            return climb_by_flips(scorer, scorer.space, start)
    return scorer.best
