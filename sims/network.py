"""KV bytes in flight, as fluids: every flow gets its max-min fair share of the links and boxes it passes.

A flow passes what its source may send, the link itself, and what its target may receive. A box sends as fast as the
best of its links can, and receives likewise: the matrix of a cluster holds what each pair reaches alone. What stays
inside a box shares what two of its cards reach between each other.

A flow may have a limit of its own: KV that is sent layer by layer comes no faster than it is computed. Where the
limits of all flows fit through, nobody waits for anybody, and a new flow costs a few additions; rates are worked out
again only among flows that share something which is too narrow for them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from ..coordinator.planning.model.cluster import Cluster
from ..kvtransport.probing.figures import WINDOW_BYTES

__all__ = ["Flow", "FluidError", "FluidNetwork", "link_capacities"]

BYTES_PER_GB: Final = 1e9 / 8.0
"""Bytes of a gigabit."""

_ROUNDING: Final = 1e-6
"""Bytes that may be left of a flow which has ended, by float arithmetic; and the share by which demands may exceed a
capacity and still fit."""


class FluidError(ValueError):
    """Flows that cannot be: between boxes without a link, or of no bytes."""


@final
class _SharedCapacity:
    """Something that flows share: what a box sends or receives, or a link. `demand` is what all of them could use; it
    is `crowded` when that is more than there is. `room` and `waiting` are for sharing out: what is left, and for how
    many."""

    __slots__ = ("capacity", "crowded", "demand", "flows", "room", "waiting")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.demand = 0.0
        self.crowded = False
        self.flows: dict[int, Flow] = {}
        self.room = 0.0
        self.waiting = 0

    def ask(self, more: float) -> None:
        """Its flows could use so much more, or less."""
        self.demand = self.demand + more if self.flows else 0.0
        self.crowded = self.demand > self.capacity * (1.0 + _ROUNDING)


@final
class Flow:
    """Bytes on their way. `left` is as of `since`; `most` bytes per second is what it could use if it were alone, and
    `fair` what it is given while rates are shared out (None: not yet)."""

    __slots__ = ("done", "ends_at", "fair", "key", "left", "most", "rate", "since", "way")

    def __init__(self, key: int, size: float, way: tuple[_SharedCapacity, ...], limit: float) -> None:
        self.key = key
        self.left = size
        self.way = way
        self.most = min(limit, *(narrow.capacity for narrow in way))
        self.rate = 0.0
        self.fair: float | None = None
        self.since = 0.0
        self.ends_at = inf
        self.done = False


def link_capacities(cluster: Cluster, streams: int | None = None) -> NDArray[np.float64]:
    """Bytes per second from box to box; with so many TCP streams, or with as many as it takes (None).

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
    """The flows between boxes (indices into the capacities). It wants to be advanced at `wake_at`."""

    def __init__(self, capacities: NDArray[np.float64]) -> None:
        self._capacities = capacities
        boxes = len(capacities)
        across = np.where(np.eye(boxes, dtype=bool), 0.0, capacities)
        self._sending = [_SharedCapacity(float(row.max())) for row in across]
        self._receiving = [_SharedCapacity(float(column.max())) for column in across.T]
        self._links: dict[tuple[int, int], _SharedCapacity] = {}
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
        while ends and ends[0][0] != ends[0][2].ends_at:
            heappop(ends)
        return ends[0][0] if ends else inf

    def start(self, source: int, target: int, size: float, now: float, *, limit: float = inf) -> Flow:
        """Send `size` bytes, no faster than `limit` bytes per second. Raises FluidError."""
        if not size > 0.0 or not limit > 0.0:
            raise FluidError(f"a flow of {size} bytes at no more than {limit} bytes per second")
        flow = Flow(next(self._keys), size, self._way(source, target), limit)
        flow.since = now
        self._flows += 1
        self._enter(flow, now)
        return flow

    def unlimit(self, flow: Flow, now: float, *, at_least: float = 0.0) -> None:
        """From now on only the way limits the flow; at least so many bytes are still to be sent."""
        self._settle(flow, now)
        more = min(narrow.capacity for narrow in flow.way) - flow.most
        was_crowded = any(narrow.crowded for narrow in flow.way)
        for narrow in flow.way:
            narrow.ask(more)
        flow.most += more
        flow.left = max(flow.left, at_least)
        flow.ends_at = inf
        if was_crowded or any(narrow.crowded for narrow in flow.way):
            self._share_out(flow.way, now)
        else:
            self._set_rate(flow, flow.most, now)

    def stop(self, flow: Flow, now: float) -> None:
        """Send no more of it; nothing happens to one that has ended."""
        if not flow.done:
            self._end(flow, now)

    def advance(self, now: float) -> list[Flow]:
        """The flows that end at `now`."""
        ended: list[Flow] = []
        while self.wake_at <= now:
            flow = heappop(self._ends)[2]
            ended.append(flow)
            self._end(flow, now)
        return ended

    def check_integrity(self) -> None:
        """No link or box carries more than it can, and every rate is somebody's limit. Raises FluidError."""
        narrows = [*self._sending, *self._receiving, *self._links.values()]
        for narrow in narrows:
            total = sum(flow.rate for flow in narrow.flows.values())
            if total > narrow.capacity * (1.0 + 1e-6):
                raise FluidError(f"{total} bytes per second where {narrow.capacity} fit")
        full = {id(n) for n in narrows if sum(f.rate for f in n.flows.values()) >= n.capacity * (1.0 - 1e-6)}
        for flow in {flow for narrow in narrows for flow in narrow.flows.values()}:
            held_back = any(
                id(narrow) in full and flow.rate >= max(f.rate for f in narrow.flows.values()) * (1.0 - 1e-6)
                for narrow in flow.way
            )
            if not held_back and flow.rate < flow.most * (1.0 - 1e-6):
                raise FluidError(f"flow {flow.key} runs at {flow.rate} of {flow.most} for no reason")

    def _way(self, source: int, target: int) -> tuple[_SharedCapacity, ...]:
        link = self._links.get((source, target))
        if link is None:
            capacity = float(self._capacities[source, target])
            if not capacity > 0.0:
                raise FluidError(f"there is no link from box {source} to box {target}")
            link = self._links[source, target] = _SharedCapacity(capacity)
        if source == target:
            return (link,)
        return (self._sending[source], link, self._receiving[target])

    def _enter(self, flow: Flow, now: float) -> None:
        for narrow in flow.way:
            narrow.flows[flow.key] = flow
            narrow.ask(flow.most)
        if any(narrow.crowded for narrow in flow.way):
            self._share_out(flow.way, now)
        else:
            self._set_rate(flow, flow.most, now)

    def _leave(self, flow: Flow, now: float) -> None:
        crowded = [narrow for narrow in flow.way if narrow.crowded]
        for narrow in flow.way:
            del narrow.flows[flow.key]
            narrow.ask(-flow.most)
        flow.ends_at = inf
        if crowded:
            self._share_out(tuple(crowded), now)

    def _end(self, flow: Flow, now: float) -> None:
        flow.done = True
        self._flows -= 1
        self._leave(flow, now)

    def _share_out(self, start: tuple[_SharedCapacity, ...], now: float) -> None:
        """Fair rates for all flows that anything crowded joins to those that pass `start`.

        Progressive filling: the flows that are held back most get the least fair share of what is left anywhere, and
        leave the rest to the others.
        """
        flows, crowded = _joined(start)
        for narrow in crowded:
            narrow.room, narrow.waiting = narrow.capacity, len(narrow.flows)
        for flow in flows:
            flow.fair = None
        flows.sort(key=_by_most)
        for flow in flows:
            while flow.fair is None:
                share, tightest = _least_share(crowded)
                if tightest is None or flow.most <= share:
                    _grant(flow, flow.most)
                else:
                    for other in tightest.flows.values():
                        if other.fair is None:
                            _grant(other, share)
        for flow in flows:
            self._set_rate(flow, flow.fair or 0.0, now)

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
        """What it has sent up to now is off."""
        flow.left = max(_ROUNDING, flow.left - flow.rate * (now - flow.since))
        flow.since = now


