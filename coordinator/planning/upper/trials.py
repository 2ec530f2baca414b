"""The choice among the best few plans of a search, by trying them.

Estimates are off by some percent, and by more for some kinds of plans than for others, so the plan
that is expected to be best need not be. Whoever can try a plan (by a simulation) hands that in: this
room knows none. The best colocated plan is always among those that are tried, so the plan that is
chosen is no worse than that in the trial, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..lower.evaluator import HEADROOM, LowerLevel
from ..model.problem import Proposal, Solution
from .search import SearchResult


class TrialOutcome(NamedTuple):
    """What came of a plan. `attainment`: the share of all requests in time, at the rates that are
    asked for; `capacity`: the highest multiple of those at which every service has its target."""

    attainment: float
    capacity: float


Trial = Callable[[Sequence[Proposal]], TrialOutcome]
"""Tries the plans of all services together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPlan:
    """A solution with its plans, and what came of them."""

    solution: Solution
    proposals: tuple[Proposal, ...]
    outcome: TrialOutcome

    @property
    def objective(self) -> float:
        """As that of the estimate, by what was seen."""
        expected = self.proposals[0].score
        return expected.objective - _worth(expected.attainment, expected.capacity) + _worth(*self.outcome)


def pick_candidates(found: SearchResult, count: int) -> list[Solution]:
    """The solution that was found, the best colocated one, and then the best of those that were
    evaluated, one for each number of replicas by phase: so many in all, or two where that is
    more."""
    picked = dict.fromkeys((found.solution, found.colocated))
    kinds = {_count_replicas(solution) for solution in picked}
    for solution, score in sorted(found.evaluated.items(), key=lambda item: (-item[1].objective, item[0])):
        kind = _count_replicas(solution)
        if len(picked) >= count or not score.attainment > 0.0:
            break
        if kind not in kinds:
            kinds.add(kind)
            picked[solution] = None
    return list(picked)


def try_plans(
    solutions: Sequence[Solution], evaluator: LowerLevel, trial: Trial, *, epoch: int, version: int
) -> list[TriedPlan]:
    """All of them, the best first; of equals the earlier."""
    tried = []
    for solution in solutions:
        proposals = evaluator.propose(solution, epoch=epoch, version=version)
        tried.append(TriedPlan(solution=solution, proposals=proposals, outcome=trial(proposals)))
    return sorted(tried, key=lambda plan: -plan.objective)


def _count_replicas(solution: Solution) -> tuple[tuple[tuple[int, str], int], ...]:
    return tuple(sorted(Counter((group.service, group.phase.value) for group in solution).items()))


def _worth(attainment: float, capacity: float) -> float:
    return attainment + HEADROOM * capacity / (1.0 + capacity)
