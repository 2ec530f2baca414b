"""What goes into a simulation: services, plans, settings, and what happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..coordinator.costs.replica import Hop, StageHardware, kv_capacity_tokens, replica_times
from ..coordinator.costs.rounds import TOKEN_BUDGETS, choose_token_budget
from ..coordinator.costs.step_times import StepTimes
from ..coordinator.plan import Phase, Plan, Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.planning.model.workload import Service
from ..coordinator.repair.damping import DampingSettings
from ..coordinator.routing.interface import RoutingSettings
from .engine.values import SimEngineSettings
from .records import Trace


class WorldError(ValueError):
    """A scenario that cannot be simulated; one line that says what does not fit what."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServiceRun:
    """One service: what is asked of it, and the plan that serves it. The trace's lengths and
    arrivals count, not those of `service.workload`."""

    service: Service
    plan: Plan
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """How engines and links work, other than by decisions.

    - `engine`: the settings of all engines, in steps of at most its token budget; the plan may give
      a replica less. None: vLLM's defaults, with the budgets of the plan or of `ReplicaModel`.
    - `layerwise`: KV is sent while the prompt is computed, which hides most of the transfer; else
      after the prefill.
    - `streams`: TCP streams of a transfer, each of which carries one window per round trip; None:
      as many as the link needs.
    - `first_token_at_decode`: the decode replica generates the first token, once the KV is there;
      else the prefill replica does, earlier, as on the network and in the papers.
    - `detect_s`: seconds until the coordinator notices that a box is lost; requests stall as long.
    - `damping`: how long boxes that are lost again and again are trusted less.
    - `routing`: the policy that requests are routed by, one of `policies.POLICIES`; `seed` is for
      policies that draw lots.
    """

    engine: SimEngineSettings | None = None
    layerwise: bool = True
    streams: int | None = None
    first_token_at_decode: bool = False
    detect_s: float = 1.0
    damping: DampingSettings = field(default_factory=DampingSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.streams is not None and self.streams < 1:
            raise WorldError(f"streams is {self.streams}; it must be at least 1")
        if not self.detect_s >= 0.0:
            raise WorldError(f"detect_s is {self.detect_s}; it must not be negative")


class BoxLost(NamedTuple):
    """At `at` seconds the box fails; its requests are replayed elsewhere."""

    at: float
    box: str


class BoxJoined(NamedTuple):
    """At `at` seconds the box is there; until then it is not."""

    at: float
    box: str


class PlanChange(NamedTuple):
    """From `at` seconds on the service follows another plan.

    Replicas of the same GPUs and layers keep their engine, whatever their phase: a flip costs
    nothing. The others are stopped, their requests replayed; new ones are ready `reload_s` seconds
    later.
    """

    at: float
    service: int
    plan: Plan
    reload_s: float = 0.0


Change = BoxLost | BoxJoined | PlanChange


class Situation(NamedTuple):
    """What the coordinator is told when a loss has been noticed, a box has joined, or one is trusted again. `held`:
    boxes that are there and failed repeatedly; they get no requests while others can serve."""

    now: float
    plans: tuple[Plan, ...]
    missing: frozenset[str]
    held: frozenset[str] = frozenset()


Replan = Callable[[Situation], Sequence[PlanChange]]
"""Answers a situation with plans, each from the moment that it would be ready."""


class ReplicaModel(NamedTuple):
    """How fast a replica is, how many tokens of KV it holds, and how many a batch of it computes at
    most where the plan does not say."""

    times: StepTimes
    kv_tokens: int
    max_batched_tokens: int = TOKEN_BUDGETS[0]


def roofline_model(cluster: Cluster, service: Service, replica: Replica) -> ReplicaModel:
    """By GPU table and cluster links; token budget by deadlines where prefill runs beside decoding.
    Raises WorldError for a replica that does not fit."""
    numbers = [cluster.index(stage.peer) for stage in replica.stages]
    stages = []
    for stage, number in zip(replica.stages, numbers, strict=True):
        box = cluster.boxes[number]
        if stage.gpus.stop > box.gpus:
            raise WorldError(f"replica {replica.id}: GPU {stage.gpus.stop - 1} of box {box.id}, which has {box.gpus}")
        stages.append(StageHardware(gpu=box.gpu, tp=stage.tp, layers=stage.layers, link_gbps=box.gpu_link_gbps))
    hops = []
    if len(stages) > 1:
        for here, there in zip(numbers, numbers[1:] + numbers[:1], strict=True):
            inside = here == there
            gbps = cluster.boxes[here].gpu_link_gbps if inside else float(cluster.gbps[here, there])
            if not gbps > 0.0:
                ends = f"{cluster.boxes[here].id} to box {cluster.boxes[there].id}"
                raise WorldError(f"replica {replica.id}: there is no link from box {ends}")
            hops.append(Hop(0.0 if inside else float(cluster.rtt_s[here, there]), gbps))
    tokens = kv_capacity_tokens(service.model, stages)
    if tokens < 1:
        raise WorldError(f"replica {replica.id}: {service.model.name} does not fit its {len(replica.gpus)} GPUs")
    times = replica_times(service.model, stages, hops)
    if replica.phase is Phase.PREFILL:
        return ReplicaModel(times, tokens)
    return ReplicaModel(times, tokens, choose_token_budget(times, len(stages), service.slo.tpot_s))
