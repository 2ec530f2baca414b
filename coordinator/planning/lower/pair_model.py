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
from .replica_pairs import ReplicaPairs
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
        pair."""
        prefills, decodes = (
            Pool.of_shares(np.bincount(ends, rates, len(loads)).astype(np.float64), loads)
            for ends in (self.pairs.prefill, self.pairs.decode)
        )
        return prefills, decodes

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
        latency_s, prefill_s = np.tile(self.pairs.latency_s[pairs], sets)[:, None], self.tables.prefill_s[prefills]
        layers, busy = self.service.model.layers, busy.ravel()
        least_s = visible_s(wire_s, latency_s, prefill_s, layers)
        shared_s = visible_s(wire_s / (1.0 - busy)[:, None], latency_s, prefill_s, layers) - least_s
        is_transferred = prefills != decodes
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
