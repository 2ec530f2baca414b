"""The neighbours of a solution: flip, split, merge and move of ThunderServe (section 3.2, figure
4), with mixed as a third phase, and three more: boxes gathered and cut anew, idle GPUs taken in (or
a group let go), and a group that changes its service.

Every neighbour keeps the pins, uses no GPU twice, and has only groups that hold their model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from ...plan import Phase
from ..model.problem import Group, Slice, Solution, connected_boxes
from .search_space import SearchSpace, make_group, make_solution

Move = Callable[[SearchSpace, Solution, np.random.Generator], Iterator[Solution]]


def flips(space: SearchSpace, solution: Solution) -> Iterator[tuple[Group, Solution]]:
    """Every group in every other phase, as (the group as it becomes, solution); of groups that are
    alike only one."""
    seen: set[object] = set()
    for place, group in enumerate(solution):
        signature = space.signature(group)
        if signature in seen:
            continue
        seen.add(signature)
        for phase in space.phases_of(group.slices):
            if phase is not group.phase:
                flipped = group._replace(phase=phase)
                yield flipped, make_solution((*solution[:place], flipped, *solution[place + 1 :]))


def random_neighbour(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Solution | None:
    """A random one, drawn by kind of move and then by place; None where there is no such move at
    that place."""
    moves = list(MOVES)
    if len(space.problem.services) > 1:
        moves.append(_reassign)
    if space.problem.price_weight > 0.0 or space.idle_gpus(solution):
        moves.append(_idle)
    return next(moves[int(rng.integers(len(moves)))](space, solution, rng), None)


def _replace(solution: Solution, gone: Iterable[Group], come: Iterable[Group]) -> Solution:
    rest = list(solution)
    for group in gone:
        rest.remove(group)
    return make_solution((*rest, *come))


def _pick(rng: np.random.Generator, solution: Sequence[Group]) -> Group:
    return solution[int(rng.integers(len(solution)))]


def _pick_two(rng: np.random.Generator, solution: Solution) -> tuple[Group, Group] | None:
    if len(solution) < 2:
        return None
    one, other = int(rng.integers(len(solution))), int(rng.integers(1, len(solution)))
    return solution[one], solution[(one + other) % len(solution)]


def _pick_phase(rng: np.random.Generator, phases: Sequence[Phase]) -> Phase:
    return phases[int(rng.integers(len(phases)))]


def _flip(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    group = _pick(rng, solution)
    others = [phase for phase in space.phases_of(group.slices) if phase is not group.phase]
    if others:
        yield _replace(solution, [group], [group._replace(phase=_pick_phase(rng, others))])


def _split(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """By boxes, or each slice at the same ratio."""
    group = _pick(rng, solution)
    if len(group.slices) > 1 and rng.random() < 0.5:
        at = int(rng.integers(1, len(group.slices)))
        order = rng.permutation(len(group.slices))
        parts = ([group.slices[int(n)] for n in order[:at]], [group.slices[int(n)] for n in order[at:]])
    else:
        ratio = float(rng.choice((0.25, 1 / 3, 0.5)))
        first = [
            Slice(box, int(count * ratio) // space.gpu_units[box] * space.gpu_units[box]) for box, count in group.slices
        ]
        parts = (first, [Slice(box, count - less.gpus) for (box, count), less in zip(group.slices, first, strict=True)])
    made = [_try_group(space, part, group.phase, group.service, rng) for part in parts]
    if made[0] is not None and made[1] is not None:
        yield _replace(solution, [group], [made[0], made[1]])


def _try_group(
    space: SearchSpace, slices: Iterable[Slice], phase: Phase, service: int, rng: np.random.Generator
) -> Group | None:
    """A group that holds its model, half of the time in the phase given (if it may), else in
    any."""
    group = make_group(slices, phase, service)
    if not space.can_hold(group.slices, service):
        return None
    allowed = space.phases_of(group.slices)
    return group if phase in allowed and rng.random() < 0.5 else group._replace(phase=_pick_phase(rng, allowed))


def _merge(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    pair = _pick_two(rng, solution)
    if pair is None or pair[0].service != pair[1].service:
        return
    one, two = pair
    made = _try_group(space, (*one.slices, *two.slices), one.phase, one.service, rng)
    if made is not None:
        yield _replace(solution, [one, two], [made])


def _move(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """GPUs of one box from a group to another, mostly all that it has of it; a group that has no
    others joins."""
    pair = _pick_two(rng, solution)
    if pair is None:
        return
    one, two = pair
    given = one.slices[int(rng.integers(len(one.slices)))]
    unit = space.gpu_units[given.box]
    count = (
        given.gpus if rng.random() < space.settings.whole_moves else unit * int(rng.integers(1, given.gpus // unit + 1))
    )
    less = make_group((*one.slices, Slice(given.box, -count)), one.phase, one.service)
    more = make_group((*two.slices, Slice(given.box, count)), two.phase, two.service)
    left = (less, more) if less.slices else (more,)
    if _all_hold(space, left):
        yield _replace(solution, [one, two], left)


def _all_hold(space: SearchSpace, groups: Iterable[Group]) -> bool:
    return all(
        space.can_hold(group.slices, group.service) and group.phase in space.phases_of(group.slices) for group in groups
    )


def _gather(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """Boxes of one or two groups and all groups that touch them, cut anew: in one or two parts of
    equal groups across every box. Replaces many moves that are each worse."""
    pair = _pick_two(rng, solution) if rng.random() < 0.5 else None
    chosen = pair or (_pick(rng, solution),)
    boxes = connected_boxes(solution, (box for group in chosen for box, _ in group.slices))
    if len(boxes) > space.settings.gathered_boxes:
        return
    gone = [group for group in solution if group.slices[0].box in boxes]
    order = rng.permutation(sorted(boxes)).tolist()
    at = int(rng.integers(1, len(order) + 1)) if rng.random() < space.settings.gather_apart else len(order)
    made: list[Group] = []
    for part in (order[:at], order[at:]):
        for slices in _deal(space, part, int(rng.integers(1, space.settings.gather_groups + 1))) if part else ():
            like = _pick(rng, gone)
            group = _try_group(space, slices, like.phase, like.service, rng)
            if group is None:
                return
            made.append(group)
    yield _replace(solution, gone, made)


def _deal(space: SearchSpace, boxes: Sequence[int], parts: int) -> list[list[Slice]]:
    """All GPUs of these in so many parts, each box's as evenly as they go; what is over goes
    round."""
    dealt: list[list[Slice]] = [[] for _ in range(parts)]
    turn = 0
    for box in boxes:
        unit = space.gpu_units[box]
        size, left_over = divmod(space.boxes[box].gpus // unit, parts)
        for part in range(parts):
            count = size + ((part - turn) % parts < left_over)
            if count:
                dealt[part].append(Slice(box, count * unit))
        turn += left_over
    return dealt


def _idle(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """Idle GPUs of a box become a group or join one; where nothing is idle and money counts, a
    group is let go."""
    idle_gpus = space.idle_gpus(solution)
    if not idle_gpus:
        if len(solution) > 1:  # drawn only where money counts
            yield _replace(solution, [_pick(rng, solution)], [])
        return
    boxes = sorted(idle_gpus)
    box = boxes[int(rng.integers(len(boxes)))]
    service = _pick(rng, solution).service
    alone = _try_group(space, [Slice(box, idle_gpus[box])], Phase.MIXED, service, rng)
    if alone is not None and rng.random() < 0.5:
        yield _replace(solution, [], [alone])
        return
    group = _pick(rng, solution)
    more = make_group((*group.slices, Slice(box, idle_gpus[box])), group.phase, group.service)
    if _all_hold(space, (more,)):
        yield _replace(solution, [group], [more])


def _reassign(space: SearchSpace, solution: Solution, rng: np.random.Generator) -> Iterator[Solution]:
    """A group to another service, in any phase."""
    group = _pick(rng, solution)
    others = [number for number in range(len(space.problem.services)) if number != group.service]
    made = _try_group(space, group.slices, group.phase, others[int(rng.integers(len(others)))], rng)
    if made is not None:
        yield _replace(solution, [group], [made])


MOVES: Final[Sequence[Move]] = (_flip, _split, _merge, _merge, _move, _gather, _gather)
"""Of one service; some come twice since they help twice as often."""
