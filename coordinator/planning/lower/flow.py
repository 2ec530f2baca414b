"""How requests are shared among pairs of replicas: the orchestration of ThunderServe section 3.3.

The paper's linear programme over X (the share of requests that each replica prefills) and Y (where
those are decoded) has no capacities, so its optimum sends everything over the best pair. Here
Z_ij = X_i Y_ij is a rate in requests per second, and what a replica does to its requests depends on
its load: it loses (is late with) a convex, piecewise linear number of requests per second.

    maximise    sum_ij worth_ij Z_ij - sum_g lost_g(load_g)
    subject to  load_g = sum_j Z_gj / prefill_rate_g + sum_i Z_ig / decode_rate_g <= 1,
                sum_ij Z_ij <= rate,
                and on every link, and in and out of every box, no more Gb/s of KV than there are.

`worth` is 1 less what the pair itself loses to KV transfers. Loads are part of the programme, so it
is solved once, without iterating between loads and shares.

Three solvers: `solve_greedy` gives requests to the pair where one more is worth the most, until
that changes; it is exact where replicas are the limit, and never takes a decision back where links
are. `solve_exact` is exact (HiGHS). `solve_quick` is exact and fast for few pairs, and is what a
search goes by: where links are short, the error of the greedy one hides which of two is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from math import inf, isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .simplex import Segments, maximise

if TYPE_CHECKING:
    from scipy.sparse import coo_array

Array = NDArray[np.float64]
Index = NDArray[np.intp]

EPSILON: Final = 1e-12

MAX_SIMPLEX_PAIRS: Final = 64
"""Up to so many `solve_quick` is no slower than HiGHS; most solutions of a search have a dozen."""


class FlowError(RuntimeError):
    """The solver did not find the optimum that every such programme has."""


class LinkDemand(NamedTuple):
    """What one request of a pair sends from box to box, in Gb; a pair has one for each two
    boxes."""

    source: int
    target: int
    gigabits: float


@dataclass(frozen=True, slots=True, eq=False)
class LinkCapacities:
    """Gb/s that KV may take: from box to box, out of every box, and into it."""

    between: Array
    out: Array
    into: Array

    def less(self, used_gbps: Array) -> LinkCapacities:
        """What is left when `used_gbps` [from, to] Gb/s are taken."""
        return LinkCapacities(
            np.maximum(self.between - used_gbps, 0.0),
            np.maximum(self.out - used_gbps.sum(axis=1), 0.0),
            np.maximum(self.into - used_gbps.sum(axis=0), 0.0),
        )

    def more(self, used_gbps: Array) -> LinkCapacities:
        """With `used_gbps` [from, to] Gb/s given back."""
        return LinkCapacities(
            self.between + used_gbps, self.out + used_gbps.sum(axis=1), self.into + used_gbps.sum(axis=0)
        )


@dataclass(frozen=True, slots=True, eq=False)
class LossCurve:
    """Requests lost per second over the load: `slopes[k]` up to `loads[k]`, rising, from 0 before
    the first."""

    loads: tuple[float, ...]
    slopes: tuple[float, ...]

    @property
    def widths(self) -> tuple[float, ...]:
        """Of the pieces."""
        return tuple(np.diff((0.0, *self.loads)).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class FlowProblem:
    """Replicas, by index; pairs of them that may serve requests together, and `rate` requests per
    second to serve.

    `prefill_rate`, `decode_rate` and `mixed_rate`: as in `behaviour.Behaviour`. A pair prefills on
    `prefill[k]`, decodes on `decode[k]` (the same for a replica that keeps its requests), is worth
    `worth[k]` per request and sends `link_demands[k]`. Without `mixed_rate`, a request that is kept
    takes as much as its halves would.
    """

    rate: float
    prefill_rate: Array
    decode_rate: Array
    curves: Sequence[LossCurve]
    prefill: Index
    decode: Index
    worth: Array
    link_demands: Sequence[tuple[LinkDemand, ...]]
    capacities: LinkCapacities
    mixed_rate: Array | None = None

    def pair_loads(self) -> tuple[Array, Array]:
        """By pair: the load that one request per second puts on its prefill and its decode
        replica."""
        prefilling, decoding = 1.0 / self.prefill_rate[self.prefill], 1.0 / self.decode_rate[self.decode]
        if self.mixed_rate is not None:
            kept, half = self.prefill == self.decode, 0.5 / self.mixed_rate[self.prefill]
            prefilling, decoding = np.where(kept, half, prefilling), np.where(kept, half, decoding)
        return prefilling, decoding

    def without_losses(self, rate: float, loads: Sequence[float]) -> FlowProblem:
        """The same for another rate, up to these loads, where nothing is lost and all pairs are
        worth the same."""
        curves = [LossCurve((load,), (0.0,)) for load in loads]
        return replace(self, rate=rate, curves=curves, worth=np.ones_like(self.worth))


@dataclass(frozen=True, slots=True, eq=False)
class RequestFlow:
    """Requests per second of each pair, the load of each replica, Gb/s from box to box."""

    pair_rates: Array
    loads: Array
    used_gbps: Array

    @property
    def served(self) -> float:
        """Requests per second in all; the rest would only be late."""
        return float(self.pair_rates.sum())


def build_loss_curve(loads: Array, lost: Array) -> LossCurve:
    """The highest convex curve below the points: pieces in order of slope, so that filling may stop
    anywhere."""
    hull: list[int] = []
    for point in range(len(loads)):
        while len(hull) > 1 and _above(loads, lost, hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    ends = np.array(hull)
    slopes = np.diff(lost[ends]) / np.diff(loads[ends])
    return LossCurve(tuple(loads[ends][1:].tolist()), tuple(slopes.tolist()))


def _above(loads: Array, lost: Array, first: int, middle: int, last: int) -> bool:
    rise = (lost[middle] - lost[first]) * (loads[last] - loads[first])
    return bool(rise >= (lost[last] - lost[first]) * (loads[middle] - loads[first]))


def flow_from_rates(network: FlowProblem, pairs: Array) -> RequestFlow:
    """Loads and links under so many requests per second of each pair."""
    loads = np.zeros(len(network.prefill_rate))
    prefilling, decoding = network.pair_loads()
    np.add.at(loads, network.prefill, pairs * prefilling)
    np.add.at(loads, network.decode, pairs * decoding)
    used_gbps = np.zeros_like(network.capacities.between)
    for pair in np.flatnonzero(pairs).tolist():
        for demand in network.link_demands[pair]:
            used_gbps[demand.source, demand.target] += demand.gigabits * pairs[pair]
    return RequestFlow(pairs, loads, used_gbps)


_Limit = tuple[int, int]
"""From box to box; -1 on one side: everything into the other, or out of it."""


def _limits_of(demand: LinkDemand) -> tuple[_Limit, _Limit, _Limit]:
    """What a wire takes up."""
    return (demand.source, demand.target), (demand.source, -1), (-1, demand.target)


def _limit_gbps(capacities: LinkCapacities, limit: _Limit) -> float:
    source, target = limit
    if target < 0:
        return float(capacities.out[source])
    return float(capacities.into[target] if source < 0 else capacities.between[source, target])


# --- the fast path


class _GreedyFlow:
    """Requests placed so far, and what one more would be worth on each pair.

    That only falls as loads rise, so what the heap says of a pair is no less than the truth, and is
    put right when the pair comes up.
    """

    def __init__(self, network: FlowProblem) -> None:
        self._network = network
        self._piece = [0] * len(network.curves)
        self._left = [curve.loads[0] for curve in network.curves]
        self._slope = [curve.slopes[0] for curve in network.curves]
        self._worth: list[float] = network.worth.tolist()
        self._prefill_of: list[int] = network.prefill.tolist()
        self._decode_of: list[int] = network.decode.tolist()
        prefilling, decoding = network.pair_loads()
        self._prefill_cost: list[float] = prefilling.tolist()
        self._decode_cost: list[float] = decoding.tolist()
        self._left_gbps: dict[_Limit, float] = {}  # Gb/s that are left, filled as it is asked for
        self._needs: dict[int, list[tuple[_Limit, float]]] = {}  # Gb of a pair's request, likewise
        self._queue = [(-self._gain(pair), pair) for pair in range(len(self._worth))]
        heapify(self._queue)
        self.pairs = [0.0] * len(self._worth)

    def best(self) -> int | None:
        """The pair where one more request is worth the most; None when it is worth nothing on
        any."""
        while self._queue:
            said, pair = self._queue[0]
            gain = self._gain(pair)
            if not gain > 0.0:
                heappop(self._queue)  # gains only fall: it will not be worth anything again
            elif -said > gain:
                heapreplace(self._queue, (-gain, pair))
            else:
                return pair
        return None

    def place(self, pair: int, rest: float) -> float:
        """Places some of `rest` requests per second on the pair that is best."""
        prefill, decode = self._prefill_of[pair], self._decode_of[pair]
        prefill_cost, decode_cost = self._prefill_cost[pair], self._decode_cost[pair]
        if prefill == decode:  # both costs fall on the one curve of a mixed replica
            amount = self._left[prefill] / (prefill_cost + decode_cost)
        else:
            amount = min(self._left[prefill] / prefill_cost, self._left[decode] / decode_cost)
        needs = self._needs_of(pair)
        amount = min(amount, rest)
        room = min((self._left_gbps[limit] / gigabits for limit, gigabits in needs), default=inf)
        if room <= amount:  # a link is full: nothing more will ever go over this pair
            amount = max(room, 0.0)
            heappop(self._queue)
        self.pairs[pair] += amount
        for limit, gigabits in needs:
            self._left_gbps[limit] -= gigabits * amount
        self._add_load(prefill, amount * prefill_cost)
        self._add_load(decode, amount * decode_cost)
        return max(amount, EPSILON)  # progress also where nothing fits, so that filling ends

    def _gain(self, pair: int) -> float:
        """Of one more request, less what it would cost the others on both replicas."""
        return (
            self._worth[pair]
            - self._slope[self._prefill_of[pair]] * self._prefill_cost[pair]
            - self._slope[self._decode_of[pair]] * self._decode_cost[pair]
        )

    def _needs_of(self, pair: int) -> list[tuple[_Limit, float]]:
        """What a request of this pair sends over which links."""
        if pair not in self._needs:
            gigabits: dict[_Limit, float] = {}
            for demand in self._network.link_demands[pair]:
                for limit in _limits_of(demand):
                    gigabits[limit] = gigabits.get(limit, 0.0) + demand.gigabits
            for limit in gigabits:
                if limit not in self._left_gbps:
                    self._left_gbps[limit] = _limit_gbps(self._network.capacities, limit)
            self._needs[pair] = list(gigabits.items())
        return self._needs[pair]

    def _add_load(self, replica: int, load: float) -> None:
        self._left[replica] -= load
        if self._left[replica] > EPSILON:
            return
        curve = self._network.curves[replica]
        self._piece[replica] += 1
        piece = self._piece[replica]
        slope = inf
        if piece < len(curve.loads):
            slope = curve.slopes[piece]
            self._left[replica] = curve.loads[piece] - curve.loads[piece - 1]
        self._slope[replica] = slope


def solve_greedy(network: FlowProblem) -> RequestFlow:
    """Request by request (in effect) to the pair where one more is worth the most. Ties go to the
    earlier pair."""
    filling, rest = _GreedyFlow(network), network.rate
    while rest > EPSILON and (pair := filling.best()) is not None:
        rest -= filling.place(pair, rest)
    return flow_from_rates(network, np.array(filling.pairs))


# --- the exact ones


def solve_quick(network: FlowProblem) -> RequestFlow:
    """The optimum where there are few pairs, by the simplex method; of more pairs what
    `solve_greedy` finds."""
    pairs = len(network.worth)
    if not 0 < pairs <= MAX_SIMPLEX_PAIRS:
        return solve_greedy(network)
    return flow_from_rates(network, _drop_specks(_simplex(network)))


def _drop_specks(pairs: Array) -> Array:
    """Without what solvers leave over where nothing should be."""
    return np.where(pairs > 1e-9 * max(1.0, pairs.max(initial=0.0)), pairs, 0.0)


def _simplex(network: FlowProblem) -> Array:
    """Free are the pairs; basic are the loads, the requests that are left, and the Gb/s that
    are."""
    pairs, replicas = len(network.worth), len(network.prefill_rate)
    prefilling, decoding = network.pair_loads()
    capacities = _binding_limits(network)
    asked = [network.rate] if isfinite(network.rate) else []
    table, each = np.zeros((replicas + len(asked) + len(capacities), pairs)), np.arange(pairs)
    table[network.prefill, each] -= prefilling
    table[network.decode, each] -= decoding
    table[replicas : replicas + len(asked)] = 1.0
    for row, needs in enumerate(capacities.values(), replicas + len(asked)):
        for pair, gigabits in needs:
            table[row, pair] += gigabits
    left = [*asked, *(_limit_gbps(network.capacities, limit) for limit in capacities)]
    loads = [Segments(curve.loads, tuple(-slope for slope in curve.slopes)) for curve in network.curves]
    return maximise(
        table,
        np.array([*[0.0] * replicas, *left]),
        [Segments((inf,), (worth,)) for worth in network.worth.tolist()],
        [*loads, *[Segments((inf,), (0.0,))] * len(left)],
    )


def _binding_limits(network: FlowProblem) -> dict[_Limit, list[tuple[int, float]]]:
    """The pairs and their Gb per request on every limit that may bind, which no link is that can
    take all that one of its boxes sends or takes in."""
    capacities, found = network.capacities, dict[_Limit, list[tuple[int, float]]]()
    between, out, into = capacities.between.tolist(), capacities.out.tolist(), capacities.into.tolist()
    for pair, link_demands in enumerate(network.link_demands):
        for demand in link_demands:
            link, *ends = _limits_of(demand)
            slow = between[demand.source][demand.target] < min(out[demand.source], into[demand.target])
            for limit in (link, *ends) if slow else ends:
                found.setdefault(limit, []).append((pair, demand.gigabits))
    return found


def solve_exact(network: FlowProblem) -> RequestFlow:
    """The optimum by linear programming. Raises FlowError."""
    pairs = len(network.worth)
    if pairs <= 1:
        return solve_quick(network)
    from scipy.optimize import linprog  # 25 MiB, which the planner of a box alone does without
    from scipy.sparse import coo_array

    pieces = [(replica, slope, width) for replica, curve in enumerate(network.curves)
              for slope, width in zip(curve.slopes, curve.widths, strict=True)]  # fmt: skip
    owner = np.array([replica for replica, _, _ in pieces])
    replicas = len(network.prefill_rate)
    columns = np.arange(pairs)
    prefilling, decoding = network.pair_loads()
    # Each piece of a curve is a variable; curves are convex, so the optimum fills the cheap ones first by itself.
    balance = coo_array(
        (
            np.concatenate((prefilling, decoding, -np.ones(len(pieces)))),
            (
                np.concatenate((network.prefill, network.decode, owner)),
                np.concatenate((columns, columns, pairs + np.arange(len(pieces)))),
            ),
        ),
        shape=(replicas, pairs + len(pieces)),
    )
    limits, bounds = _limit_rows(network, pairs + len(pieces))
    found = linprog(
        np.concatenate((-network.worth, [slope for _, slope, _ in pieces])),
        A_ub=limits, b_ub=bounds, A_eq=balance, b_eq=np.zeros(replicas),
        bounds=[(0.0, None)] * pairs + [(0.0, width) for _, _, width in pieces],
        method="highs",
    )  # fmt: skip
    if found.status != 0:
        raise FlowError(f"orchestration of {replicas} replicas over {pairs} pairs: {found.message}")
    return flow_from_rates(network, _drop_specks(np.asarray(found.x[:pairs], dtype=np.float64)))


def _limit_rows(network: FlowProblem, columns: int) -> tuple[coo_array, Array]:
    """Rows: all requests; then every link that some pair takes, out of and into its boxes
    included."""
    from scipy.sparse import coo_array

    rows: dict[_Limit, int] = {}
    bounds: list[float] = []
    cells: list[tuple[int, int, float]] = []
    if isfinite(network.rate):
        bounds.append(network.rate)
        cells += [(0, pair, 1.0) for pair in range(len(network.worth))]
    for pair, link_demands in enumerate(network.link_demands):
        for demand in link_demands:
            for limit in _limits_of(demand):
                if limit not in rows:
                    rows[limit] = len(bounds)
                    bounds.append(_limit_gbps(network.capacities, limit))
                cells.append((rows[limit], pair, demand.gigabits))
    if not bounds:
        return coo_array((1, columns)), np.zeros(1)
    row, column, value = (np.array(part) for part in zip(*cells, strict=True))
    return coo_array((value, (row, column)), shape=(len(bounds), columns)), np.array(bounds)
