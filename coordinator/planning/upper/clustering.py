"""Where a search starts: groups along the fast links, by hierarchical clustering of the bandwidth matrix (ThunderServe
section 3.2), in several sizes, and all of them mixed, which is serving colocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from ...plan import Phase
from ..model.problem import Group, Slice, Solution
from .space import Space, group_of, solution_of

__all__ = ["Part", "all_of", "colocated_starts", "dendrogram", "held", "smallest_share", "tile"]

Part = tuple[Slice, ...]
"""GPUs of some boxes, each of which is named once, in any order."""


def dendrogram(space: Space, boxes: Sequence[int]) -> list[tuple[int, int]]:
    """The merges of average-linkage clustering of these boxes, slowest links last: pairs of cluster numbers, where the
    first len(boxes) are the boxes and each merge makes the next number."""
    if len(boxes) < 2:
        return []
    near = space.near_gbps[np.ix_(boxes, boxes)]
    apart = 1.0 / np.maximum(near, 1e-6)
    np.fill_diagonal(apart, 0.0)
    return [(int(one), int(two)) for one, two, *_ in linkage(squareform(apart, checks=False), method="average")]


def all_of(space: Space, boxes: Iterable[int]) -> Part:
    """All GPUs of these."""
    return tuple(Slice(box, space.boxes[box].gpus) for box in boxes)


def smallest_share(space: Space, most: Slice, service: int) -> int:
    """The fewest of these GPUs that hold the service's model; 0 where all of them do not."""
    unit = space.units[most.box]
    counts = range(unit, most.gpus + 1, unit)
    return next((count for count in counts if space.holds((Slice(most.box, count),), service)), 0)


def held(space: Space, part: Part, service: int) -> bool:
    """Whether one of these boxes, or a run of them from the first, holds the service's model."""
    return any(
        space.holds((part[number],), service) or space.holds(_sorted(part[: number + 1]), service)
        for number in range(len(part))
    )


def tile(gpus: int, unit: int, share: int) -> list[int]:
    """`gpus` dealt out into as many near-equal parts as have `share` at least, in multiples of `unit`."""
    parts = max(1, gpus // share)
    size, over = divmod(gpus // unit, parts)
    return [(size + (part < over)) * unit for part in range(parts)]


def colocated_starts(space: Space, parts: Sequence[Part]) -> Iterator[Solution]:
    """All-mixed solutions (as far as pins let them) with groups of one, two, three and four times the smallest size
    that holds the model, and with one group for each box. `parts`: the GPUs of each service. No start has no group;
    equal ones are left out."""
    seen: set[Solution] = set()
    for scale in (1, 2, 3, 4, 1 << 30):
        start = _start(space, parts, scale)
        if start and start not in seen:
            seen.add(start)
            yield start


def _start(space: Space, parts: Sequence[Part], scale: int) -> Solution:
    groups: list[Group] = []
    for service, part in enumerate(parts):
        ordered = _sorted(part)
        loose: dict[int, Part] = {}
        for number, piece in enumerate(ordered):
            share = smallest_share(space, piece, service)
            if share:
                sizes = tile(piece.gpus, space.units[piece.box], min(piece.gpus, share * scale))
                groups.extend(_group(space, (Slice(piece.box, size),), service) for size in sizes)
            else:
                loose[number] = (piece,)
        groups.extend(_joined(space, [box for box, _ in ordered], loose, service))
    return solution_of(groups)


def _joined(space: Space, boxes: Sequence[int], loose: dict[int, Part], service: int) -> Iterator[Group]:
    """Boxes that are too small alone, joined up the dendrogram until they hold the model; what is left over at its
    root stays idle."""
    for merge, (one, two) in enumerate(dendrogram(space, boxes)):
        both = (*loose.pop(one, ()), *loose.pop(two, ()))
        while both:
            fitting = next((n for n in range(1, len(both) + 1) if space.holds(_sorted(both[:n]), service)), 0)
            if not fitting:
                loose[len(boxes) + merge] = both
                break
            yield _group(space, _sorted(both[:fitting]), service)
            both = both[fitting:]


def _sorted(slices: Part) -> Part:
    return tuple(sorted(slices))


def _group(space: Space, slices: Part, service: int) -> Group:
    phases = space.phases_of(slices)
    return group_of(slices, Phase.MIXED if Phase.MIXED in phases else phases[0], service)
