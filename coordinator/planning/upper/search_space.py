"""What the moves of a search may touch: usable boxes, the steps in which their GPUs are dealt out,
the phases that pins leave, and which boxes are alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..model.cluster import Box, Cluster
from ..model.errors import NoPlan
from ..model.problem import Evaluator, Group, Problem, Slice, Solution
from .settings import SearchSettings

DEFAULTS: Final = SearchSettings()

PHASES = (Phase.PREFILL, Phase.DECODE, Phase.MIXED)


def make_solution(groups: Iterable[Group]) -> Solution:
    """Groups in the order that makes equal solutions equal values."""
    return tuple(sorted(groups))


def make_group(slices: Iterable[Slice], phase: Phase, service: int = 0) -> Group:
    """A group with its slices sorted, those of one box added up, and empty ones left out."""
    gpus: dict[int, int] = {}
    for box, count in slices:
        gpus[box] = gpus.get(box, 0) + count
    return Group(tuple(Slice(box, count) for box, count in sorted(gpus.items()) if count), phase, service)


@dataclass(frozen=True, slots=True, eq=False)
class SearchSpace:
    """One problem as its search sees it. Everything indexed by box is in the order of the cluster.

    `gpu_units`: GPUs of a box come and go in multiples of this (all of them where the box is
    atomic). `phases`: what a box may do. `near_gbps` [box, box]: the slower direction of a link;
    inside a box, its own. `box_class`: the number of the class of boxes that can be exchanged for
    each other without any figure changing.
    """

    problem: Problem
    evaluator: Evaluator
    settings: SearchSettings
    usable: tuple[int, ...]
    gpu_units: tuple[int, ...]
    phases: tuple[tuple[Phase, ...], ...]
    near_gbps: NDArray[np.float64]
    box_class: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, evaluator: Evaluator, settings: SearchSettings = DEFAULTS) -> SearchSpace:
        """Raises NoPlan where pins and exclusions contradict each other or name boxes that are not
        there."""
        cluster = problem.cluster
        ids = [box.id for box in cluster.boxes]
        for what, named in (("pinned", set(problem.pinned)), ("excluded", set(problem.excluded))):
            for unknown in sorted(named - set(ids)):
                raise NoPlan(f"box {unknown} is {what}, but not in the cluster")
        for both in sorted(problem.excluded & set(problem.pinned)):
            raise NoPlan(f"box {both} is pinned to {problem.pinned[both]} and excluded")
        usable = tuple(number for number, box in enumerate(cluster.boxes) if box.id not in problem.excluded)
        if not usable:
            raise NoPlan("every box of the cluster is excluded")
        pins = {problem.pinned.get(cluster.boxes[number].id) for number in usable}
        if pins in ({Phase.PREFILL}, {Phase.DECODE}):
            left = "decodes" if pins == {Phase.PREFILL} else "prefills"
            raise NoPlan(f"all usable boxes are pinned to {next(iter(pins))}: nobody {left}")
        near = np.minimum(cluster.gbps, cluster.gbps.T).astype(np.float64)
        np.fill_diagonal(near, [box.gpu_link_gbps for box in cluster.boxes])
        return cls(
            problem=problem,
            evaluator=evaluator,
            settings=settings,
            usable=usable,
            gpu_units=tuple(box.gpus if box.atomic else 1 for box in cluster.boxes),
            phases=tuple((problem.pinned[name],) if name in problem.pinned else PHASES for name in ids),
            near_gbps=near,
            box_class=_classify_boxes(cluster, problem),
        )

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Of the cluster."""
        return self.problem.cluster.boxes

    @property
    def gpus(self) -> int:
        """Cards that may be used."""
        return sum(self.boxes[number].gpus for number in self.usable)

    def phases_of(self, slices: Sequence[Slice]) -> tuple[Phase, ...]:
        """What a group of these may do; empty where pins contradict each other."""
        return tuple(phase for phase in PHASES if all(phase in self.phases[box] for box, _ in slices))

    def can_hold(self, slices: tuple[Slice, ...], service: int) -> bool:
        """Whether a group of these can be."""
        if self.problem.within_boxes and len(slices) > 1:
            return False
        return bool(slices and self.phases_of(slices) and self.evaluator.can_hold(slices, service))

    def idle_gpus(self, solution: Solution) -> dict[int, int]:
        """GPUs in no group, by usable box; boxes without any are left out."""
        left = {number: self.boxes[number].gpus for number in self.usable}
        for group in solution:
            for box, count in group.slices:
                left[box] -= count
        return {box: count for box, count in left.items() if count}

    def signature(self, group: Group) -> tuple[tuple[tuple[int, int], ...], Phase, int]:
        """What a group is like when boxes that are alike count as the same."""
        return (tuple(sorted((self.box_class[box], count) for box, count in group.slices)), group.phase, group.service)

    def canonical(self, solution: Solution) -> Solution:
        """The same solution for those that differ only in which of the alike boxes does what (two
        of them may be missed where groups cross many boxes; none are mistaken for each other).

        Boxes of a class are put in the order of what they do, seen two groups far.
        """
        if len({self.box_class[box] for box in self.usable}) == len(self.usable):
            return solution
        used = {box for group in solution for box, _ in group.slices}
        ranks = dict.fromkeys(used, 0)
        # first by what each box does, then by what the boxes do that it shares groups with
        for _ in range(2):
            doings: dict[int, list[str]] = {box: [] for box in used}
            for group in solution:
                shape = sorted((self.box_class[box], count, ranks[box]) for box, count in group.slices)
                for box, count in group.slices:
                    doings[box].append(f"{group.phase} {group.service} {count} {shape}")
            views = {box: "; ".join(sorted(lines)) for box, lines in doings.items()}
            order = {view: rank for rank, view in enumerate(sorted(set(views.values())))}
            ranks = {box: order[view] for box, view in views.items()}
        return self._renamed(solution, ranks)

    def _renamed(self, solution: Solution, ranks: dict[int, int]) -> Solution:
        """Boxes of each class take the lowest numbers of the class, in this order."""
        names: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        for box in self.usable:
            members.setdefault(self.box_class[box], []).append(box)
        for numbers in members.values():
            used = sorted((box for box in numbers if box in ranks), key=lambda box: (ranks[box], box))
            names.update(zip(used, numbers, strict=False))
        return make_solution(
            Group(tuple(sorted(Slice(names[box], count) for box, count in group.slices)), group.phase, group.service)
            for group in solution
        )


