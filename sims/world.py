"""The world of a simulation: services, their replicas' engines, the network between them, and what
happens to them.

    result = simulate(cluster, [ServiceRun(service=service, plan=plan, trace=trace)])

Requests are routed by the coordinator's own `Router`, by the loads as they are at that moment. Both
replicas of a split request get it at once: the decode replica reserves blocks for the KV, the
prefill replica computes the prompt. What a lost box held is computed again elsewhere, from the
prompt and the tokens that had been generated.
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
from ..coordinator.repair.damping import FlapDamping
from .coordination import SimCoordinator
from .deployment import Deployment, check_plans
from .engine.engine import Engine
from .engine.values import SimEngineSettings, StepRecord
from .events import EventQueue, Scheduled
from .gateway import SimGateway
from .kv_transfers import KVTransfers
from .network import FluidNetwork, link_capacities
from .results.outcomes import SimResult, StepLog, TransferRecord
from .scenario import (
    BoxJoined,
    Change,
    LinksChanged,
    PlanChange,
    Replan,
    ReplicaModel,
    ServiceRun,
    SimSettings,
    WorldError,
    degrade_links,
    roofline_model,
)
from .serving import NEVER, ReplicaHost, SimRequest

PROGRESS_EVERY: Final = 1000
"""Requests that end between two calls of the progress callback."""

WATCH_POOLS_S: Final = 5.0
"""Between two looks of the coordinator at who is borrowed."""

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

    `replan` is asked when the coordinator has news: of boxes, links or traffic. `record`: keep
    every step and transfer, for a Chrome trace. Raises WorldError or ClusterError for what does not
    fit together.
    """
    settings = settings or SimSettings()
    world = _World(cluster, runs, settings, model_of, record)
    world.progress = progress
    world.prepare(changes)
    if replan is not None:
        world.add_coordinator(replan)
    world.queue.run(settings.until_s)
    return world.result()


@final
@dataclass(slots=True)
class _TraceArrivals:
    """The arrivals of one service's trace: an event that schedules itself for the next one."""

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
            prefix = self.deployment.trace.prefixes[row] if self.deployment.trace.prefixes else ()
            request = SimRequest(self.deployment.number, row, self.prompts[row], self.outputs[row], prefix)
            self.world.accept(request, now)
        follow = self.world.take_following()
        if self.row < len(self.arrivals):
            follow.append(Scheduled(self.arrivals[self.row], self))
        return follow


@final
@dataclass(slots=True)
class _WorldEvent:
    """One of the world's methods, as an event."""

    world: _World
    act: Callable[[float], None]

    def happen(self, now: float) -> Iterable[Scheduled]:
        self.act(now)
        return self.world.take_following()


