"""Large clusters in cells: boxes near each other, each cell a problem of its own with a share of
the traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from ..model.problem import Group, Problem, Slice, Solution
from .clustering import GpuSet, all_gpus, dendrogram, fits_somewhere
from .search_space import SearchSpace


class Cell:
    """Some boxes of one service's part of a cluster; `problem` has only those (in order), that
    service, rate 1.0 of `share`."""

    def __init__(self, whole: Problem, boxes: Sequence[int], service: int) -> None:
        self._whole = whole
        self.boxes = tuple(sorted(boxes))
        self.service = service
        ids = [box.id for box in whole.cluster.boxes]
        inside = {ids[box] for box in self.boxes}
        self._cluster = whole.cluster.without(frozenset(ids) - inside)
        self._pinned = {name: phase for name, phase in whole.pinned.items() if name in inside}

    @property
    def power(self) -> float:
        """How much it might carry, before anything is known: compute and bandwidth both count."""
        boxes = self._cluster.boxes
        return sum(box.gpus * sqrt(box.gpu.tflops * box.gpu.memory_gbps) for box in boxes)

    def problem(self, share: float) -> Problem:
        """With this share of the service's traffic."""
        service = self._whole.services[self.service]
        part = replace(service, workload=replace(service.workload, rate=service.workload.rate * share))
        return replace(self._whole, cluster=self._cluster, services=(part,), pinned=self._pinned, excluded=frozenset())

    def to_cluster(self, solution: Solution) -> list[Group]:
        """A solution of the cell as groups of the whole."""
        return [
            Group(tuple(Slice(self.boxes[box], gpus) for box, gpus in group.slices), group.phase, self.service)
            for group in solution
        ]

    def to_cell(self, solution: Solution) -> Solution:
        """The groups of a solution of the whole that lie in the cell and serve its service."""
        here = {box: number for number, box in enumerate(self.boxes)}
        return tuple(
            sorted(
                Group(tuple(Slice(here[box], gpus) for box, gpus in group.slices), group.phase, 0)
                for group in solution
                if group.service == self.service and all(box in here for box, _ in group.slices)
            )
        )


def split_into_cells(space: SearchSpace, parts: Sequence[GpuSet], size: int) -> list[Cell]:
    """Each service's boxes in cells of up to `size` GPUs, or one larger box, by the dendrogram. One
    that cannot hold the model joins what it meets further up."""
    found: list[Cell] = []
    for service, part in enumerate(parts):
        boxes = sorted(box for box, _ in part)
        clusters: dict[int, list[list[int]]] = {number: [[box]] for number, box in enumerate(boxes)}
        for merge, (one, two) in enumerate(dendrogram(space, boxes)):
            together = clusters.pop(one) + clusters.pop(two)
            clusters[len(boxes) + merge] = _join_small(space, together, size, service)
        found.extend(Cell(space.problem, cell, service) for cells in clusters.values() for cell in cells)
    return found


def _join_small(space: SearchSpace, parts: list[list[int]], size: int, service: int) -> list[list[int]]:
    """Parts joined, smallest first, as long as two fit in `size` or one of them does not hold the
    model."""

    def gpus(part: list[int]) -> int:
        return sum(space.boxes[box].gpus for box in part)

    parts = sorted(parts, key=lambda part: (gpus(part), part))
    while len(parts) > 1:
        fits = gpus(parts[0]) + gpus(parts[1]) <= size
        if not fits and fits_somewhere(space, all_gpus(space, parts[0]), service):
            break
        joined = sorted(parts[0] + parts[1])
        parts = sorted([*parts[2:], joined], key=lambda part: (gpus(part), part))
    return parts
