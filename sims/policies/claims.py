"""Requests that ask for places in Splitwise's pools, in a simulation: what a gateway and a replica say to each other
before a route is taken (`coordinator.routing.pools`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import msgspec

from ...coordinator.requests.values import FindRoute
from ...coordinator.routing.interface import NoRoute, Route
from ...coordinator.routing.pools import PoolClaim, PoolLimits
from ..deployment import Deployment, SentWork
from ..serving import GatewayPlaces, ReplicaHost, SimRequest

Act = Callable[[float], None]


@final
class SimPoolQuestion:
    """One request's search for a route whose replicas all accept it: `then` hears which, None where there is none.
    Replicas are asked at the same time; each try takes a round trip. `do_at` has something done at a moment."""

    def __init__(
        self,
        request: SimRequest,
        wanted: FindRoute,
        deployment: Deployment,
        *,
        places: GatewayPlaces,
        limits: PoolLimits,
        do_at: Callable[[float, Act, float], None],
        then: Callable[[Route | None, float], None],
    ) -> None:
        self._request = request
        self._wanted = wanted
        self._deployment = deployment
        self._places = places
        self._limits = limits
        self._do_at = do_at
        self._then = then
        self._route: Route  # that is asked about
        self._unanswered = 0
        self._answers: dict[PoolClaim, bool] = {}

    def __repr__(self) -> str:
        return f"<SimPoolQuestion {self._unanswered} unanswered, {self._answers}>"

    def ask(self, route: Route, now: float) -> None:
        """Ask the replicas of a route that has just been chosen."""
        news = [claim for claim in route.claims if claim not in self._answers]
        self._route, self._unanswered = route, len(news)
        for claim in news:
            host = self._deployment.hosts[claim.replica]
            asked = self._deployment.own_work(self._request, claim)
            self._do_at(now + self._message_s(host), partial(self._reach, host, claim, asked), now)

    def _message_s(self, host: ReplicaHost) -> float:
        return self._places.message_s(self._request.gateway, host)

    def _reach(self, host: ReplicaHost, claim: PoolClaim, asked: SentWork | None, now: float) -> None:
        """The claim is at the replica; one that is lost does not answer, until its gateway notices."""
        if host.is_lost:
            lost = partial(self._hear, claim, False, None)
            if host.is_noticed:
                lost(now)
            else:
                host.unanswered.append(lost)
            return
        accepted, state = host.claims.answer(
            self._request, claim, host.pool_state, self._limits, now, self._request.gateway
        )
        note = partial(self._deployment.note_told, self._request, claim, state, accepted, asked)
        self._do_at(now + self._message_s(host), partial(self._hear, claim, accepted, note), now)

    def _hear(self, claim: PoolClaim, accepted: bool, note: Callable[[], None] | None, now: float) -> None:
        """An answer is at the gateway."""
        self._unanswered -= 1
        self._answers[claim] = accepted
        if note is not None:
            note()
        if self._unanswered or self._request.is_over:
            return
        route: Route | None = self._route
        if not all(map(self._answers.get, self._route.claims)):
            wanted = self._wanted
            try:
                route = self._deployment.route(wanted.tokens, now, wanted.blamed, self._request, self._answers)
            except NoRoute:
                route = None
        if route is not None and not self._answers.keys() >= set(route.claims):
            self.ask(route, now)
        else:
            self._end(route, now)

    def _end(self, route: Route | None, now: float) -> None:
        """Who has accepted, and is not on the route, hears that the request does not come."""
        used = {claim.replica for claim in route.claims} if route is not None else set()
        hosts = self._deployment.hosts
        for name in {claim.replica for claim, accepted in self._answers.items() if accepted} - used:
            if (host := hosts.get(name)) is not None:
                self._do_at(now + self._message_s(host), partial(self._give_up, host), now)
        self._then(msgspec.structs.replace(route, claims=()) if route is not None else None, now)

    def _give_up(self, host: ReplicaHost, now: float) -> None:
        host.claims.leave(self._request)
