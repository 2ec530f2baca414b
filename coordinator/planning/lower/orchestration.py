"""How the replicas of one service share its requests, and how those fare at every rate.

Shares are made for full load: for as many requests as all replicas carry in time together, or for
those that are asked for, if there are more. With few requests any shares are as good as others, and
the programme would send all of them to the fastest replica; the router, which lets queues grow in
proportion to shares, would then keep requests waiting there while others are idle. Fewer requests
have the same shares, and all replicas less to do: so attainment falls with the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..model.kv_cost import kv_gigabits
from ..model.length_classes import Classes
from ..model.link_share import MOST
from ..model.workload import Service
from .flow import FlowProblem, LinkCapacities, RequestFlow, flow_from_rates
from .pair_model import PairModel, activation_gbps, busiest_link
from .queueing import ReplicaTables, RequestTimes
from .replica_pairs import ClusterLinks, ReplicaPairs, pair_replicas
from .replicas import ConfiguredReplica, LoadCurve, count_phases

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Solver = Callable[[FlowProblem], RequestFlow]

LEVELS: Final = np.array([0.1, 0.3, 0.45, 0.55, 0.65, 0.72, 0.78, 0.83, 0.87, 0.9, 0.925, 0.95, 0.975, 1.0])
"""Where attainment is looked at, as parts of the rate at which a replica or a link is full."""


LEAST_LOAD: Final = 1e-9

STRICTNESS: Final = 8.0
"""By how much a rate counts for less where the target is missed: by a hundredth of it, 8 %."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedShare:
    """The share of requests in time, which falls with the rate of those that are served:
    `in_time[k]` at `rates[k]`, which rise to where a replica or a link is full."""

    rates: Array
    in_time: Array

    def at(self, rate: float) -> float:
        """At a rate up to the highest."""
        return float(np.interp(rate, self.rates, self.in_time))

    def value(self, target: float | None) -> float:
        """About the highest rate with so many in time. A rate with fewer counts for less, the
        further below: where attainment hardly falls with the rate, a small error of it should not
        decide. None: requests per second in time, at the rate that is best for that."""
        worth = self.in_time if target is None else np.minimum(self.in_time / target, 1.0) ** STRICTNESS
        return float((self.rates * worth).max())

    def reaches(self, target: float) -> bool:
        """Whether so many are in time where there are few."""
        return bool(self.in_time[0] >= target)

    def highest_rate(self, target: float) -> float:
        """The highest with so many in time; 0 where even few requests have fewer."""
        late = np.flatnonzero(self.in_time < target)
        if not len(late):
            return float(self.rates[-1])
        if late[0] == 0:
            return 0.0
        before, after = late[0] - 1, late[0]
        part = (self.in_time[before] - target) / (self.in_time[before] - self.in_time[after])
        return float(self.rates[before] + part * (self.rates[after] - self.rates[before]))

    def best_rate(self, asked: float) -> float:
        """Up to what is asked for, the rate at which most requests per second are in time: those
        beyond it would only be late, or make others late."""
        most = min(asked, float(self.rates[-1]))
        rates = np.append(self.rates[self.rates < most], most)
        found = np.nan_to_num(rates * np.interp(rates, self.rates, self.in_time))
        return float(rates[np.flatnonzero(found >= found.max() * (1.0 - 1e-9))[-1]])


@dataclass(frozen=True, slots=True, eq=False)
class Orchestration:
    """Who serves how many requests, and how. `full`: the flow that the shares are made by; `flow`:
    in the same shares, as many requests as are asked for, or what of them is best served. Rows of
    `times` are those pairs of `pairs` that have any: `active`."""

    service: Service
    classes: Classes
    replicas: Sequence[ConfiguredReplica]
    curves: Sequence[LoadCurve]
    network: FlowProblem
    model: PairModel
    links: ClusterLinks
    full: RequestFlow
    flow: RequestFlow
    active: Index
    served_share: ServedShare

    @property
    def pairs(self) -> ReplicaPairs:
        """All that may serve requests."""
        return self.model.pairs

    @property
    def times(self) -> RequestTimes:
        """Of the requests that are served."""
        return _times(self.model, self.links, self.replicas, self.flow, self.active, np.ones(1))

    @property
    def attainment(self) -> float:
        """In time, of all requests that are asked for."""
        served = self.flow.served
        return served * self.served_share.at(served) / self.service.workload.rate

    @property
    def capacity(self) -> float:
        """What replicas and links carry in time, over the rate that is asked for."""
        usable_load = [curve.usable_load for curve in self.curves]
        return carried_rate(self.replicas, usable_load, self.network) / self.service.workload.rate

    def highest_rate(self, capacities: LinkCapacities) -> float:
        """Requests per second in these shares with the service's target in time. `capacities`: of
        links, after other services."""
        found = self.served_share.highest_rate(self.service.slo.target)
        return min(found, self.full.served * _link_room(self.full, capacities))