def _classify_boxes(cluster: Cluster, problem: Problem) -> tuple[int, ...]:
    """By first member. Two boxes are alike when all about them is equal and exchanging them leaves
    the links as they are; that is transitive, so one comparison with each class is enough."""
    classes: list[int] = []
    found: list[int] = []
    for number, box in enumerate(cluster.boxes):
        for first in found:
            if _same_box(box, cluster.boxes[first], problem) and _exchangeable(cluster, first, number):
                classes.append(first)
                break
        else:
            found.append(number)
            classes.append(number)
    return tuple(classes)


def _same_box(one: Box, two: Box, problem: Problem) -> bool:
    def figures(box: Box) -> tuple[object, ...]:
        pin, out = problem.pinned.get(box.id), box.id in problem.excluded
        return (box.gpu, box.gpus, box.usd_per_hour, box.gpu_link_gbps, box.atomic, pin, out)

    return figures(one) == figures(two)


def _exchangeable(cluster: Cluster, one: int, two: int) -> bool:
    others = np.ones(len(cluster.boxes), dtype=bool)
    others[[one, two]] = False
    for matrix in (cluster.gbps, cluster.rtt_s, cluster.usd_per_gb):
        rows = np.array_equal(matrix[one][others], matrix[two][others])
        columns = np.array_equal(matrix[:, one][others], matrix[:, two][others])
        if not (rows and columns and matrix[one, two] == matrix[two, one]):
            return False
    return True
