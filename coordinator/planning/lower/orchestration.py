"""How the replicas of one service share its requests, and how those fare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..model.kv_cost import kv_gigabits, visible_s
from ..model.length_classes import Classes
from ..model.workload import Service
from .behaviour import LOADS
from .flow import Flow, Network, Roads, solve
from .handover import Handovers, Links, handovers
from .members import REFERENCE_LOAD, Curve, Member, crowd_of
from .queueing import Fates, Fleet, Sending

__all__ = ["Orchestration", "Solver", "carried", "highest_rate", "orchestrate"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Solver = Callable[[Network], Flow]


HALVINGS: Final = 9
"""Of the interval that the highest rate is searched in."""

REFERENCE_BUSY: Final = 0.5
"""How busy links are taken to be before it is known what they carry."""


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
        usable = [curve.usable for curve in self.curves]
        return carried(self.members, usable, self.network) / self.service.workload.rate


def orchestrate(
    service: Service, classes: Classes, members: Sequence[Member], curves: Sequence[Curve], links: Links, roads: Roads,
    solver: Solver,
) -> Orchestration:  # fmt: skip
    """On what is left of the links. `solver`: `flow.fill` or `flow.solve`."""
    gigabits = kv_gigabits(service.model, classes.prompt, service.kv_bits)
    average = float(classes.share @ gigabits)
    handover = handovers([member.holder for member in members], links, average)
    fleet = Fleet.of([member.behaviour for member in members], classes, service.workload.arrival_cv)
    outcome = _Outcome(service, classes, fleet, handover, gigabits, crowd_of(member.group.phase for member in members))
    network = Network(
        service.workload.rate, fleet.read, fleet.write, [curve.lost for curve in curves],
        handover.reader, handover.writer, outcome.worth(curves), handover.wires, roads, fleet.both,
    )  # fmt: skip
    flow = solver(network)
    active = np.flatnonzero(flow.pairs)
    busy = _busy(handover, active, links.busy(flow.used + _hop_gbps(members, handover, flow, service)))
    fates = outcome.of(active, flow.loads, busy)
    return Orchestration(service, classes, members, curves, network, handover, flow, active, fates)


def highest_rate(found: Orchestration, links: Links, roads: Roads, solver: Solver) -> float:
    """Requests per second at which the service's target share would still be in time, shared out anew for each rate.

    `roads`: what other services leave of the links."""
    target = found.service.slo.target
    low, high = 0.0, solve(found.network.unlimited(inf, [1.0] * len(found.members))).served

    def enough(rate: float) -> bool:
        workload = replace(found.service.workload, rate=rate)
        service = replace(found.service, workload=workload)
        again = orchestrate(service, found.classes, found.members, found.curves, links, roads, solver)
        return again.attainment >= target

    if high > 0.0 and enough(high):
        return high
    for _ in range(HALVINGS if high > 0.0 else 0):
        middle = (low + high) / 2.0
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """What becomes of requests on any pair at any load."""

    service: Service
    classes: Classes
    fleet: Fleet
    handover: Handovers
    gigabits: Array
    crowd: tuple[int, int]

    def of(self, pairs: Index, loads: Array, busy: Array) -> Fates:
        """Rows for these pairs, at these loads of all replicas. `busy`: the share of the time that others send on a
        pair's links; they share them, so that KV takes 1 / (1 - busy) times as long on average. A decode replica needs
        a step for the first token as for any other."""
        readers, writers = self.handover.reader[pairs], self.handover.writer[pairs]
        everyone = np.arange(len(loads))
        row = self.fleet.at(everyone, loads)
        reading = self.fleet.reading(everyone, row, self.crowd[0]).at(readers)
        writing = self.fleet.writing(everyone, loads, row, self.crowd[1]).at(writers)
        wire_s = self.handover.gigabit_s[pairs][:, None] * self.gigabits
        alpha_s, read_s = self.handover.alpha_s[pairs][:, None], self.fleet.lone_s[readers]
        layers = self.service.model.layers
        least_s = visible_s(wire_s, alpha_s, read_s, layers)
        shared_s = visible_s(wire_s / (1.0 - busy)[:, None], alpha_s, read_s, layers) - least_s
        sending = Sending(least_s, busy, shared_s / np.maximum(busy, 1e-9)[:, None])
        handed = readers != writers
        early = ~handed | self.service.decode_writes_first
        step_s = np.where(handed & self.service.decode_writes_first, writing.tpot_s, 0.0)
        admit_s = np.broadcast_to(writing.admit_s[:, None], wire_s.shape)
        return Fates(self.classes, reading, writing, sending, admit_s, early.astype(np.float64), step_s)

    def worth(self, curves: Sequence[Curve]) -> Array:
        """Of a request on each pair, before what both replicas lose to their loads.

        Both replicas' losses are counted by their curves: what the pair as a whole loses more at the reference load,
        through KV on its way, or less, because the same requests are late twice, is left for its worth.
        """
        worth = np.ones(len(self.handover.reader))
        cross = np.flatnonzero(self.handover.reader != self.handover.writer)
        if len(cross):
            loads = np.full(len(curves), LOADS[REFERENCE_LOAD])
            busy = np.array([REFERENCE_BUSY * bool(self.handover.wires[pair]) for pair in cross.tolist()])
            share = self.of(cross, loads, busy).met(self.service.slo)
            alone = np.array([curve.met[REFERENCE_LOAD] for curve in curves])
            worth[cross] += share - alone[self.handover.reader[cross]] - alone[self.handover.writer[cross]] + 1.0
        return worth


def _busy(handover: Handovers, active: Index, busy: Array) -> Array:
    """By pair: how much of the time the busiest of its links is."""
    return np.array(
        [
            max((busy[wire.source, wire.target] for wire in handover.wires[pair]), default=0.0)
            for pair in active.tolist()
        ],
        dtype=np.float64,
    )


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


def carried(members: Sequence[Member], usable: Sequence[float], network: Network | None = None) -> float:
    """The highest rate, in requests per second, that keeps every replica at a load that it is in time with: `usable`.

    With `network`, every replica that has to hand over is held to the links of its pairs; without, to none. What
    several replicas' links have in common is not looked at: `flow.solve` does.
    """
    ways = _ways(members, network)
    reading = writing = 0.0
    both: list[Array] = []
    for member, load, way in zip(members, usable, ways.tolist(), strict=True):
        behaves = member.behaviour
        if member.group.phase is Phase.PREFILL:
            reading += min(load * behaves.read, way)
        elif member.group.phase is Phase.DECODE:
            writing += min(load * behaves.write, way)
        elif load:
            both.append(load * np.array([behaves.read, behaves.write, behaves.both]))
    if not (reading or writing):
        return float(sum(rates[2] for rates in both))
    # mixed replicas help the side that is behind, those first that lose least of their own; the rest keep their own
    side, behind = (0, writing - reading) if reading < writing else (1, reading - writing)
    own = 0.0
    for rates in sorted(both, key=lambda rates: rates[2] / rates[side]):
        part = min(1.0, behind / rates[side])
        behind -= part * rates[side]
        own += (1.0 - part) * rates[2]
    return float(max(reading, writing) - max(behind, 0.0) + own)


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
