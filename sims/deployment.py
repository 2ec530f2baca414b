"""One service in a simulation: its plan, its replicas' engines, and the router with their loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

import numpy as np

from ..coordinator.plan import Plan, Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.planning.model.workload import Service
from ..coordinator.routing.interface import NoRoute, Route
from ..coordinator.routing.router import Router
from .kv_transfers import TransferLinks, links_between
from .policies import POLICIES
from .results.outcomes import ServiceLog
from .scenario import ServiceRun, SimSettings, WorldError
from .serving import ReplicaHost


@final
class Deployment:
    """See the module."""

    def __init__(self, number: int, run: ServiceRun, cluster: Cluster, settings: SimSettings) -> None:
        self.number = number
        self.service: Service = run.service
        self.trace = run.trace
        self.plan = run.plan
        self.hosts: dict[str, ReplicaHost] = {}
        self.log = ServiceLog(run)
        self.token_bytes = run.service.model.kv_bytes_per_token * run.service.kv_bits / 16.0
        self._cluster = cluster
        self._settings = settings
        self._rng = np.random.default_rng((settings.seed, number))
        self._router = Router(run.plan, settings.routing, policies=POLICIES, rng=self._rng)
        self._excluded: frozenset[str] = frozenset()  # boxes and replicas that get no requests
        self._missing: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()  # boxes that are the last to be taken
        self._changed: dict[str, ReplicaHost] = {}  # since the router last heard of them
        self._links: dict[tuple[str, str], TransferLinks] = {}
        self.check_links()

    def route(self, tokens: int, now: float, blamed: Mapping[str, int], answer: int | None = None) -> Route:
        """Choose replicas by present loads, without hosts `blamed` by number. The length of the
        `answer` is told where the settings say so. Raises NoRoute."""
        output = answer if self._settings.known_answers else None
        loads = self._router.loads
        for name, host in self._changed.items():
            loads.note(name, host.outstanding, host.prefill_tokens, host.engine.free_tokens, decodes=host.decodes)
        self._changed.clear()
        excluded = self._excluded
        if blamed:
            failed = frozenset(blamed.values())
            excluded |= {name for name, host in self.hosts.items() if host.number in failed}
        try:
            return self._router.route(tokens, excluded | self._held, now=now, output_tokens=output)
        except NoRoute:
            if self._held <= excluded:
                raise
        return self._router.route(tokens, excluded, now=now, output_tokens=output)

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
        self._update_excluded()

    def set_held(self, held: frozenset[str]) -> None:
        """Take these boxes from now on only where no others can serve."""
        self._held = held

    def mark_ready(self, hosts: Iterable[ReplicaHost]) -> None:
        """Replicas have loaded their weights: they may get requests."""
        for host in hosts:
            host.is_loading = False
        self._update_excluded()

    def _update_excluded(self) -> None:
        self._excluded = self._missing | {name for name, host in self.hosts.items() if host.is_loading}

    def follow_plan(
        self, plan: Plan, start: Callable[[Replica], ReplicaHost]
    ) -> tuple[list[ReplicaHost], list[ReplicaHost]]:
        """Follow another plan. Returns the hosts that it does not use any more, and those that
        `start` made, which get no requests while they are loading.

        A replica of the same GPUs and layers goes on with its engine, whatever its id and phase are
        now.
        """
        running = {host.replica.stages: host for host in self.hosts.values()}
        self.hosts, begun = {}, []
        for replica in plan.replicas:
            host = running.pop(replica.stages, None)
            if host is None:
                host = start(replica)
                host.is_loading = True
                begun.append(host)
            host.replica = replica
            self.hosts[replica.id] = host
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
