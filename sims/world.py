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
from itertools import count
from math import inf
from typing import Final, final

from ..coordinator.plan import Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.planning.model.workload import Service
from ..coordinator.routing import NoRoute
from .deployment import NEVER, Assignment, Deployment, SimReplica, SimRequest, Split, check_plans
from .engine.engine import Engine
from .engine.sequence import Sequence as Work
from .engine.values import EngineSettings, SignalKind, StepRecord
from .events import EventQueue, Scheduled
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
            self.world.dispatch(SimRequest(self.deployment.number, row, now, self.prompts[row], self.outputs[row]), now)
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
        self.world.landed(self.handover, now)
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
        self._assigned: dict[int, Assignment] = {}  # by the key of both sides' sequences
        self._keys = count()
        self._follow: list[Scheduled] = []
        self._ended = 0
        self._total = sum(len(run.trace) for run in runs)
        check_plans(cluster, [run.plan for run in runs])
        self._deployments = [Deployment(number, run, cluster, settings) for number, run in enumerate(runs)]

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

    # Requests

    def dispatch(self, request: SimRequest, now: float) -> None:
        """Find a route for it and set it going; it waits where there is none."""
        deployment = self._deployments[request.service]
        known = request.prompt + request.written
        try:
            route = deployment.route(known, now)
        except NoRoute:
            deployment.backlog.append(request)
            return
        decode = deployment.hosts[route.decode]
        prefill = deployment.hosts[route.prefill] if route.prefill is not None else None
        if prefill is not None and request.output - request.written == 1 and self._prefill_writes(known, route.split):
            decode, prefill = prefill, None  # the only token comes from there
        for host in (decode, prefill):
            if host is not None and host.lost:
                host.stranded.append(request)
                return
        assignment = self._assign(request, decode, prefill, route.split)
        if not all(host.engine.fits(work) for host, work in assignment.sides()):
            deployment.log.refused += 1
            self._count_end(now)
            return
        self._assigned[assignment.writer.key] = assignment
        assignment.taken_up()
        for host, work in assignment.sides():
            host.engine.submit(work, now)
            self._touch(host)
        if assignment.split is not None:
            assignment.split.handover.room = decode.engine.expects(assignment.writer)

    def _prefill_writes(self, known: int, split: int) -> bool:
        """Whether the next token comes from the prefill side."""
        return split >= known and not self._settings.decode_writes_first

    def _assign(self, request: SimRequest, decode: SimReplica, prefill: SimReplica | None, split: int) -> Assignment:
        """Sequences for both sides, or for one that does it all."""
        key = next(self._keys)
        known, left = request.prompt + request.written, request.output - request.written
        fresh = request.first_at is None
        if prefill is None or known == 1:  # the writing side reads the last token in any case
            return Assignment(request, decode, Work(key, known, left, fresh=fresh), None)
        if self._prefill_writes(known, split):
            writer = Work(key, known + 1, left - 1, fresh=False, incoming=known)
        else:
            writer = Work(key, known, left, fresh=fresh, incoming=min(split, known - 1))
        deployment = self._deployments[request.service]
        ways = deployment.ways(prefill.replica, decode.replica)
        handover = KVTransfer(key, ways, deployment.token_bytes, deployment.service.model.layers)
        reader = Work(key, split, 0, hands_over=True)
        return Assignment(request, decode, writer, Split(prefill, reader, handover))

    # Engines and links

    def engine_woke(self, host: SimReplica, now: float) -> list[Scheduled]:
        """A replica ends a step, and begins another."""
        signals = host.engine.advance(now)
        for signal in signals:
            assignment = self._assigned.get(signal.sequence.key)
            if signal.kind is SignalKind.READ:
                self._read(host, assignment, signal.sequence, now)
            elif assignment is None:  # the request has another route now
                continue
            elif signal.kind is SignalKind.DONE:
                self._done(assignment, now)
            elif signal.kind is SignalKind.FIRST:
                assignment.request.first_at = signal.at
                assignment.read()
            elif assignment.split is None:
                continue
            elif signal.kind is SignalKind.ROOM:
                self._handovers.room_made(assignment.split.handover, now)
            else:
                self._handovers.reading(assignment.split.handover, signal.tokens, signal.at, now)
        self._touch(host)
        return self.take_follow()

    def landed(self, handover: KVTransfer, now: float) -> None:
        """All of a request's KV is where its answer will be written."""
        assignment = self._assigned.get(handover.request)
        if assignment is None or assignment.split is None:
            return  # it was withdrawn on the last bit of the way
        (prefill, reader, _), decode, request = assignment.split, assignment.decode, assignment.request
        assignment.split = None
        self._deployments[request.service].log.kv_s[request.row] = now - handover.read_at
        if self._transfers is not None:
            self._transfers.append(
                TransferRecord(request.row, prefill.number, decode.number, handover.begun_at, now, reader.known)
            )
        prefill.engine.release(reader, now)
        decode.engine.land(assignment.writer, now)
        self._touch(prefill)
        self._touch(decode)

    def _network_woke(self, now: float) -> None:
        if now != self._network_alarm:
            return  # flows have come or gone since this alarm was set
        self._network_alarm = NEVER
        for flow in self._network.advance(now):
            handover = self._handovers.ended(flow)
            if handover is not None:
                self._follow.append(Scheduled(now + handover.ways.rtt_s, _KvLanded(self, handover)))

    def _read(self, host: SimReplica, assignment: Assignment | None, reader: Work, now: float) -> None:
        host.outstanding -= 1
        host.unread -= reader.known
        if assignment is None or assignment.split is None:
            host.engine.release(reader, now)
            return
        request = assignment.request
        if self._prefill_writes(request.prompt + request.written, reader.known):
            request.written += 1
            if request.first_at is None:
                request.first_at = now
        self._handovers.all_read(assignment.split.handover, now)

    def _done(self, assignment: Assignment, now: float) -> None:
        decode, request = assignment.decode, assignment.request
        assignment.let_go()
        del self._assigned[assignment.writer.key]
        log = self._deployments[request.service].log
        log.ttft_s[request.row] = (now if request.first_at is None else request.first_at) - request.arrival
        log.e2e_s[request.row] = now - request.arrival
        log.decode[request.row] = decode.number
        log.prefill[request.row] = assignment.prefill_number
        self._count_end(now)

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
            self._strand_all(host, now)
        self._missing |= {box}
        missing = self._missing
        noticed = _WorldEvent(self, lambda then: self._noticed(missing, lost, then))
        self._follow.append(Scheduled(now + self._settings.detect_s, noticed))

    def _strand_all(self, host: SimReplica, now: float) -> None:
        """Everything that a replica had is to be routed again."""
        for work in host.engine.lose(now):
            assignment = self._assigned.pop(work.key, None)
            if assignment is not None:
                self._withdraw(assignment, now)
                host.stranded.append(assignment.request)

    def _withdraw(self, assignment: Assignment, now: float) -> None:
        """Take a request off its route; it keeps the tokens that its gateway has got."""
        request, decode, writer = assignment.request, assignment.decode, assignment.writer
        if assignment.split is None:
            request.written = request.output - writer.left
            if not request.written:
                request.first_at = None  # announced for the end of a step that never ended
            return
        prefill, reader, handover = assignment.split
        self._handovers.abandon(handover, now)
        if not decode.lost:
            decode.engine.withdraw(writer, now)
            assignment.let_go()
            self._touch(decode)
        if not prefill.lost and handover.read:
            prefill.engine.release(reader, now)
            self._touch(prefill)

    def _noticed(self, missing: frozenset[str], hosts: Iterable[SimReplica], now: float) -> None:
        """The network has found out which boxes are missing: requests are replayed, and there may be new plans."""
        for deployment in self._deployments:
            deployment.boxes_missing(missing & self._missing)
        self._replay(hosts, now)
        self._ask_for_plans(now)

    def _replay(self, hosts: Iterable[SimReplica], now: float) -> None:
        for host in hosts:
            stranded, host.stranded = host.stranded, []
            for request in stranded:
                self._deployments[request.service].log.replays[request.row] += 1
                self.dispatch(request, now)

    def _join(self, box: str, now: float) -> None:
        """A box is there, with its replicas' weights loaded as far as all their boxes are."""
        self._missing -= {box}
        for deployment in self._deployments:
            for name, host in list(deployment.hosts.items()):
                if host.lost and self._missing.isdisjoint(host.replica.peers):
                    deployment.hosts[name] = self._start(deployment, host.replica)
                    deployment.changed(deployment.hosts[name])
            deployment.boxes_missing(self._missing)
            self._try_backlog(deployment, now)
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
                self._strand_all(host, now)
        ready = _WorldEvent(self, lambda then: self._ready(deployment, begun, then))
        self._follow.append(Scheduled(now + change.reload_s, ready))
        self._replay(stopped, now)
        self._try_backlog(deployment, now)

    def _ready(self, deployment: Deployment, hosts: Iterable[SimReplica], now: float) -> None:
        for host in hosts:
            if deployment.hosts.get(host.replica.id) is host:
                deployment.ready(host.replica.id)
        self._try_backlog(deployment, now)

    def _try_backlog(self, deployment: Deployment, now: float) -> None:
        waiting = list(deployment.backlog)
        deployment.backlog.clear()
        for request in waiting:
            self.dispatch(request, now)


def _keep(steps: list[StepLog], replica: int, step: StepRecord) -> None:
    steps.append(StepLog(replica, step))
