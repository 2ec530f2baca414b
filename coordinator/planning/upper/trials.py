"""The choice among the best few plans of a search, by trying them.

Estimates are off by some percent, and by more for some kinds of plans than for others, so the plan
that is expected to be best need not be. Whoever can try a plan (by a simulation) hands that in: this
room knows none. The best few of different kinds are tried at full length, the best colocated one
always among them. Then others challenge the best of those: each has one run, at more than the best
carries, and only who keeps the target there is tried at full length, too. A trial does not tell
plans apart that differ by a percent or two, so the colocated plan stays unless another is better by
more: nothing of it depends on links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

import numpy as np

from ...plan import Phase
from ..lower.evaluator import HEADROOM, LowerLevel
from ..model.errors import UnservedError
from ..model.problem import Problem, Proposal, Solution
from .moves import flips, random_neighbour
from .scorer import never
from .search import SearchResult
from .search_space import SearchSpace

SURER: Final = 1.02
"""How many times as much as a colocated plan another has to carry in a trial to be taken instead."""

AHEAD: Final = 1.03
"""What a challenger has to carry, over the best so far: less than that is the draw of requests."""

NEIGHBOURS: Final = 100
"""Drawn of the best plan, that challengers are chosen among."""

NEAREST: Final = 6
"""Neighbours that are tried of running phases, before others of a better one are."""

LIKELY: Final = 24
"""Of neighbours and of all that a search has evaluated, those with the best scores: whole plans are
made of them, at some 50 ms each, to see what is expected of those."""


class TrialsOver(Exception):
    """There is no time left to try plans in."""


class TrialOutcome(NamedTuple):
    """What came of a plan. `attainment`: the share of all requests in time, at the rates that are
    asked for; `capacity`: the highest multiple of those at which every service has its target."""

    attainment: float
    capacity: float


class PlanTrial(Protocol):
    """Tries the plans of all services together. May raise TrialsOver."""

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        """At full length: some ten runs."""
        ...

    def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
        """Whether every service has its target at so many times the rates that are asked for: one
        run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPlan:
    """A solution with its plans, and what came of them."""

    solution: Solution
    proposals: tuple[Proposal, ...]
    outcome: TrialOutcome

    @property
    def is_colocated(self) -> bool:
        """Whether no replica of it needs another."""
        return all(group.phase is Phase.MIXED for group in self.solution)

    @property
    def capacity(self) -> float:
        """What it carried; as a colocated plan, as if that were SURER times as much."""
        return self.outcome.capacity * (SURER if self.is_colocated else 1.0)

    @property
    def objective(self) -> float:
        """As that of the estimate, by what was seen; likewise."""
        expected = self.proposals[0].score
        attainment = min(1.0, self.outcome.attainment * (SURER if self.is_colocated else 1.0))
        return expected.objective - _worth(expected.attainment, expected.capacity) + _worth(attainment, self.capacity)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanTrials:
    """Tries plans. `epoch`, `version`: of those. `rank`: what the best has most of. The same
    arguments give the same result, unless time ends it."""

    problem: Problem
    evaluator: LowerLevel
    trial: PlanTrial
    epoch: int = 0
    version: int = 1
    rank: Callable[[TriedPlan], float] = attrgetter("objective")

    def pick_candidates(self, found: SearchResult, count: int) -> list[Solution]:
        """The solution that was found, the best colocated one, and then those of which most is
        expected, one for each number of replicas by phase: so many in all, or two where that is
        more."""
        picked = dict.fromkeys((found.solution, found.colocated))
        kinds = {_count_replicas(solution) for solution in picked}
        for solution in self.rank_expected(_best_evaluated(found)) if count > len(picked) else ():
            kind = _count_replicas(solution)
            if len(picked) < count and kind not in kinds:
                kinds.add(kind)
                picked[solution] = None
        return list(picked)

    def try_all(self, solutions: Sequence[Solution], spent: Callable[[], bool] = never) -> list[TriedPlan]:
        """At full length, the best first; of equals the earlier. However little time there is, one
        is tried."""
        tried: list[TriedPlan] = []
        for solution in solutions:
            if not (tried and spent()):
                tried.append(self._try(solution))
        return sorted(tried, key=self.rank, reverse=True)

    def choose_phases(
        self, running: Solution, others: Iterable[Solution], spent: Callable[[], bool] = never
    ) -> tuple[TriedPlan, ...]:
        """Phases for replicas that run: those of `others`, and then neighbours of the best so far while they are better
        still, for as long as there is time to try them. All that were tried, the best first: the running ones, unless
        another has AHEAD of the requests that they have in time. Empty where not even they could be tried."""
        tried: dict[Solution, TriedPlan] = {}
        with suppress(TrialsOver):
            waiting = [running, *others]
            while waiting:
                best = max(tried.values(), key=_attainment, default=None)
                for solution in waiting:
                    if tried and spent():
                        raise TrialsOver
                    if solution not in tried:
                        with suppress(UnservedError):
                            tried[solution] = self._try(solution)
                now = max(tried.values(), key=_attainment, default=None)
                waiting = [] if now is None or now is best else self._find_neighbours(now.solution, tried)
        if running not in tried:
            return ()
        ranked = sorted(tried.values(), key=_attainment, reverse=True)
        if _attainment(ranked[0]) < AHEAD * _attainment(tried[running]):
            ranked.insert(0, ranked.pop(ranked.index(tried[running])))
        return tuple(ranked)

    def _find_neighbours(self, best: Solution, known: Collection[Solution]) -> list[Solution]:
        """With one flip, those of which most is expected."""
        near = [solution for _, solution in flips(SearchSpace.of(self.problem, self.evaluator), best)]
        new = sorted({*near} - {*known}, key=lambda one: (-self.evaluator.score(one).objective, one))
        return new[:NEAREST]

    def challenge(
        self, tried: Sequence[TriedPlan], found: SearchResult, count: int, rng: np.random.Generator,
        spent: Callable[[], bool] = never, most_losses: int | None = None,
    ) -> list[TriedPlan]:  # fmt: skip
        """What was tried, with those of at most `count` challengers that came to be tried, the best first. The first
        one that was tried is challenged first. `most_losses`: it ends when so many in a row have lost."""
        best, known, likely = tried[0], {plan.solution for plan in tried}, list[Solution]()
        won, lost = [], 0
        for _ in range(count):
            likely = likely or self._find_challengers(best.solution, found, rng)
            likely = [solution for solution in likely if solution not in known]
            if spent() or not likely or not best.outcome.capacity > 0.0 or lost == most_losses:
                break
            solution, lost = likely.pop(0), lost + 1
            known.add(solution)
            if self.trial.carries(self._propose(solution), AHEAD * best.outcome.capacity):
                won.append(self._try(solution))
                if self.rank(won[-1]) > self.rank(best):
                    best, likely, lost = won[-1], [], 0  # the next challengers are neighbours of this one
        return sorted([*tried, *won], key=self.rank, reverse=True)

    def rank_expected(self, solutions: Sequence[Solution]) -> list[Solution]:
        """By the rank that they would have if all came as expected; without those of which nothing
        is. Of whole plans, which say more of the highest rate than scores of a search."""
        expected = []
        for solution in dict.fromkeys(solutions):
            try:
                proposals = self._propose(solution)
            except UnservedError:
                continue
            outcome = TrialOutcome(proposals[0].score.attainment, proposals[0].score.capacity)
            expected.append(TriedPlan(solution=solution, proposals=proposals, outcome=outcome))
        hopeful = [plan for plan in expected if plan.outcome.capacity > 0.0]
        return [plan.solution for plan in sorted(hopeful, key=self.rank, reverse=True)]

    def _propose(self, solution: Solution) -> tuple[Proposal, ...]:
        return self.evaluator.propose(solution, epoch=self.epoch, version=self.version)

    def _try(self, solution: Solution) -> TriedPlan:
        proposals = self._propose(solution)
        return TriedPlan(solution=solution, proposals=proposals, outcome=self.trial(proposals))

    def _find_challengers(self, best: Solution, found: SearchResult, rng: np.random.Generator) -> list[Solution]:
        """Neighbours of `best`, and what the search has evaluated, the most promising first."""
        space = SearchSpace.of(self.problem, self.evaluator)
        drawn = (random_neighbour(space, best, rng) for _ in range(NEIGHBOURS))
        near = {space.canonical(one) for one in (*(one for _, one in flips(space, best)), *drawn) if one}
        scores = {one: self.evaluator.score(one).objective for one in sorted(near)}
        nearest = sorted(scores, key=lambda one: (-scores[one], one))
        return self.rank_expected([*nearest[: LIKELY // 2], *_best_evaluated(found)[: LIKELY // 2]])


def _best_evaluated(found: SearchResult) -> list[Solution]:
    """By their objective."""
    evaluated = found.evaluated
    return sorted(evaluated, key=lambda one: (-evaluated[one].objective, one))[:LIKELY]


def _count_replicas(solution: Solution) -> tuple[tuple[tuple[int, str], int], ...]:
    return tuple(sorted(Counter((group.service, group.phase.value) for group in solution).items()))


def _attainment(plan: TriedPlan) -> float:
    return plan.outcome.attainment


def _worth(attainment: float, capacity: float) -> float:
    return attainment + HEADROOM * capacity / (1.0 + capacity)
