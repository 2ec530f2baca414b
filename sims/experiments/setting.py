"""The paper's clusters and workloads as problems, plans for them, simulated runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ...coordinator.costs.gpus import Specs
from ...coordinator.costs.model_shape import KvCacheDtype, model_shape
from ...coordinator.plan import Phase, Plan
from ...coordinator.planning.lower.evaluator import LowerLevel
from ...coordinator.planning.model.cluster import Cluster
from ...coordinator.planning.model.cluster_file import packaged_cluster
from ...coordinator.planning.model.problem import Group, Problem, Proposal, Slice, Solution
from ...coordinator.planning.model.slo import scaled_slo
from ...coordinator.planning.model.workload import Service, Workload
from ...coordinator.planning.upper.search import SearchResult, search
from ...coordinator.planning.upper.settings import SearchSettings
from ...coordinator.routing.interface import RoutingSettings
from ..engine.values import SimEngineSettings
from ..policies import PLAN, SHARES
from ..records import Trace
from ..results.outcomes import ServiceOutcome, attainment
from ..scenario import ServiceRun, SimSettings
from ..workloads import Lengths, azure, begin_alike, draw
from ..world import simulate

CLOUD: Final = "thunderserve-cloud-32"
WORKLOADS: Final = ("coding", "conversation")
COLUMNS: Final = (Specs.TABLE1, Specs.MEASURED)
TARGET: Final = 0.9
REPLANS: Final = 3
HALVINGS: Final = 8
"""How often `most` plans again at most."""

CACHING: Final = SimEngineSettings(prefix_blocks=4)
"""Of replicas that keep prompts, in pieces of 64 tokens."""

BRACKET: Final = (0.2, 1.6)
"""Where the highest rate is looked for, as multiples of what the planner expects."""

MOST_BRACKETS: Final = 4
"""One above the other, while all that is tried is carried: to 6.5 times what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much of everything: seeds, seconds of arrivals, search steps (None: the planner's own),
    steps of one watched, halvings of a rate, plans with the best estimates that are `tried` in simulations,
    plans that challenge each of the best of those (so many `starts`) at most, and until `most_losses` in a row have
    lost; and the `policy` that routes there; `requests` of a run, where a page counts those and no seconds, and at
    least of those that plans are tried in. `kept`: see `KeptResults`."""

    seeds: tuple[int, ...] = (0, 1, 2)
    seconds: float = 150.0
    steps: int | None = None
    long_steps: int = 2000
    halvings: int = 6
    tried: int = 6
    challengers: int = 16
    starts: int = 1
    most_losses: int | None = None
    policy: str = PLAN
    requests: int = 1000
    kept: Path | None = field(default=None, compare=False, repr=False)

    @classmethod
    def quick(cls) -> Scope:
        """To see that everything works; its figures say little."""
        return cls(seeds=(0,), seconds=20.0, steps=60, long_steps=60, halvings=1, tried=2, challengers=1, requests=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """A problem by names. `boxes`: only so many of the cluster's, from the first; `scale`: deadlines
    over a lone request's times on A100s; `gbps`: between boxes, instead of the file's;
    `mixed_only`: colocated; `step_tokens`: of every step (0: by the deadline);
    `kv_cache_dtype`: of the engines."""

    cluster: str = CLOUD
    boxes: int | None = None
    specs: Specs = Specs.TABLE1
    model: str = "llama-30b"
    workload: str
    rate: float
    scale: float = 10.0
    gbps: float | None = None
    kv_bits: float = 4.5
    mixed_only: bool = False
    step_tokens: int = 0
    kv_cache_dtype: KvCacheDtype = "auto"

    def problem(self) -> Problem:
        """What it names."""
        cluster = packaged_cluster(self.cluster, self.specs)
        if self.boxes is not None:
            cluster = cluster.without(frozenset(box.id for box in cluster.boxes[self.boxes :]))
        if self.gbps is not None:
            cluster = replace(cluster, gbps=np.where(cluster.gbps > 0.0, self.gbps, 0.0))
        drawn, model = lengths(self.workload), model_shape(self.model).with_kv_cache_dtype(self.kv_cache_dtype)
        workload = Workload(name=drawn.source, prompts=drawn.prompt, outputs=drawn.output, rate=self.rate)
        service = Service(
            name=self.workload, model=model, workload=workload, kv_bits=self.kv_bits,
            slo=scaled_slo(model, workload, self.scale, TARGET), step_tokens=self.step_tokens,
        )  # fmt: skip
        pinned = {box.id: Phase.MIXED for box in cluster.boxes} if self.mixed_only else {}
        return Problem(cluster=cluster, services=(service,), pinned=pinned)


@dataclass(frozen=True, slots=True, eq=False)
class Deployed:
    """Replicas that stay the same, with new shares of the requests for each rate."""

    problem: Problem
    solution: Solution
    _proposals: dict[float, Proposal] = field(default_factory=dict)

    @property
    def is_colocated(self) -> bool:
        """Whether no replica of it needs another."""
        return all(group.phase is Phase.MIXED for group in self.solution)

    def at(self, rate: float | None = None) -> Proposal:
        """The lower level's plan for a rate; without one, the problem's."""
        wanted = rate or self.problem.services[0].workload.rate
        if wanted not in self._proposals:
            evaluator = LowerLevel(at_rate(self.problem, wanted))
            (self._proposals[wanted],) = evaluator.propose(self.solution, epoch=0, version=1)
        return self._proposals[wanted]


def at_rate(problem: Problem, rate: float) -> Problem:
    """The same with another rate."""
    service = problem.services[0]
    return replace(problem, services=(replace(service, workload=replace(service.workload, rate=rate)),))


@cache
def lengths(workload: str) -> Lengths:
    """Of Azure's traces, by the name of the workload."""
    return azure(workload).lengths


@cache
def searched(case: PlannedCase, steps: int | None, seed: int = 0) -> SearchResult:
    """What is found for a case in so many evaluations; searched for once and remembered."""
    problem = case.problem()
    return search(problem, LowerLevel(problem), rng=np.random.default_rng(seed), settings=SearchSettings(steps=steps))


@cache
def planned(case: PlannedCase, steps: int | None) -> Deployed:
    """With the solution that is expected to be best."""
    return Deployed(case.problem(), searched(case, steps).solution)


@cache
def most(case: PlannedCase, steps: int | None) -> Deployed:
    """What is expected to carry most: planned for the case's rate, and again for the rate that is
    expected of what was found, while that helps."""
    best = planned(case, steps)
    for _ in range(HALVINGS):  # far above what can be in time, all plans look alike
        if _carried(best) > 0.0:
            break
        case = replace(case, rate=0.5 * case.rate)
        best = planned(case, steps)
    for _ in range(REPLANS):
        again = planned(replace(case, rate=float(f"{_carried(best):.2g}")), steps)
        if _carried(again) <= _carried(best):
            break
        best = again
    return best


def _carried(deployed: Deployed) -> float:
    return deployed.at().max_rate


def group(cluster: Cluster, phase: Phase, gpus: Mapping[str, int]) -> Group:
    """A group of so many GPUs of each box, by the box's id."""
    return Group(tuple(sorted(Slice(cluster.index(box), count) for box, count in gpus.items())), phase)


def outcome(
    problem: Problem,
    plan: Plan,
    scope: Scope,
    seed: int,
    *,
    rate: float | None = None,
    dispatch: str = SHARES,
    engine: SimEngineSettings | None = None,
    prefix_caches: bool = False,
) -> ServiceOutcome:
    """A run of Poisson arrivals with the workload's lengths. All plans meet the same requests at a
    seed and rate. `engine`: one for all replicas; `prefix_caches`: prompts begin alike (`begin_alike`), and replicas
    keep them."""
    service = problem.services[0]
    workload = service.workload
    if engine is not None:
        plan = _with_steps_of_engines(plan)
    drawn = Lengths(workload.prompts, workload.outputs, workload.name)
    rng = np.random.default_rng([17, seed])
    trace = draw(drawn, rate=rate or workload.rate, rng=rng, seconds=scope.seconds)
    if prefix_caches:
        trace = begin_alike(trace, piece_tokens=CACHING.prefix_blocks * CACHING.block_tokens, rng=rng)
        engine = CACHING
    return run(problem, plan, trace, SimSettings(engine=engine, routing=RoutingSettings(policy=dispatch), seed=seed))


def _with_steps_of_engines(plan: Plan) -> Plan:
    """The plan without its own budgets of steps."""
    replicas = tuple(msgspec.structs.replace(replica, step_tokens=0) for replica in plan.replicas)
    return msgspec.structs.replace(plan, replicas=replicas)


def run(problem: Problem, plan: Plan, trace: Trace, settings: SimSettings) -> ServiceOutcome:
    """One simulation of one service."""
    service = problem.services[0]
    return simulate(problem.cluster, [ServiceRun(service=service, plan=plan, trace=trace)], settings=settings).services[
        0
    ]


def highest_rate(
    deployed: Deployed,
    scope: Scope,
    seed: int,
    dispatch: str = SHARES,
    engine: SimEngineSettings | None = None,
    prefix_caches: bool = False,
) -> float:
    """Requests per second at which TARGET of them still meet all deadlines, by halving around the
    planner's estimate, or beyond that while all that is tried is carried; the lowest rate tried where even that is too
    much."""
    low, high = (factor * deployed.at().max_rate for factor in BRACKET)
    slo = deployed.problem.services[0].slo
    for _ in range(MOST_BRACKETS):
        top = high
        for _ in range(scope.halvings):
            rate = (low + high) / 2
            plan = deployed.at(rate).plan
            found = outcome(
                deployed.problem, plan, scope, seed, rate=rate, dispatch=dispatch, engine=engine,
                prefix_caches=prefix_caches,
            )  # fmt: skip
            if attainment(found.outcomes, slo) >= TARGET:
                low = rate
            else:
                high = rate
        if high < top:
            break
        high = BRACKET[1] * top
    return low


def shapes(plan: Plan, cluster: Cluster) -> dict[Phase, str]:
    """Replicas by phase as the paper has them: GPUs, (TP, PP), how many."""
    gpu_of = {box.id: box.gpu.name.removeprefix("RTX-").partition("-")[0] for box in cluster.boxes}
    found: dict[Phase, Counter[str]] = {phase: Counter() for phase in Phase}
    for replica in plan.replicas:
        cards: Counter[str] = Counter()
        for stage in replica.stages:
            cards[gpu_of[stage.peer]] += stage.tp
        tp = "/".join(str(width) for width in sorted({stage.tp for stage in replica.stages}, reverse=True))
        named = "+".join(f"{count} {card}" for card, count in sorted(cards.items()))
        found[replica.phase][f"{named} ({tp},{len(replica.stages)})"] += 1
    return {
        phase: "; ".join(kind + (f" x{count}" if count > 1 else "") for kind, count in sorted(kinds.items())) or "-"
        for phase, kinds in found.items()
    }


def spread(values: Sequence[float]) -> str:
    """The mean over seeds, with the least and the most."""
    mean = f"{np.mean(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3g}-{max(values):.3g})"
