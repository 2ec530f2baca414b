"""Which route a request takes: the plan's, among the replicas that can serve it now. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from ...bootstrap import PeerId
from ...coordinator import NoRoute, Plan, Route, Router, RoutingSettings
from ...coordinator.requests.values import FindRoute
from ..view import NetworkView, Queue


@final
class RouteFinder:
    """Routes requests for a service by the plan that the `view` follows; `queues`: this gateway's work at each node."""

    def __init__(
        self,
        view: NetworkView,
        service: str,
        settings: RoutingSettings,
        queues: Callable[[], Mapping[PeerId, Queue]],
    ) -> None:
        self._view = view
        self._service = service
        self._settings = settings
        self._queues = queues
        self._router: Router | None = None  # of the latest plan
        self.hung: frozenset[str] = frozenset()  # heads of replicas that do not answer: the last to be taken

    @property
    def is_hopeful(self) -> bool:
        """Whether an engine is being started, so that waiting for a route makes sense."""
        return self._view.hopeful(self._service)

    def find(self, wanted: FindRoute, now: float) -> Route:
        """The route for what a request's machine wants. Raises NoRoute."""
        view, plan = self._view, self._view.plan
        if plan is None or plan.service != self._service:
            raise NoRoute("the coordinator has made no plan for it yet")
        unusable = {
            replica.head
            for replica in plan.replicas
            if not view.serving(replica, self._service)
            # An engine that has failed this request is not asked again; one started since then is another engine.
            or wanted.blamed.get(replica.head) == view.starts(PeerId(replica.head))
        }
        if self._router is None or self._router.plan is not plan:
            self._router = Router(plan, self._settings)
        self._router.report(view.loads(self._queues()))
        try:
            return self._router.route(wanted.tokens, frozenset(unusable | self.hung | {wanted.leaving}), now=now)
        except NoRoute as error:
            if wanted.leaving or self.hung <= unusable:
                raise self._explain(error, plan, now) from None
        try:
            return self._router.route(wanted.tokens, frozenset(unusable), now=now)
        except NoRoute as error:
            raise self._explain(error, plan, now) from None

    def _explain(self, error: NoRoute, plan: Plan, now: float) -> NoRoute:
        """With the boxes of the plan that are dead."""
        dead = self._view.describe_dead(now, plan.peers)
        return NoRoute(f"{error}; {dead}") if dead else error
