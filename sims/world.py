"""The world of a simulation: services, their replicas' engines, the network between them, and what happens to them.

    result = simulate(cluster, [ServiceRun(service=service, plan=plan, trace=trace)])

Requests are routed by the coordinator's own `Router`, by the loads as they are. Both sides of a split request are asked
at once: the decode side reserves blocks for the KV, the prefill side reads. Whatever a lost box held is computed again
elsewhere, from the prompt and the tokens that were written before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final, final

from ..coordinator.plan import Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.planning.model.workload import Service
from .deployment import Deployment, check_plans
from .engine.engine import Engine
from .engine.values import EngineSettings, StepRecord
from .events import EventQueue, Scheduled
from .gateway import SimGateway
from .kv_transfers import KVTransfer, KVTransfers
from .network import FluidNetwork, link_capacities
from .results.outcomes import SimResult, StepLog, TransferRecord
from .scenario import (
    BoxJoined,
    Change,
    PlanChange,
    Replan,
    ReplicaModel,
    ServiceRun,
    SimSettings,
    Situation,
    WorldError,
    roofline_model,
)
from .serving import NEVER, SimReplica, SimRequest

__all__ = ["Progress", "simulate"]

PROGRESS_EVERY: Final = 1000
"""Requests that end between two calls of the progress callback."""

Progress = Callable[[int, int, float], None]
"""Called with the requests that have ended, all there are, and the simulated seconds."""

ModelOf = Callable[[Cluster, Service, Replica], ReplicaModel]


def simulate(
    cluster: Cluster,
    runs: Sequence[ServiceRun],
    *,
    settings: SimSettings | None = None,
    changes: Sequence[Change] = (),
    replan: Replan | None = None,
    model_of: ModelOf = roofline_model,
    record: bool = False,
    progress: Progress | None = None,
) -> SimResult:
    """Let all requests run to their ends. With the same arguments, the same result to the last bit.

    `replan` is asked when a box is known to be lost or has joined. `record`: keep every step and transfer, for a
    Chrome trace. Raises WorldError or ClusterError for what does not fit together.
    """
    world = _World(cluster, runs, settings or SimSettings(), model_of, record)
    world.replan, world.progress = replan, progress
    world.prepare(changes)
    world.queue.run()
    return world.result()


@final
@dataclass(slots=True)
class _TraceArrivals:
    """The requests of a service, moment by moment; an event that follows itself."""

    world: _World
    deployment: Deployment
    arrivals: list[float]
    prompts: list[int]
    outputs: list[int]
    row: int = 0

    def happen(self, now: float) -> Iterable[Scheduled]:
        while self.row < len(self.arrivals) and self.arrivals[self.row] <= now:
            row = self.row
            self.row = row + 1
            request = SimRequest(self.deployment.number, row, self.prompts[row], self.outputs[row])
            self.world.gateway.arrived(request, now)
        follow = self.world.take_follow()
        if self.row < len(self.arrivals):
            follow.append(Scheduled(self.arrivals[self.row], self))
        return follow


@final
@dataclass(slots=True)
class _WorldEvent:
    """Something that the world does at a moment."""

    world: _World
    act: Callable[[float], None]

    def happen(self, now: float) -> Iterable[Scheduled]:
        self.act(now)
        return self.world.take_follow()


@final
@dataclass(slots=True)
class _KvLanded:
    """All KV of a request has come, and the other side knows."""

    world: _World
    handover: KVTransfer

    def happen(self, now: float) -> Iterable[Scheduled]:
        self.world.gateway.landed(self.handover, now)
        return self.world.take_follow()


@final
class _World:
    """What `simulate` runs; its methods are what events do."""

    def __init__(
        self, cluster: Cluster, runs: Sequence[ServiceRun], settings: SimSettings, model_of: ModelOf, record: bool
    ) -> None:
        self.queue = EventQueue()
        self.replan: Replan | None = None
        self.progress: Progress | None = None
        self._cluster = cluster
        self._settings = settings
        self._model_of = model_of
        self._network = FluidNetwork(link_capacities(cluster, settings.streams))
        self._handovers = KVTransfers(self._network, layerwise=settings.layerwise)
        self._network_event = _WorldEvent(self, self._network_woke)
        self._network_alarm = NEVER
        self._missing: frozenset[str] = frozenset()
        self._hosts: list[SimReplica] = []
        self._steps: list[StepLog] | None = [] if record else None
        self._transfers: list[TransferRecord] | None = [] if record else None
        self._follow: list[Scheduled] = []
        self._ended = 0
        self._total = sum(len(run.trace) for run in runs)
        check_plans(cluster, [run.plan for run in runs])
        self._deployments = [Deployment(number, run, cluster, settings) for number, run in enumerate(runs)]
        self.gateway = SimGateway(
            self._deployments,
            self._handovers,
            settings,
            on_load=self._touch,
            on_end=self._count_end,
            transfers=self._transfers,
        )

    def prepare(self, changes: Sequence[Change]) -> None:
        """Start the engines, and put into the queue what comes from outside."""
        first: dict[str, bool] = {}
        for change in sorted(changes, key=lambda change: change.at):
            if isinstance(change, PlanChange):
                self.queue.push(change.at, self._plan_event(change))
                continue
            self._cluster.index(change.box)
            joins = isinstance(change, BoxJoined)
            first.setdefault(change.box, joins)
            self.queue.push(change.at, _WorldEvent(self, partial(self._join if joins else self._lose, change.box)))
        self._missing = frozenset(box for box, joins in first.items() if joins)
        for deployment in self._deployments:
            for replica in deployment.plan.replicas:
                deployment.hosts[replica.id] = self._start(deployment, replica)
                deployment.changed(deployment.hosts[replica.id])
            deployment.boxes_missing(self._missing)
            trace = deployment.trace
            columns = (trace.arrival_s.tolist(), trace.prompt.tolist(), trace.output.tolist())
            self.queue.push(columns[0][0], _TraceArrivals(self, deployment, *columns))

    def take_follow(self) -> list[Scheduled]:
        """The events that follow from what has been done since the last call."""
        wake_at = self._network.wake_at
        if wake_at != self._network_alarm and wake_at != inf:
            self._network_alarm = wake_at
            self._follow.append(Scheduled(wake_at, self._network_event))
        follow, self._follow = self._follow, []
        return follow

    def result(self) -> SimResult:
        """When nothing happens any more."""
        for host in self._hosts:
            if not host.lost:
                host.check_integrity()
        self._network.check_integrity()
        end_s = self.queue.now
        return SimResult(
            services=tuple(deployment.log.outcome() for deployment in self._deployments),
            replicas=tuple(host.outcome(self._deployments[host.service].service.name) for host in self._hosts),
            boxes=tuple(box.id for box in self._cluster.boxes),
            settings=self._settings,
            events=self.queue.statistics().happened,
            end_s=end_s,
            sent_bytes=self._handovers.sent_bytes,
            traffic_usd=sum(
                size * 1e-9 * float(self._cluster.usd_per_gb[ends])
                for ends, size in self._handovers.sent_bytes.items()
                if ends[0] != ends[1]
            ),
            steps=tuple(self._steps or ()),
            transfers=tuple(self._transfers or ()),
        )

    def engine_woke(self, host: SimReplica, now: float) -> list[Scheduled]:
        """A replica ends a step, and begins another."""
        signals = host.engine.advance(now)
        if signals:
            self.gateway.on_signals(host, signals, now)
        self._touch(host)
        return self.take_follow()

    def _network_woke(self, now: float) -> None:
        if now != self._network_alarm:
            return  # flows have come or gone since this alarm was set
        self._network_alarm = NEVER
        for flow in self._network.advance(now):
            handover = self._handovers.ended(flow)
            if handover is not None:
                self._follow.append(Scheduled(now + handover.ways.rtt_s, _KvLanded(self, handover)))

    def _count_end(self, now: float) -> None:
        self._ended += 1
        if self.progress is not None and (self._ended % PROGRESS_EVERY == 0 or self._ended == self._total):
            self.progress(self._ended, self._total, now)

    def _touch(self, host: SimReplica) -> None:
        """Its load has changed, and perhaps the moment at which it wants to go on."""
        self._deployments[host.service].changed(host)
        wake_at = host.engine.wake_at
        if wake_at != host.alarm and wake_at != inf:
            host.alarm = wake_at
            self._follow.append(Scheduled(wake_at, host))

    # Boxes and plans

    def _start(self, deployment: Deployment, replica: Replica) -> SimReplica:
        model = self._model_of(self._cluster, deployment.service, replica)
        number = len(self._hosts)
        record = None if self._steps is None else partial(_keep, self._steps, number)
        engine = Engine(
            model.times,
            self._engine_settings(replica, model),
            kv_tokens=model.kv_tokens,
            stages=len(replica.stages),
            record=record,
        )
        host = SimReplica(number, deployment.number, replica, engine, self.engine_woke)
        host.lost = not self._missing.isdisjoint(replica.peers)
        self._hosts.append(host)
        return host

    def _engine_settings(self, replica: Replica, model: ReplicaModel) -> EngineSettings:
        """As for all, in steps of as many tokens as the plan wants."""
        common = self._settings.engine
        if common is None:
            return EngineSettings(max_batched_tokens=replica.step_tokens or model.max_batched_tokens)
        if not replica.step_tokens:
            return common
        return replace(common, max_batched_tokens=min(replica.step_tokens, common.max_batched_tokens))

    def _lose(self, box: str, now: float) -> None:
        """A box is gone. Nobody knows until `detect_s` later."""
        lost = [
            host
            for deployment in self._deployments
            for host in deployment.hosts.values()
            if box in host.replica.peers and not host.lost
        ]
        for host in lost:
            host.lost = True
        for host in lost:
            self.gateway.lost(host, now)
        self._missing |= {box}
        missing = self._missing
        noticed = _WorldEvent(self, lambda then: self._noticed(missing, lost, then))
        self._follow.append(Scheduled(now + self._settings.detect_s, noticed))

    def _noticed(self, missing: frozenset[str], hosts: Iterable[SimReplica], now: float) -> None:
        """The network has found out which boxes are missing: requests are replayed, and there may be new plans."""
        for deployment in self._deployments:
            deployment.boxes_missing(missing & self._missing)
        for host in hosts:
            self.gateway.noticed(host, now)
        self._ask_for_plans(now)

    def _join(self, box: str, now: float) -> None:
        """A box is there, with its replicas' weights loaded as far as all their boxes are."""
        self._missing -= {box}
        for deployment in self._deployments:
            for name, host in list(deployment.hosts.items()):
                if host.lost and self._missing.isdisjoint(host.replica.peers):
                    deployment.hosts[name] = self._start(deployment, host.replica)
                    deployment.changed(deployment.hosts[name])
            deployment.boxes_missing(self._missing)
            self.gateway.retry(deployment.number, now)
        self._ask_for_plans(now)

    def _ask_for_plans(self, now: float) -> None:
        if self.replan is not None:
            plans = tuple(deployment.plan for deployment in self._deployments)
            for change in self.replan(Situation(now, plans, self._missing)):
                self._follow.append(Scheduled(max(now, change.at), self._plan_event(change)))

    def _plan_event(self, change: PlanChange) -> _WorldEvent:
        if not 0 <= change.service < len(self._deployments):
            raise WorldError(f"a plan for service {change.service}; there are {len(self._deployments)}")
        check_plans(self._cluster, [change.plan])
        return _WorldEvent(self, lambda now: self._follow_plan(change, now))

    def _follow_plan(self, change: PlanChange, now: float) -> None:
        deployment = self._deployments[change.service]
        stopped, begun = deployment.follow(change.plan, lambda replica: self._start(deployment, replica))
        for host in deployment.hosts.values():  # those that go on may have another phase, and other steps
            model = self._model_of(self._cluster, deployment.service, host.replica)
            host.engine.settings = self._engine_settings(host.replica, model)
        for host in stopped:
            if not host.lost:
                host.lost = True
                self.gateway.lost(host, now)
        ready = _WorldEvent(self, lambda then: self._ready(deployment, begun, then))
        self._follow.append(Scheduled(now + change.reload_s, ready))
        for host in stopped:
            self.gateway.noticed(host, now)
        self.gateway.retry(deployment.number, now)

    def _ready(self, deployment: Deployment, hosts: Iterable[SimReplica], now: float) -> None:
        for host in hosts:
            if deployment.hosts.get(host.replica.id) is host:
                deployment.ready(host.replica.id)
        self.gateway.retry(deployment.number, now)


def _keep(steps: list[StepLog], replica: int, step: StepRecord) -> None:
    steps.append(StepLog(replica, step))
