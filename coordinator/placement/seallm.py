"""SeaLLM's placement (Zhao et al., section 4.1 and algorithm 1 of its appendix), as printed where it can be.

All groups of a try have one degree of tensor parallelism, a power of two of at most a box's GPUs; where that is too
small for some services, two small groups of a box become a larger one until all can be placed. Into these groups
services are put one at a time: the one with the highest unserved index (equation 6, by a replay of the last period
under what is placed so far) into the group with the lowest request rate, of those that have room for it; until nothing
fits. Tries are judged by a replay: the highest attainment, of equal ones the lowest normalized latency.

What the paper leaves open or contradicts, and what is done here:

- Its eight processes are four degrees times "the number of shared LLM services": every degree is tried with one and
  with two services in each engine.
- Algorithm 1 may fill all groups with copies of busy services before a quiet one has its first. Equation 3 wants all to
  be placed, so a copy is put only where services that have none could still be placed.
- Equation 5 (every service above a threshold) is not in algorithm 1. Tries that keep it go before those that do not.
- Copies are added until nothing fits, also where they do harm: an engine of two services decodes for one at a time.
  Only the choice among tries answers that.
- Equation 6 has the normalized latency of services of which nothing was served, which is not known: they count by their
  requests alone.
- `L_s` and the deadlines are "on one GPU". GPUs are unequal here and the largest model fits on no one of them: see
  `PlacementProblem.alone_s`.
- Nodes have equal numbers of GPUs there. Here a box gives as many groups as it has room for, and GPUs that are left
  over stay idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Final

import numpy as np

from .replay import Judged, PeriodReplay
from .values import SHARED_BY, GpuGroup, Groups, PlacementError, PlacementProblem, name_all

ALPHA: Final = 1e-4
"""Of equation 6: as in section 6.1."""

ATTAINMENT: Final = 0.9
"""The threshold of equation 5. Higher: services that are far from others in need get more."""


def place_seallm(replay: PeriodReplay, *, alpha: float = ALPHA, attainment: float = ATTAINMENT) -> Groups:
    """The best of all tries. Raises PlacementError where some service fits nowhere with the others."""
    problem = replay.problem
    best: Groups | None = None
    best_figures: tuple[float, ...] = ()
    for tp, most in product(problem.degrees, range(1, SHARED_BY + 1)):
        empty = partition_gpus(problem, tp, most)
        if empty is None:
            continue
        groups = _allocate(replay, empty, most, alpha)
        judged = replay.judge(groups)
        figures = _figures(judged, attainment)
        if best is None or figures > best_figures:
            best, best_figures = groups, figures
    if best is None:
        raise PlacementError(f"{name_all(problem)} have no room together on {problem.gpus} GPUs")
    return best


def place_new(problem: PlacementProblem, groups: Groups, service: int) -> Groups:
    """With a service of which nothing is known yet: it gets the fewest GPUs that it fits on for itself, until services
    are placed anew (section 3). Free ones, else those of the group with the lowest request rate whose services have
    others. Raises PlacementError where there are none."""
    used = Counter[int]()
    for group in groups:
        used[group.box] += group.tp
    spots: list[tuple[int, float, int, GpuGroup | None]] = [  # GPUs, rate, box, and the group that they are of
        (tp, 0.0, number, None)
        for number, box in enumerate(problem.boxes)
        if (tp := _fewest(problem, number, box.gpus - used[number], service))
    ]
    if not spots:
        copies = Counter(each for group in groups for each in group.services)
        spots = [
            (tp, sum(problem.counts[each] / copies[each] for each in group.services), group.box, group)
            for group in groups
            if all(copies[each] > 1 for each in group.services)
            and (tp := _fewest(problem, group.box, group.tp, service))
        ]
    if not spots:
        raise PlacementError(f"{problem.services[service].name} has no room beside the others on {problem.gpus} GPUs")
    tp, _, box, taken = min(spots, key=lambda spot: spot[:3])
    left = list(groups)
    if taken is not None:
        left.remove(taken)
    return tuple(sorted([*left, GpuGroup(box, tp, (service,))]))


def _fewest(problem: PlacementProblem, box: int, free: int, service: int) -> int:
    """Of so many GPUs of a box; 0: it does not fit."""
    return next((tp for tp in problem.degrees if tp <= free and problem.can_host(box, tp, (service,))), 0)


def partition_gpus(problem: PlacementProblem, tp: int, most: int) -> Groups | None:
    """Empty groups of a degree, some of them merged so that all services can be placed, `most` in each; None where they
    cannot."""
    sizes = [
        (number, size) for number, box in enumerate(problem.boxes) for size in [tp] * (box.gpus // tp)
    ]  # fmt: skip
    while True:
        groups = tuple(GpuGroup(box, size) for box, size in sorted(sizes))
        misfits = set(range(len(problem.services))) - fit_each(problem, groups, most)
        if not misfits:
            return groups
        merged = _merge_two(sizes, max(problem.degrees))
        if merged is None:
            return None
        sizes = merged


def fit_each(
    problem: PlacementProblem, groups: Iterable[GpuGroup], most: int, services: Iterable[int] | None = None
) -> set[int]:
    """Which of these services (None: of all) find a place in the groups as they are, the largest first, each in the
    smallest group that has room."""
    rooms = sorted(groups, key=lambda group: (group.tp, len(group.services)))
    placed = set[int]()
    wanted = range(len(problem.services)) if services is None else services
    for service in sorted(wanted, key=lambda each: -problem.services[each].model.weight_bytes):
        place = next((place for place, group in enumerate(rooms) if can_add(problem, group, service, most)), None)
        if place is not None:
            rooms[place] = rooms[place].with_service(service)
            placed.add(service)
    return placed


def can_add(problem: PlacementProblem, group: GpuGroup, service: int, most: int) -> bool:
    """Whether a group has room for another service, disks aside."""
    return (
        len(group.services) < most
        and service not in group.services
        and problem.can_host(group.box, group.tp, group.with_service(service).services)
    )


def _merge_two(sizes: list[tuple[int, int]], largest: int) -> list[tuple[int, int]] | None:
    """Two of the smallest groups of one size in a box as one; None where there are none."""
    for box, size in sorted(set(sizes), key=lambda each: (each[1], each[0])):
        if size < largest and sizes.count((box, size)) > 1:
            left = list(sizes)
            left.remove((box, size))
            left.remove((box, size))
            return [*left, (box, 2 * size)]
    return None


def _allocate(replay: PeriodReplay, empty: Groups, most: int, alpha: float) -> Groups:
    """Algorithm 1 from line 8."""
    problem, groups = replay.problem, list(empty)
    while True:
        index = replay.judge(groups).unserved_index(alpha)
        services = sorted(range(len(problem.services)), key=lambda each: (-index[each], each))
        place, service = _find_next(problem, groups, services, most)
        if service is None:
            return tuple(group for group in groups if group.services)
        groups[place] = groups[place].with_service(service)


def _find_next(
    problem: PlacementProblem, groups: list[GpuGroup], services: list[int], most: int
) -> tuple[int, int | None]:
    """The group that is to have another service, and which: the neediest that it has room for."""
    copies = np.bincount([each for group in groups for each in group.services], minlength=len(services))
    rates = [sum(problem.counts[each] / copies[each] for each in group.services) for group in groups]
    missing = {each for each in services if not copies[each]}
    for place in sorted(range(len(groups)), key=lambda each: (rates[each], -groups[each].tp, each)):
        for service in services:
            if not can_add(problem, groups[place], service, most):
                continue
            if not _fits_disk_with(problem, groups, place, service):
                continue
            left = missing - {service}
            grown = [group.with_service(service) if each == place else group for each, group in enumerate(groups)]
            if not left or fit_each(problem, grown, most, left) == left:
                return place, service
    return -1, None


def _fits_disk_with(problem: PlacementProblem, groups: list[GpuGroup], place: int, service: int) -> bool:
    box = groups[place].box
    return problem.fits_disk(box, [service, *(each for group in groups if group.box == box for each in group.services)])


def _figures(judged: Judged, attainment: float) -> tuple[float, ...]:
    """Higher is better: all services above the threshold, attainment, and normalized latency."""
    keeps = judged.is_complete and float(judged.by_service.min()) >= attainment
    return float(keeps), judged.attainment, -judged.normalized
