"""One service in a simulation: its plan, its replicas' engines, and the router with their loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, final

import numpy as np

from ..coordinator.plan import Plan, Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.planning.model.workload import Service
from ..coordinator.routing import Route, Router
from .engine.engine import Engine
from .engine.sequence import Sequence
from .engine.values import SimEngineError
from .events import Scheduled
from .kv_transfers import KVTransfer, TransferLinks, links_between
from .policies import POLICIES
from .results.outcomes import ReplicaOutcome, ServiceLog
from .scenario import ServiceRun, SimSettings, WorldError

__all__ = ["NEVER", "Assignment", "Deployment", "ReplicaHost", "SimRequest", "Split", "check_plans"]

NEVER: Final = -1.0

AdvanceHost = Callable[["ReplicaHost", float], list[Scheduled]]
"""Called when a replica's engine is due; returns the events that follow."""


@final
class ReplicaHost:
    """A replica of the plan with its engine and its load. As an event, it is the engine's alarm."""

    __slots__ = (
        "_advance", "alarm", "engine", "is_lost", "number", "outstanding", "prefill_tokens", "replica",
        "service", "stranded"
    )  # fmt: skip

    def __init__(self, number: int, service: int, replica: Replica, engine: Engine, advance: AdvanceHost) -> None:
        self.number = number
        self.service = service
        self.replica = replica
        self.engine = engine
        self.alarm = NEVER  # when the queue advances it next
        self.outstanding = 0  # requests
        self.prefill_tokens = 0  # of their prompts, still to be computed here
        self.is_lost = False  # one of its boxes has failed
        self.stranded: list[SimRequest] = []  # held when it failed, or routed here before anybody noticed
        self._advance = advance

    def happen(self, now: float) -> Iterable[Scheduled]:
        """Advance the engine, unless its next event has moved since this alarm was set."""
        if self.engine.wake_at != now:
            return ()
        self.alarm = NEVER
        return self._advance(self, now)

    def check_integrity(self) -> None:
        """Nothing is left when all requests have ended. Raises SimEngineError."""
        self.engine.check_integrity()
        if self.outstanding or self.prefill_tokens:
            raise SimEngineError(
                f"{self.replica.id} is left with {self.outstanding} requests, {self.prefill_tokens} tokens to prefill"
            )

    def outcome(self, service: str) -> ReplicaOutcome:
        """Its figures for the result."""
        return ReplicaOutcome(
            id=self.replica.id,
            service=service,
            phase=self.replica.phase,
            boxes=self.replica.peers,
            times=self.engine.times.source,
            counts=self.engine.counts,
            blocks=self.engine.blocks,
        )


@final
class SimRequest:
    """A request between its arrival and its last token. `generated`: tokens that its gateway has,
    as of its latest route or the end of its prefill; the first of them at `first_at`, which may lie
    ahead by a step."""

    __slots__ = ("arrival", "first_at", "generated", "output", "prompt", "row", "service")

    def __init__(self, service: int, row: int, arrival: float, prompt: int, output: int) -> None:
        self.service = service
        self.row = row
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.generated = 0
        self.first_at: float | None = None


class Split(NamedTuple):
    """The prefill half of a request on two replicas, until its KV has been transferred."""

    prefill: ReplicaHost
    prefill_seq: Sequence
    transfer: KVTransfer


@final
class Assignment:
    """A request on its route: its decode replica and, if that is another, its prefill replica.
    `prefill_tokens`: what the decode replica has to compute of the prompt itself, until the first
    token."""

    __slots__ = ("decode", "decode_seq", "prefill_number", "prefill_tokens", "request", "split")

    def __init__(self, request: SimRequest, decode: ReplicaHost, decode_seq: Sequence, split: Split | None) -> None:
        self.request = request
        self.decode = decode
        self.decode_seq = decode_seq
        self.split = split
        self.prefill_tokens = decode_seq.known - decode_seq.external
        self.prefill_number = decode.number if split is None else split.prefill.number

    def add_load(self) -> None:
        """Count it in the loads of its replicas."""
        for host, _ in self.sides():
            host.outstanding += 1
        self.decode.prefill_tokens += self.prefill_tokens
        if self.split is not None:
            self.split.prefill.prefill_tokens += self.split.prefill_seq.known

    def end_prefill(self) -> None:
        """The decode replica has computed all of the prompt that it has to."""
        self.decode.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0

    def remove_load(self) -> None:
        """Take it out of the decode replica's load."""
        self.end_prefill()
        self.decode.outstanding -= 1

    def sides(self) -> Iterator[tuple[ReplicaHost, Sequence]]:
        """The replicas of the route, each with its sequence."""
        if self.split is not None:
            yield self.split.prefill, self.split.prefill_seq
        yield self.decode, self.decode_seq


