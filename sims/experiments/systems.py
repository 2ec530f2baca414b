"""The systems that are compared, each as a plan for the same simulator: ours, and what HexGen,
DistServe and vLLM would do with the money (ThunderServe section 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from operator import attrgetter
from statistics import fmean
from typing import Final

import numpy as np

from ...coordinator.plan import Phase
from ...coordinator.planning.lower.evaluator import LowerLevel
from ...coordinator.planning.model.problem import Problem, Solution
from ...coordinator.planning.upper.trials import PlanTrials
from ...coordinator.routing.interface import RoutingSettings
from ..engine.values import SimEngineSettings
from ..policies import PLAN, SHARES
from ..results.trials import SECONDS, SimulatedTrial
from ..scenario import SimSettings
from .page import KeptResults
from .setting import Deployed, PlannedCase, Scope, group, highest_rate, most, searched

IN_HOUSE: Final = "thunderserve-8xa100"
WHOLE: Final = "HexGen-like, 2048"
SYSTEMS: Final = ("ours", "HexGen-like", WHOLE, "DistServe-like", "vLLM-like")
WIDTHS: Final = (1, 2, 4, 8)
LINKS: Final = (10.0, 40.0)
"""Gb/s between boxes, which the paper does not print."""
WHOLE_TOKENS: Final = 2048
"""vLLM's default of tokens in a step."""
FACTORS: Final = (1.0, 1.5, 2.0)
"""Rates that plans are searched for at, over what is expected of colocated serving: the stricter the
deadlines, the more another plan may carry."""
SEARCHES: Final = 2
"""At each of those rates, with other chances: at strict deadlines what is found differs."""
IN_HOUSE_TRIED: Final = 3
"""Likewise, of all configurations of the A100 box."""
TRIALS: Final = 1000
"""Added to the seeds of reported runs, for those that plans are chosen with."""


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """A plan on its cluster. `dispatch`: by the plan's shares or by its queues, whichever carries
    more. `engine`: the same on all replicas, or with token budgets of their own (None)."""

    name: str
    deployed: Deployed
    dispatch: str
    engine: SimEngineSettings | None = None


def systems(case: PlannedCase, scope: Scope) -> Iterator[System]:
    """All for one case of the cloud."""
    yield _system("ours", chosen(case, scope), scope)
    yield _system("HexGen-like", best_colocated(case, scope), scope)
    # with its own replicas: those for small steps are pipelines, which take too long for large ones
    whole = best_colocated(replace(case, step_tokens=WHOLE_TOKENS), scope)
    yield _system(WHOLE, whole, scope, SimEngineSettings(max_batched_tokens=WHOLE_TOKENS))
    for name in IN_HOUSE_SYSTEMS:
        yield _system(name, best_in_house(case, name, scope), scope)


def best_in_house(case: PlannedCase, system: str, scope: Scope) -> Deployed:
    """Of all configurations of one of IN_HOUSE_SYSTEMS, on the A100 box."""
    problem = replace(case, cluster=IN_HOUSE, gbps=None).problem()
    trials = _trials(problem, scope)
    best = trials.try_all(trials.rank_expected(list(IN_HOUSE_SYSTEMS[system](problem)))[:IN_HOUSE_TRIED])[0]
    return Deployed(problem, best.solution)


def scope_of_trials(case: PlannedCase, scope: Scope) -> Scope:
    """What plans are chosen with. Over links other than the first of LINKS in less time: by trials as
    short as those of `plan`, with one seed, and nobody challenges the best."""
    if case.gbps == LINKS[0]:
        return scope
    return replace(scope, seeds=scope.seeds[:1], seconds=min(SECONDS, scope.seconds), challengers=0)


@cache
def best_colocated(case: PlannedCase, scope: Scope) -> Deployed:
    """Of colocated plans for several rates, and their neighbours: the best in trials, as for
    ours."""
    colocated = replace(case, mixed_only=True)

    def choose() -> Deployed:
        return _search_and_try(colocated, most(colocated, scope.steps).at().max_rate, scope, searches=1)

    return _keep("best colocated plan", colocated, scope, choose)


@cache
def chosen(case: PlannedCase, scope: Scope) -> Deployed:
    """Of plans for several times what colocated serving is expected to carry, their neighbours, and
    colocated serving: the best in simulations that are not reported."""
    colocated = best_colocated(case, scope)

    def choose() -> Deployed:
        return _search_and_try(case, colocated.at().max_rate, scope, colocated.solution, searches=SEARCHES)

    return _keep("best plan", case, scope, choose)


