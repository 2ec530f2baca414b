"""What the elected coordinator does: turn adverts into a plan and publish it. No I/O, no clock."""

from __future__ import annotations

from typing import final

from ..bootstrap import PeerId
from ..coordinator import Plan, make_plan
from .view import NetworkView


@final
class Coordinator:
    """Makes plans while this node is the elected coordinator; idle otherwise."""

    def __init__(self, own: PeerId, codec: str) -> None:
        self._own = own
        self._codec = codec
        self._numbered: tuple[int, int] = (-1, 0)  # (epoch, last version used in it)
        self._seen: object = None  # what was planned from last: the same need not be planned again

    def decide(self, view: NetworkView, leader: tuple[PeerId, int] | None) -> Plan | None:
        """A plan to publish now, or None when there is nothing to say."""
        if leader is None or leader[0] != self._own:
            return None
        epoch = leader[1]
        service = self._service(view)
        if service is None:
            return None
        previous = view.plan if view.plan is not None and view.plan.service == service else None
        if previous is not None and previous.epoch > epoch:
            return None  # an election has overtaken us; the next change of the view will say so
        boxes, links = view.boxes(service), view.links()
        seen = (epoch, previous, boxes, links)
        if seen == self._seen:
            return None
        self._seen = seen
        version = self._numbered[1] + 1 if self._numbered[0] == epoch else 1
        if previous is not None and previous.epoch == epoch:
            version = max(version, previous.version + 1)
        plan = make_plan(
            boxes,
            links,
            service=service,
            epoch=epoch,
            version=version,
            previous=previous,
            codec=self._codec,
        )
        if plan is None or plan is previous:
            return None
        self._numbered = (epoch, plan.version)
        return plan

    def _service(self, view: NetworkView) -> str | None:
        """The service to plan for: the running one while a box offers it, else the one most boxes offer."""
        offered = [a.model.service for a in view.adverts.values() if a.model is not None]
        if not offered:
            return None
        if view.plan is not None and view.plan.service in offered:
            return view.plan.service
        return max(sorted(set(offered)), key=offered.count)