@final
class _World:
    """The state of a simulation; its methods are what events do."""

    def __init__(
        self, cluster: Cluster, runs: Sequence[ServiceRun], settings: SimSettings, model_of: ModelOf, record: bool
    ) -> None:
        self.queue = EventQueue()
        self.coordinator: SimCoordinator | None = None
        self.progress: Progress | None = None
        self._cluster = cluster
        self._settings = settings
        self._model_of = model_of
        self._network = FluidNetwork(link_capacities(cluster, settings.streams))
        self._transfers = KVTransfers(self._network, layerwise=settings.layerwise, wait_limit=settings.kv_wait_limit)
        self._network_event = _WorldEvent(self, self._advance_network)
        self._network_alarm = NEVER
        self._planning_event = _WorldEvent(self, self._plan)
        self._planning_alarm = NEVER
        self._missing: frozenset[str] = frozenset()
        self._damping = FlapDamping(settings.damping)
        self._held: frozenset[str] = frozenset()
        self._reuse_alarm = NEVER
        self._hosts: list[ReplicaHost] = []
        self._steps: list[StepLog] | None = [] if record else None
        self._transfer_log: list[TransferRecord] | None = [] if record else None
        self._follow: list[Scheduled] = []
        self._last_arrival = max(float(run.trace.arrival_s[-1]) for run in runs)
        self._ended = 0
        self._total = sum(len(run.trace) for run in runs)
        check_plans(cluster, [run.plan for run in runs])
        self._deployments = [Deployment(number, run, cluster, settings) for number, run in enumerate(runs)]
        self.gateway = SimGateway(
            self._deployments,
            self._transfers,
            cluster,
            settings,
            on_load=self._note_load,
            on_end=self._count_end,
            later=self._schedule,
            transfer_log=self._transfer_log,
        )

    def prepare(self, changes: Sequence[Change]) -> None:
        """Start the engines, and schedule arrivals and changes."""
        first: dict[str, bool] = {}
        for change in sorted(changes, key=lambda change: change.at):
            if isinstance(change, PlanChange):
                self.queue.push(change.at, self._plan_event(change))
                continue
            if isinstance(change, LinksChanged):
                degrade_links(self._cluster, change)
                self.queue.push(change.at, _WorldEvent(self, partial(self._change_links, change)))
                continue
            self._cluster.index(change.box)
            joins = isinstance(change, BoxJoined)
            first.setdefault(change.box, joins)
            self.queue.push(
                change.at, _WorldEvent(self, partial(self._join_box if joins else self._lose_box, change.box))
            )
        self._missing = frozenset(box for box, joins in first.items() if joins)
        self.gateway.set_missing(self._missing)
        for deployment in self._deployments:
            for replica in deployment.plan.replicas:
                deployment.hosts[replica.id] = self._start_host(deployment, replica)
                deployment.note_load(deployment.hosts[replica.id])
            deployment.set_missing(self._missing)
            trace = deployment.trace
            columns = (trace.arrival_s.tolist(), trace.prompt.tolist(), trace.output.tolist())
            self.queue.push(columns[0][0], _TraceArrivals(self, deployment, *columns))

    def add_coordinator(self, replan: Replan) -> None:
        """One that replans from now on."""
        names = [deployment.service.name for deployment in self._deployments]
        self.coordinator = SimCoordinator(
            replan, self._cluster, names, quiet_s=self._settings.quiet_s, missing=self._missing
        )
        if any(deployment.lends_replicas for deployment in self._deployments):
            self.queue.push(0.0, _WorldEvent(self, self._watch_pools))

    def accept(self, request: SimRequest, now: float) -> None:
        """A request arrives."""
        if self.coordinator is not None:
            self.coordinator.record_start(request.service, request.prompt, now)
        self.gateway.accept(request, now)

    def take_following(self) -> list[Scheduled]:
        """The events that follow from what has happened since the last call."""
        wake_at = self._network.wake_at
        if wake_at != self._network_alarm and wake_at != inf:
            self._network_alarm = wake_at
            self._follow.append(Scheduled(wake_at, self._network_event))
        plan_at = inf if self.coordinator is None else self.coordinator.wake_at
        if plan_at != self._planning_alarm and plan_at != inf:
            self._planning_alarm = plan_at
            self._follow.append(Scheduled(max(plan_at, self.queue.now), self._planning_event))
        follow, self._follow = self._follow, []
        return follow

    def result(self) -> SimResult:
        """The result. Once no event is left, nothing else is either."""
        for host in self._hosts if not len(self.queue) else ():
            if not host.is_lost:
                host.check_integrity()
        self._network.check_integrity()
        end_s = self.queue.now
        return SimResult(
            services=tuple(deployment.log.outcome() for deployment in self._deployments),
            replicas=tuple(host.outcome(self._deployments[host.service].service.name) for host in self._hosts),
            boxes=tuple(box.id for box in self._cluster.boxes),
            settings=self._settings,
            events=self.queue.happened,
            end_s=end_s,
            sent_bytes=self._transfers.sent_bytes,
            traffic_usd=sum(
                size * 1e-9 * float(self._cluster.usd_per_gb[ends])
                for ends, size in self._transfers.sent_bytes.items()
                if ends[0] != ends[1]
            ),
            steps=tuple(self._steps or ()),
            transfers=tuple(self._transfer_log or ()),
        )

    def advance_engine(self, host: ReplicaHost, now: float) -> list[Scheduled]:
        """A replica ends a step, and begins the next one."""
        signals = host.engine.advance(now)
        if signals:
            self.gateway.on_signals(host, signals, now)
        self._note_load(host)
        return self.take_following()

    def _advance_network(self, now: float) -> None:
        if now != self._network_alarm:
            return  # flows have come or gone since this alarm was set
        self._network_alarm = NEVER
        for flow in self._network.advance(now):
            transfer = self._transfers.end_flow(flow)
            if transfer is not None:
                completed = _WorldEvent(self, partial(self.gateway.complete_transfer, transfer))
                sync_s = self._settings.layer_sync_s if transfer.is_layerwise else 0.0
                self._follow.append(Scheduled(now + transfer.links.rtt_s + sync_s, completed))

    def _count_end(self, request: SimRequest, now: float) -> None:
        self._ended += 1
        # What comes after the last request of the traces nobody knows: the end of traffic is no news.
        if self.coordinator is not None and not request.left and now <= self._last_arrival:
            self.coordinator.record_end(request.service, request.prompt, request.count, now)
        if self.progress is not None and (self._ended % PROGRESS_EVERY == 0 or self._ended == self._total):
            self.progress(self._ended, self._total, now)

    def _schedule(self, at: float, act: Callable[[float], None]) -> None:
        self._follow.append(Scheduled(at, _WorldEvent(self, act)))

    def _note_load(self, host: ReplicaHost) -> None:
        """Tell the router of a new load, and reschedule the engine if it wakes earlier."""
        self._deployments[host.service].note_load(host)
        wake_at = host.engine.wake_at
        if wake_at != host.alarm and wake_at != inf:
            host.alarm = wake_at
            self._follow.append(Scheduled(wake_at, host))

    # Boxes and plans

    def _start_host(self, deployment: Deployment, replica: Replica) -> ReplicaHost:
        model = self._model_of(self._cluster, deployment.service, replica)
        number = len(self._hosts)
        record = None if self._steps is None else partial(_log_step, self._steps, number)
        engine = Engine(
            model.times,
            self._engine_settings(replica, model),
            kv_tokens=model.kv_tokens,
            stages=len(replica.stages),
            record=record,
        )
        host = ReplicaHost(number, deployment.number, replica, engine, self.advance_engine)
        host.is_lost = not self._missing.isdisjoint(replica.peers)
        self._hosts.append(host)
        return host

    def _engine_settings(self, replica: Replica, model: ReplicaModel) -> SimEngineSettings:
        """The settings of all engines, with the token budget that the plan gives this replica."""
        common = self._settings.engine
        if common is None:
            return SimEngineSettings(max_batched_tokens=replica.step_tokens or model.max_batched_tokens)
        if not replica.step_tokens:
            return common
        return replace(common, max_batched_tokens=min(replica.step_tokens, common.max_batched_tokens))

    def _lose_box(self, box: str, now: float) -> None:
        """A box fails. The coordinator notices `detect_s` later."""
        failed = [
            host
            for deployment in self._deployments
            for host in deployment.hosts.values()
            if box in host.replica.peers and not host.is_lost
        ]
        # All are marked before any is emptied: a request between two of them must not go back to the second.
        for host in failed:
            host.is_lost = True
        for host in failed:
            self.gateway.take_off(host, now)
        self._missing |= {box}
        missing = self._missing
        self.gateway.set_missing(missing)
        noticed = _WorldEvent(self, lambda then: self._notice_loss(box, missing, failed, then))
        self._follow.append(Scheduled(now + self._settings.detect_s, noticed))
        dead = _WorldEvent(self, lambda then: self._count_dead(box, then))
        self._follow.append(Scheduled(now + self._settings.planned_after_s, dead))

    def _notice_loss(self, box: str, missing: frozenset[str], hosts: Iterable[ReplicaHost], now: float) -> None:
        """Gateways notice which boxes are missing: their requests go on elsewhere."""
        self._damping.note_fault(box, "it was lost", now)
        self._hold(now)
        for deployment in self._deployments:
            deployment.set_missing(missing & self._missing)
        # A plan that was made before anybody knew may have begun others on the box meanwhile.
        begun = [host for deployment in self._deployments for host in deployment.hosts.values() if host.is_lost]
        for host in dict.fromkeys((*hosts, *begun)):
            self.gateway.notice_loss(host, now)

    def _count_dead(self, box: str, now: float) -> None:
        """The coordinator learns that a box is dead, unless it is back."""
        if self.coordinator is not None and box in self._missing:
            self.coordinator.on_lost(box, now)

    def _join_box(self, box: str, now: float) -> None:
        """A box joins; replicas that are whole now begin with empty engines."""
        self._missing -= {box}
        self.gateway.set_missing(self._missing)
        self._hold(now)
        for deployment in self._deployments:
            for name, host in list(deployment.hosts.items()):
                if host.is_lost and self._missing.isdisjoint(host.replica.peers):
                    deployment.hosts[name] = self._start_host(deployment, host.replica)
                    deployment.note_load(deployment.hosts[name])
            deployment.set_missing(self._missing)
            self.gateway.retry(deployment.number, now)
        if self.coordinator is not None:
            self.coordinator.on_joined(box, now)

    def _hold(self, now: float) -> None:
        """See which boxes are trusted less, and look again when one is trusted as before."""
        here = [box.id for box in self._cluster.boxes if box.id not in self._missing]
        self._held = self._damping.held(here, now)
        for deployment in self._deployments:
            deployment.set_held(self._held)
        if self.coordinator is not None:
            self.coordinator.set_held(self._held)
        wake_at = self._damping.wake_at(now)
        if wake_at != inf and wake_at != self._reuse_alarm:
            self._reuse_alarm = wake_at
            self._follow.append(Scheduled(wake_at, _WorldEvent(self, self._trust_again)))

    def _watch_pools(self, now: float) -> None:
        """Tell the coordinator what replicas report, again and again until all requests have ended."""
        if self._ended == self._total or not len(self.queue):
            return
        for deployment in self._deployments:
            if self.coordinator is not None and deployment.lends_replicas:
                self.coordinator.watch_pools(deployment.number, deployment.plan, deployment.actual_loads(), now)
        self._follow.append(Scheduled(now + WATCH_POOLS_S, _WorldEvent(self, self._watch_pools)))

    def _trust_again(self, now: float) -> None:
        before = self._held
        self._hold(now)
        if self._held != before:
            for deployment in self._deployments:
                self.gateway.retry(deployment.number, now)
            if self.coordinator is not None:
                self.coordinator.on_trusted(before - self._held, now)

    def _change_links(self, change: LinksChanged, now: float) -> None:
        """Links carry less or more; pipelines over them take another time for their steps."""
        self._cluster = cluster = degrade_links(self._cluster, change)
        self._network.change_capacities(link_capacities(cluster, self._settings.streams), now)
        for deployment in self._deployments:
            for host in deployment.hosts.values():
                if len(set(host.replica.peers)) > 1:
                    model = self._model_of(cluster, deployment.service, host.replica)
                    host.engine.change_times(model.times)
        if self.coordinator is not None:
            told = _WorldEvent(self, lambda then: self._tell_links(change, then))
            self._follow.append(Scheduled(now + self._settings.told_s, told))

    def _tell_links(self, change: LinksChanged, now: float) -> None:
        assert self.coordinator is not None
        ends = ", ".join(f"{source} to {target}" for source, target in change.ends[:2])
        more = f" and {len(change.ends) - 2} more" if len(change.ends) > 2 else ""
        self.coordinator.on_links(self._cluster, f"{change.gbps:g} Gb/s from {ends}{more}", now)

    def _plan(self, now: float) -> None:
        """The coordinator plans by its news. What it answered before and is not followed yet is void."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.wake_at > now:
            return
        self._planning_alarm = NEVER
        plans = tuple(deployment.plan for deployment in self._deployments)
        for change in coordinator.plan(plans, now):
            answer = self._plan_event(change, coordinator.round)
            self._follow.append(Scheduled(max(now, change.at), answer))

    def _plan_event(self, change: PlanChange, planned_in: int | None = None) -> _WorldEvent:
        """`planned_in`: the round of the coordinator that it is from; None: it is none of its."""
        if not 0 <= change.service < len(self._deployments):
            raise WorldError(f"a plan for service {change.service}; there are {len(self._deployments)}")
        check_plans(self._cluster, [change.plan])
        return _WorldEvent(self, lambda now: self._follow_plan(change, planned_in, now))

    def _follow_plan(self, change: PlanChange, planned_in: int | None, now: float) -> None:
        if self.coordinator is not None and planned_in not in (None, self.coordinator.round):
            return
        deployment = self._deployments[change.service]
        stopped, begun = deployment.follow_plan(change.plan, lambda replica: self._start_host(deployment, replica))
        # Hosts that go on may have another phase now, and with it another token budget.
        for host in deployment.hosts.values():
            model = self._model_of(self._cluster, deployment.service, host.replica)
            host.engine.settings = self._engine_settings(host.replica, model)
        for host in stopped:
            if not host.is_lost:
                host.is_lost = True
                self.gateway.take_off(host, now)
        loading: dict[float, list[ReplicaHost]] = {}
        for host in begun:
            loading.setdefault(change.reload_s.get(host.replica.id, 0.0), []).append(host)
        for seconds, hosts in loading.items():
            ready = _WorldEvent(self, partial(self._put_to_use, deployment, hosts))
            self._follow.append(Scheduled(now + seconds, ready))
        for host in stopped:
            self.gateway.notice_loss(host, now)
        self.gateway.retry(deployment.number, now)

    def _put_to_use(self, deployment: Deployment, hosts: Iterable[ReplicaHost], now: float) -> None:
        deployment.mark_ready(hosts)
        self.gateway.retry(deployment.number, now)


def _log_step(steps: list[StepLog], replica: int, step: StepRecord) -> None:
    steps.append(StepLog(replica, step))