def orchestrate(
    service: Service,
    classes: Classes,
    replicas: Sequence[ConfiguredReplica],
    curves: Sequence[LoadCurve],
    links: ClusterLinks,
    capacities: LinkCapacities,
    solver: Solver,
    *,
    planned: float | None = None,
) -> Orchestration:
    """On what is left of the links. `solver`: one of those in `flow`. `planned`: the rate that
    shares are made for, as a multiple of what is carried in time; None: that, or what is asked
    for, if it is more."""
    gigabits = kv_gigabits(service.model, classes.prompt, service.kv_bits)
    average = float(classes.share @ gigabits)
    pairs = pair_replicas([replica.holder for replica in replicas], links, average)
    tables = ReplicaTables.of([replica.behaviour for replica in replicas], classes, service.workload.arrival_cv)
    model = PairModel(service, classes, tables, pairs, gigabits)
    asked = service.workload.rate
    network = FlowProblem(
        asked, tables.prefill_rate, tables.decode_rate, [curve.lost for curve in curves], pairs.prefill, pairs.decode,
        model.worth(curves, count_phases(replica.group.phase for replica in replicas)), pairs.link_demands, capacities,
        tables.mixed_rate,
    )  # fmt: skip
    carried = carried_rate(replicas, [curve.usable_load for curve in curves], network)
    rate = max(asked, carried) if planned is None or not carried else planned * carried
    full = solver(replace(network, rate=rate))
    active = np.flatnonzero(full.pair_rates)
    share = _served_share(model, links, replicas, full, active, capacities)
    served = share.best_rate(asked)
    flow = flow_from_rates(network, full.pair_rates * (served / full.served if full.served else 0.0))
    return Orchestration(service, classes, replicas, curves, network, model, links, full, flow, active, share)


def _served_share(
    model: PairModel, links: ClusterLinks, replicas: Sequence[ConfiguredReplica], full: RequestFlow, active: Index,
    capacities: LinkCapacities,
) -> ServedShare:  # fmt: skip
    """Up to where a replica is busy all the time, or a link carries what it may."""
    if not full.served > 0.0:
        return ServedShare(np.zeros(1), np.zeros(1))
    # replicas that are hardly busy belong to absurd figures, for which any rate will do
    top = min(1.0 / max(float(full.loads.max()), LEAST_LOAD), max(1.0, _link_room(full, capacities)))
    levels = LEVELS * top
    times = _times(model, links, replicas, full, active, levels)
    weights = full.pair_rates[active] / full.served
    in_time = np.nan_to_num(times.share_in_time(model.service.slo).reshape(len(levels), -1) @ weights).clip(0.0, 1.0)
    # nothing gets better by more requests: what the tables say otherwise is their error
    return ServedShare(levels * full.served, np.minimum.accumulate(in_time))


def _times(
    model: PairModel, links: ClusterLinks, replicas: Sequence[ConfiguredReplica], flow: RequestFlow, active: Index,
    levels: Array,
) -> RequestTimes:  # fmt: skip
    """Of the flow's pairs at each multiple of it."""
    used = flow.used_gbps + activation_gbps(replicas, model.pairs, flow, model.service)
    busy = np.minimum(np.outer(levels, busiest_link(model.pairs, active, links.use(used))), MOST)
    loads = levels[:, None] * flow.loads
    return model.times(active, loads, busy, model.pools(flow.pair_rates, flow.loads))


def _link_room(flow: RequestFlow, capacities: LinkCapacities) -> float:
    """How many times as much the links could carry."""
    used = flow.used_gbps
    taken = np.concatenate((used.ravel(), used.sum(axis=1), used.sum(axis=0)))
    limits = np.concatenate((capacities.between.ravel(), capacities.out, capacities.into))
    busy = taken > 0.0
    return float((limits[busy] / taken[busy]).min(initial=inf))


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
