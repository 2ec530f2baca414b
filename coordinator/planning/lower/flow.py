"""Which replicas read the prompts, and which of them hand over to which: the orchestration of ThunderServe section 3.3.

The paper's linear programme over X and Y has no capacities, so its optimum is to send everything to the best pair.
Here Z_ij = X_i Y_ij in requests per second, and what a replica does to its requests depends on its load: each has a
convex curve of requests lost (late) per second over its load, in straight pieces. The programme is

    maximise    sum_ij worth_ij Z_ij - sum_g lost_g(load_g)
    subject to  load_g = sum_j Z_gj / read_g + sum_i Z_ig / write_g <= 1,    sum_ij Z_ij <= rate,
                and on every link, and in and out of every box, no more Gb/s of KV than there are.

`worth` is 1 less what the pair itself loses to KV on its way. Since loads are part of the programme, it is solved once
and nothing oscillates. `fill` is the fast path: it sends requests where one more is worth the most, until that changes.
It is exact where replicas are the limit, and takes no way back where links are. `solve` is exact (HiGHS). `route` is
exact and quick where there are few pairs, and what a search judges by: where links are short, what `fill` misses of a
solution hides which of two is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from math import inf, isfinite
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from .simplex import Pieces, maximise

__all__ = [
    "Flow",
    "FlowError",
    "LossCurve",
    "Network",
    "Roads",
    "Wire",
    "fill",
    "flow_of",
    "loss_curve",
    "route",
    "solve",
]

Array = NDArray[np.float64]
Index = NDArray[np.intp]

NOTHING: Final = 1e-12

FEW_PAIRS: Final = 64
"""Up to so many `route` is no slower than HiGHS; most solutions of a search have a dozen."""


class FlowError(RuntimeError):
    """The solver did not find the optimum that every such programme has."""


class Wire(NamedTuple):
    """What one request of a pair sends from box to box, in Gb; a pair has one for each two boxes."""

    source: int
    target: int
    gigabits: float


@dataclass(frozen=True, slots=True, eq=False)
class Roads:
    """Gb/s that KV may take: from box to box, out of every box, and into it."""

    between: Array
    out: Array
    into: Array

    def less(self, used: Array) -> Roads:
        """What is left when `used` [from, to] Gb/s are taken."""
        return Roads(
            np.maximum(self.between - used, 0.0),
            np.maximum(self.out - used.sum(axis=1), 0.0),
            np.maximum(self.into - used.sum(axis=0), 0.0),
        )

    def more(self, used: Array) -> Roads:
        """With `used` [from, to] Gb/s given back."""
        return Roads(self.between + used, self.out + used.sum(axis=1), self.into + used.sum(axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class LossCurve:
    """Requests lost per second over the load: `slopes[k]` up to `loads[k]`, rising, from 0 before the first."""

    loads: tuple[float, ...]
    slopes: tuple[float, ...]

    @property
    def widths(self) -> tuple[float, ...]:
        """Of the pieces."""
        return tuple(np.diff((0.0, *self.loads)).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Replicas, by index; pairs of them that may serve requests together, and `rate` requests per second to serve.

    `read`, `write` and `both`: as in `behaviour.Behaviour`. A pair reads on `reader[k]`, writes on `writer[k]` (the
    same for a replica that keeps its requests), is worth `worth[k]` per request and sends `wires[k]`. Without `both`, a
    request that is kept takes as much as its halves would.
    """

    rate: float
    read: Array
    write: Array
    curves: Sequence[LossCurve]
    reader: Index
    writer: Index
    worth: Array
    wires: Sequence[tuple[Wire, ...]]
    roads: Roads
    both: Array | None = None

    def costs(self) -> tuple[Array, Array]:
        """By pair: the load that one request per second puts on its reader, and on its writer."""
        reading, writing = 1.0 / self.read[self.reader], 1.0 / self.write[self.writer]
        if self.both is not None:
            kept, half = self.reader == self.writer, 0.5 / self.both[self.reader]
            reading, writing = np.where(kept, half, reading), np.where(kept, half, writing)
        return reading, writing

    def unlimited(self, rate: float, loads: Sequence[float]) -> Network:
        """The same for another rate, up to these loads, where nothing is lost and all pairs are worth the same."""
        curves = [LossCurve((load,), (0.0,)) for load in loads]
        return replace(self, rate=rate, curves=curves, worth=np.ones_like(self.worth))


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Requests per second of each pair, the load of each replica, Gb/s from box to box."""

    pairs: Array
    loads: Array
    used: Array

    @property
    def served(self) -> float:
        """Requests per second in all; the rest would only be late."""
        return float(self.pairs.sum())


def loss_curve(loads: Array, lost: Array) -> LossCurve:
    """The highest convex curve below the points; where a replica would lose more by being loaded more, it does not
    help to load it: the pieces are in order of their slopes, and who fills them may stop anywhere."""
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


def flow_of(network: Network, pairs: Array) -> Flow:
    """Loads and links under so many requests per second of each pair."""
    loads = np.zeros(len(network.read))
    reading, writing = network.costs()
    np.add.at(loads, network.reader, pairs * reading)
    np.add.at(loads, network.writer, pairs * writing)
    used = np.zeros_like(network.roads.between)
    for pair in np.flatnonzero(pairs).tolist():
        for wire in network.wires[pair]:
            used[wire.source, wire.target] += wire.gigabits * pairs[pair]
    return Flow(pairs, loads, used)


_Way = tuple[int, int]
"""From box to box; -1 on one side: everything into the other, or out of it."""


def _ways(wire: Wire) -> tuple[_Way, _Way, _Way]:
    """What a wire takes up."""
    return (wire.source, wire.target), (wire.source, -1), (-1, wire.target)


def _room(roads: Roads, way: _Way) -> float:
    source, target = way
    if target < 0:
        return float(roads.out[source])
    return float(roads.into[target] if source < 0 else roads.between[source, target])


# --- the fast path


class _Filling:
    """Requests placed so far, and what one more would be worth on each pair.

    That only falls as loads rise, so what the heap says of a pair is no less than the truth, and is put right when the
    pair comes up.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._piece = [0] * len(network.curves)
        self._left = [curve.loads[0] for curve in network.curves]
        self._slope = [curve.slopes[0] for curve in network.curves]
        self._worth: list[float] = network.worth.tolist()
        self._reader: list[int] = network.reader.tolist()
        self._writer: list[int] = network.writer.tolist()
        reading, writing = network.costs()
        self._read_cost: list[float] = reading.tolist()
        self._write_cost: list[float] = writing.tolist()
        self._rooms: dict[_Way, float] = {}  # Gb/s that are left, filled as it is asked for
        self._needs: dict[int, list[tuple[_Way, float]]] = {}  # Gb of a pair's request, likewise
        self._queue = [(-self._gain(pair), pair) for pair in range(len(self._worth))]
        heapify(self._queue)
        self.pairs = [0.0] * len(self._worth)

    def best(self) -> int | None:
        """The pair where one more request is worth the most; None when it is worth nothing on any."""
        while self._queue:
            said, pair = self._queue[0]
            gain = self._gain(pair)
            if not gain > 0.0:
                heappop(self._queue)
            elif -said > gain:
                heapreplace(self._queue, (-gain, pair))
            else:
                return pair
        return None

    def place(self, pair: int, rest: float) -> float:
        """Places some of `rest` requests per second on the pair that is best."""
        reader, writer = self._reader[pair], self._writer[pair]
        read_cost, write_cost = self._read_cost[pair], self._write_cost[pair]
        if reader == writer:
            amount = self._left[reader] / (read_cost + write_cost)
        else:
            amount = min(self._left[reader] / read_cost, self._left[writer] / write_cost)
        needs = self._needs_of(pair)
        amount = min(amount, rest)
        room = min((self._rooms[way] / gigabits for way, gigabits in needs), default=inf)
        if room <= amount:
            amount = max(room, 0.0)
            heappop(self._queue)
        self.pairs[pair] += amount
        for way, gigabits in needs:
            self._rooms[way] -= gigabits * amount
        self._load(reader, amount * read_cost)
        self._load(writer, amount * write_cost)
        return max(amount, NOTHING)

    def _gain(self, pair: int) -> float:
        """Of one more request, less what it would cost the others on both replicas."""
        return (
            self._worth[pair]
            - self._slope[self._reader[pair]] * self._read_cost[pair]
            - self._slope[self._writer[pair]] * self._write_cost[pair]
        )

    def _needs_of(self, pair: int) -> list[tuple[_Way, float]]:
        """What a request of this pair sends over which roads."""
        if pair not in self._needs:
            gigabits: dict[_Way, float] = {}
            for wire in self._network.wires[pair]:
                for way in _ways(wire):
                    gigabits[way] = gigabits.get(way, 0.0) + wire.gigabits
            for way in gigabits:
                if way not in self._rooms:
                    self._rooms[way] = _room(self._network.roads, way)
            self._needs[pair] = list(gigabits.items())
        return self._needs[pair]

    def _load(self, replica: int, load: float) -> None:
        self._left[replica] -= load
        if self._left[replica] > NOTHING:
            return
        curve = self._network.curves[replica]
        self._piece[replica] += 1
        piece = self._piece[replica]
        slope = inf
        if piece < len(curve.loads):
            slope = curve.slopes[piece]
            self._left[replica] = curve.loads[piece] - curve.loads[piece - 1]
        self._slope[replica] = slope


