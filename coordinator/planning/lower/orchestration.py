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
from .flow import FlowProblem, LinkCapacities, RequestFlow, solve_exact
from .queueing import KVDelays, ReplicaTables, RequestTimes
from .replica_pairs import ClusterLinks, ReplicaPairs, pair_replicas
from .replicas import REFERENCE_LOAD, ConfiguredReplica, LoadCurve, count_phases

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Solver = Callable[[FlowProblem], RequestFlow]


HALVINGS: Final = 9
"""Of the interval that the highest rate is searched in."""

REFERENCE_BUSY: Final = 0.5
"""How busy links are taken to be before it is known what they carry."""


@dataclass(frozen=True, slots=True, eq=False)
class Orchestration:
    """Who serves how many requests, and how. Rows of `times` are those pairs of `pairs` that have
    any: `active`."""

    service: Service
    classes: Classes
    replicas: Sequence[ConfiguredReplica]
    curves: Sequence[LoadCurve]
    network: FlowProblem
    pairs: ReplicaPairs
    flow: RequestFlow
    active: Index
    times: RequestTimes

    @property
    def attainment(self) -> float:
        """In time, of all requests that are asked for."""
        return (
            float(self.times.share_in_time(self.service.slo) @ self.flow.pair_rates[self.active])
            / self.service.workload.rate
        )

    @property
    def capacity(self) -> float:
        """What replicas and links carry in time, over the rate that is asked for."""
        usable_load = [curve.usable_load for curve in self.curves]
        return carried_rate(self.replicas, usable_load, self.network) / self.service.workload.rate


def orchestrate(
    service: Service,
    classes: Classes,
    replicas: Sequence[ConfiguredReplica],
    curves: Sequence[LoadCurve],
    links: ClusterLinks,
    capacities: LinkCapacities,
    solver: Solver,
) -> Orchestration:
    """On what is left of the links. `solver`: `flow.solve_greedy` or `flow.solve_exact`."""
    gigabits = kv_gigabits(service.model, classes.prompt, service.kv_bits)
    average = float(classes.share @ gigabits)
    pairs = pair_replicas([replica.holder for replica in replicas], links, average)
    tables = ReplicaTables.of([replica.behaviour for replica in replicas], classes, service.workload.arrival_cv)
    outcome = _PairModel(
        service, classes, tables, pairs, gigabits, count_phases(replica.group.phase for replica in replicas)
    )
    network = FlowProblem(
        service.workload.rate, tables.prefill_rate, tables.decode_rate, [curve.lost for curve in curves],
        pairs.prefill, pairs.decode, outcome.worth(curves), pairs.link_demands, capacities, tables.mixed_rate,
    )  # fmt: skip
    flow = solver(network)
    active = np.flatnonzero(flow.pair_rates)
    busy = _busiest_link(pairs, active, links.busy(flow.used_gbps + _activation_gbps(replicas, pairs, flow, service)))
    times = outcome.of(active, flow.loads, busy)
    return Orchestration(service, classes, replicas, curves, network, pairs, flow, active, times)


def find_highest_rate(found: Orchestration, links: ClusterLinks, capacities: LinkCapacities, solver: Solver) -> float:
    """Requests per second with the service's target share still in time, shared out anew for each.
    `capacities`: of links, after other services."""
    target = found.service.slo.target
    low, high = 0.0, solve_exact(found.network.without_losses(inf, [1.0] * len(found.replicas))).served

    def enough(rate: float) -> bool:
        workload = replace(found.service.workload, rate=rate)
        service = replace(found.service, workload=workload)
        again = orchestrate(service, found.classes, found.replicas, found.curves, links, capacities, solver)
        return again.attainment >= target

    if high > 0.0 and enough(high):
        return high
    for _ in range(HALVINGS if high > 0.0 else 0):
        middle = (low + high) / 2.0
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True, eq=False)
class _PairModel:
    """What becomes of requests on any pair at any load."""

    service: Service
    classes: Classes
    tables: ReplicaTables
    pairs: ReplicaPairs
    gigabits: Array
    counts: tuple[int, int]

    def of(self, pairs: Index, loads: Array, busy: Array) -> RequestTimes:
        """Rows for these pairs at these loads. `busy`: share of the time that others send, so KV
        takes 1 / (1 - busy) times as long. Decode needs a step for the first token."""
        prefills, decodes = self.pairs.prefill[pairs], self.pairs.decode[pairs]
        everyone = np.arange(len(loads))
        row = self.tables.at(everyone, loads)
        prefilling = self.tables.prefill_times(everyone, row, self.counts[0]).at(prefills)
        decoding = self.tables.decode_times(everyone, loads, row, self.counts[1]).at(decodes)
        wire_s = self.pairs.gigabit_s[pairs][:, None] * self.gigabits
        latency_s, prefill_s = self.pairs.latency_s[pairs][:, None], self.tables.prefill_s[prefills]
        layers = self.service.model.layers
        least_s = visible_s(wire_s, latency_s, prefill_s, layers)
        shared_s = visible_s(wire_s / (1.0 - busy)[:, None], latency_s, prefill_s, layers) - least_s
        sending = KVDelays(least_s, busy, shared_s / np.maximum(busy, 1e-9)[:, None])
        is_transferred = prefills != decodes
        early = ~is_transferred | self.service.first_token_at_decode
        step_s = np.where(is_transferred & self.service.first_token_at_decode, decoding.tpot_s, 0.0)
        admit_s = np.broadcast_to(decoding.admit_s[:, None], wire_s.shape)
        return RequestTimes(
            self.classes, prefilling, decoding, sending, admit_s, early.astype(np.float64), step_s,
            self.pairs.control_s[pairs],
        )  # fmt: skip

    def worth(self, curves: Sequence[LoadCurve]) -> Array:
        """Of a request on each pair, before what both replicas lose to their loads.

        Both replicas' losses are counted by their curves: what the pair as a whole loses more at
        the reference load, through KV on its way, or less, because the same requests are late
        twice, is left for its worth.
        """
        worth = np.ones(len(self.pairs.prefill))
        cross = np.flatnonzero(self.pairs.prefill != self.pairs.decode)
        if len(cross):
            loads = np.full(len(curves), LOADS[REFERENCE_LOAD])
            busy = np.array([REFERENCE_BUSY * bool(self.pairs.link_demands[pair]) for pair in cross.tolist()])
            share = self.of(cross, loads, busy).share_in_time(self.service.slo)
            alone = np.array([curve.in_time_share[REFERENCE_LOAD] for curve in curves])
            worth[cross] += share - alone[self.pairs.prefill[cross]] - alone[self.pairs.decode[cross]] + 1.0
        return worth


