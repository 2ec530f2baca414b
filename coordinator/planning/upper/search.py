"""The upper level: which GPUs form replicas, and what those do.

A small cluster is searched as a whole. A large one is searched in cells of boxes that are near each
other, each with its share of the traffic; their solutions together are one of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ...plan import Phase
from ..model.problem import Evaluator, Group, Problem, Score, Solution
from .cells import Cell, split_into_cells
from .clustering import GpuSet, all_gpus, colocated_starts
from .packing import Packing
from .scorer import Improvement, Progress, Scorer, never
from .search_space import SearchSpace, make_solution
from .seed_assignment import assign_gpus
from .settings import SearchSettings
from .tabu import climb_by_flips, tabu_search

DEFAULTS: Final = SearchSettings()

ANYTIME: Final = 10**7
"""Steps where time is what ends a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """`colocated`: the best all-mixed solution, never better than `solution`. `steps`: see
    `Scorer`. `history`: each new best with its step. `evaluated`: all that was scored on the way
    (of a cluster that is searched in cells: as a whole)."""

    solution: Solution
    score: Score
    colocated: Solution
    colocated_score: Score
    steps: int
    history: tuple[Improvement, ...]
    evaluated: Mapping[Solution, Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    """What a search may use: randomness, time, and somebody to tell."""

    rng: np.random.Generator
    spent: Callable[[], bool]
    progress: Progress | None

    def after(self, done: int, total: int) -> _Means:
        """For a part of the search that comes after `done` of `total` steps."""
        tell = self.progress
        if tell is None:
            return self
        return replace(self, progress=lambda step, _, objective: tell(done + step, total, objective))


def search(
    problem: Problem,
    evaluator: Evaluator,
    *,
    rng: np.random.Generator,
    spent: Callable[[], bool] = never,
    start: Solution | None = None,
    progress: Progress | None = None,
    settings: SearchSettings = DEFAULTS,
    anytime: bool = False,
) -> SearchResult:
    """The best solution found in `settings.steps` steps, or until `spent()`.

    `start`: the running solution, which is then one of those that the search begins at. `progress`
    is called after each evaluation. `anytime`: a cluster that is searched as a whole is searched
    until `spent()`, however many steps that takes.

    The same arguments give the same result, unless time ends the search. Raises NoPlan where there
    is no solution.
    """
    space = SearchSpace.of(problem, evaluator, settings)
    means = _Means(rng=rng, spent=spent, progress=progress)
    steps = settings.steps_for(space.gpus)
    if space.gpus <= 2 * settings.cell_gpus:
        return _search_whole(space, assign_gpus(space), start, ANYTIME if anytime else steps, means)
    return _search_cells(
        space, split_into_cells(space, assign_gpus(space, boxes_whole=True), settings.cell_gpus), start, steps, means
    )


def _search_whole(
    space: SearchSpace, parts: Sequence[GpuSet], running: Solution | None, limit: int, means: _Means
) -> SearchResult:
    """All of it at once: colocated solutions in several sizes, each with its phases set one group
    at a time, and tabu search from the best of those."""
    scorer = Scorer(space, limit=limit, spent=means.spent, progress=means.progress)
    plain = list(colocated_starts(space, parts))
    packing = Packing(space, max(1, len(plain[0]) // 2))
    # the packing also joins boxes that the dendrogram keeps apart
    colocated = max({*plain, packing.start(means.rng, (Phase.MIXED,))} - {()}, key=scorer.objective)
    cut = scorer.find_best_above(list(phase_cuts(space, colocated)))
    starts = [running or (), colocated, cut[1] if cut else (), *_packing_starts(scorer, packing, means.rng)]
    # sorted, since sets have no order and of equal starts the first wins: equal seeds give equal plans
    best = max(sorted({*starts} - {()}), key=scorer.objective)
    tabu_search(scorer, packing, climb_by_flips(scorer, space, best), means.rng)
    return _make_result(scorer, colocated)


def _packing_starts(scorer: Scorer, packing: Packing, rng: np.random.Generator) -> list[Solution]:
    """Packings by the values of their columns: by those as they are, by values with noise, and by
    values with less noise around those of the best packing so far."""
    noise_of = scorer.space.settings.packing_noise
    best, level = np.zeros(packing.columns), float("-inf")
    found: list[Solution] = []
    many = max(2, min(scorer.space.settings.packings, scorer.limit // 2))
    for place in range(many):
        spread = 0.0 if place == 0 else 2.0 * noise_of if place < many / 2 else noise_of
        near = best if place >= many / 2 else 0.0
        noise = near + rng.normal(0.0, spread, packing.columns)
        start = packing.start(rng, noise=np.exp(noise))
        if start:
            found.append(start)
            if scorer.objective(start) > level:
                best, level = noise, scorer.objective(start)
        if scorer.is_exhausted():
            break
    return found


def _search_cells(
    space: SearchSpace,
    cells: list[Cell],
    running: Solution | None,
    limit: int,
    means: _Means,
) -> SearchResult:
    """Twice over all cells: a first look with shares of the traffic by what their cards are on
    paper, then the search with shares by what they were found to carry."""
    # Shares of the traffic need capacities, and those need plans: begin with what the cards
    # have on paper, and search a second time with what was found.
    rates = [cell.power for cell in cells]
    found = [cell.to_cell(running) if running else () for cell in cells]
    colocated: list[Solution] = [()] * len(cells)
    done = 0
    for part in (space.settings.first_pass, 1.0 - space.settings.first_pass):
        # a cell on paper carries what its cards could; after the first pass, what its best solution does
        shares = _shares(cells, rates)
        for place, cell in enumerate(cells):
            problem = cell.problem(shares[place])
            inner = SearchSpace.of(problem, space.evaluator.for_subproblem(problem), space.settings)
            steps = round(limit * part * inner.gpus / space.gpus)
            result = _search_whole(
                inner, [all_gpus(inner, inner.usable)], found[place], steps, means.after(done, limit)
            )
            done += result.steps
            found[place], colocated[place] = result.solution, result.colocated
            rates[place] = result.score.capacity * problem.services[0].workload.rate
    # cells have searched as if links between them carried nothing: only the whole says what they are worth together
    scorer = Scorer(space, limit=limit)
    together = [
        make_solution(group for cell, inner in zip(cells, parts, strict=True) for group in cell.to_cluster(inner))
        for parts in (colocated, found)
    ]
    for solution in together:
        scorer.score(solution)
    if running:
        scorer.score(running)
    whole = _make_result(scorer, together[0])
    return replace(whole, steps=done + whole.steps)


def _shares(cells: list[Cell], rates: list[float]) -> list[float]:
    """Of its service's traffic, for each cell."""
    totals: dict[int, float] = {}
    for cell, rate in zip(cells, rates, strict=True):
        totals[cell.service] = totals.get(cell.service, 0.0) + rate
    return [rate / totals[cell.service] for cell, rate in zip(cells, rates, strict=True)]


def _make_result(scorer: Scorer, colocated: Solution) -> SearchResult:
    plain = scorer.score(colocated)
    solution = scorer.pick_most_robust(plain.objective, scorer.space.settings.box_away)
    if not scorer.score(solution).capacity > 0.0:
        # No solution meets the deadlines, so all look alike, also those that cannot serve at all.
        solution = colocated
    return SearchResult(
        solution=solution,
        score=scorer.score(solution),
        colocated=colocated,
        colocated_score=plain,
        steps=scorer.steps,
        history=tuple(scorer.history),
        evaluated=scorer.evaluated,
    )


def phase_cuts(space: SearchSpace, start: Solution) -> Iterator[Solution]:
    """Groups in the order of compute over memory bandwidth: those before a cut prefill, those
    behind it decode. Pinned groups stay as they are."""

    def leaning(group: Group) -> float:
        cards = [(space.boxes[box].gpu, count) for box, count in group.slices]
        return sum(gpu.tflops * n for gpu, n in cards) / sum(gpu.memory_gbps * n for gpu, n in cards)

    many = space.settings.phase_cuts
    order = sorted(start, key=lambda group: (-leaning(group), group))
    for cut in sorted({round(len(order) * place / (many + 1)) for place in range(1, many + 1)}):
        wanted = [Phase.PREFILL] * cut + [Phase.DECODE] * (len(order) - cut)
        yield make_solution(
            group._replace(phase=phase) if phase in space.phases_of(group.slices) else group
            for group, phase in zip(order, wanted, strict=True)
        )