def _keep(name: str, case: PlannedCase, scope: Scope, choose: Callable[[], Deployed]) -> Deployed:
    """What a run before this one has chosen (`Scope.kept`), or is now. With the rate that it is planned for."""

    def choose_now() -> tuple[float, Solution]:
        found = choose()
        return found.problem.services[0].workload.rate, found.solution

    kept = KeptResults(scope.kept)
    rate, solution = kept.get(f"{name}: {case} {scope}", choose_now, tuple[float, Solution])
    return Deployed(replace(case, rate=rate).problem(), solution)


def _search_and_try(case: PlannedCase, rate: float, scope: Scope, *others: Solution, searches: int) -> Deployed:
    """What most is expected of, among plans for FACTORS of a rate, and `others`; and who challenges
    the best ones of those (`Scope.starts`)."""
    cases = [replace(case, rate=float(f"{factor * rate:.2g}")) for factor in FACTORS]
    trials = _trials(cases[0].problem(), scope)
    every = [searched(one, scope.steps, seed) for one in cases for seed in range(searches)]
    likely = [trials.pick_candidates(found, scope.tried) for found in every]
    ranked = trials.rank_expected([solution for those in likely for solution in those])
    tried = trials.try_all([*others, *ranked[: scope.tried]])
    climbed = []
    for number, start in enumerate(tried[: scope.starts]):
        source = next((found for found, those in zip(every, likely, strict=True) if start.solution in those), every[0])
        rest, rng = [plan for plan in tried if plan is not start], np.random.default_rng(number)
        climbed += trials.challenge([start, *rest], source, scope.challengers, rng, most_losses=scope.most_losses)
    return Deployed(trials.problem, max(climbed, key=trials.rank).solution)


def _trials(problem: Problem, scope: Scope) -> PlanTrials:
    """With requests of other seeds than those that are reported, routed alike; the best is who carries most."""
    seeds = tuple(TRIALS + seed for seed in scope.seeds)
    settings = SimSettings(routing=RoutingSettings(policy=scope.policy))
    trial = SimulatedTrial(
        problem=problem, seeds=seeds, seconds=scope.seconds, requests=scope.requests, is_even=True, settings=settings
    )
    return PlanTrials(problem=problem, evaluator=LowerLevel(problem), trial=trial, rank=attrgetter("capacity"))


@cache
def _carried(deployed: Deployed, scope: Scope, dispatch: str, engine: SimEngineSettings | None = None) -> float:
    """The highest rate in trials: a mean, since one cannot tell a few percent."""
    return fmean(highest_rate(deployed, scope, TRIALS + seed, dispatch, engine) for seed in scope.seeds)


def best_dispatch(deployed: Deployed, scope: Scope, engine: SimEngineSettings | None = None) -> str:
    """The policy that carries more in trials; the network's where both do as much."""
    return max((PLAN, SHARES), key=lambda dispatch: _carried(deployed, scope, dispatch, engine))


def _system(name: str, deployed: Deployed, scope: Scope, engine: SimEngineSettings | None = None) -> System:
    return System(name, deployed, best_dispatch(deployed, scope, engine), engine)


def _split(problem: Problem) -> Iterator[Solution]:
    """Equal prefill replicas beside equal decode replicas, on all GPUs of the box."""
    (box,) = problem.cluster.boxes
    for prefill_gpus, prefill_width, decode_width in product(range(1, box.gpus), WIDTHS, WIDTHS):
        decode_gpus = box.gpus - prefill_gpus
        if prefill_gpus % prefill_width == 0 and decode_gpus % decode_width == 0:
            prefill = group(problem.cluster, Phase.PREFILL, {box.id: prefill_width})
            decode = group(problem.cluster, Phase.DECODE, {box.id: decode_width})
            yield tuple(sorted([prefill] * (prefill_gpus // prefill_width) + [decode] * (decode_gpus // decode_width)))


def _colocated(problem: Problem) -> Iterator[Solution]:
    """Equal replicas that do both."""
    (box,) = problem.cluster.boxes
    for width in WIDTHS:
        yield (group(problem.cluster, Phase.MIXED, {box.id: width}),) * (box.gpus // width)


IN_HOUSE_SYSTEMS: Final[Mapping[str, Callable[[Problem], Iterator[Solution]]]] = {
    "DistServe-like": _split,
    "vLLM-like": _colocated,
}
"""On the A100 box: by name, all configurations."""