def _busiest_link(pairs: ReplicaPairs, active: Index, busy: Array) -> Array:
    """By pair: how much of the time the busiest of its links is."""
    return np.array(
        [
            max((busy[demand.source, demand.target] for demand in pairs.link_demands[pair]), default=0.0)
            for pair in active.tolist()
        ],
        dtype=np.float64,
    )


def _activation_gbps(
    replicas: Sequence[ConfiguredReplica], pairs: ReplicaPairs, flow: RequestFlow, service: Service
) -> Array:
    """Gb/s [from, to] of activations in pipelines across boxes: of all tokens prefilled and
    decoded."""
    used_gbps = np.zeros_like(flow.used_gbps)
    spanning = [index for index, replica in enumerate(replicas) if len(replica.group.slices) > 1]
    if not spanning:
        return used_gbps
    token = service.model.activation_bytes_per_token * 8e-9
    prefill_tokens_s = (
        np.bincount(pairs.prefill, flow.pair_rates, minlength=len(replicas)) * service.workload.mean_prompt
    )
    decode_tokens_s = np.bincount(pairs.decode, flow.pair_rates, minlength=len(replicas)) * service.workload.mean_output
    for index in spanning:
        boxes = [box for box, _, _ in replicas[index].holder.spans]
        for source, target in pairwise(boxes):
            used_gbps[source, target] += (prefill_tokens_s[index] + decode_tokens_s[index]) * token * (source != target)
    return used_gbps


def carried_rate(
    replicas: Sequence[ConfiguredReplica], usable_load: Sequence[float], network: FlowProblem | None = None
) -> float:
    """The highest rate, in requests per second, that keeps every replica at a load that it is in
    time with: `usable_load`.

    With `network`, every replica that transfers KV is held to the links of its pairs; without,
    to none. What several replicas' links have in common is not looked at: `flow.solve_exact` does.
    """
    limits = _link_limited_rates(replicas, network)
    prefilling = decoding = 0.0
    mixed: list[Array] = []
    for replica, load, limit in zip(replicas, usable_load, limits.tolist(), strict=True):
        behaves = replica.behaviour
        if replica.group.phase is Phase.PREFILL:
            prefilling += min(load * behaves.prefill_rate, limit)
        elif replica.group.phase is Phase.DECODE:
            decoding += min(load * behaves.decode_rate, limit)
        elif load:
            mixed.append(load * np.array([behaves.prefill_rate, behaves.decode_rate, behaves.mixed_rate]))
    if not (prefilling or decoding):
        return float(sum(rates[2] for rates in mixed))
    # mixed replicas help the side that is behind, those first that lose least of their own; the rest keep their own
    side, behind = (0, decoding - prefilling) if prefilling < decoding else (1, prefilling - decoding)
    own = 0.0
    for rates in sorted(mixed, key=lambda rates: rates[2] / rates[side]):
        part = behind / rates[side] if behind < rates[side] else 1.0  # the other quotient may overflow
        behind -= part * rates[side]
        own += (1.0 - part) * rates[2]
    return float(max(prefilling, decoding) - max(behind, 0.0) + own)


def _link_limited_rates(replicas: Sequence[ConfiguredReplica], network: FlowProblem | None) -> Array:
    """Requests per second that the links of each replica's pairs let through, one replica at a
    time."""
    if network is None:
        return np.full(len(replicas), np.inf)
    between = network.capacities.between
    through = np.array([
        min((between[demand.source, demand.target] / demand.gigabits for demand in link_demands), default=np.inf)
        for link_demands in network.link_demands
    ])  # fmt: skip
    limits = np.zeros(len(replicas))
    np.add.at(limits, network.prefill, through)
    np.add.at(limits, network.decode, through)
    return limits
