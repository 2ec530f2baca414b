"""One service in a simulation: its plan, its replicas' engines, and the router with their loads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import NamedTuple, final

import msgspec
import numpy as np

from ..coordinator.capacity import LinkView
from ..coordinator.costs.sweep import profile_times
from ..coordinator.plan import Plan, Replica
from ..coordinator.planning.model.cluster import Cluster
from ..coordinator.planning.model.workload import Service
from ..coordinator.prefixes.fetching import KvLinks, PrefixFetch, list_sources, route_fetch
from ..coordinator.prefixes.knowledge import ExpectedPrefill, PrefixKnowledge
from ..coordinator.profile import ReplicaProfile
from ..coordinator.routing.interface import NoRoute, ReplicaLoads, Route
from ..coordinator.routing.pools import NO_ANSWERS, PoolClaim, PoolState
from ..coordinator.routing.router import NOTHING_CACHED, Router
from .kv_transfers import TransferLinks, links_between
from .policies import POLICIES
from .records import Trace
from .results.outcomes import ServiceLog
from .scenario import ServiceRun, SimSettings, WorldError
from .serving import GatewayPlaces, ReplicaHost, SimRequest


@final
class _Report:
    """What a replica has told of its load, and by gateway, what that has sent there or has seen end
    since: requests, and tokens of prompts. `had`: requests of each gateway there when it was told.
    `answers`: what it has told single gateways since, which then holds for those."""

    __slots__ = ("answers", "decodes", "had", "kv_free_tokens", "outstanding", "own", "own_tokens", "prefill_tokens")

    def __init__(self, host: ReplicaHost, had: Counter[int | None]) -> None:
        self.outstanding = host.outstanding
        self.prefill_tokens = host.prefill_tokens
        self.kv_free_tokens = host.engine.free_tokens
        self.decodes = host.decodes
        self.had = had
        self.own: Counter[int | None] = Counter()
        self.own_tokens: Counter[int | None] = Counter()
        self.answers: dict[int | None, tuple[PoolState, SentWork]] = {}  # the latest, and all that they had sent before

    def told(self, gateway: int | None) -> PoolState | None:
        """What it has answered to this gateway, with what that has sent there since."""
        if gateway not in self.answers:
            return None
        told, asked = self.answers[gateway]
        return msgspec.structs.replace(
            told,
            requests=max(0, told.requests + self.own[gateway] - asked.requests),
            prefill_tokens=told.prefill_tokens + self.own_tokens[gateway] - asked.tokens,
        )


class SentWork(NamedTuple):
    """What a gateway had sent to a replica since its `report`."""

    report: _Report
    requests: int
    tokens: int


@final
class Deployment:
    """See the module."""

    def __init__(self, number: int, run: ServiceRun, cluster: Cluster, settings: SimSettings) -> None:
        self.number = number
        self.service: Service = run.service
        self.trace = run.trace
        self._as_routed = run.as_routed
        self.plan = run.plan
        self.hosts: dict[str, ReplicaHost] = {}
        self.log = ServiceLog(run)
        model = run.service.model
        self.token_bytes = model.layers * model.raw_kv_bytes_per_token_layer * run.service.kv_bits / 16.0
        self._cluster = cluster
        self._settings = settings
        self._rng = np.random.default_rng((settings.seed, number))
        self._places = GatewayPlaces(cluster, settings)
        # By the box of the gateway; None: of all gateways, which route as one while they hear of all loads at once.
        self._routers: dict[int | None, Router] = {None: self._make_router(None, None)}
        self._profiles: dict[int, ReplicaProfile] = {}  # by the number of the host
        self._reports: dict[str, _Report] = {}  # what gateways have heard, where they hear it late
        self._report_at = 0.0  # when they hear the next
        self._routed: dict[int, tuple[int | None, str]] = {}  # by row: the gateway, and where it decodes
        self._prefixes: dict[int | None, PrefixKnowledge] = {}  # likewise: who holds which
        self._heard_at = -inf  # when gateways have heard of those last
        self._excluded: frozenset[str] = frozenset()  # boxes and replicas that get no requests
        self._missing: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()  # boxes that are the last to be taken
        self._changed: dict[str, ReplicaHost] = {}  # since the router last heard of them
        self._links: dict[tuple[str, str], TransferLinks] = {}
        self._kv_links = KvLinks(self.token_bytes * 8e-9, self._link_between)
        self._check_pieces(run.trace)
        self.check_links()

    def route(
        self,
        tokens: int,
        now: float,
        blamed: Mapping[str, int],
        request: SimRequest | None = None,
        answers: Mapping[PoolClaim, bool] = NO_ANSWERS,
    ) -> Route:
        """Choose replicas by the loads that the request's gateway knows, without hosts `blamed` by
        number. The length of the answer, or its limit, is told where the settings say so. Raises NoRoute."""
        left = request.left if request is not None else None
        gateway = request.gateway if request is not None and self._settings.report_s else None
        router = self._routers.get(gateway)
        if router is None:
            router = self._routers[gateway] = self._make_router(None, gateway)
        self._tell_loads(router, gateway, now)
        excluded = self._excluded
        if blamed:
            failed = frozenset(blamed.values())
            excluded |= {name for name, host in self.hosts.items() if host.number in failed}
        row = request.row if request is not None else None
        known, named = self._prefixes_at(gateway, now), dict[str, int]()
        names = request.prefix if request is not None and known is not None else ()
        if known is not None and names:
            named = known.find_named(lambda _: names, now)
        cached = known.believe(named) if known is not None else NOTHING_CACHED
        find = partial(
            router.route,
            tokens,
            now=now,
            request=row,
            output_tokens=left if self._settings.known_answers else None,
            max_output_tokens=left if self._settings.told_limits else None,
            cached_tokens=cached,
            answers=answers,
        )
        try:
            route = find(excluded | self._held)
        except NoRoute:
            if self._held <= excluded:
                raise
            route = find(excluded)
        route = self._repeat_route(route, row, tokens)
        if known is not None and names:
            prefill = route.prefill or route.decode
            queued = int(router.loads.prefill_tokens[router.loads.index[prefill]])
            fetch = self._choose_fetch(route, tokens, named, known, excluded | self._held, router, now)
            expected = ExpectedPrefill(now, tokens, queued, named.get(prefill, 0))
            known.note_route(row, prefill, lambda _: names, expected, fetch, is_asked=bool(route.claims))
            if fetch is not None:
                route = route_fetch(route, fetch, tokens)
        if self._settings.report_s and row is not None:
            self._count_own(row, gateway, route, tokens)
        return route

    def _repeat_route(self, route: Route, row: int | None, tokens: int) -> Route:
        """Where the request went in the run that is repeated, if there is one and the plan has these replicas."""
        ends = self._as_routed.get(row) if row is not None else None
        if ends is None:
            return route
        heads = {host.replica.head: name for name, host in self.hosts.items()}
        prefill, decode = (heads.get(end, "") for end in ends)
        is_same = (route.prefill or route.decode, route.decode) == (prefill, decode)
        return route if is_same or not (prefill and decode) else Route.between(prefill, decode, tokens)

    def own_work(self, request: SimRequest, claim: PoolClaim) -> SentWork | None:
        """Of its gateway at a replica that this asks now; None: gateways hear of all loads at once."""
        report, gateway = self._reports.get(claim.replica), request.gateway
        return SentWork(report, report.own[gateway], report.own_tokens[gateway]) if report is not None else None

    def note_told(
        self, request: SimRequest, claim: PoolClaim, state: PoolState, accepted: bool, asked: SentWork | None
    ) -> None:
        """The gateway of a request hears how it stands at a replica that it has asked for a place, unless that has
        reported meanwhile."""
        if not accepted:
            asked = self._take_back(request, claim, asked)
        if asked is not None and asked.report is self._reports.get(claim.replica):
            asked.report.answers[request.gateway] = state, asked

    def note_accepted(self, request: SimRequest) -> None:
        """The replicas of its route take it."""
        known = self._prefixes.get(request.gateway if self._settings.report_s else None)
        if known is not None:
            known.note_accepted(request.row)

    def _take_back(self, request: SimRequest, claim: PoolClaim, asked: SentWork | None) -> SentWork | None:
        """It does not go where it has been refused; what its gateway has sent there without it."""
        decodes = self._routed.get(request.row, (None, ""))[1] == claim.replica
        if decodes:
            del self._routed[request.row]
        if asked is None:
            return None
        report, requests, tokens = asked
        report.own[request.gateway] -= decodes
        report.own_tokens[request.gateway] -= claim.prefill_tokens
        return SentWork(report, requests - decodes, tokens - claim.prefill_tokens)

    def _choose_fetch(
        self,
        route: Route,
        tokens: int,
        named: Mapping[str, int],
        known: PrefixKnowledge,
        excluded: frozenset[str],
        router: Router,
        now: float,
    ) -> PrefixFetch | None:
        """What of its prompt comes from another replica, none of those with `excluded` boxes."""
        share = self._settings.routing.prefix_fetch
        if not share:
            return None
        sources = list_sources(self.plan, route, named, excluded=excluded, loads=router.loads, prompt_tokens=tokens)
        if not sources:
            return None
        token_s = self.profile(self.hosts[route.decode]).prefill.prompt_token_s
        return known.choose_fetch(
            tokens, route.decode, named, sources=sources, token_s=token_s, links=self._kv_links, share=share, now=now
        )

    def _link_between(self, source: str, target: str) -> LinkView | None:
        cluster, ends = self._cluster, (self.hosts[source].replica.head, self.hosts[target].replica.head)
        one, two = map(cluster.index, ends)
        if not cluster.gbps[one, two] > 0.0:
            return None
        return LinkView(
            source=ends[0], target=ends[1], rtt_s=float(cluster.rtt_s[one, two]), gbps=float(cluster.gbps[one, two])
        )

    def note_first_token(self, request: SimRequest, at: float) -> None:
        """Its answer has begun."""
        gateway = request.gateway if self._settings.report_s else None
        if (known := self._prefixes.get(gateway)) is not None:
            known.note_first_token(request.row, at)

    @property
    def mixes_phases(self) -> bool:
        """Whether the policy has any replica prefill and decode."""
        return self._routers[None].policy.mixes_phases

    @property
    def lends_replicas(self) -> bool:
        """Whether the policy has replicas do what the plan's phases do not give them."""
        return self._routers[None].policy.lends_replicas

    def end_request(self, request: SimRequest, output_tokens: int | None, first_token_at: float | None) -> None:
        """A request has ended, with so many tokens of its answer; None: not with all of it. `first_token_at`: where
        it has run on one route alone."""
        gateway = request.gateway if self._settings.report_s else None
        router = self._routers.get(gateway)
        if router is not None:
            router.end_request(request.row, output_tokens)
        if (known := self._prefixes.get(gateway)) is not None:
            known.note_end(request.row, first_token_at)
        self._uncount_own(request.row)

    def usable_hosts(self) -> list[ReplicaHost]:
        """Those that requests are sent to, by what is known of boxes; all, where there are none."""
        missing = self._excluded
        hosts = list(self.hosts.values())
        return [h for h in hosts if missing.isdisjoint((h.replica.id, *h.replica.peers))] or hosts

    def work_of_others(self, gateway: int | None, now: float) -> dict[str, tuple[int, int]]:
        """By replica, as they have told last: requests of other gateways, and tokens of prompts that have yet to be
        computed, this gateway's among them."""
        self._hear_reports(now)
        return {
            name: (max(0, report.outstanding - report.had[gateway]), report.prefill_tokens)
            for name, report in self._reports.items()
        }

    def _prefixes_at(self, gateway: int | None, now: float) -> PrefixKnowledge | None:
        """What this gateway knows of prefix caches; it hears of them as often as of loads. None: they are not routed
        by."""
        if not (self.trace.prefixes and self._settings.routing.prefix_weight):
            return None
        known = self._prefixes.setdefault(gateway, PrefixKnowledge())
        if now >= self._heard_at + self._settings.report_s:
            self._heard_at = now
            for each in self._prefixes.values():
                each.keep(self.hosts)
                for host in self.hosts.values():
                    host.tell_prefixes(each.index)
        return known

    def _check_pieces(self, trace: Trace) -> None:
        """Raise WorldError for a prefix cache whose pieces are not those that the trace names."""
        engine = self._settings.engine
        tokens = engine.prefix_blocks * engine.block_tokens if engine is not None else 0
        if tokens and trace.prefixes and tokens != trace.prefix_tokens:
            raise WorldError(
                f"prefix caches keep pieces of {tokens} tokens, and the trace names those of {trace.prefix_tokens}"
            )

    def _make_router(self, earlier: Router | None, gateway: int | None) -> Router:
        router = Router(self.plan, self._settings.routing, policies=POLICIES, rng=self._rng, earlier=earlier)
        router.loads.round_trip_s[:] = [self._places.round_trip_s(gateway, replica) for replica in self.plan.replicas]
        return router

    def _tell_loads(self, router: Router, gateway: int | None, now: float) -> None:
        """What is known of loads at this gateway: all that is so, or what replicas have told last,
        and what it has routed or has seen end since."""
        if not self._settings.report_s:
            for host in self._changed.values():
                router.loads.note(
                    host.replica.id,
                    host.outstanding,
                    host.prefill_tokens,
                    host.engine.free_tokens,
                    decodes=host.decodes,
                )
                self._note_profile(router, host)
            self._changed.clear()
            return
        self._hear_reports(now)
        router.loads.gateways = float(max(1, len(self._settings.gateways)))
        for name, report in self._reports.items():
            requests, tokens = report.own[gateway], report.own_tokens[gateway]
            router.loads.note(
                name,
                max(0, report.outstanding + requests),
                report.prefill_tokens + tokens,
                report.kv_free_tokens,
                decodes=report.decodes,
                sent_tokens=tokens,
                told=report.told(gateway),
            )
            self._note_profile(router, self.hosts[name])

    def _hear_reports(self, now: float) -> None:
        """Replicas tell of their loads when it is time, whether requests are routed meanwhile or not."""
        if now < self._report_at:
            return
        had: defaultdict[str, Counter[int | None]] = defaultdict(Counter)
        for own, decode in self._routed.values():
            had[decode][own] += 1
        self._reports = {name: _Report(host, had[name]) for name, host in self.hosts.items()}
        self._report_at = now - now % self._settings.report_s + self._settings.report_s

    def _note_profile(self, router: Router, host: ReplicaHost) -> None:
        profiles = router.loads.profiles
        if router.needs_profiles and profiles[router.loads.index[host.replica.id]] is None:
            profiles[router.loads.index[host.replica.id]] = self.profile(host)

    def profile(self, host: ReplicaHost) -> ReplicaProfile:
        """As found by a sweep before it has traffic."""
        found = self._profiles.get(host.number)
        if found is None:
            engine = host.engine
            tokens = engine.blocks * engine.settings.block_tokens
            found = self._profiles[host.number] = profile_times(engine.times, tokens)
        return found

    def _count_own(self, row: int, gateway: int | None, route: Route, tokens: int) -> None:
        self._uncount_own(row)
        self._routed[row] = gateway, route.decode
        self._reports[route.decode].own[gateway] += 1
        first = route.decode if route.cached else route.prefill or route.decode
        self._reports[first].own_tokens[gateway] += tokens - route.cached - route.found

    def _uncount_own(self, row: int) -> None:
        gateway, decode = self._routed.pop(row, (None, ""))
        if decode in self._reports:
            self._reports[decode].own[gateway] -= 1

    def actual_loads(self) -> ReplicaLoads:
        """The loads of the plan's replicas as they are now, as the coordinator hears of them."""
        loads = ReplicaLoads(replica.id for replica in self.plan.replicas)
        for host in self.hosts.values():
            loads.note(
                host.replica.id, host.outstanding, host.prefill_tokens, host.engine.free_tokens, decodes=host.decodes
            )
        return loads

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
        self._routers = {gateway: self._make_router(router, gateway) for gateway, router in self._routers.items()}
        self._reports, self._report_at = {}, 0.0
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
