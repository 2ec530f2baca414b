"""Which services a coordinator plans for, and whose turn it is: one plan for each, over the boxes that offer it.

A box offers one service, and its owner says which. Who invents services gets no more than turns: so
many services are planned for at most, those that run already first, then those that most boxes offer.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, final

from ...bootstrap import PeerId
from ...coordinator import Plan, PlanError
from ...coordinator.bounds import MAX_SERVICES
from ...coordinator.plan import Regrouping
from ...coordinator.regrouping.steps import RegroupProposal
from ...coordinator.repair.damping import FlapDamping
from ...coordinator.services.catalogue import find_slo_fault
from ..settings import DEFAULT_SLO, WAN
from ..view import NetworkView
from .coordination import Leader, PlanningSettings, PlanningTask, PlanNumbers, ServicePlanning
from .messages import RegroupOrder

IDLE_LOOK_S: Final = 60.0  # between two looks at a network that offers nothing


def choose_services(view: NetworkView, limit: int = MAX_SERVICES) -> tuple[str, ...]:
    """The services to plan for, best first: those that run while a box offers them, then those of most boxes. None
    that an admin has taken out of the catalogue."""
    offered = Counter(each.service for each in view.offered_names() if not view.catalogue.is_removed(*each))
    ranked = sorted(offered, key=lambda service: (view.plan_of(service) is None, -offered[service], service))
    return tuple(ranked[:limit])


def choose_slo(view: NetworkView, service: str) -> str:
    """The deadlines that the catalogue has for a service; "" where it has none that can be read."""
    name = next((each.name for each in view.offered_names() if each.service == service), service)
    entry = view.catalogue.entry_of(service, name)
    return entry.slo if entry is not None and not find_slo_fault(entry.slo) else ""


@final
class Coordinator:
    """Makes plans while this node is the elected coordinator; idle otherwise. `lends_replicas`: gateways borrow
    replicas for what they have no phase for, so those that stay borrowed are moved."""

    def __init__(
        self,
        own: PeerId,
        codec: str,
        quiet_s: float = WAN.quiet_s,
        slo: str = DEFAULT_SLO,
        *,
        lends_replicas: bool = False,
    ) -> None:
        self._own = own
        self._settings = PlanningSettings(codec=codec, quiet_s=quiet_s, slo=slo, lends_replicas=lends_replicas)
        self._numbers = PlanNumbers()
        self._damping = FlapDamping()
        self._services: dict[str, ServicePlanning] = {}

    def __repr__(self) -> str:
        return f"<Coordinator services={len(self._services)}>"

    def next(self, view: NetworkView, leader: Leader | None, now: float) -> PlanningTask | None:
        """What is to be planned at `now` (seconds), if anything. Say `settle` when it is done. It is to be called when
        the view has changed, and at `wake_at`."""
        # Whoever may be elected remembers who flaps, so all nodes watch.
        self._damping.observe(view.signs(), now)
        self._keep(view)
        for each in self._by_urgency(view, leader, now):
            task = each.next(view, leader, now)
            if task is not None:
                return task
        return None

    def wake_at(self, now: float) -> float:
        """When `next` is to be called at the latest, whether or not the view changes."""
        looks = [each.wake_at(now) for each in self._services.values()]
        return min([now + IDLE_LOOK_S, self._damping.wake_at(now), *looks])

    def is_outdated(self, task: PlanningTask, view: NetworkView, leader: Leader | None, now: float) -> bool:
        """Whether boxes have come, gone or failed since this task was begun, of its service or of another one: what it
        has found by now is enough."""
        self._damping.observe(view.signs(), now)
        planning = self._services.get(task.service)
        if planning is None or planning.is_outdated(task, view, leader, now):
            return True
        others = (each for service, each in self._services.items() if service != task.service)
        return any(each.is_urgent(view, leader, now) for each in others)

    def on_fault(self, box: PeerId, fault: str, now: float) -> None:
        """A box that is here has failed this node, as `fault` says."""
        self._damping.note_fault(box, fault, now)

    def settle(
        self, task: PlanningTask, plan: Plan | None, view: NetworkView, leader: Leader | None, now: float
    ) -> Plan | None:
        """What of a finished task is to be published, if anything: things may have changed meanwhile."""
        planning = self._services.get(task.service)
        return planning.settle(task, plan, view, leader, now) if planning is not None else None

    def on_failed(self, task: PlanningTask, reason: str, now: float) -> bool:
        """Planning went wrong with what some box says: the next task leaves boxes out. Returns whether there are any
        to leave out."""
        planning = self._services.get(task.service)
        return planning is not None and planning.on_failed(task, reason, now)

    def seek(self, view: NetworkView, leader: Leader | None, now: float) -> PlanningTask | None:
        """For which service other groups of boxes are to be looked for, if for any: say `consider` when that is
        done."""
        self._keep(view)
        return next(filter(None, (each.seek(view, leader, now) for each in self._in_turn())), None)

    def consider(
        self, service: str, found: RegroupProposal | None, view: NetworkView, leader: Leader | None, now: float
    ) -> Regrouping | None:
        """A look for other groups has found this: what the next plan begins with, if that is worth it. Raises PlanError
        where things have changed meanwhile."""
        planning = self._services.get(service)
        return planning.consider(found, view, leader, now) if planning is not None else None

    def order(self, order: RegroupOrder, view: NetworkView, leader: Leader | None) -> Regrouping:
        """These groups, or these cuts, are wanted: the next plan begins with their first step. Raises PlanError."""
        if leader is None or leader[0] != self._own:
            raise PlanError("this node does not coordinate the network; ask the one that does")
        self._keep(view)
        planning = self._services.get(order.service)
        if planning is None:
            raise PlanError(f"no plan for {order.service} is running")
        return planning.order(order, view, leader)

    def _keep(self, view: NetworkView) -> None:
        """One planning for each service, and nothing of those that are planned for no more."""
        before = self._services
        self._services = {
            service: before.get(service)
            or ServicePlanning(self._own, service, self._settings, self._numbers, self._damping)
            for service in choose_services(view)
        }
        for each in self._services.values():
            each.slo = choose_slo(view, each.service) or self._settings.slo

    def _in_turn(self) -> list[ServicePlanning]:
        """That which was planned for longest ago first."""
        return sorted(self._services.values(), key=lambda each: each.planned_at)

    def _by_urgency(self, view: NetworkView, leader: Leader | None, now: float) -> list[ServicePlanning]:
        """Boxes that have come or gone before figures that have moved."""
        if leader is None or leader[0] != self._own:
            return self._in_turn()
        return sorted(self._in_turn(), key=lambda each: not each.is_urgent(view, leader, now))
