"""KV transfers as fluid flows: each gets its max-min fair share of the links and boxes it passes.

A flow uses three resources: its source's sending capacity, the link, and its target's receiving
capacity. A box sends as fast as the best of its links can, and receives likewise: the matrix of a
cluster holds what each pair reaches alone. Flows inside a box share what two of its GPUs reach
between each other.

A flow may have a rate limit of its own: KV that is sent layer by layer comes no faster than it is
computed. While the limits of all flows fit, no flow slows another down, and a new one costs a few
additions; rates are computed again only among flows that share a crowded resource.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import attrgetter
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from ..coordinator.planning.model.cluster import Cluster
from ..kvtransport.probing.figures import WINDOW_BYTES

BYTES_PER_GB: Final = 1e9 / 8.0
"""Bytes of a gigabit."""

_ROUNDING: Final = 1e-6
"""Bytes that may be left of a flow that has ended, by float arithmetic; and the share by which
demands may exceed a capacity and still fit."""


class FluidError(ValueError):
    """A flow that cannot be: between boxes without a link, or of no bytes."""


@final
class _Resource:
    """A capacity (bytes per second) that flows share: a box's sending or receiving, or a link.

    `demand`: what its flows could use together; it is `crowded` when that exceeds the capacity.
    While rates are assigned, `spare` is the capacity left and `unassigned` the number of flows
    without a rate.
    """

    __slots__ = ("capacity", "crowded", "demand", "flows", "spare", "unassigned")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.demand = 0.0
        self.crowded = False
        self.flows: dict[int, Flow] = {}
        self.spare = 0.0
        self.unassigned = 0

    def add_demand(self, more: float) -> None:
        """Its flows could use `more` bytes per second than before (or less, if negative)."""
        self.demand = self.demand + more if self.flows else 0.0
        self.crowded = self.demand > self.capacity * (1.0 + _ROUNDING)


@final
class Flow:
    """Bytes at `rate` bytes/s; `left` to send as of `since`; `limit`: how fast they come at most;
    `max_rate`: what it could use alone; `fair_rate`: its share, None while undecided."""

    __slots__ = (
        "done", "ends_at", "fair_rate", "key", "left", "limit", "max_rate", "rate", "resources", "since"
    )  # fmt: skip

    def __init__(self, key: int, size: float, resources: tuple[_Resource, ...], limit: float) -> None:
        self.key = key
        self.left = size
        self.resources = resources
        self.limit = limit
        self.max_rate = self.rate_alone()
        self.rate = 0.0
        self.fair_rate: float | None = None
        self.since = 0.0
        self.ends_at = inf
        self.done = False

    def rate_alone(self) -> float:
        """By its limit and its resources, as they are now."""
        return min(self.limit, *(resource.capacity for resource in self.resources))


def link_capacities(cluster: Cluster, streams: int | None = None) -> NDArray[np.float64]:
    """Bytes per second from box to box; with so many TCP streams, or with as many as it takes
    (None).

    A stream moves one window per round trip; inside a box no stream has to.
    """
    gbps = cluster.gbps.copy()
    if streams is not None:
        rtt = np.where(cluster.rtt_s > 0.0, cluster.rtt_s, np.inf)
        windowed = np.where(np.isfinite(rtt), streams * WINDOW_BYTES / BYTES_PER_GB / rtt, np.inf)
        gbps = np.minimum(gbps, windowed)
    np.fill_diagonal(gbps, [box.gpu_link_gbps for box in cluster.boxes])
    return gbps * BYTES_PER_GB


@final
class FluidNetwork:
    """All flows between boxes (indices into the capacities). To be advanced at `wake_at`."""

    def __init__(self, capacities: NDArray[np.float64]) -> None:
        self._capacities = capacities
        out, into = _box_capacities(capacities)
        self._sending = [_Resource(capacity) for capacity in out]
        self._receiving = [_Resource(capacity) for capacity in into]
        self._links: dict[tuple[int, int], _Resource] = {}
        self._keys = count()
        self._flows = 0
        self._ends: list[tuple[float, int, Flow]] = []  # heap; entries whose flow ends at another time are outdated

    def __repr__(self) -> str:
        return f"<FluidNetwork of {len(self._sending)} boxes, {self._flows} flows>"

    def __len__(self) -> int:
        return self._flows

    @property
    def wake_at(self) -> float:
        """When the next flow ends."""
        ends = self._ends
        # A rate that changes leaves its old entry in the heap, which is dropped when it comes up.
        while ends and ends[0][0] != ends[0][2].ends_at:
            heappop(ends)
        return ends[0][0] if ends else inf

    def start(self, source: int, target: int, size: float, now: float, *, limit: float = inf) -> Flow:
        """Send `size` bytes, no faster than `limit` bytes per second. Raises FluidError."""
        if not size > 0.0 or not limit > 0.0:
            raise FluidError(f"a flow of {size} bytes at no more than {limit} bytes per second")
        flow = Flow(next(self._keys), size, self._resources_between(source, target), limit)
        flow.since = now
        self._flows += 1
        self._enter(flow, now)
        return flow

    def lift_limit(self, flow: Flow, now: float, *, at_least: float = 0.0) -> None:
        """Let only its resources limit the flow; at least `at_least` bytes are left."""
        self._settle(flow, now)
        flow.limit = inf
        more = flow.rate_alone() - flow.max_rate
        flow.max_rate += more
        flow.left = max(flow.left, at_least)
        flow.ends_at = inf
        self._demand(flow, more, now)

    def change_capacities(self, capacities: NDArray[np.float64], now: float) -> None:
        """Links carry as much as these say from now on; flows under way go on at their new shares."""
        self._capacities = capacities
        for resources, figures in zip((self._sending, self._receiving), _box_capacities(capacities), strict=True):
            for resource, capacity in zip(resources, figures, strict=True):
                resource.capacity = capacity
        for ends, link in self._links.items():
            link.capacity = float(capacities[ends])
        resources = [*self._sending, *self._receiving, *self._links.values()]
        for flow in {key: flow for resource in resources for key, flow in resource.flows.items()}.values():
            flow.max_rate = flow.rate_alone()
        for resource in resources:
            resource.demand = 0.0
            resource.add_demand(sum(flow.max_rate for flow in resource.flows.values()))
        self._share_out(tuple(resources), now)

    def stop(self, flow: Flow, now: float) -> None:
        """Stop a flow; nothing happens to one that has ended."""
        if not flow.done:
            self._end(flow, now)

    def advance(self, now: float) -> list[Flow]:
        """End the flows that are due by `now`, and return them."""
        ended: list[Flow] = []
        while self.wake_at <= now:
            flow = heappop(self._ends)[2]
            ended.append(flow)
            self._end(flow, now)
        return ended

    def check_integrity(self) -> None:
        """Raises FluidError if a resource is overloaded, or a flow slow for no reason."""
        resources = [*self._sending, *self._receiving, *self._links.values()]
        for resource in resources:
            total = sum(flow.rate for flow in resource.flows.values())
            if total > resource.capacity * (1.0 + 1e-6):
                raise FluidError(f"{total} bytes per second where {resource.capacity} fit")
        full = {id(n) for n in resources if sum(f.rate for f in n.flows.values()) >= n.capacity * (1.0 - 1e-6)}
        for flow in {flow for resource in resources for flow in resource.flows.values()}:
            held_back = any(
                id(resource) in full and flow.rate >= max(f.rate for f in resource.flows.values()) * (1.0 - 1e-6)
                for resource in flow.resources
            )
            if not held_back and flow.rate < flow.max_rate * (1.0 - 1e-6):
                raise FluidError(f"flow {flow.key} runs at {flow.rate} of {flow.max_rate} for no reason")

    def _resources_between(self, source: int, target: int) -> tuple[_Resource, ...]:
        link = self._links.get((source, target))
        if link is None:
            capacity = float(self._capacities[source, target])
            if not capacity > 0.0:
                raise FluidError(f"there is no link from box {source} to box {target}")
            link = self._links[source, target] = _Resource(capacity)
        if source == target:
            return (link,)
        return (self._sending[source], link, self._receiving[target])

    def _enter(self, flow: Flow, now: float) -> None:
        for resource in flow.resources:
            resource.flows[flow.key] = flow
        self._demand(flow, flow.max_rate, now)

    def _demand(self, flow: Flow, more: float, now: float) -> None:
        """A flow could use `more` bytes per second than before: set its rate, and all that this changes."""
        is_crowded = False
        for resource in flow.resources:
            resource.add_demand(more)
            is_crowded = is_crowded or resource.crowded
        # Where nothing is crowded all flows run at their own limits, and no other flow's rate changes.
        if is_crowded:
            self._share_out(flow.resources, now)
        else:
            self._set_rate(flow, flow.max_rate, now)

    def _end(self, flow: Flow, now: float) -> None:
        flow.done = True
        self._flows -= 1
        # Only flows on resources that were crowded with this one can be faster without it.
        crowded = [resource for resource in flow.resources if resource.crowded]
        for resource in flow.resources:
            del resource.flows[flow.key]
            resource.add_demand(-flow.max_rate)
        flow.ends_at = inf
        if crowded:
            self._share_out(tuple(crowded), now)

    def _share_out(self, start: tuple[_Resource, ...], now: float) -> None:
        """Assign max-min fair rates to the flows through `start` and all that share crowded
        resources with them.

        Progressive filling: the resource with the least spare capacity per flow limits its flows
        first; the capacity that those leave elsewhere goes to the others.
        """
        flows, crowded = _find_sharing(start)
        if not crowded:  # the flow that has left was the one too many
            for flow in flows:
                self._set_rate(flow, flow.max_rate, now)
            return
        for resource in crowded:
            resource.spare, resource.unassigned = resource.capacity, len(resource.flows)
        for flow in flows:
            flow.fair_rate = None
        # In order of what they could use: a flow that needs less than the least fair share takes just that.
        flows.sort(key=attrgetter("max_rate", "key"))
        for flow in flows:
            while flow.fair_rate is None:
                share, tightest = _least_share(crowded)
                if tightest is None or flow.max_rate <= share:
                    _assign_rate(flow, flow.max_rate)
                else:
                    for other in tightest.flows.values():
                        if other.fair_rate is None:
                            _assign_rate(other, share)
        for flow in flows:
            self._set_rate(flow, flow.fair_rate or 0.0, now)

    def _set_rate(self, flow: Flow, rate: float, now: float) -> None:
        if rate == flow.rate and flow.ends_at != inf:
            return
        self._settle(flow, now)
        flow.rate = rate
        flow.ends_at = now + flow.left / rate
        heappush(self._ends, (flow.ends_at, flow.key, flow))
        if len(self._ends) > 64 + 8 * self._flows:
            self._ends = [entry for entry in self._ends if entry[0] == entry[2].ends_at]
            heapify(self._ends)

    @staticmethod
    def _settle(flow: Flow, now: float) -> None:
        """Take what it has sent up to now off `left`."""
        flow.left = max(_ROUNDING, flow.left - flow.rate * (now - flow.since))
        flow.since = now


def _box_capacities(capacities: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """What each box sends, and receives, at most: as much as the best of its links."""
    across = np.where(np.eye(len(capacities), dtype=bool), 0.0, capacities)
    return across.max(axis=1).tolist(), across.max(axis=0).tolist()


def _least_share(crowded: list[_Resource]) -> tuple[float, _Resource | None]:
    """The least spare capacity per unassigned flow among crowded resources, and the resource."""
    least, tightest = inf, None
    for resource in crowded:
        if resource.unassigned and resource.spare < least * resource.unassigned:
            least, tightest = resource.spare / resource.unassigned, resource
    return least, tightest


def _assign_rate(flow: Flow, rate: float) -> None:
    flow.fair_rate = rate
    for resource in flow.resources:
        resource.spare -= rate
        resource.unassigned -= 1


def _find_sharing(start: tuple[_Resource, ...]) -> tuple[list[Flow], list[_Resource]]:
    """Flows that share `start` or crowded resources with it, and those resources."""
    flows: dict[int, Flow] = {}
    crowded: list[_Resource] = []
    todo = list(start)
    seen = set(todo)
    while todo:
        resource = todo.pop()
        if resource.crowded:
            crowded.append(resource)
        for key, flow in resource.flows.items():
            if key not in flows:
                flows[key] = flow
                for other in flow.resources:
                    if other.crowded and other not in seen:
                        seen.add(other)
                        todo.append(other)
    return list(flows.values()), crowded