def fill(network: Network) -> Flow:
    """Request by request (in effect) to the pair where one more is worth the most. Ties go to the earlier pair."""
    filling, rest = _Filling(network), network.rate
    while rest > NOTHING and (pair := filling.best()) is not None:
        rest -= filling.place(pair, rest)
    return flow_of(network, np.array(filling.pairs))


# --- the exact ones


def route(network: Network) -> Flow:
    """The optimum where there are few pairs, by the simplex method; of more pairs what `fill` finds."""
    pairs = len(network.worth)
    if not 0 < pairs <= FEW_PAIRS:
        return fill(network)
    return flow_of(network, _without_specks(_simplex(network)))


def _without_specks(pairs: Array) -> Array:
    """Without what solvers leave over where nothing should be."""
    return np.where(pairs > 1e-9 * max(1.0, pairs.max(initial=0.0)), pairs, 0.0)


def _simplex(network: Network) -> Array:
    """Free are the pairs; basic are the loads, the requests that are left, and the Gb/s that are."""
    pairs, replicas = len(network.worth), len(network.read)
    reading, writing = network.costs()
    roads = _taken(network)
    asked = [network.rate] if isfinite(network.rate) else []
    table, each = np.zeros((replicas + len(asked) + len(roads), pairs)), np.arange(pairs)
    table[network.reader, each] -= reading
    table[network.writer, each] -= writing
    table[replicas : replicas + len(asked)] = 1.0
    for row, needs in enumerate(roads.values(), replicas + len(asked)):
        for pair, gigabits in needs:
            table[row, pair] += gigabits
    left = [*asked, *(_room(network.roads, way) for way in roads)]
    loads = [Pieces(curve.loads, tuple(-slope for slope in curve.slopes)) for curve in network.curves]
    return maximise(
        table,
        np.array([*[0.0] * replicas, *left]),
        [Pieces((inf,), (worth,)) for worth in network.worth.tolist()],
        [*loads, *[Pieces((inf,), (0.0,))] * len(left)],
    )


