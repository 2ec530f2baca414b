"""Layer ranges over many boxes, judged by max flow as Helix does (Mei et al., ASPLOS 2025).

Each node holds a range of layers and passes so many tokens per second through it; a token may go on
at any node that holds the next layer. The flow through all layers is then the least of the layers'
sums: a set of nodes cuts every way exactly if what is left over misses some layer (were all layers
still there, one could always go on at the node that reaches furthest). So where links do not bind,
to place layers is to cover a strip of `layers` as high as possible, and that has many equal parts:
nodes of a kind are interchangeable, and a good cover falls into short segments, each of them
covered in one of few ways. `place` enumerates those ways and lets an integer programme choose among
them; `max_flow` checks the result on the whole graph, links included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array
from scipy.sparse.csgraph import maximum_flow

WIDEST: Final = 8
"""Layers of the longest segment."""

DEEPEST: Final = 3
"""Nodes over each other at most, of those that span a segment (or a part of one) as a whole."""

_ROUNDS: Final = 8  # halvings of the interval between a flow that can be and one that cannot
_NODES: Final = 500  # branches of the integer programme until it gives up
_SCALE: Final = 1000  # max flow counts in whole numbers: of 1/1000 token per second
_UNBOUND: Final = 2_000_000_000  # for scipy's 32-bit capacities


class NoPlacement(ValueError):
    """Nodes that do not hold the model together."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """`count` equal nodes; `tokens_s[k - 1]`: what one passes per second with k layers."""

    name: str
    count: int
    tokens_s: tuple[float, ...]


class NodeLayers(NamedTuple):
    """A node of a kind (its index) holds layers [first, last)."""

    kind: int
    first: int
    last: int


Counts = tuple[int, ...]  # nodes of each kind
Covers = dict[Counts, tuple[NodeLayers, ...]]  # how so many nodes cover a segment that begins at 0


def compute_bound(kinds: Sequence[NodeKind], layers: int) -> float:
    """Tokens per second if every node held the number of layers that suits it best, and nothing was
    lost to whole layers: the sum of the best tokens/s * layers of each, over all layers."""
    best = (kind.count * max(k * rate for k, rate in enumerate(kind.tokens_s, 1)) for kind in kinds)
    return sum(best) / layers


def one_pipeline(kinds: Sequence[NodeKind], layers: int) -> float:
    """Tokens per second of one pipeline through all nodes, each layer in one node."""

    def held(flow: float) -> int:
        return sum(
            kind.count * max((k for k, rate in enumerate(kind.tokens_s, 1) if rate >= flow), default=0)
            for kind in kinds
        )

    return max((rate for kind in kinds for rate in kind.tokens_s if held(rate) >= layers), default=0.0)


def least_layer(kinds: Sequence[NodeKind], placements: Sequence[NodeLayers], layers: int) -> float:
    """Tokens per second of the weakest layer: the max flow where links do not bind."""
    passed = np.zeros(layers)
    for kind, first, last in placements:
        passed[first:last] += kinds[kind].tokens_s[last - first - 1]
    return float(passed.min())


def max_flow(
    kinds: Sequence[NodeKind], placements: Sequence[NodeLayers], layers: int, *, link_tokens_s: float = inf
) -> float:
    """Tokens per second from the first layer to the last over the whole graph: from node i to node
    j there is a link, of `link_tokens_s`, where j holds the layer behind the last of i."""
    size = len(placements)
    source, sink = 2 * size, 2 * size + 1
    link = min(_UNBOUND, link_tokens_s * _SCALE)
    edges: list[tuple[int, int, float]] = []
    for number, (kind, first, last) in enumerate(placements):
        edges.append((2 * number, 2 * number + 1, kinds[kind].tokens_s[last - first - 1] * _SCALE))
        edges.extend([(source, 2 * number, _UNBOUND)] if first == 0 else [])
        edges.extend([(2 * number + 1, sink, _UNBOUND)] if last == layers else [])
    for here, there in product(range(size), repeat=2):
        if placements[there].first <= placements[here].last < placements[there].last:
            edges.append((2 * here + 1, 2 * there, link))
    start, end, room = zip(*edges, strict=True)
    graph = coo_array((np.array(room).astype(np.int32), (start, end)), shape=(sink + 1, sink + 1)).tocsr()
    return float(maximum_flow(graph, source, sink).flow_value / _SCALE)


def place(kinds: Sequence[NodeKind], layers: int) -> tuple[NodeLayers, ...]:
    """Layer ranges with the highest flow found. Raises NoPlacement if they do not fit."""
    low, high = 0.0, compute_bound(kinds, layers)
    found = _placed(kinds, layers, high / 1024)
    if found is None:
        raise NoPlacement(f"{sum(kind.count for kind in kinds)} nodes do not hold {layers} layers")
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        better = _placed(kinds, layers, middle)
        if better is None:
            high = middle
        else:
            found, low = better, max(middle, least_layer(kinds, better, layers))
    return found


def _placed(kinds: Sequence[NodeKind], layers: int, flow: float) -> tuple[NodeLayers, ...] | None:
    """Adjacent segments that pass `flow` at least capacity; None if nodes do not suffice."""
    covers = _Segments(kinds).covers
    columns = [
        (width, counts, pieces) for width in range(1, WIDEST + 1) for counts, pieces in covers(width, flow).items()
    ]
    if not columns:
        return None
    worth = [max(k * rate for k, rate in enumerate(kind.tokens_s, 1)) for kind in kinds]
    widths = np.array([width for width, *_ in columns])
    used = np.array([counts for _, counts, _ in columns]).T
    chosen = milp(
        (np.array(worth) @ used) / sum(worth),
        integrality=np.ones(len(columns)),
        options={"node_limit": _NODES},
        constraints=[
            LinearConstraint(widths, layers, layers),
            LinearConstraint(used, 0, [kind.count for kind in kinds]),
        ],
    )
    if chosen.x is None:
        return None
    placements: list[NodeLayers] = []
    first = 0
    for (width, _, pieces), times in zip(columns, np.rint(chosen.x).astype(int), strict=True):
        for _ in range(times):
            placements.extend(NodeLayers(kind, first + start, first + end) for kind, start, end in pieces)
            first += width
    return tuple(placements)


class _Segments:
    """The ways to cover a segment, for one set of kinds."""

    def __init__(self, kinds: Sequence[NodeKind]) -> None:
        self._kinds = kinds
        self._known: dict[tuple[int, float, int, int], Covers] = {}

    def covers(self, width: int, flow: float, first_kind: int = 0, depth: int = DEEPEST) -> Covers:
        """All that waste no node: nodes over the whole width (kinds from `first_kind`, so each set
        once) over a cover of the rest, or two shorter segments side by side."""
        if flow <= 0.0:
            return {(0,) * len(self._kinds): ()}
        if depth == 0:
            return {}
        key = (width, flow, first_kind, depth)
        if key not in self._known:
            self._known[key] = _undominated(self._spanned(*key) | self._halved(width, flow, depth), self._kinds)
        return self._known[key]

    def _spanned(self, width: int, flow: float, first_kind: int, depth: int) -> Covers:
        found: Covers = {}
        for number in range(first_kind, len(self._kinds)):
            rates = self._kinds[number].tokens_s
            if width <= len(rates):
                for counts, pieces in self.covers(width, flow - rates[width - 1], number, depth - 1).items():
                    more = tuple(count + (place == number) for place, count in enumerate(counts))
                    found[more] = (NodeLayers(number, 0, width), *pieces)
        return found

    def _halved(self, width: int, flow: float, depth: int) -> Covers:
        found: Covers = {}
        for left in range(1, width // 2 + 1):
            pairs = product(
                self.covers(left, flow, 0, depth).items(), self.covers(width - left, flow, 0, depth).items()
            )
            for (some, low), (others, high) in pairs:
                counts = tuple(one + two for one, two in zip(some, others, strict=True))
                found[counts] = (*low, *(NodeLayers(kind, left + start, left + end) for kind, start, end in high))
        return found


def _undominated(covers: Covers, kinds: Sequence[NodeKind]) -> Covers:
    """Without those that need too many nodes, or all nodes of another one and more."""
    kept: Covers = {}
    for counts in sorted(covers, key=sum):
        enough = all(count <= kind.count for count, kind in zip(counts, kinds, strict=True))
        if enough and not any(all(a <= b for a, b in zip(other, counts, strict=True)) for other in kept):
            kept[counts] = covers[counts]
    return kept
