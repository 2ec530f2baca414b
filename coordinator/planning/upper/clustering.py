"""Where a search starts: groups along fast links, by hierarchical clustering (ThunderServe section
3.2), in several sizes, and all mixed, which is serving colocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...plan import Phase
from ..model.problem import Group, Slice, Solution
from .search_space import SearchSpace, make_group, make_solution

GpuSet = tuple[Slice, ...]
"""GPUs of some boxes, each of which is named once, in any order."""


def dendrogram(space: SearchSpace, boxes: Sequence[int]) -> list[tuple[int, int]]:
    """The merges of average-linkage clustering of these boxes, slowest links last: pairs of cluster
    numbers, where the first len(boxes) are the boxes and each merge makes the next number."""
    if len(boxes) < 2:
        return []
    from scipy.cluster.hierarchy import linkage  # as in `lower.flow`: only where there is something to cluster
    from scipy.spatial.distance import squareform

    near = space.near_gbps[np.ix_(boxes, boxes)]
    apart = 1.0 / np.maximum(near, 1e-6)
    np.fill_diagonal(apart, 0.0)
    return [(int(one), int(two)) for one, two, *_ in linkage(squareform(apart, checks=False), method="average")]


def all_gpus(space: SearchSpace, boxes: Iterable[int]) -> GpuSet:
    """All GPUs of these."""
    return tuple(Slice(box, space.boxes[box].gpus) for box in boxes)


def smallest_gpu_count(space: SearchSpace, most: Slice, service: int) -> int:
    """The fewest of these GPUs that hold the service's model; 0 where all of them do not."""
    unit = space.gpu_units[most.box]
    counts = range(unit, most.gpus + 1, unit)
    return next((count for count in counts if space.can_hold((Slice(most.box, count),), service)), 0)


def fits_somewhere(space: SearchSpace, part: GpuSet, service: int) -> bool:
    """Whether one of these boxes, or a run of them from the first, holds the service's model."""
    return any(
        space.can_hold((part[number],), service) or space.can_hold(_sorted(part[: number + 1]), service)
        for number in range(len(part))
    )


def deal_evenly(gpus: int, unit: int, share: int) -> list[int]:
    """`gpus` dealt out into as many near-equal parts as have `share` at least, in multiples of
    `unit`."""
    parts = max(1, gpus // share)
    size, left_over = divmod(gpus // unit, parts)
    return [(size + (part < left_over)) * unit for part in range(parts)]


def colocated_starts(space: SearchSpace, parts: Sequence[GpuSet]) -> Iterator[Solution]:
    """All-mixed solutions (as pins allow) with groups of 1 to 4 times the smallest size that holds
    the model, or one per box; equal ones once. `parts`: each service's GPUs."""
    seen: set[Solution] = set()
    for scale in (1, 2, 3, 4, 1 << 30):
        start = _build_start(space, parts, scale)
        if start and start not in seen:
            seen.add(start)
            yield start


def _build_start(space: SearchSpace, parts: Sequence[GpuSet], scale: int) -> Solution:
    groups: list[Group] = []
    for service, part in enumerate(parts):
        ordered = _sorted(part)
        loose: dict[int, GpuSet] = {}
        for number, slice_ in enumerate(ordered):
            share = smallest_gpu_count(space, slice_, service)
            if share:
                sizes = deal_evenly(slice_.gpus, space.gpu_units[slice_.box], min(slice_.gpus, share * scale))
                groups.extend(_make_colocated_group(space, (Slice(slice_.box, size),), service) for size in sizes)
            else:
                loose[number] = (slice_,)
        groups.extend(_join_boxes(space, [box for box, _ in ordered], loose, service))
    return make_solution(groups)


def _join_boxes(space: SearchSpace, boxes: Sequence[int], loose: dict[int, GpuSet], service: int) -> Iterator[Group]:
    """Boxes that are too small alone, joined up the dendrogram until they hold the model; what is
    left over at its root stays idle."""
    for merge, (one, two) in enumerate(dendrogram(space, boxes)):
        both = (*loose.pop(one, ()), *loose.pop(two, ()))
        while both:
            fitting = next((n for n in range(1, len(both) + 1) if space.can_hold(_sorted(both[:n]), service)), 0)
            if not fitting:
                loose[len(boxes) + merge] = both
                break
            yield _make_colocated_group(space, _sorted(both[:fitting]), service)
            both = both[fitting:]


def _sorted(slices: GpuSet) -> GpuSet:
    return tuple(sorted(slices))


def _make_colocated_group(space: SearchSpace, slices: GpuSet, service: int) -> Group:
    phases = space.phases_of(slices)
    return make_group(slices, Phase.MIXED if Phase.MIXED in phases else phases[0], service)
