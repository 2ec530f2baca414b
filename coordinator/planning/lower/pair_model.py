"""What becomes of requests on pairs of replicas, at any load of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..model.kv_cost import visible_s
from ..model.length_classes import Classes
from ..model.workload import Service
from .behaviour import LOADS
from .flow import RequestFlow
from .queueing import KVDelays, Pool, ReplicaTables, RequestTimes
from .replica_pairs import ClusterLinks, ReplicaPairs
from .replicas import REFERENCE_LOAD, ConfiguredReplica, LoadCurve

Array = NDArray[np.float64]
Index = NDArray[np.intp]

REFERENCE_BUSY: Final = 0.5
"""How busy links are taken to be before it is known what they carry."""


@dataclass(frozen=True, slots=True, eq=False)
class PairModel:
    """What becomes of requests on any pair at any load. `gigabits`: of KV, by class."""

    service: Service
    classes: Classes
    tables: ReplicaTables
    pairs: ReplicaPairs
    gigabits: Array

    def pools(self, rates: Array, loads: Array) -> tuple[Pool, Pool]:
        """Who helps whom with prompts, and with outputs, at so many requests per second of each
        pair: those that the same replicas go on with, and all that keep theirs. Where the other end
        is another one, too, its queue decides as much. And of a prefill replica's queue the router
        sees little: prompts on their way through a pipeline are in it, and keep nobody waiting."""
        shares = np.zeros((len(loads), len(loads)))
        np.add.at(shares, (self.pairs.prefill, self.pairs.decode), rates)
        ends = (shares > 0.0).astype(np.float64)
        kept = np.outer(ends.diagonal(), ends.diagonal())
        seen = self._seen_of_queues()[:, None]
        prompts, outputs = (ends @ ends.T + kept > 0.0) * seen, 1.0 * (ends.T @ ends + kept > 0.0)
        for alike in (prompts, outputs):
            np.fill_diagonal(alike, 1.0)
        return Pool.of_shares(shares.sum(axis=1), loads, prompts), Pool.of_shares(shares.sum(axis=0), loads, outputs)

    def _seen_of_queues(self) -> Array:
        """By replica: the part of its prompts that the next one waits for; all but on prefill replicas."""
        tables = self.tables
        sends = np.isfinite(tables.prefill_rate) & np.isinf(tables.decode_rate)
        under_way = np.where(sends, tables.prefill_rate, 0.0) * (tables.prefill_s @ self.classes.share)
        return np.asarray(1.0 / np.maximum(1.0, under_way))

    def times(self, pairs: Index, loads: Array, busy: Array, pools: tuple[Pool, Pool]) -> RequestTimes:
        """Rows for these pairs at each row of `loads`, one set after the other. `busy` [set, pair]:
        share of the time that others send, so KV takes 1 / (1 - busy) times as long; who comes with
        it joins the batch at the end of a step. Decode needs a step for the first token."""
        sets, replicas = loads.shape
        everyone, load = np.tile(np.arange(replicas), sets), loads.ravel()
        row = self.tables.at(everyone, load)
        first = np.arange(sets)[:, None] * replicas
        prefills, decodes = np.tile(self.pairs.prefill[pairs], sets), np.tile(self.pairs.decode[pairs], sets)
        from_rows, to_rows = (first + ends[pairs] for ends in (self.pairs.prefill, self.pairs.decode))
        prefilling = self.tables.prefill_times(everyone, row, pools[0]).at(from_rows.ravel())
        decoding = self.tables.decode_times(everyone, load, row, pools[1]).at(to_rows.ravel())
        wire_s = np.tile(self.pairs.gigabit_s[pairs][:, None] * self.gigabits, (sets, 1))
        # beside decodes a prompt takes as long as its rounds, and its KV is sent meanwhile
        step_s = row.step_s[from_rows.ravel(), None]
        prefill_s = self.tables.prefill_s[prefills] + self.tables.prefill_rounds[prefills] * step_s
        latency_s = np.tile(self.pairs.latency_s[pairs], sets)[:, None]
        layers, busy = self.service.model.layers, busy.ravel()
        least_s = visible_s(wire_s, latency_s, prefill_s, layers)
        shared_s = visible_s(wire_s / (1.0 - busy)[:, None], latency_s, prefill_s, layers) - least_s
        is_transferred = prefills != decodes
        decoding = decoding.after(prefilling, ~is_transferred)
        join_s = np.where(is_transferred, row.join_s[to_rows.ravel()], 0.0)
        sending = KVDelays(least_s + join_s[:, None], busy, shared_s / np.maximum(busy, 1e-9)[:, None])
        early = ~is_transferred | self.service.first_token_at_decode
        step_s = np.where(is_transferred & self.service.first_token_at_decode, decoding.tpot_s, 0.0)
        admit_s = np.broadcast_to(decoding.admit_s[:, None], wire_s.shape)
        return RequestTimes(
            self.classes, prefilling, decoding, sending, admit_s, early.astype(np.float64), step_s,
            np.tile(self.pairs.control_s[pairs], sets),
        )  # fmt: skip

    def worth(self, curves: Sequence[LoadCurve], counts: tuple[int, int]) -> Array:
        """Of a request on each pair, before what both replicas lose to their loads.

        Both replicas' losses are counted by their curves: what the pair as a whole loses more at
        the reference load, through KV on its way, or less, because the same requests are late
        twice, is left for its worth. `counts`: how many share the prompts, and the outputs.
        """
        worth = np.ones(len(self.pairs.prefill))
        cross = np.flatnonzero(self.pairs.prefill != self.pairs.decode)
        if len(cross):
            loads = np.full((1, len(curves)), LOADS[REFERENCE_LOAD])
            busy = np.array([[REFERENCE_BUSY * bool(self.pairs.link_demands[pair]) for pair in cross.tolist()]])
            pools = Pool.of_equals(counts[0]), Pool.of_equals(counts[1])
            share = self.times(cross, loads, busy, pools).share_in_time(self.service.slo)
            alone = np.array([curve.in_time_share[REFERENCE_LOAD] for curve in curves])
            worth[cross] += share - alone[self.pairs.prefill[cross]] - alone[self.pairs.decode[cross]] + 1.0
        return worth


def busy_with_others(
    model: PairModel, links: ClusterLinks, flow: RequestFlow, active: Index, activations: Array
) -> Array:
    """By pair: how much of the time the busiest of its links sends what its KV has to share it with.

    A prefill replica's prompts follow each other, and so does their KV: for as long as the next
    prompt takes, it has to share links with that of other replicas alone.
    """
    pairs, used = model.pairs, flow.used_gbps + activations
    wire_s = pairs.gigabit_s[active] * float(model.classes.share @ model.gigabits)
    busy = np.zeros(len(active))
    for source in np.unique(pairs.prefill[active]).tolist():
        rows = np.flatnonzero(pairs.prefill[active] == source)
        own = _sent_gbps(pairs, active[rows], flow)
        if not own.any():
            continue
        slowest_s = float(wire_s[rows].max())
        alone = min(1.0, 1.0 / float(model.tables.prefill_rate[source]) / slowest_s) if slowest_s else 1.0
        busy[rows] = busiest_link(pairs, active[rows], links.use(np.maximum(used - alone * own, 0.0)))
    return busy


def _sent_gbps(pairs: ReplicaPairs, active: Index, flow: RequestFlow) -> Array:
    """Gb/s [from, to] of these pairs' KV."""
    found = np.zeros_like(flow.used_gbps)
    for pair in active.tolist():
        for demand in pairs.link_demands[pair]:
            found[demand.source, demand.target] += flow.pair_rates[pair] * demand.gigabits
    return found


def busiest_link(pairs: ReplicaPairs, active: Index, busy: Array) -> Array:
    """By pair: how much of the time the busiest of its links is."""
    return np.array(
        [
            max((busy[demand.source, demand.target] for demand in pairs.link_demands[pair]), default=0.0)
            for pair in active.tolist()
        ],
        dtype=np.float64,
    )


def activation_gbps(
    replicas: Sequence[ConfiguredReplica], pairs: ReplicaPairs, flow: RequestFlow, service: Service
) -> Array:
    """Gb/s [from, to] of activations in pipelines across boxes: of all tokens prefilled and
    decoded."""
    used_gbps, workload = np.zeros_like(flow.used_gbps), service.workload
    prompts, outputs = (np.bincount(ends, flow.pair_rates, len(replicas)) for ends in (pairs.prefill, pairs.decode))
    tokens_s = prompts * workload.mean_prompt + outputs * workload.mean_output
    gbps = tokens_s * service.model.activation_bytes_per_token * 8e-9
    for replica, needed in zip(replicas, gbps.tolist(), strict=True):
        for source, target in pairwise(box for box, _, _ in replica.holder.spans):
            used_gbps[source, target] += needed
    return used_gbps
