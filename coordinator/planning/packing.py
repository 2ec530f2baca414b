"""Starts for the search by integer programming: how to cut every box, or two boxes together, into replicas, and in
which phases, so that as much is read as is written and both are most.

Each way to cut is a column: the programme counts how many boxes of each class are cut in which way. It knows rates
only. Of the links it counts the fastest of each box, and only for what a column reads more than it writes, or the other
way round; what waiting does to deadlines it does not see. So it is solved several times, each time with rates that are
off by chance, and the search goes on from the solutions with the real objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ..plan import Phase
from .handover import LINK_SHARE
from .kv_cost import kv_gigabits
from .problem import Group, Slice, Solution
from .space import PHASES, Space, solution_of

__all__ = ["Packing"]

MOST_PARTS: Final = 4
"""Replicas in a box, at most: of more, all are of one size."""

MIXED_CLASSES: Final = 4
"""Classes of boxes up to which two unlike ones may share replicas: their pairs soon are more than is worth a look."""

HEADROOM: Final = 0.1
"""What a rate of twice the one asked for is worth more than the rate itself."""

GAP: Final = 1e-3
NODES: Final = 200  # branches of the programme until it gives the best that it has

Array = NDArray[np.float64]


class _Replica(NamedTuple):
    """GPUs of each of a column's boxes."""

    gpus: tuple[int, ...]
    phase: Phase
    service: int


class _Column(NamedTuple):
    """One box, or two, of these classes, cut in this way."""

    classes: tuple[int, ...]
    cut: tuple[_Replica, ...]


class Packing:
    """The columns of one problem and what they carry. `crowd`: about how many replicas will share a queue."""

    def __init__(self, space: Space, crowd: int) -> None:
        self._space = space
        self._classes = _classes(space)
        singles = [(number,) for number in range(len(self._classes))]
        pairs = [
            (one, two)
            for one, two in combinations_with_replacement(range(len(self._classes)), 2)
            if (len(self._classes[one]) > 1 if one == two else len(self._classes) <= MIXED_CLASSES)
        ]
        self._columns = [
            _Column(classes, cut) for classes in (*singles, *pairs) for cut in _cuts(space, self._members(classes))
        ]
        rates = [self._rates(column, crowd) for column in self._columns]
        self._carried = np.stack(rates, axis=2) if rates else np.zeros((4, len(space.problem.services), 0))

    def start(self, phases: Sequence[Phase] = PHASES, noise: Array | None = None) -> Solution:
        """The best solution by rates (times `noise`, a factor for each column), of replicas in these phases where pins
        leave the choice. Empty where no one or two boxes hold the model."""
        usable = [
            number
            for number, column in enumerate(self._columns)
            if all(
                replica.phase in phases or not set(phases) & set(self._allowed(column, replica))
                for replica in column.cut
            )
        ]
        if not usable:
            return ()
        carried = self._carried if noise is None else self._carried * noise
        times = self._chosen(carried[:, :, usable], [self._columns[number] for number in usable])
        left = [list(boxes) for boxes in self._classes]
        groups: list[Group] = []
        for number, count in zip(usable, times, strict=True):
            for _ in range(count):
                boxes = [left[one].pop(0) for one in self._columns[number].classes]
                groups.extend(_group(boxes, replica) for replica in self._columns[number].cut)
        return solution_of(groups)

    def recut(self, solution: Solution, rng: np.random.Generator) -> Solution | None:
        """A neighbour: one or two boxes, which share no replica with others, cut in another way. None where the draw
        finds no such boxes."""
        column = self._columns[int(rng.integers(len(self._columns)))] if self._columns else None
        if column is None:
            return None
        boxes = [int(rng.choice(self._classes[one])) for one in column.classes]
        inside = set(boxes)
        touched = [group for group in solution if any(box in inside for box, _ in group.slices)]
        if len(inside) < len(boxes) or any(box not in inside for group in touched for box, _ in group.slices):
            return None
        rest = [group for group in solution if group not in touched]
        return solution_of((*rest, *(_group(boxes, replica) for replica in column.cut)))

    @property
    def columns(self) -> int:
        """How many there are."""
        return len(self._columns)

    def _members(self, classes: Sequence[int]) -> list[int]:
        """A box for each: two different ones of the same class."""
        return [self._classes[one][classes[:place].count(one)] for place, one in enumerate(classes)]

    def _allowed(self, column: _Column, replica: _Replica) -> tuple[Phase, ...]:
        return self._space.phases_of(_group(self._members(column.classes), replica).slices)

    def _rates(self, column: _Column, crowd: int) -> Array:
        """Requests per second [read, written, read or written by mixed replicas; service].

        What one phase does more than the other has to go over the boxes' links, and counts only as far as those let it.
        """
        space = self._space
        found = np.zeros((4, len(space.problem.services)))
        boxes = self._members(column.classes)
        for replica in column.cut:
            first = 2 * (replica.phase is Phase.MIXED)
            found[first : first + 2, replica.service] += space.evaluator.rates(_group(boxes, replica), crowd)
        for number, service in enumerate(space.problem.services):
            gigabits = float(kv_gigabits(service.model, service.workload.mean_prompt, service.kv_bits))
            over = LINK_SHARE * sum(_fastest(space, box) for box in boxes) / gigabits
            found[:2, number] = np.minimum(found[:2, number], found[:2, number].min() + over)
        return found

    def _chosen(self, carried: Array, columns: Sequence[_Column]) -> NDArray[np.int64]:
        """How often each column is taken.

        Variables: times of each column; times of each that its mixed replicas read rather than write; for each service
        its rate over what is asked for, and the part of that up to 1.
        """
        space, many = self._space, len(columns)
        services = len(space.problem.services)
        asked = np.array([service.workload.rate for service in space.problem.services])
        reads, writes, mixed_reads, mixed_writes = carried / asked[:, None]
        each, blank = np.eye(services), np.zeros((services, services))
        rows = [
            np.hstack((reads, mixed_reads, -each, blank)),
            np.hstack((writes + mixed_writes, -mixed_writes, -each, blank)),
            np.hstack((np.eye(many), -np.eye(many), np.zeros((many, 2 * services)))),
            np.hstack((np.zeros((services, 2 * many)), each, -each)),
        ]
        used = np.zeros((len(self._classes), 2 * many + 2 * services))
        usd = np.zeros(many)
        for number, column in enumerate(columns):
            np.add.at(used[:, number], list(column.classes), 1.0)
            usd[number] = sum(space.boxes[box].usd_per_hour for box in self._members(column.classes))
        weight = asked / asked.sum()
        found = milp(
            np.concatenate((space.problem.price_weight * usd, np.zeros(many), -HEADROOM * weight, -weight)),
            integrality=np.concatenate((np.ones(many), np.zeros(many + 2 * services))),
            bounds=Bounds(0.0, np.concatenate((np.full(2 * many + services, np.inf), np.ones(services)))),
            constraints=[
                LinearConstraint(csr_array(np.vstack(rows)), 0.0, np.inf),
                LinearConstraint(csr_array(used), 0.0, [len(boxes) for boxes in self._classes]),
            ],
            options={"node_limit": NODES, "mip_rel_gap": GAP},
        )
        return np.zeros(many, dtype=np.int64) if found.x is None else np.rint(found.x[:many]).astype(np.int64)


