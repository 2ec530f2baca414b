"""What the elected coordinator does: turn adverts into a plan and publish it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, final

import msgspec

from ...bootstrap import PeerId
from ...coordinator import BoxView, Demand, LinkView, Plan
from ...coordinator.capacity import KvCodec
from ...coordinator.demand import is_idle
from ...coordinator.names import name_of
from ...kernels.codecs import codec_named
from ..settings import WAN
from ..view import NetworkView
from .set_aside import SetAside

Leader = tuple[PeerId, int]

MAX_LEFT_OUT: Final = 16  # boxes that a plan says it is made without; a network full of liars has no room for more


class PlanningTask(msgspec.Struct, frozen=True, kw_only=True):
    """Something to plan. `run` takes seconds: it is for another process."""

    boxes: tuple[BoxView, ...]
    links: tuple[LinkView, ...]
    demands: tuple[Demand, ...]
    service: str
    epoch: int
    version: int
    previous: Plan | None
    codec: str

    def run(self, spent: Callable[[], bool]) -> Plan | None:
        """The plan found until `spent()`; the previous one where nothing is better, None where nobody is ready."""
        from ...coordinator.network_plan import plan_network  # a second and 60 MB that only the coordinator pays

        return plan_network(
            self.boxes,
            self.links,
            self.demands,
            service=self.service,
            epoch=self.epoch,
            version=self.version,
            previous=self.previous,
            codec=KvCodec(self.codec, codec_named(self.codec).bits),
            spent=spent,
        )

    @property
    def roster(self) -> Any:
        """What must not wait: who is there, and what each can do."""
        boxes = frozenset((box.peer, box.ready, box.draining, box.fits, box.tp, box.phase) for box in self.boxes)
        return self.epoch, self.service, boxes

    @property
    def figures(self) -> Any:
        """Whatever a plan follows from."""
        return self.epoch, self.previous and self.previous.number, self.boxes, self.links, self.demands

    @property
    def quiet(self) -> bool:
        """Whether the running plan may stay: nobody asks now, so no other would serve better."""
        return self.previous is not None and is_idle(self.demands)


@final
class Coordinator:
    """Makes plans while this node is the elected coordinator; idle otherwise."""

    def __init__(self, own: PeerId, codec: str, quiet_s: float = WAN.quiet_s) -> None:
        self._own = own
        self._codec = codec
        self._quiet_s = quiet_s
        self._numbered: tuple[int, int] = (-1, 0)  # (epoch, last version used in it)
        self._last: PlanningTask | None = None
        self._planned_at = float("-inf")
        self._aside = SetAside()

    def next(self, view: NetworkView, leader: Leader | None, now: float) -> PlanningTask | None:
        """What is to be planned at `now` (seconds), if anything. Say `settle` when it is done."""
        self._aside.forget(view.adverts, now)
        left_out = self._aside.left_out(now)
        task = self._task(view, leader, left_out)
        if task is None:
            return None
        last = self._last
        known = last is not None and task.roster == last.roster
        if known and now < self._planned_at + self._quiet_s:
            return None
        demands = view.demands(task.service)
        task = msgspec.structs.replace(
            task,
            links=tuple(link for link in view.links() if link.source not in left_out),
            demands=tuple(demand for peer, demand in demands.items() if peer not in left_out),
        )
        if last is not None and known and (task.figures == last.figures or task.quiet):
            return None
        self._last, self._planned_at = task, now
        return task

    def settle(
        self, task: PlanningTask, plan: Plan | None, view: NetworkView, leader: Leader | None, now: float
    ) -> Plan | None:
        """What of a finished task is to be published, if anything: things may have changed meanwhile."""
        self._aside.on_planned(now)
        if leader != (self._own, task.epoch) or _running(view, task.service) is not task.previous:
            self._last = None  # it has to be planned again
            return None
        if plan is None or plan == task.previous:
            return None
        self._numbered = (task.epoch, plan.version)
        self._last = msgspec.structs.replace(task, previous=plan)
        left_out = (*self._aside.explain(now), *_explain_unreadable(view))
        more = (f"and {len(left_out) - MAX_LEFT_OUT} more boxes are left out",) * (len(left_out) > MAX_LEFT_OUT)
        return msgspec.structs.replace(plan, why=(*left_out[:MAX_LEFT_OUT], *more, *plan.why))

    def on_failed(self, task: PlanningTask, reason: str, now: float) -> bool:
        """Planning went wrong with what some box says: the next task leaves boxes out. Returns whether there are any
        to leave out."""
        told = {box.peer for box in task.boxes} | {link.source for link in task.links}
        self._last = None
        if self._aside.on_failed(told, reason, now):
            return True
        self._last = task  # the same again would fail again: only news is planned with
        return False

    def _task(self, view: NetworkView, leader: Leader | None, left_out: Collection[str]) -> PlanningTask | None:
        """What there is to plan with as yet, but for links and demands: they are many, and looked at less often."""
        if leader is None or leader[0] != self._own:
            return None
        epoch = leader[1]
        service = self._service(view)
        if service is None:
            return None
        previous = _running(view, service)
        if previous is not None and previous.epoch > epoch:
            return None  # an election has overtaken us; the next change of the view will say so
        version = self._numbered[1] + 1 if self._numbered[0] == epoch else 1
        if previous is not None and previous.epoch == epoch:
            version = max(version, previous.version + 1)
        return PlanningTask(
            boxes=tuple(sorted((b for b in view.boxes(service) if b.peer not in left_out), key=lambda box: box.peer)),
            links=(),
            demands=(),
            service=service,
            epoch=epoch,
            version=version,
            previous=previous,
            codec=self._codec,
        )

    def _service(self, view: NetworkView) -> str | None:
        """The service to plan for: the running one while a box offers it, else the one most boxes offer."""
        offered = [a.model.service for a in view.adverts.values() if a.model is not None]
        if not offered:
            return None
        if view.plan is not None and view.plan.service in offered:
            return view.plan.service
        return max(sorted(set(offered)), key=offered.count)


def _explain_unreadable(view: NetworkView) -> list[str]:
    """A line for `status` on each box whose advert is none."""
    return [
        f"{name_of(peer)} is left out: what it says of itself cannot be read ({fault})"
        for peer, fault in sorted(view.unreadable.items())
    ]


def _running(view: NetworkView, service: str) -> Plan | None:
    return view.plan if view.plan is not None and view.plan.service == service else None