def _by_most(flow: Flow) -> tuple[float, int]:
    return flow.most, flow.key


def _least_share(crowded: list[_SharedCapacity]) -> tuple[float, _SharedCapacity | None]:
    """The least that is left anywhere for each of those that wait there, and where."""
    least, tightest = inf, None
    for narrow in crowded:
        if narrow.waiting and narrow.room < least * narrow.waiting:
            least, tightest = narrow.room / narrow.waiting, narrow
    return least, tightest


def _grant(flow: Flow, rate: float) -> None:
    flow.fair = rate
    for narrow in flow.way:
        narrow.room -= rate
        narrow.waiting -= 1


def _joined(start: tuple[_SharedCapacity, ...]) -> tuple[list[Flow], list[_SharedCapacity]]:
    """The flows through `start` and, from each to the next, through everything crowded on their ways; and that."""
    flows: dict[int, Flow] = {}
    crowded: list[_SharedCapacity] = []
    todo = list(start)
    seen = set(todo)
    while todo:
        narrow = todo.pop()
        if narrow.crowded:
            crowded.append(narrow)
        for key, flow in narrow.flows.items():
            if key not in flows:
                flows[key] = flow
                for other in flow.way:
                    if other.crowded and other not in seen:
                        seen.add(other)
                        todo.append(other)
    return list(flows.values()), crowded