def _taken(network: Network) -> dict[_Way, list[tuple[int, float]]]:
    """The pairs and their Gb per request on every way that may run out, which no link is that can take all that one of
    its boxes sends or takes in."""
    roads, found = network.roads, dict[_Way, list[tuple[int, float]]]()
    between, out, into = roads.between.tolist(), roads.out.tolist(), roads.into.tolist()
    for pair, wires in enumerate(network.wires):
        for wire in wires:
            link, *ends = _ways(wire)
            slow = between[wire.source][wire.target] < min(out[wire.source], into[wire.target])
            for way in (link, *ends) if slow else ends:
                found.setdefault(way, []).append((pair, wire.gigabits))
    return found


def solve(network: Network) -> Flow:
    """The optimum by linear programming. Raises FlowError."""
    pairs = len(network.worth)
    if not pairs:
        return flow_of(network, np.zeros(0))
    pieces = [(replica, slope, width) for replica, curve in enumerate(network.curves)
              for slope, width in zip(curve.slopes, curve.widths, strict=True)]  # fmt: skip
    owner = np.array([replica for replica, _, _ in pieces])
    replicas = len(network.read)
    columns = np.arange(pairs)
    reading, writing = network.costs()
    balance = coo_array(
        (
            np.concatenate((reading, writing, -np.ones(len(pieces)))),
            (
                np.concatenate((network.reader, network.writer, owner)),
                np.concatenate((columns, columns, pairs + np.arange(len(pieces)))),
            ),
        ),
        shape=(replicas, pairs + len(pieces)),
    )
    limits, bounds = _limits(network, pairs + len(pieces))
    found = linprog(
        np.concatenate((-network.worth, [slope for _, slope, _ in pieces])),
        A_ub=limits, b_ub=bounds, A_eq=balance, b_eq=np.zeros(replicas),
        bounds=[(0.0, None)] * pairs + [(0.0, width) for _, _, width in pieces],
        method="highs",
    )  # fmt: skip
    if found.status != 0:
        raise FlowError(f"orchestration of {replicas} replicas over {pairs} pairs: {found.message}")
    return flow_of(network, _without_specks(np.asarray(found.x[:pairs], dtype=np.float64)))


def _limits(network: Network, columns: int) -> tuple[coo_array, Array]:
    """Rows: all requests; then every road that some pair takes, out of and into its boxes included."""
    rows: dict[_Way, int] = {}
    bounds: list[float] = []
    cells: list[tuple[int, int, float]] = []
    if isfinite(network.rate):
        bounds.append(network.rate)
        cells += [(0, pair, 1.0) for pair in range(len(network.worth))]
    for pair, wires in enumerate(network.wires):
        for wire in wires:
            for way in _ways(wire):
                if way not in rows:
                    rows[way] = len(bounds)
                    bounds.append(_room(network.roads, way))
                cells.append((rows[way], pair, wire.gigabits))
    if not bounds:
        return coo_array((1, columns)), np.zeros(1)
    row, column, value = (np.array(part) for part in zip(*cells, strict=True))
    return coo_array((value, (row, column)), shape=(len(bounds), columns)), np.array(bounds)