def _classes(space: Space) -> list[list[int]]:
    """Usable boxes that are alike but for their links."""
    found: dict[object, list[int]] = {}
    for number in space.usable:
        box = space.boxes[number]
        key = (box.gpu, box.gpus, box.gpu_link_gbps, box.usd_per_hour, box.atomic, space.phases[number])
        found.setdefault(key, []).append(number)
    return list(found.values())


def _group(boxes: Sequence[int], replica: _Replica) -> Group:
    slices = tuple(sorted(Slice(box, gpus) for box, gpus in zip(boxes, replica.gpus, strict=True)))
    return Group(slices, replica.phase, replica.service)


def _cuts(space: Space, boxes: Sequence[int]) -> Iterator[tuple[_Replica, ...]]:
    """The ways to cut these: a single box in any sizes, two boxes in equal parts of both."""
    whole = tuple(space.boxes[box].gpus for box in boxes)
    for service in range(len(space.problem.services)):
        for sizes in _sizes(space, boxes, whole, service):
            runs = [(size, sizes.count(size)) for size in sorted(set(sizes), reverse=True)]
            slices = tuple(Slice(box, 1) for box in sorted(boxes))
            phases = space.phases_of(slices)
            for chosen in product(*(combinations_with_replacement(phases, count) for _, count in runs)):
                yield tuple(
                    _Replica(size, phase, service)
                    for (size, _), of_run in zip(runs, chosen, strict=True)
                    for phase in of_run
                )


def _sizes(
    space: Space, boxes: Sequence[int], whole: tuple[int, ...], service: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Multisets of parts that each hold the model, and leave no GPU idle if they can."""

    def holds(part: tuple[int, ...]) -> bool:
        slices = tuple(sorted(Slice(box, gpus) for box, gpus in zip(boxes, part, strict=True)))
        return space.holds(slices, service)

    if len(boxes) > 1:
        for parts in (1, 2):
            part = tuple(gpus // parts for gpus in whole)
            exact = all(gpus % (parts * space.units[box]) == 0 for gpus, box in zip(whole, boxes, strict=True))
            if exact and holds(part):
                yield (part,) * parts
        return
    unit = space.units[boxes[0]]
    shares = [share for share in range(unit, whole[0] + 1, unit) if holds((share,))]
    for sizes in _partitions(whole[0], shares):
        if len(sizes) <= MOST_PARTS or len(set(sizes)) == 1:
            yield tuple((size,) for size in sizes)


def _partitions(gpus: int, shares: Sequence[int]) -> list[tuple[int, ...]]:
    """All multisets of shares with a sum of `gpus`, or of the most below it that they can make."""

    def parts(rest: int, largest: int) -> Iterator[tuple[int, ...]]:
        if rest == 0:
            yield ()
        for share in shares:
            if share <= min(rest, largest):
                yield from ((share, *others) for others in parts(rest - share, share))

    return next((found for total in range(gpus, 0, -1) if (found := list(parts(total, total)))), [])


def _fastest(space: Space, box: int) -> float:
    """Gb/s of the box's fastest link to another one."""
    others = [other for other in space.usable if other != box]
    return float(space.near_gbps[box, others].max()) if others else 0.0
