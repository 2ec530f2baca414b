"""How the replicas of one service share its requests, and how those fare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..plan import Phase
from .behaviour import LOADS
from .flow import Flow, Network, Roads
from .handover import Handovers, Links, handovers
from .kv_cost import kv_gigabits, visible_s
from .length_classes import Classes
from .members import REFERENCE_LOAD, Curve, Member
from .queueing import Fates, Fleet
from .workload import Service

__all__ = ["Orchestration", "Solver", "carried", "orchestrate"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Solver = Callable[[Network], Flow]


@dataclass(frozen=True, slots=True, eq=False)
class Orchestration:
    """Who serves how many requests, and how. Rows of `fates` are those pairs of `handover` that have any: `active`."""

    service: Service
    classes: Classes
    members: Sequence[Member]
    curves: Sequence[Curve]
    network: Network
    handover: Handovers
    flow: Flow
    active: Index
    fates: Fates

    @property
    def attainment(self) -> float:
        """In time, of all requests that are asked for."""
        return float(self.fates.met(self.service.slo) @ self.flow.pairs[self.active]) / self.service.workload.rate

    @property
    def capacity(self) -> float:
        """What replicas and links carry in time, over the rate that is asked for."""
        return carried(self.members, self.curves, self.network) / self.service.workload.rate


def orchestrate(
    service: Service, classes: Classes, members: Sequence[Member], curves: Sequence[Curve], links: Links, roads: Roads,
    solver: Solver,
) -> Orchestration:  # fmt: skip
    """On what is left of the links. `solver`: `flow.fill` or `flow.solve`."""
    gigabits = kv_gigabits(service.model, classes.prompt, service.kv_bits)
    average = float(classes.share @ gigabits)
    handover = handovers([member.holder for member in members], links, average)
    fleet = Fleet.of([member.behaviour for member in members], classes, service.workload.arrival_cv)
    outcome = _Outcome(service, classes, fleet, handover, gigabits, _crowd(members))
    network = Network(
        service.workload.rate, fleet.read, fleet.write, [curve.lost for curve in curves],
        handover.reader, handover.writer, outcome.worth(curves), handover.wires, roads,
    )  # fmt: skip
    flow = solver(network)
    active = np.flatnonzero(flow.pairs)
    stretch = _stretch(handover, active, links.busy(flow.used + _hop_gbps(members, handover, flow, service)))
    fates = outcome.of(active, flow.loads, stretch)
    return Orchestration(service, classes, members, curves, network, handover, flow, active, fates)


def _crowd(members: Sequence[Member]) -> tuple[int, int]:
    """How many replicas share the prompts, and the outputs; 1 where there are none, who do not wait either."""
    return (
        max(1, sum(member.group.phase is not Phase.DECODE for member in members)),
        max(1, sum(member.group.phase is not Phase.PREFILL for member in members)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What becomes of requests on any pair at any load."""

    service: Service
    classes: Classes
    fleet: Fleet
    handover: Handovers
    gigabits: Array
    crowd: tuple[int, int]

    def of(self, pairs: Index, loads: Array, stretch: Array) -> Fates:
        """Rows for these pairs, at these loads of all replicas. `stretch`: how much longer their KV takes on links that
        carry more than it. A decode replica needs a step for the first token as for any other."""
        readers, writers = self.handover.reader[pairs], self.handover.writer[pairs]
        everyone = np.arange(len(loads))
        reading = self.fleet.reading(everyone, loads, self.crowd[0]).at(readers)
        writing = self.fleet.writing(everyone, loads, self.crowd[1]).at(writers)
        wire_s = (self.handover.gigabit_s[pairs] * stretch)[:, None] * self.gigabits
        alpha_s = self.handover.alpha_s[pairs][:, None]
        visible = visible_s(wire_s, alpha_s, self.fleet.lone_s[readers], self.service.model.layers)
        handed = (readers != writers)[:, None]
        admit, step = writing.admit_s[:, None], writing.tpot_s[:, None]
        if self.service.decode_writes_first:
            first, later = admit + visible + handed * step, np.zeros_like(visible)
        else:
            first, later = np.where(handed, 0.0, admit + visible), np.where(handed, admit + visible, 0.0)
        return Fates(self.classes, reading, writing, first, later)

    def worth(self, curves: Sequence[Curve]) -> Array:
        """Of a request on each pair, before what both replicas lose to their loads.

        Both replicas' losses are counted by their curves: what the pair as a whole loses more at the reference load,
        through KV on its way, or less, because the same requests are late twice, is left for its worth.
        """
        worth = np.ones(len(self.handover.reader))
        cross = np.flatnonzero(self.handover.reader != self.handover.writer)
        if len(cross):
            loads = np.full(len(curves), LOADS[REFERENCE_LOAD])
            share = self.of(cross, loads, np.ones(len(cross))).met(self.service.slo)
            alone = np.array([curve.met[REFERENCE_LOAD] for curve in curves])
            worth[cross] += share - alone[self.handover.reader[cross]] - alone[self.handover.writer[cross]] + 1.0
        return worth


