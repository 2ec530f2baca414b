"""What goes into a simulation: services, plans, settings, and what happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from types import MappingProxyType
from typing import Final, NamedTuple

from ..coordinator.costs.replica import Hop, StageHardware, kv_capacity_tokens, replica_times
from ..coordinator.costs.rounds import TOKEN_BUDGETS, choose_token_budget
from ..coordinator.costs.step_times import StepTimes
from ..coordinator.demand import Demand
from ..coordinator.names import count_of
from ..coordinator.plan import Phase, Plan, Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.planning.model.workload import Service, Slo
from ..coordinator.repair.damping import DampingSettings
from ..coordinator.requests.admission import AdmissionSettings
from ..coordinator.routing.interface import RoutingSettings
from .engine.values import SimEngineSettings
from .records import Trace


class WorldError(ValueError):
    """A scenario that cannot be simulated; one line that says what does not fit what."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServiceRun:
    """One service: what is asked of it, and the plan that serves it. The trace's lengths and
    arrivals count, not those of `service.workload`. `later_slos`: the deadlines of requests that
    arrive from a moment on, instead of the service's. `as_routed`: by the row of the trace, the boxes that prefilled
    and that decoded a request in a run that is repeated (of a replica over several boxes, its head): it goes there
    while the plan has them, and else where the policy sends it."""

    service: Service
    plan: Plan
    trace: Trace
    later_slos: tuple[tuple[float, Slo], ...] = ()
    as_routed: Mapping[int, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimAdmission:
    """How gateways admit requests, as `node.settings.ClientLimits` has it on the network.

    `urgent`, `batch`: the shares of requests of these classes, drawn by lot; the others are normal. `queue_requests`
    wait or run at most at a gateway. `queued_s`: so much prefilling is given to engines ahead of time; `share`: of
    their room one client has at most so many times what is left free. `deadline_s`: that clients wait for an answer.
    """

    rules: AdmissionSettings = field(default_factory=AdmissionSettings)
    urgent: float = 0.0
    batch: float = 0.0
    queue_requests: int = 4096
    queued_s: float = 0.25
    share: float = 15.0
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        if not (self.urgent >= 0.0 and self.batch >= 0.0 and self.urgent + self.batch <= 1.0):
            raise WorldError(
                f"urgent is {self.urgent} and batch {self.batch}: shares are 0 or more, at most 1 together"
            )
        if self.queue_requests < 1 or not min(self.queued_s, self.share, self.deadline_s) > 0.0:
            raise WorldError("queue_requests must be at least 1; queued_s, share and deadline_s must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """How engines and links work, other than by decisions.

    - `engine`: the settings of all engines, in steps of at most its token budget; the plan may give
      a replica less. None: vLLM's defaults, with the budgets of the plan or of `ReplicaModel`.
    - `layerwise`: KV is sent while the prompt is computed, which hides most of the transfer; else
      after the prefill.
    - `layerwise_from`: prompts of fewer tokens are sent after the prefill all the same, as in
      Splitwise (512 on its H100).
    - `layer_sync_s`: what a layerwise transfer takes beyond its bytes, once for each request: from
      the last byte until the decode replica can go on (Splitwise: some 5 ms between H100, 8 ms
      between A100, for any prompt).
    - `kv_wait_limit`: KV that would take more than so many times as long as computing the prompt where it
      is awaited is given up, and computed there. The running network: 1.5. Infinite: none is.
    - `streams`: TCP streams of a transfer, each of which carries one window per round trip; None:
      as many as the link needs.
    - `gateways`: the boxes whose gateways take the requests, in turn. What they and replicas say to
      each other takes half a round trip; none: no time.
    - `message_s`: what the processes at both ends take for such a message, beside its half round trip.
    - `report_s`: seconds between a replica's reports of its load, by which gateways know of each
      other's requests; their own they know at once. 0: gateways know of all at once, and route as
      one. The running network: 1.
    - `first_token_at_decode`: the decode replica generates the first token, once the KV is there;
      else the prefill replica does, earlier, as on the network and in the papers.
    - `detect_s`: seconds until gateways notice that a box is lost; its requests stall as long.
    - `dead_s`: seconds until the coordinator counts a lost box as dead, and plans without it; None:
      as soon as gateways notice.
    - `told_s`: seconds until the coordinator is told what links carry now.
    - `quiet_s`: what is told of links and traffic is planned with at most so often; boxes that come
      or go are planned with at once.
    - `damping`: how long boxes that are lost again and again are trusted less.
    - `admission`: requests wait for their turns at gateways, which refuse what would begin too late; None: all are
      given to engines at once.
    - `routing`: the policy that requests are routed by, one of `policies.POLICIES`: by default not the
      network's but `plan`, with which the plans of the results' pages are compared; `seed` is for
      policies that draw lots. `known_answers`: it is told how long each answer will be, which no
      gateway knows; `told_limits`: how long it may be at most, by clients that get as much as they ask for.
    - `until_s`: nothing happens later; requests that have not ended by then never do.
    """

    engine: SimEngineSettings | None = None
    layerwise: bool = True
    layerwise_from: int = 0
    layer_sync_s: float = 0.0
    kv_wait_limit: float = inf
    streams: int | None = None
    gateways: tuple[str, ...] = ()
    message_s: float = 0.0
    report_s: float = 0.0
    first_token_at_decode: bool = False
    detect_s: float = 1.0
    dead_s: float | None = None
    told_s: float = 2.0
    quiet_s: float = 15.0
    damping: DampingSettings = field(default_factory=DampingSettings)
    routing: RoutingSettings = field(default_factory=lambda: RoutingSettings(policy="plan"))
    admission: SimAdmission | None = None
    known_answers: bool = False
    told_limits: bool = False
    seed: int = 0
    until_s: float = inf

    def __post_init__(self) -> None:
        if self.streams is not None and self.streams < 1:
            raise WorldError(f"streams is {self.streams}; it must be at least 1")
        if self.layerwise_from < 0:
            raise WorldError(f"layerwise_from is {self.layerwise_from}; it must not be negative")
        if not self.kv_wait_limit > 0.0:
            raise WorldError(f"kv_wait_limit is {self.kv_wait_limit}; it must be above 0")
        for name in ("layer_sync_s", "message_s", "report_s", "detect_s", "dead_s", "told_s", "quiet_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise WorldError(f"{name} is {value}; it must not be negative")
        if self.dead_s is not None and self.dead_s < self.detect_s:
            raise WorldError(f"dead_s is {self.dead_s}; it must not be less than detect_s, {self.detect_s}")

    @property
    def planned_after_s(self) -> float:
        """Seconds from the loss of a box until the coordinator plans without it."""
        return self.detect_s if self.dead_s is None else self.dead_s


class BoxLost(NamedTuple):
    """At `at` seconds the box fails; its requests are replayed elsewhere."""

    at: float
    box: str


class BoxJoined(NamedTuple):
    """At `at` seconds the box is there; until then it is not."""

    at: float
    box: str


class LinksChanged(NamedTuple):
    """From `at` seconds on the links `ends`, each from one box to another, carry `gbps` Gb/s."""

    at: float
    ends: tuple[tuple[str, str], ...]
    gbps: float


NO_RELOAD: Final[Mapping[str, float]] = MappingProxyType({})


class PlanChange(NamedTuple):
    """From `at` seconds on the service follows another plan.

    Replicas of the same GPUs and layers keep their engine, whatever their phase: a flip costs
    nothing. The others are stopped, their requests replayed; new ones are ready `reload_s` seconds
    later, by id, or at once.
    """

    at: float
    service: int
    plan: Plan
    reload_s: Mapping[str, float] = NO_RELOAD


Change = BoxLost | BoxJoined | LinksChanged | PlanChange


class Situation(NamedTuple):
    """What the coordinator is told when it is to plan: boxes that are `missing`, those that have
    `joined` since the beginning, links as they were told last (of all boxes), and what gateways say
    of each service's traffic, None where nothing yet. `why`: a line for each piece of news. `held`:
    boxes that are there and failed repeatedly; they get no requests while others can serve.
    `pins`: by box, the phase that its replica was moved to because it stayed borrowed."""

    now: float
    plans: tuple[Plan, ...]
    missing: frozenset[str]
    joined: frozenset[str]
    cluster: Cluster
    demands: tuple[Demand | None, ...]
    why: tuple[str, ...]
    held: frozenset[str] = frozenset()
    pins: Mapping[str, Phase] = MappingProxyType({})


Replan = Callable[[Situation], Sequence[PlanChange]]
"""Answers a situation with plans, each from the moment that it would be ready. Who is asked again
before that moment has answered for nothing: what it said before is not followed."""


def degrade_links(cluster: Cluster, change: LinksChanged) -> Cluster:
    """The cluster with these links as they are now. Raises WorldError or ClusterError."""
    if not (isfinite(change.gbps) and change.gbps > 0.0):
        raise WorldError(f"links that carry {change.gbps} Gb/s; it must be above 0")
    gbps = cluster.gbps.copy()
    for source, target in change.ends:
        link = cluster.index(source), cluster.index(target)
        if link[0] == link[1] or not gbps[link] > 0.0:
            raise WorldError(f"there is no link from box {source} to box {target}")
        gbps[link] = change.gbps
    return replace(cluster, gbps=gbps)


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
        raise WorldError(
            f"replica {replica.id}: {service.model.name} does not fit its {count_of(len(replica.gpus), 'GPU')}"
        )
    times = replica_times(service.model, stages, hops)
    if replica.phase is Phase.PREFILL:
        return ReplicaModel(times, tokens)
    return ReplicaModel(times, tokens, choose_token_budget(times, len(stages), service.slo.tpot_s))
