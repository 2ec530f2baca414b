"""Which engine of a fleet takes a request: the one with the fewest, as in SeaLLM, or as gateways of the network choose.

    fleet = Fleet(traces, GatewayRouting())

Gateways hear of the requests of other services by reports, as nodes send them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, Protocol, final

import numpy as np

from ...coordinator.costs.sweep import profile_times
from ...coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from ...coordinator.profile import ReplicaProfile
from ...coordinator.routing.interface import RoutingSettings, WorkBeside
from ...coordinator.routing.router import Router
from .engines import FleetEngine, FleetRequest, FleetState

REPORT_S: Final = 0.25
"""Of nodes whose box several services share: `NodeTuning.load_interval_s`."""

HEARD_S: Final = 0.05
"""Until the other gateways know of a request that comes after a quiet while, which is told at once:
`NodeTuning.watch_interval_s`."""


class FleetRouting(Protocol):
    """Chooses engines. Of one fleet."""

    def choose(self, fleet: FleetState, request: FleetRequest, hosts: Sequence[int], now: float) -> int:
        """One of the engines that have its service and could hold it."""
        ...

    def look(self, fleet: FleetState, now: float) -> None:
        """Something is about to change."""
        ...

    def end(self, request: FleetRequest) -> None:
        """It has been answered."""
        ...


class FewestRequests:
    """The engine with the fewest, of all its services."""

    def choose(self, fleet: FleetState, request: FleetRequest, hosts: Sequence[int], now: float) -> int:
        """See `FleetRouting`."""
        return min(hosts, key=lambda id_: len(fleet.hosted[id_]))

    def look(self, fleet: FleetState, now: float) -> None:
        """See `FleetRouting`."""

    def end(self, request: FleetRequest) -> None:
        """See `FleetRouting`."""


@final
class AsRouted(FewestRequests):
    """The engine that `where` has for a request, by its service and row, while that is there."""

    def __init__(self, where: Mapping[tuple[int, int], int]) -> None:
        self._where = where

    def choose(self, fleet: FleetState, request: FleetRequest, hosts: Sequence[int], now: float) -> int:
        """See `FleetRouting`."""
        found = self._where.get((request.service, request.row), -1)
        return found if found in hosts else super().choose(fleet, request, hosts, now)


@final
class GatewayRouting:
    """The network's own code, with one gateway for each service. It knows of its requests at once, and of those of
    other services by the latest report: of `first_s` or `report_s` later each, or of a request that came when nothing
    had been told for as long (`Advertising`). Of boxes that are as good the first is taken: each service has an order
    of its own, drawn by `seed`, as a box has another node for each."""

    def __init__(
        self,
        settings: RoutingSettings | None = None,
        *,
        report_s: float = REPORT_S,
        first_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._settings = settings or RoutingSettings()
        self._report_s = report_s
        self._seed = seed
        self._names: dict[tuple[int, int], str] = {}  # by service and engine
        self._report_at = first_s
        self._routers: dict[int, Router] = {}
        self._profiles: dict[tuple[int, int], ReplicaProfile] = {}  # by engine and service
        self._reported: dict[int, Mapping[int, WorkBeside]] = {}  # by engine, of its services
        self._told_at: dict[tuple[int, int], float] = {}  # by engine and service, when that had changed
        self._hurried: dict[tuple[int, int], tuple[float, WorkBeside]] = {}  # likewise, what is heard from when on

    def look(self, fleet: FleetState, now: float) -> None:
        """See `FleetRouting`."""
        if now >= self._report_at:
            told_at = self._report_at
            self._report_at += self._report_s * (1 + (now - self._report_at) // self._report_s)
            found = {id_: fleet.count_work(id_) for id_ in fleet.engines}
            for id_, work in found.items():
                before = self._reported.get(id_, {})
                self._told_at |= {
                    (id_, each): told_at for each in {*work, *before} if work.get(each) != before.get(each)
                }
            self._reported = found
            self._hurried.clear()

    def choose(self, fleet: FleetState, request: FleetRequest, hosts: Sequence[int], now: float) -> int:
        """See `FleetRouting`."""
        self._hear(now)
        service, names = request.service, {id_: self._name(request.service, id_) for id_ in hosts}
        router = self._router(fleet, service)
        router.loads.forget()
        for id_, name in names.items():
            own = fleet.count_work(id_).get(service, WorkBeside())
            others = [work for each, work in self._reported.get(id_, {}).items() if each != service]
            beside = WorkBeside(*map(sum, zip(*others, strict=True))) if others else WorkBeside()
            router.loads.note(name, own.requests, own.prefill_tokens, np.inf, decodes=own.requests)
            router.loads.note_beside(name, beside)
        absent = frozenset(router.loads.ids) - frozenset(names.values())
        prompt = request.sequence.known
        route = router.route(prompt, absent, now=now, request=f"{service}.{request.row}")
        chosen = next(id_ for id_, name in names.items() if name == route.decode)
        self._note_request(fleet, chosen, request, now)
        return chosen

    def end(self, request: FleetRequest) -> None:
        """See `FleetRouting`."""
        self._routers[request.service].end_request(f"{request.service}.{request.row}", request.output)

    def _hear(self, now: float) -> None:
        for key in [key for key, (at, _) in self._hurried.items() if at <= now]:
            id_, service = key
            work = {**self._reported.get(id_, {}), service: self._hurried.pop(key)[1]}
            self._reported = {**self._reported, id_: work}

    def _note_request(self, fleet: FleetState, id_: int, request: FleetRequest, now: float) -> None:
        """It comes to this engine, whose node for the service says so unless it has told something just now."""
        key = id_, request.service
        if now - self._told_at.get(key, -inf) < self._report_s:
            return
        requests, tokens = fleet.count_work(id_).get(request.service, WorkBeside())
        self._hurried[key] = now + HEARD_S, WorkBeside(requests + 1, tokens + request.sequence.known)
        self._told_at[key] = now

    def _name(self, service: int, id_: int) -> str:
        """Of a service's node on a box: routes are tried in the order of these."""
        if (service, id_) not in self._names:
            lot = int(np.random.default_rng([self._seed, service, id_]).integers(1 << 32))
            self._names[service, id_] = f"{lot:08x}-{id_}"
        return self._names[service, id_]

    def _router(self, fleet: FleetState, service: int) -> Router:
        """Of the engines that have the service now."""
        engines = {self._name(service, id_): id_ for id_, engine in fleet.engines.items() if service in engine.names}
        earlier = self._routers.get(service)
        if earlier is not None and earlier.loads.ids == tuple(engines):
            return earlier
        router = self._routers[service] = Router(
            _plan_alone(service, tuple(engines)), self._settings, rng=np.random.default_rng(service), earlier=earlier
        )
        router.loads.profiles = [self._profile(id_, fleet.engines[id_], service) for id_ in engines.values()]
        return router

    def _profile(self, id_: int, engine: FleetEngine, service: int) -> ReplicaProfile:
        found = self._profiles.get((id_, service))
        if found is None:
            found = self._profiles[id_, service] = profile_times(engine.times_of(service), engine.kv_tokens_of(service))
        return found


def _plan_alone(service: int, names: Sequence[str]) -> Plan:
    """Each replica does both phases of its requests."""
    replicas = tuple(
        Replica(id=name, phase=Phase.MIXED, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=1),))
        for name in names
    )
    pairings = tuple(Pairing(prefill=name, decode=name, weight=1.0 / len(names)) for name in names)
    return Plan(
        epoch=0, version=0, service=f"service-{service}", replicas=replicas, pairings=pairings, codec="raw", why=("",)
    )