def _stretch(handover: Handovers, active: Index, busy: Array) -> Array:
    """How much longer KV takes on links that are busy so much of the time: transfers share them."""
    worst = [
        max((busy[wire.source, wire.target] for wire in handover.wires[pair]), default=0.0) for pair in active.tolist()
    ]
    return 1.0 / (1.0 - np.array(worst, dtype=np.float64))


def _hop_gbps(members: Sequence[Member], handover: Handovers, flow: Flow, service: Service) -> Array:
    """Gb/s [from, to] of activations in pipelines across boxes: of all tokens read and written."""
    used = np.zeros_like(flow.used)
    spanning = [index for index, member in enumerate(members) if len(member.group.slices) > 1]
    if not spanning:
        return used
    token = service.model.activation_bytes_per_token * 8e-9
    read = np.bincount(handover.reader, flow.pairs, minlength=len(members)) * service.workload.mean_prompt
    written = np.bincount(handover.writer, flow.pairs, minlength=len(members)) * service.workload.mean_output
    for index in spanning:
        boxes = [box for box, _, _ in members[index].holder.spans]
        for source, target in pairwise(boxes):
            used[source, target] += (read[index] + written[index]) * token * (source != target)
    return used


def carried(members: Sequence[Member], curves: Sequence[Curve], network: Network | None = None) -> float:
    """The highest rate, in requests per second, that keeps every replica at a load that it is in time with.

    With `network`, every replica that has to hand over is held to the links of its pairs; without, to none. What
    several replicas' links have in common is not looked at: `flow.solve` does.
    """
    ways = _ways(members, network)
    reading = writing = 0.0
    both: list[tuple[float, float]] = []
    for index, (member, curve) in enumerate(zip(members, curves, strict=True)):
        read, write = curve.usable * member.behaviour.read, curve.usable * member.behaviour.write
        if member.group.phase is Phase.PREFILL:
            reading += min(read, ways[index])
        elif member.group.phase is Phase.DECODE:
            writing += min(write, ways[index])
        elif curve.usable:
            both.append((read, write))
    if not (reading or writing):
        return sum(1.0 / (1.0 / read + 1.0 / write) for read, write in both)
    # all mixed replicas write at first; those that read best for it change sides until both sides are equal
    writing += sum(write for _, write in both)
    for read, write in sorted(both, key=lambda rates: rates[1] / rates[0]):
        if reading >= writing:
            break
        part = min(1.0, (writing - reading) / (read + write))
        reading, writing = reading + part * read, writing - part * write
    return min(reading, writing)


def _ways(members: Sequence[Member], network: Network | None) -> Array:
    """Requests per second that the links of each replica's pairs let through, one replica at a time."""
    if network is None:
        return np.full(len(members), np.inf)
    between = network.roads.between
    through = np.array([
        min((between[wire.source, wire.target] / wire.gigabits for wire in wires), default=np.inf)
        for wires in network.wires
    ])  # fmt: skip
    ways = np.zeros(len(members))
    np.add.at(ways, network.reader, through)
    np.add.at(ways, network.writer, through)
    return ways
