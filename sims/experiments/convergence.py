"""How soon the search has a good plan: figure 10, with the paper's own algorithm beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from time import process_time
from typing import Final

import numpy as np

from ...coordinator.costs.gpus import Specs
from ...coordinator.plan import Phase
from ...coordinator.planning.lower.evaluator import LowerLevel
from ...coordinator.planning.model.problem import Problem
from ...coordinator.planning.upper.scorer import Progress, Scorer
from ...coordinator.planning.upper.search import search
from ...coordinator.planning.upper.search_space import PHASES, SearchSpace
from ...coordinator.planning.upper.settings import SearchSettings
from . import algorithm_1
from .page import Curves, Page, PageTable, Picture, ResultRow
from .setting import PlannedCase, Scope, spread

TITLE: Final = "Figure 10"
PAPER_S: Final = {16: 21, 24: 36, 32: 54}
RATE_PER_GPU: Final = 0.25
NEAR: Final = 0.01
OURS: Final = "ours"
LETTER: Final = "Algorithm 1"
MIXED: Final = "Algorithm 1 with mixed replicas"

Curve = list[tuple[float, float]]
"""(CPU seconds, best objective so far), a point for each that was better than the last."""


class ConvergenceRow(ResultRow, frozen=True):
    """One search on so many GPUs. `objective`: mean over seeds (least-most); `evaluations`: solutions
    that were scored, mean; `cpu_s_to_1_percent`: until within 1 % of the best that any search found
    on these GPUs, mean over the seeds that came so near; `near`: how many did."""

    gpus: int
    search: str
    objective: str
    evaluations: float
    near: str
    cpu_s_to_1_percent: str
    cpu_s: float
    paper_s: int
    curves: list[Curve]


@dataclass(frozen=True, slots=True)
class _Run:
    """One search of one seed."""

    curve: Curve
    evaluations: int
    cpu_s: float

    @property
    def objective(self) -> float:
        return self.curve[-1][1]

    def seconds_to(self, level: float) -> float | None:
        """Until the best so far was at this level; None where it never was."""
        return next((seconds for seconds, objective in self.curve if objective >= level), None)


@cache
def convergence_rows(scope: Scope) -> tuple[ConvergenceRow, ...]:
    """16, 24 and 32 GPUs."""
    return tuple(row for gpus in PAPER_S for row in _rows(gpus, scope))


def _rows(gpus: int, scope: Scope) -> list[ConvergenceRow]:
    case = PlannedCase(
        cluster=f"thunderserve-cloud-{gpus}", specs=Specs.TABLE1, workload="conversation", rate=RATE_PER_GPU * gpus
    )
    runs = {name: [_watch(case.problem(), run, seed, scope) for seed in scope.seeds] for name, run in SEARCHES.items()}
    best = max(one.objective for every in runs.values() for one in every)
    return [_row(gpus, name, every, best * (1.0 - NEAR)) for name, every in runs.items()]


def _row(gpus: int, name: str, runs: Sequence[_Run], level: float) -> ConvergenceRow:
    reached = [seconds for run in runs if (seconds := run.seconds_to(level)) is not None]
    return ConvergenceRow(
        gpus=gpus,
        search=name,
        objective=spread([run.objective for run in runs]),
        evaluations=float(np.mean([run.evaluations for run in runs])),
        near=f"{len(reached)} of {len(runs)}",
        cpu_s_to_1_percent=f"{np.mean(reached):.2g}" if reached else "-",
        cpu_s=float(np.mean([run.cpu_s for run in runs])),
        paper_s=PAPER_S[gpus],
        curves=[[*run.curve, (run.cpu_s, run.objective)] for run in runs],
    )


Search = Callable[[Problem, np.random.Generator, Scope, Progress], int]
"""Tells the progress of a search for a plan, and returns how many solutions it scored."""


def _watch(problem: Problem, run: Search, seed: int, scope: Scope) -> _Run:
    curve: Curve = []
    start = process_time()

    def note(_step: int, _limit: int, objective: float) -> None:
        if not curve or objective > curve[-1][1]:
            curve.append((process_time() - start, objective))

    evaluations = run(problem, np.random.default_rng(seed), scope, note)
    return _Run(curve, evaluations, process_time() - start)


def _search_ours(problem: Problem, rng: np.random.Generator, scope: Scope, progress: Progress) -> int:
    settings = SearchSettings(steps=scope.long_steps)
    return len(search(problem, LowerLevel(problem), rng=rng, settings=settings, progress=progress).evaluated)


def _search_by_algorithm_1(
    problem: Problem, phases: Sequence[Phase], rng: np.random.Generator, scope: Scope, progress: Progress
) -> int:
    space = SearchSpace.of(problem, LowerLevel(problem))
    steps = min(algorithm_1.STEPS, scope.long_steps)
    scorer = Scorer(space, limit=steps * algorithm_1.NEIGHBOURS, progress=progress)
    algorithm_1.run_algorithm_1(
        algorithm_1.make_start(space, phases, rng),
        lambda here: algorithm_1.construct_neighbours(space, here, phases, rng),
        scorer.objective,
        steps=steps,
    )
    return len(scorer.evaluated)


SEARCHES: Final[dict[str, Search]] = {
    OURS: _search_ours,
    LETTER: lambda problem, *more: _search_by_algorithm_1(problem, algorithm_1.PHASES, *more),
    MIXED: lambda problem, *more: _search_by_algorithm_1(problem, PHASES, *more),
}


def mean_curve(curves: Sequence[Curve], at_s: Sequence[float]) -> list[float]:
    """The best objective so far at each of these CPU seconds, mean over the curves; NaN where one has
    none yet."""
    rows = []
    for curve in curves:
        times, values = [point[0] for point in curve], [np.nan, *(point[1] for point in curve)]
        rows.append([values[place] for place in np.searchsorted(times, at_s, side="right")])
    return [float(value) for value in np.mean(rows, axis=0)]


def convergence(scope: Scope) -> Page:
    """The page."""
    rows = convergence_rows(scope)
    return Page(
        name="convergence",
        title="How soon the search has a good plan",
        assumes=(
            f"LLaMA-30B, conversations at {RATE_PER_GPU:g} requests/s for each GPU, Table 1's column, "
            f"{len(scope.seeds)} seeds. The 16 and 24 GPUs are subsets of the 32; the paper does not say which its "
            f"are.\n\nOurs: up to {scope.long_steps} steps (solutions bounded or evaluated). {LETTER}: the paper's to "
            f"the letter, {algorithm_1.STEPS} steps, each to the best of {algorithm_1.NEIGHBOURS} random neighbours "
            f"(flip, split, merge, move) that is not among the last {algorithm_1.MEMORY} solutions, from a group for "
            "each box in random phases, prefill or decode; then the same with mixed as a third phase, as ours has "
            "it.\n\nAll have the same lower level, whose estimates are what is compared. CPU seconds are of one "
            "shared, busy core, and include all that the evaluator computes for the first time."
        ),
        tables=(PageTable(TITLE, rows),),
        remarks=REMARKS,
        pictures=(_picture(rows),),
    )


def _picture(rows: Sequence[ConvergenceRow]) -> Picture:
    """A panel for each size of cluster."""
    panels = []
    for gpus in PAPER_S:
        of_size = {row.search: row.curves for row in rows if row.gpus == gpus}
        last_s = max(curve[-1][0] for curves in of_size.values() for curve in curves)
        at_s = np.geomspace(0.01, last_s, 200).tolist()
        lines = {
            # a search is drawn until the last of its seeds has ended
            name: (until, mean_curve(curves, until))
            for name, curves in of_size.items()
            for until in [[second for second in at_s if second <= max(curve[-1][0] for curve in curves)]]
        }
        panels.append(Curves(f"CPU seconds, {gpus} GPUs", "best objective so far", lines, log_x=True))
    return Picture("convergence", "best objective so far over CPU seconds, on 16, 24 and 32 GPUs", (tuple(panels),))


REMARKS: Final = """\
- Ours comes within 1 % of the best that any search found in 0.16 to 4.8 CPU seconds, with every
  seed; the paper needs 21, 36 and 54 s to converge. Most neighbours are left out by their upper
  bounds, and the starts, chosen among partitions of the boxes, are good already.
- The paper's algorithm to the letter ends 8 to 17 % below (mean over seeds), and never within 1 %.
  Its hundred steps take 1.5 to 2.9 CPU seconds, less than ours is given; but when they end, ours is
  ahead at every size, by the means.
- Of the difference the third phase is half with 16 GPUs, four fifths with 24 and hardly any with 32:
  with mixed replicas Algorithm 1 ends 4, 3 and 11 % below, and one of nine searches within 1 %. With
  16 GPUs it is ahead of ours by a percent or two when it ends, after 1.8 s; ours passes it at 4 s.
- The rest is the search. Ten random neighbours are seldom the good ones, a memory of five solutions
  hardly keeps it from coming back, and most seeds end somewhere else (0.80 to 0.94 to the letter;
  ours at the same objective with all three).
- Why its seconds are fewer than the paper's: a solution's score takes 3 to 5 ms here, of estimates
  that remember every group's configuration, and some 50 ms there, of a simulation.
- Growth with the number of GPUs does not show in ours: what costs time is computing a group's
  configuration for the first time, and 16 GPUs in four boxes have no fewer kinds of groups than 32
  in seven.
"""