@final
class Deployment:
    """See the module."""

    def __init__(self, number: int, run: ServiceRun, cluster: Cluster, settings: SimSettings) -> None:
        self.number = number
        self.service: Service = run.service
        self.trace = run.trace
        self.plan = run.plan
        self.hosts: dict[str, ReplicaHost] = {}
        self.backlog: deque[SimRequest] = deque()  # no replica can take them now
        self.log = ServiceLog(run)
        self.token_bytes = run.service.model.kv_bytes_per_token * run.service.kv_bits / 16.0
        self._cluster = cluster
        self._settings = settings
        self._rng = np.random.default_rng((settings.seed, number))
        self._router = Router(run.plan, settings.routing, policies=POLICIES, rng=self._rng)
        self._excluded: frozenset[str] = frozenset()  # boxes and replicas that get no requests
        self._not_ready: set[str] = set()
        self._missing: frozenset[str] = frozenset()
        self._changed: dict[str, ReplicaHost] = {}  # since the router last heard of them
        self._links: dict[tuple[str, str], TransferLinks] = {}
        self.check_links()

    def route(self, tokens: int, now: float) -> Route:
        """Choose replicas by the loads as they are now. Raises NoRoute."""
        loads = self._router.loads
        for name, host in self._changed.items():
            loads.note(name, host.outstanding, host.prefill_tokens, host.engine.free_tokens)
        self._changed.clear()
        return self._router.route(tokens, self._excluded, now=now)

    def note_load(self, host: ReplicaHost) -> None:
        """The router is to hear of this replica's load before it routes the next request."""
        if self.hosts.get(host.replica.id) is host:
            self._changed[host.replica.id] = host

    def transfer_links(self, prefill: Replica, decode: Replica) -> TransferLinks:
        """The links that KV takes from one replica to the other."""
        key = (prefill.id, decode.id)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = links_between(self._cluster, prefill, decode)
        return found

    def check_links(self) -> None:
        """Raise WorldError for a pair with requests and without a link."""
        by_id = {replica.id: replica for replica in self.plan.replicas}
        for pair in self.plan.pairings:
            if pair.prefill != pair.decode and pair.weight > 0.0:
                self.transfer_links(by_id[pair.prefill], by_id[pair.decode])

    def set_missing(self, missing: frozenset[str]) -> None:
        """Route around these boxes from now on."""
        self._missing = missing
        self._excluded = missing | self._not_ready

    def mark_ready(self, replica: str) -> None:
        """A replica has loaded its weights: it may get requests."""
        self._not_ready.discard(replica)
        self._excluded = self._missing | self._not_ready

    def follow_plan(
        self, plan: Plan, start: Callable[[Replica], ReplicaHost]
    ) -> tuple[list[ReplicaHost], list[ReplicaHost]]:
        """Follow another plan. Returns the hosts that it does not use any more, and those that
        `start` made, which get no requests before `mark_ready`.

        A replica of the same GPUs and layers goes on with its engine, whatever its id and phase are
        now.
        """
        running = {host.replica.stages: host for host in self.hosts.values()}
        self.hosts, begun = {}, []
        for replica in plan.replicas:
            host = running.pop(replica.stages, None)
            if host is None:
                host = start(replica)
                begun.append(host)
            host.replica = replica
            self.hosts[replica.id] = host
        old = self._not_ready
        self._not_ready = {host.replica.id for host in begun} | (old & self.hosts.keys())
        self.plan = plan
        self._router = Router(plan, self._settings.routing, policies=POLICIES, rng=self._rng)
        self._links.clear()
        self._changed = dict(self.hosts)
        self.set_missing(self._missing)
        self.check_links()
        return list(running.values()), begun


def check_plans(cluster: Cluster, plans: Iterable[Plan]) -> None:
    """Raise ClusterError for a box that is not there, WorldError for a GPU in two plans."""
    owner: dict[tuple[str, int], str] = {}
    for plan in plans:
        for replica in plan.replicas:
            for peer, gpu in replica.gpus:
                if gpu >= cluster.boxes[cluster.index(peer)].gpus:
                    raise WorldError(f"replica {replica.id}: box {peer} has no GPU {gpu}")
                other = owner.setdefault((peer, gpu), plan.service)
                if other != plan.service:
                    raise WorldError(f"GPU {gpu} of box {peer} is in the plans of {other} and {plan.service}")
