"""Tabu search over solutions (ThunderServe, Algorithm 1). Not as there: steepest ascents come
before it, and a step may be a little worse, by chance (Metropolis)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import log

import numpy as np

from ..model.problem import Solution
from .moves import flips, random_neighbour
from .packing import Packing
from .scorer import Scorer
from .search_space import SearchSpace


def climb(scorer: Scorer, start: Solution, around: Callable[[Solution], Iterable[Solution]]) -> Solution:
    """Steepest ascent from `start`, until no neighbour is better or the budget is used up."""
    here, level = start, scorer.objective(start)
    while not scorer.is_exhausted():
        found = scorer.find_best_above(list(around(here)), level)
        if found is None:
            break
        level, here = found
    return here


def climb_by_flips(scorer: Scorer, space: SearchSpace, start: Solution) -> Solution:
    """Steepest ascent by changing one group's phase at a time."""
    return climb(scorer, start, lambda here: (solution for _, solution in flips(space, here)))


def tabu_search(scorer: Scorer, packing: Packing, here: Solution, rng: np.random.Generator) -> None:
    """Search on from `here` until the scorer's budget is used up; the scorer keeps the best of all.

    In rounds: the first begins at `here`, later ones at the best solution so far or at a new
    packing. After `barren_rounds` that score nothing new, the space is so small that all of it has
    been seen.
    """
    settings, barren = scorer.space.settings, 0
    while barren < settings.barren_rounds and not scorer.is_exhausted():
        seen, left = scorer.steps, scorer.limit - scorer.steps
        # the last round takes what is left: a short one would end before it has cooled down
        last = scorer.limit if left < 2 * settings.round_steps else seen + settings.round_steps
        _run_round(scorer, packing, here, rng, last)
        here = _pick_start(scorer, packing, rng)
        barren = barren + 1 if scorer.steps == seen else 0


def _run_round(scorer: Scorer, packing: Packing, here: Solution, rng: np.random.Generator, last: int) -> None:
    """Step until there are `last` steps in all, or nothing new turns up.

    Each step goes to a random neighbour that is better, or that is worse by no more than chance
    allows, which is less and less. None undoes one of the last moves (brings back groups that one
    of them took away) unless that makes a new best.
    """
    space, level, first = scorer.space, scorer.objective(here), scorer.steps
    settings = space.settings
    removed: deque[frozenset[object]] = deque(maxlen=settings.tabu_moves)
    fruitless, moved = 0, first
    while not scorer.is_exhausted():
        if scorer.steps >= min(last, moved + settings.stale_steps) or fruitless >= settings.fruitless_draws:
            break
        fruitless += 1
        drawn = packing.recut(here, rng) if rng.random() < settings.recut_share else random_neighbour(space, here, rng)
        temperature = settings.warm * (settings.cold / settings.warm) ** ((scorer.steps - first) / (last - first))
        # Metropolis: worse by x is accepted with probability exp(-x / temperature); drawn before the
        # evaluation, it is a floor that the cheap upper bound can be held against
        floor = level + temperature * log(1.0 - rng.random())
        if drawn is None or drawn == here:
            continue
        steps, record = scorer.steps, scorer.best_score.objective
        objective = scorer.objective(drawn) if scorer.upper_bound(drawn) > floor else float("-inf")
        fruitless = fruitless if scorer.steps == steps else 0
        if objective > record or (objective > floor and _new_signatures(space, here, drawn) not in removed):
            removed.append(_new_signatures(space, drawn, here))
            level, here, moved = objective, drawn, scorer.steps


def _new_signatures(space: SearchSpace, old: Solution, new: Solution) -> frozenset[object]:
    """Signatures of the groups that `new` has and `old` has not."""
    return frozenset(space.signature(group) for group in set(new) - set(old))


def _pick_start(scorer: Scorer, packing: Packing, rng: np.random.Generator) -> Solution:
    """Where a round begins: at the best solution, or at a new packing after an ascent by flips."""
    settings = scorer.space.settings
    if rng.random() < settings.fresh_share:
        start = packing.start(rng, noise=np.exp(rng.normal(0.0, settings.fresh_noise, packing.columns)))
        if start:
            return climb_by_flips(scorer, scorer.space, start)
    return scorer.best
