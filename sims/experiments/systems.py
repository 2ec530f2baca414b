"""The systems that are compared, each as a plan for the same simulator: ours, and what HexGen,
DistServe and vLLM would do with the money (ThunderServe section 5.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean
from typing import Final

from ...coordinator.plan import Phase
from ...coordinator.planning.model.problem import Problem, Solution
from ..engine.values import SimEngineSettings
from ..policies import PLAN, SHARES
from .setting import Deployed, PlannedCase, Scope, group, highest_rate, most

IN_HOUSE: Final = "thunderserve-8xa100"
WHOLE: Final = "HexGen-like, 2048"
SYSTEMS: Final = ("ours", "HexGen-like", WHOLE, "DistServe-like", "vLLM-like")
WIDTHS: Final = (1, 2, 4, 8)
WHOLE_TOKENS: Final = 2048
"""vLLM's default of tokens in a step."""
TRIED: Final = 3
"""Of all configurations of the A100 box, those with the best estimates, which are simulated."""
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
    in_house = replace(case, cluster=IN_HOUSE, gbps=None).problem()
    for name, solutions in (("DistServe-like", _split(in_house)), ("vLLM-like", _colocated(in_house))):
        every = [Deployed(in_house, solution) for solution in solutions]
        likely = sorted(every, key=lambda one: -one.at().max_rate)[:TRIED]
        yield _system(name, _best_in_trials(likely, scope), scope)


@cache
def best_colocated(case: PlannedCase, scope: Scope) -> Deployed:
    """Of colocated plans for the case's rate and up, and for what is expected of those and up: the
    best in simulations that are not reported, as for ours."""
    first = most(replace(case, mixed_only=True), scope.steps)
    carried = replace(case, mixed_only=True, rate=float(f"{first.at().max_rate:.2g}"))
    engine = SimEngineSettings(max_batched_tokens=case.step_tokens) if case.step_tokens else None
    return _best_in_trials([first, most(carried, scope.steps)], scope, engine)


def _best_in_trials(plans: Sequence[Deployed], scope: Scope, engine: SimEngineSettings | None = None) -> Deployed:
    """The first of those that carry most."""
    return max(plans, key=lambda plan: _carried(plan, scope, PLAN, engine))


@cache
def chosen(case: PlannedCase, scope: Scope) -> Deployed:
    """Of plans for the case's rate and up, for colocated serving's rate and up, and colocated
    serving: the best in simulations that are not reported."""
    colocated = best_colocated(case, scope)
    carried = replace(case, rate=float(f"{colocated.at().max_rate:.2g}"))
    plans = [most(case, scope.steps), most(carried, scope.steps)]
    return _best_in_trials([*plans, Deployed(plans[0].problem, colocated.solution)], scope)


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
