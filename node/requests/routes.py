"""Which route a request takes: the plan's, among the replicas that can serve it now. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Final, final
from zlib import crc32

import numpy as np

from ...bootstrap import PeerId
from ...coordinator import Demand, NoRoute, Plan, Route, Router, RoutingSettings
from ...coordinator.capacity import UNKNOWN_RTT_S, Links
from ...coordinator.names import name_of
from ...coordinator.prefixes.fetching import PrefixFetch, list_sources, route_fetch
from ...coordinator.prefixes.index import NamesOf
from ...coordinator.prefixes.knowledge import ExpectedPrefill, PrefixKnowledge
from ...coordinator.profile import ReplicaProfile
from ...coordinator.repair.damping import DampingSettings, FlapDamping
from ...coordinator.requests.stalls import ExpectedTimes
from ...coordinator.requests.values import FindRoute
from ...coordinator.routing.estimates.profiles import ReplicaProfiles
from ...coordinator.routing.pools import NO_ANSWERS, PoolClaim, PoolState
from ...coordinator.routing.router import NOTHING_CACHED
from ..adverts import IS_DEAD, join_faults
from ..messages import Advert, LinkTable
from ..view import NetworkView, OwnWork, Queue
from .engine_room import prefill_tokens_s

STALL_DAMPING: Final = DampingSettings(suppress_at=1.0)
"""Nobody but its gateway sees a stall, so one is enough: 50 s for the first, 150 s for each that follows soon."""


NOWHERE: Final = PeerId("")


def _unknown_demand() -> Demand | None:
    return None


@final
class RouteFinder:
    """Routes requests for a service by the plan that the `view` follows for it. `queues`: this gateway's work at each
    node; `demand`: what it is asked; `gateway`: the box that it is on, by which it draws lots."""

    def __init__(
        self,
        view: NetworkView,
        service: str,
        settings: RoutingSettings,
        queues: Callable[[], Mapping[PeerId, Queue]],
        demand: Callable[[], Demand | None] = _unknown_demand,
        prefixes: PrefixKnowledge | None = None,
        gateway: PeerId = NOWHERE,
    ) -> None:
        self._view = view
        self._gateway = gateway
        self._rng = np.random.default_rng(crc32(gateway.encode()))
        self._demand = demand
        self.service = service
        self._settings = settings
        self._queues = queues
        self._prefixes = prefixes if prefixes is not None and settings.prefix_weight else None
        self._router: Router | None = None  # of the latest plan
        self._profiles: ReplicaProfiles | None = None  # likewise, for policies that ask for them
        self._links: Mapping[PeerId, LinkTable] | None = None  # that its round trips are of
        self._stalls = FlapDamping(STALL_DAMPING)  # of heads of replicas
        self.hung: frozenset[str] = frozenset()  # heads of replicas that do not answer: the last to be taken

    @property
    def is_hopeful(self) -> bool:
        """Whether an engine is being started, so that waiting for a route makes sense."""
        return self._view.hopeful(self.service)

    def find(
        self,
        wanted: FindRoute,
        now: float,
        left: int = 0,
        request: str | None = None,
        names_of: NamesOf | None = None,
        answers: Mapping[PoolClaim, bool] = NO_ANSWERS,
    ) -> Route:
        """The route for what the machine of this request wants; `left` tokens of its answer may still come, `names_of`
        has the names of its prefixes, `answers` what replicas have said to claims of earlier routes. Raises
        NoRoute."""
        view, known = self._view, self._prefixes
        plan = view.plan_of(self.service)
        if plan is None:
            raise NoRoute("the coordinator has made no plan for it yet")
        named = known.find_named(names_of, now) if known is not None and names_of is not None else {}
        believed = known.believe(named) if known is not None else NOTHING_CACHED
        route, avoided = self._find(wanted, plan, now, left, request, believed, answers)
        if known is not None and names_of is not None and self._router is not None:
            fetch = self._choose_fetch(wanted, plan, route, named, avoided, now)
            prefill, loads = route.prefill or route.decode, self._router.loads
            queued = int(loads.prefill_tokens[loads.index[prefill]])
            expected = ExpectedPrefill(now, wanted.tokens, queued, named.get(prefill, 0))
            known.note_route(request, prefill, names_of, expected, fetch, is_asked=bool(route.claims))
            if fetch is not None:
                route = route_fetch(route, fetch, wanted.tokens)
        self._note_sent(route, plan, wanted.tokens)
        return route

    @property
    def mixes_phases(self) -> bool:
        """Whether the policy has any replica prefill and decode."""
        return self._router is not None and self._router.policy.mixes_phases

    def find_prefill_rates(self) -> dict[str, float]:
        """Tokens of prompts that replicas compute in a second, all of their stages together, by their ids; of those
        whose profiles are known."""
        plan = self._view.plan_of(self.service)
        if plan is None:
            return {}
        profiles = self._update_profiles(plan, self._follow(plan))
        return {
            replica.id: profile.prefill_tokens_s(len(replica.stages))
            for replica, profile in zip(plan.replicas, profiles, strict=True)
            if profile is not None
        }

    def _choose_fetch(
        self,
        wanted: FindRoute,
        plan: Plan,
        route: Route,
        named: Mapping[str, int],
        avoided: frozenset[str],
        now: float,
    ) -> PrefixFetch | None:
        """What of the prompt comes from another replica; nothing where its KV so far may come from the one that it
        leaves."""
        share, router, known = self._settings.prefix_fetch, self._router, self._prefixes
        if not share or wanted.leaving or router is None or known is None:
            return None
        sources = list_sources(plan, route, named, excluded=avoided, loads=router.loads, prompt_tokens=wanted.tokens)
        links = self._view.kv_links(sources, PeerId(route.decode), plan.codec) if sources else None
        profile = self._update_profiles(plan, router)[router.loads.index[route.decode]] if sources else None
        if links is None or profile is None:
            return None
        return known.choose_fetch(
            wanted.tokens,
            route.decode,
            named,
            sources=sources,
            token_s=profile.prefill.prompt_token_s,
            links=links,
            share=share,
            now=now,
        )

    def _find(
        self,
        wanted: FindRoute,
        plan: Plan,
        now: float,
        left: int,
        request: str | None,
        cached: Mapping[str, int],
        answers: Mapping[PoolClaim, bool],
    ) -> tuple[Route, frozenset[str]]:
        """The route, and the heads of replicas that were better not taken."""
        view = self._view
        faults = self._find_faults(plan, wanted)
        unusable = frozenset(faults)
        needed_s = plan.deadlines.ttft_s + plan.deadlines.tpot_s * left  # at most, where the plan keeps its deadlines
        # The last to be taken: those that do not answer, or have stalled, and those that end before the request does.
        stalled = self._stalls.held([replica.head for replica in plan.replicas], now)
        ending = {replica.head for replica in plan.replicas if view.ends_within(replica, needed_s)}
        unsure = self.hung | stalled | ending
        router = self._follow(plan)
        self._report(router)
        prices = (sum(view.usd_per_hour(peer) for peer in replica.peers) for replica in plan.replicas)
        router.loads.usd_per_hour[:] = list(prices)
        if router.needs_profiles:
            self._update_profiles(plan, router)
        route = partial(
            router.route,
            wanted.tokens,
            now=now,
            request=request,
            max_output_tokens=left or None,
            cached_tokens=cached,
            answers=answers,
        )
        avoided = unusable | unsure | {wanted.leaving}
        try:
            return route(exclude=avoided), avoided
        except NoRoute as error:
            if wanted.leaving or unsure <= unusable:
                raise self._explain(error, faults, plan, now) from None
        try:
            return route(exclude=unusable), avoided
        except NoRoute as error:
            raise self._explain(error, faults, plan, now) from None

    def _follow(self, plan: Plan) -> Router:
        """The router of this plan, which goes on from that of the plan before."""
        if self._router is None or self._router.plan is not plan:
            self._router = Router(plan, self._settings, earlier=self._router, rng=self._rng)
            self._profiles = ReplicaProfiles(plan)
            self._links = None
            self._report(self._router)
        return self._router

    def _report(self, router: Router) -> None:
        """Tell it how replicas stand, and where links have been measured since, what asking them takes."""
        view = self._view
        router.report(view.loads(self._queues()), view.gateways_like(self._demand(), self.service))
        if self._links is not view.links_told:
            self._links = view.links_told
            heads = [replica.head for replica in router.plan.replicas]
            known = view.round_trips(self._gateway)
            router.loads.round_trip_s[:] = [known.get(head, UNKNOWN_RTT_S) for head in heads]

    def _update_profiles(self, plan: Plan, router: Router) -> list[ReplicaProfile | None]:
        """How fast the replicas are, in the plan's order."""
        view, profiles = self._view, router.loads.profiles
        signs = {peer: _sign(advert) for peer in plan.peers if (advert := view.adverts.get(PeerId(peer)))}
        if self._profiles is not None:
            self._profiles.update(signs, lambda: view.boxes(self.service), lambda: Links(view.links()), profiles)
        return profiles

    def _note_sent(self, route: Route, plan: Plan, tokens: int) -> None:
        """Count the prompt where it is computed: others' gateways may send as much there meanwhile."""
        first = plan.replica(route.decode if route.cached else route.prefill or route.decode)
        if first is not None:
            self._view.note_sent(PeerId(first.head), tokens - route.cached - route.found)

    def own_work(self, claim: PoolClaim) -> OwnWork:
        """Of this gateway at the replica that it is about to ask."""
        return self._view.own_work(PeerId(claim.replica), self._queues())

    def note_answer(self, claim: PoolClaim, accepted: bool, state: PoolState, asked: OwnWork) -> None:
        """A replica has said how it stands there: with this request, if it has accepted that."""
        if not accepted:
            self._view.take_back_sent(PeerId(claim.replica), claim.prefill_tokens)
            requests, tokens = asked.queue
            without = Queue(max(0, requests - 1), max(0, tokens - claim.prefill_tokens))
            asked = asked._replace(queue=without)
        self._view.note_answer(PeerId(claim.replica), state, asked)

    def note_accepted(self, request: str) -> None:
        """The replicas of its route take it."""
        if self._prefixes is not None:
            self._prefixes.note_accepted(request)

    def note_first_token(self, request: str, now: float) -> None:
        """The answer to a request has begun. Again is no matter."""
        if self._prefixes is not None:
            self._prefixes.note_first_token(request, now)

    def end_request(self, request: str, output_tokens: int | None, first_token_at: float | None = None) -> None:
        """A request has ended, with so many tokens of its answer; None: not with all of it. `first_token_at`: where it
        had one route alone."""
        if self._router is not None:
            self._router.end_request(request, output_tokens)
        if self._prefixes is not None:
            self._prefixes.note_end(request, first_token_at)

    def expect(self, route: Route, tokens: int) -> ExpectedTimes:
        """The times of a route that has just been found for so many tokens: those that the plan was made for, after
        each of its replicas has prefilled what lies there, other services' prompts too, and all of these, which it may
        have to compute again."""
        plan, router, first_token_s = self._view.plan_of(self.service), self._router, 0.0
        if plan is None or router is None:
            return ExpectedTimes()
        for replica in filter(None, (plan.replica(route.prefill or ""), plan.replica(route.decode))):
            advert = self._view.adverts.get(PeerId(replica.head))
            engine = advert.engine if advert is not None else None
            rate = prefill_tokens_s(self._view, replica, engine) if engine is not None else 0.0
            at = router.loads.index[replica.id]
            waiting = float(router.loads.prefill_tokens[at] + router.loads.beside_tokens[at])
            first_token_s += (waiting + tokens) / rate if rate > 0.0 else inf
        return ExpectedTimes(plan.deadlines.ttft_s + first_token_s, plan.deadlines.tpot_s)

    def note_stall(self, head: str, now: float) -> bool:
        """A replica does not get on with a request; whether that is news: what else it has will stall as well."""
        if self._stalls.held_for_s(head, now) > 0.0:
            return False
        self._stalls.observe({}, now)
        self._stalls.note_fault(head, "it stalled", now)
        return True

    def _find_faults(self, plan: Plan, wanted: FindRoute) -> dict[str, str]:
        """By the head of each replica that cannot serve this request, why not."""
        view, faults = self._view, {}
        for replica in plan.replicas:
            fault = view.find_fault(replica, self.service)
            # An engine that has failed this request is not asked again; one started since then is another engine.
            if not fault and wanted.blamed.get(replica.head) == view.starts(PeerId(replica.head)):
                fault = f"the engine of {name_of(replica.head)} has failed with this request"
            if fault:
                faults[replica.head] = fault
        return faults

    def _explain(self, error: NoRoute, faults: dict[str, str], plan: Plan, now: float) -> NoRoute:
        """With what is wrong with the plan's replicas, and its boxes that are dead."""
        dead = self._view.describe_dead(now, plan.peers)
        # Of these the line on the dead says more: since when.
        others = (fault for fault in faults.values() if not fault.endswith(IS_DEAD))
        return NoRoute("; ".join(filter(None, [str(error), join_faults(others), dead])))


def _sign(advert: Advert) -> tuple[object, ...]:
    """Differs when what a box says of its speed and its memory does."""
    engine = advert.engine
    figures = (engine.tflops, engine.memory_gbps, engine.kv_tokens, engine.stages) if engine is not None else ()
    return (advert.profile, advert.fits, *figures)
