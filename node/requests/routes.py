"""Which route a request takes: the plan's, among the replicas that can serve it now. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from ...bootstrap import PeerId
from ...coordinator import NoRoute, Plan, Route, Router, RoutingSettings
from ...coordinator.names import name_of
from ...coordinator.requests.values import FindRoute
from ..adverts import IS_DEAD, join_faults
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

    def find(self, wanted: FindRoute, now: float, left: int = 0) -> Route:
        """The route for what a request's machine wants; `left` tokens of its answer may still come. Raises NoRoute."""
        view, plan = self._view, self._view.plan
        if plan is None or plan.service != self._service:
            raise NoRoute("the coordinator has made no plan for it yet")
        faults = self._find_faults(plan, wanted)
        unusable = frozenset(faults)
        needed_s = plan.deadlines.ttft_s + plan.deadlines.tpot_s * left  # at most, where the plan keeps its deadlines
        # The last to be taken: those that do not answer, and those that end before the request does.
        unsure = self.hung | {replica.head for replica in plan.replicas if view.ends_within(replica, needed_s)}
        if self._router is None or self._router.plan is not plan:
            self._router = Router(plan, self._settings)
        self._router.report(view.loads(self._queues()))
        try:
            return self._router.route(wanted.tokens, unusable | unsure | {wanted.leaving}, now=now)
        except NoRoute as error:
            if wanted.leaving or unsure <= unusable:
                raise self._explain(error, faults, plan, now) from None
        try:
            return self._router.route(wanted.tokens, unusable, now=now)
        except NoRoute as error:
            raise self._explain(error, faults, plan, now) from None

    def _find_faults(self, plan: Plan, wanted: FindRoute) -> dict[str, str]:
        """By the head of each replica that cannot serve this request, why not."""
        view, faults = self._view, {}
        for replica in plan.replicas:
            fault = view.find_fault(replica, self._service)
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
