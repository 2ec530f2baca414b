"""Where a search starts: groups along the fast links, by hierarchical clustering of the bandwidth matrix (ThunderServe
section 3.2), in several sizes, and all of them mixed, which is serving colocated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from ..plan import Phase
from .problem import Group, Slice, Solution
from .space import Space, group_of, solution_of

__all__ = ["colocated_starts", "dendrogram", "held", "smallest_share", "tile"]

Loose = tuple[Slice, ...]


def dendrogram(space: Space, boxes: Sequence[int]) -> list[tuple[int, int]]:
    """The merges of average-linkage clustering of these boxes, slowest links last: pairs of cluster numbers, where the
    first len(boxes) are the boxes and each merge makes the next number."""
    if len(boxes) < 2:
        return []
    near = space.near_gbps[np.ix_(boxes, boxes)]
    apart = 1.0 / np.maximum(near, 1e-6)
    np.fill_diagonal(apart, 0.0)
    return [(int(one), int(two)) for one, two, *_ in linkage(squareform(apart, checks=False), method="average")]


def smallest_share(space: Space, box: int, service: int) -> int:
    """The fewest GPUs of this box that hold the service's model; 0 where all of them do not."""
    unit, gpus = space.units[box], space.boxes[box].gpus
    counts = range(unit, gpus + 1, unit)
    return next((count for count in counts if space.holds((Slice(box, count),), service)), 0)


def held(space: Space, boxes: Sequence[int], service: int) -> bool:
    """Whether one of these boxes, or a run of them from the first, holds the service's model."""
    run: list[Slice] = []
    for box in boxes:
        whole = Slice(box, space.boxes[box].gpus)
        run.append(whole)
        if space.holds((whole,), service) or space.holds(tuple(sorted(run)), service):
            return True
    return False


def tile(gpus: int, unit: int, share: int) -> list[int]:
    """`gpus` dealt out into as many near-equal parts as have `share` at least, in multiples of `unit`."""
    parts = max(1, gpus // share)
    size, over = divmod(gpus // unit, parts)
    return [(size + (part < over)) * unit for part in range(parts)]


def colocated_starts(space: Space, owners: dict[int, int]) -> Iterator[Solution]:
    """All-mixed solutions (as far as pins let them) with groups of one, two, three and four times the smallest size
    that holds the model, and with one group for each box. `owners`: the service of each box. No start has no group;
    equal ones are left out."""
    seen: set[Solution] = set()
    for scale in (1, 2, 3, 4, 1 << 30):
        start = _start(space, owners, scale)
        if start and start not in seen:
            seen.add(start)
            yield start


def _start(space: Space, owners: dict[int, int], scale: int) -> Solution:
    groups: list[Group] = []
    for service in sorted(set(owners.values())):
        boxes = [box for box in space.usable if owners[box] == service]
        loose: dict[int, Loose] = {}
        for number, box in enumerate(boxes):
            share, gpus = smallest_share(space, box, service), space.boxes[box].gpus
            if share:
                sizes = tile(gpus, space.units[box], min(gpus, share * scale))
                groups.extend(_group(space, (Slice(box, size),), service) for size in sizes)
            else:
                loose[number] = (Slice(box, gpus),)
        groups.extend(_joined(space, boxes, loose, service))
    return solution_of(groups)


def _joined(space: Space, boxes: Sequence[int], loose: dict[int, Loose], service: int) -> Iterator[Group]:
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


def _sorted(slices: Loose) -> Loose:
    return tuple(sorted(slices))


def _group(space: Space, slices: Loose, service: int) -> Group:
    phases = space.phases_of(slices)
    return group_of(slices, Phase.MIXED if Phase.MIXED in phases else phases[0], service)
