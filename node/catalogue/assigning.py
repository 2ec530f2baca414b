"""What a coordinator does for boxes that host what they are given: it decides which service each of them hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final, final

import trio

from ...bootstrap.trust.entries import MAX_PAYLOAD
from ...coordinator.demand import mean_lengths
from ...coordinator.services.assigner import Assigner
from ...coordinator.services.hosting import Brought
from ..adverts import find_beside
from ..joined import Joined
from ..view import NetworkView
from .hosts import find_hosts, power_of
from .messages import HOSTING, HostedService, HostingPlan
from .placing import SharingDesk

LOOK_S: Final = 1.0  # between two decisions; shorter: a new box hears sooner what it is to host
HEARD_S: Final = 5.0  # after its election a coordinator has heard of all boxes; shorter: it may give one service twice
MAX_HOSTS_BYTES: Final = MAX_PAYLOAD - 16384  # of boxes' ids in one entry, beside the names of services
MAX_IDLE: Final = 64  # boxes that are told at once to let go of what they host; the others a moment later
_BOX_BYTES: Final = 2  # of MessagePack, beside an id


@final
class AssignmentDesk:
    """One per node; it acts while the node coordinates."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._assigner = Assigner()
        self._plan = HostingPlan(epoch=0, serial=0)
        self._led_since: float | None = None
        self._sharing = SharingDesk(joined)

    def __repr__(self) -> str:
        return f"<AssignmentDesk {self._plan.number} {self._assigner}>"

    async def run(self) -> None:
        """Decide, again and again, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._place)
            while True:
                plan = self.look(trio.current_time())
                if plan is not None:
                    self._joined.publish(HOSTING, plan)
                await trio.sleep(LOOK_S)

    async def _place(self) -> None:
        """Place services anew while this node coordinates."""
        while True:
            if self._led_since is not None:
                await self._sharing.look(self._assigner, self._led_since)
            await trio.sleep(LOOK_S)

    def look(self, now: float) -> HostingPlan | None:
        """What is to be published at `now` (seconds), if that is news."""
        leader, view = self._joined.leader, self._joined.view
        if leader is None or leader[0] != self._joined.own:
            self._led_since = None
            return None
        if self._led_since is None:
            self._led_since = now
            self._assigner = Assigner()
        if view.hosting is not None:
            self._assigner.recall({each.name: each.boxes for each in view.hosting.services}, now)
        if now - self._led_since < HEARD_S:
            return None
        hosts = self._assigner.assign(view.catalogue.entries, find_hosts(view), find_brought(view), now)
        services, idle = group_hosts(hosts), self._assigner.idle[:MAX_IDLE]
        if self._plan.epoch == leader[1] and (services, idle) == (self._plan.services, self._plan.idle):
            return None
        if not services and not self._plan.services:
            return None  # a network without such boxes says nothing of them
        serial = self._plan.serial + 1 if self._plan.epoch == leader[1] else 1
        self._plan = HostingPlan(epoch=leader[1], serial=serial, services=services, idle=idle)
        return self._plan


def find_brought(view: NetworkView) -> dict[str, Brought]:
    """By entry, what boxes have that were started with its model, and what clients ask of it."""
    power: defaultdict[str, float] = defaultdict(float)
    fits: defaultdict[str, int] = defaultdict(int)
    tokens_s: defaultdict[str, float] = defaultdict(float)
    placed, served = set(), set()
    for peer, advert in view.adverts.items():
        model = advert.model
        entry = view.catalogue.entry_of(model.service, model.name) if model is not None else None
        if model is None or entry is None:
            continue
        demand = advert.demand
        if demand is not None:
            tokens_s[entry.name] += demand.requests_s * sum(mean_lengths((demand,)) or ())
        if advert.hosting is None and not advert.draining:
            power[entry.name] += power_of(advert) / max(1, len(find_beside(peer, view.adverts)))
            fits[entry.name] += min(advert.fits, model.layers)
            if fits[entry.name] >= model.layers:
                placed.add(entry.name)
            if advert.engine is not None and advert.engine.state == "ready" and not advert.hung:
                served.add(entry.name)
    return {
        name: Brought(
            power=power[name],
            fits=fits[name],
            is_placed=name in placed,
            is_served=name in served,
            tokens_s=tokens_s[name],
        )
        for name in {*power, *tokens_s}
    }


def group_hosts(hosts: Mapping[str, str]) -> tuple[HostedService, ...]:
    """As they are published: by entry, as many boxes as one entry of gossip has room for."""
    boxes: defaultdict[str, list[str]] = defaultdict(list)
    left = MAX_HOSTS_BYTES
    for box, name in sorted(hosts.items()):
        left -= len(box) + _BOX_BYTES
        if left >= 0:
            boxes[name].append(box)
    return tuple(HostedService(name=name, boxes=tuple(each)) for name, each in sorted(boxes.items()))
