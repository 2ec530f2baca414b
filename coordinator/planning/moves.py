"""The neighbours of a solution: flip, split, merge and move of ThunderServe (section 3.2, figure 4), with mixed as a
third phase, and four more: a box cut anew in equal parts, two groups that exchange parts, idle GPUs taken in (or a
group let go), and a group that changes its service.

Every neighbour keeps the pins, uses no GPU twice, and has only groups that hold their model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Final

import numpy as np

from ..plan import Phase
from .clustering import tile
from .problem import Group, Slice, Solution
from .space import Space, group_of, solution_of

__all__ = ["flips", "neighbour", "retilings"]

Move = Callable[[Space, Solution, np.random.Generator], Iterator[Solution]]


def flips(space: Space, solution: Solution) -> Iterator[tuple[Group, Solution]]:
    """Every group in every other phase, as (the group as it becomes, solution); of groups that are alike only one."""
    seen: set[object] = set()
    for place, group in enumerate(solution):
        kind = space.kind(group)
        if kind in seen:
            continue
        seen.add(kind)
        for phase in space.phases_of(group.slices):
            if phase is not group.phase:
                flipped = group._replace(phase=phase)
                yield flipped, solution_of((*solution[:place], flipped, *solution[place + 1 :]))


def retilings(space: Space, solution: Solution) -> Iterator[Solution]:
    """Boxes whose groups stay inside them, cut anew into equal parts: every size that holds the model, every phase."""
    seen: set[object] = set()
    free = space.free(solution)
    inner: dict[int, list[Group]] = {}
    crossed: set[int] = set()
    for group in solution:
        if len(group.slices) == 1:
            inner.setdefault(group.slices[0].box, []).append(group)
        else:
            crossed.update(box for box, _ in group.slices)
    for box, groups in inner.items():
        signature = (space.alike[box], tuple(space.kind(group) for group in groups), box in crossed)
        if signature in seen:
            continue
        seen.add(signature)
        rest = [group for group in solution if group not in groups]
        gpus = sum(group.slices[0].gpus for group in groups) + free.get(box, 0)
        for service, phase in product(sorted({group.service for group in groups}), space.phases[box]):
            for sizes in _tilings(space, box, gpus, service):
                made = [group_of((Slice(box, size),), phase, service) for size in sizes]
                if sorted(made) != sorted(groups):
                    yield solution_of((*rest, *made))


def _tilings(space: Space, box: int, gpus: int, service: int) -> Iterator[list[int]]:
    unit = space.units[box]
    seen: set[tuple[int, ...]] = set()
    for share in range(unit, gpus + 1, unit):
        sizes = tile(gpus, unit, share)
        if tuple(sizes) not in seen and space.holds((Slice(box, min(sizes)),), service):
            seen.add(tuple(sizes))
            yield sizes


def neighbour(space: Space, solution: Solution, rng: np.random.Generator) -> Solution | None:
    """A random one, drawn by kind of move and then by place; None where there is no such move at that place."""
    moves = MOVES if len(space.problem.services) == 1 else (*MOVES, _reassign)
    return next(moves[int(rng.integers(len(moves)))](space, solution, rng), None)


def _replaced(solution: Solution, gone: Iterable[Group], come: Iterable[Group]) -> Solution:
    rest = list(solution)
    for group in gone:
        rest.remove(group)
    return solution_of((*rest, *come))


def _pick(rng: np.random.Generator, solution: Sequence[Group]) -> Group:
    return solution[int(rng.integers(len(solution)))]


def _pair(rng: np.random.Generator, solution: Solution) -> tuple[Group, Group] | None:
    if len(solution) < 2:
        return None
    one, two = rng.choice(len(solution), size=2, replace=False)
    return solution[int(one)], solution[int(two)]


def _chosen(rng: np.random.Generator, phases: Sequence[Phase]) -> Phase:
    return phases[int(rng.integers(len(phases)))]


def _flip(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    group = _pick(rng, solution)
    others = [phase for phase in space.phases_of(group.slices) if phase is not group.phase]
    if others:
        yield _replaced(solution, [group], [group._replace(phase=_chosen(rng, others))])


def _split(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """By boxes, or each slice at the same ratio."""
    group = _pick(rng, solution)
    if len(group.slices) > 1 and rng.random() < 0.5:
        at = int(rng.integers(1, len(group.slices)))
        order = rng.permutation(len(group.slices))
        parts = ([group.slices[int(n)] for n in order[:at]], [group.slices[int(n)] for n in order[at:]])
    else:
        ratio = float(rng.choice((0.25, 1 / 3, 0.5)))
        first = [Slice(box, int(count * ratio) // space.units[box] * space.units[box]) for box, count in group.slices]
        parts = (first, [Slice(box, count - less.gpus) for (box, count), less in zip(group.slices, first, strict=True)])
    made = [_fitting(space, part, group.phase, group.service, rng) for part in parts]
    if made[0] is not None and made[1] is not None:
        yield _replaced(solution, [group], [made[0], made[1]])


def _fitting(
    space: Space, slices: Iterable[Slice], phase: Phase, service: int, rng: np.random.Generator
) -> Group | None:
    """A group that holds its model, half of the time in the phase given (if it may), else in any."""
    group = group_of(slices, phase, service)
    if not space.holds(group.slices, service):
        return None
    allowed = space.phases_of(group.slices)
    return group if phase in allowed and rng.random() < 0.5 else group._replace(phase=_chosen(rng, allowed))


def _merge(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    pair = _pair(rng, solution)
    if pair is None or pair[0].service != pair[1].service:
        return
    one, two = pair
    made = _fitting(space, (*one.slices, *two.slices), one.phase, one.service, rng)
    if made is not None:
        yield _replaced(solution, [one, two], [made])


def _move(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """Some GPUs of one box from a group to another; both keep their phases."""
    pair = _pair(rng, solution)
    if pair is None:
        return
    one, two = pair
    given = one.slices[int(rng.integers(len(one.slices)))]
    unit = space.units[given.box]
    count = unit * int(rng.integers(1, given.gpus // unit + 1))
    less = group_of((*one.slices, Slice(given.box, -count)), one.phase, one.service)
    more = group_of((*two.slices, Slice(given.box, count)), two.phase, two.service)
    if _all_hold(space, (less, more)):
        yield _replaced(solution, [one, two], [less, more])


def _exchange(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """Two groups give each other some GPUs."""
    pair = _pair(rng, solution)
    if pair is None:
        return
    one, two = pair
    mine = one.slices[int(rng.integers(len(one.slices)))]
    yours = two.slices[int(rng.integers(len(two.slices)))]
    if mine.box == yours.box:
        return
    give = space.units[mine.box] * int(rng.integers(1, mine.gpus // space.units[mine.box] + 1))
    take = space.units[yours.box] * int(rng.integers(1, yours.gpus // space.units[yours.box] + 1))
    first = group_of((*one.slices, Slice(mine.box, -give), Slice(yours.box, take)), one.phase, one.service)
    second = group_of((*two.slices, Slice(mine.box, give), Slice(yours.box, -take)), two.phase, two.service)
    if _all_hold(space, (first, second)):
        yield _replaced(solution, [one, two], [first, second])


def _all_hold(space: Space, groups: Iterable[Group]) -> bool:
    return all(
        space.holds(group.slices, group.service) and group.phase in space.phases_of(group.slices) for group in groups
    )


def _cut(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """A box cut anew in equal parts of one phase, or in two phases at a random place between parts."""
    options = list(retilings(space, solution))
    if options:
        yield options[int(rng.integers(len(options)))]


def _idle(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """Idle GPUs of a box become a group or join one; where nothing is idle and money counts, a group is let go."""
    free = space.free(solution)
    if not free:
        if space.problem.price_weight > 0.0 and len(solution) > 1:
            yield _replaced(solution, [_pick(rng, solution)], [])
        return
    boxes = sorted(free)
    box = boxes[int(rng.integers(len(boxes)))]
    service = _pick(rng, solution).service
    alone = _fitting(space, [Slice(box, free[box])], Phase.MIXED, service, rng)
    if alone is not None and rng.random() < 0.5:
        yield _replaced(solution, [], [alone])
        return
    group = _pick(rng, solution)
    more = group_of((*group.slices, Slice(box, free[box])), group.phase, group.service)
    if _all_hold(space, (more,)):
        yield _replaced(solution, [group], [more])


def _reassign(space: Space, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """A group to another service, in any phase."""
    group = _pick(rng, solution)
    others = [number for number in range(len(space.problem.services)) if number != group.service]
    made = _fitting(space, group.slices, group.phase, others[int(rng.integers(len(others)))], rng)
    if made is not None:
        yield _replaced(solution, [group], [made])


MOVES: Final[Sequence[Move]] = (_flip, _flip, _split, _merge, _merge, _move, _move, _exchange, _cut, _idle)
"""Of one service; some come twice since they help twice as often."""
