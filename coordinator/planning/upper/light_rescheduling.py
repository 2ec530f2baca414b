"""Lightweight rescheduling (ThunderServe section 3.4): after boxes are lost, links change or the
workload shifts, only phases and routing change. No weights are loaded, so every replica keeps its
GPUs and its stages.

Flips are found by steepest ascent, one replica at a time and then two at once where one is not
enough. A result that is not better by `MARGIN` is not adopted: the running solution stays, with its
routing solved anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from ...names import count_of
from ..lower.evaluator import LowerLevel
from ..lower.parallel import Stages
from ..model.cluster import Cluster
from ..model.errors import NoPlan
from ..model.problem import Evaluator, Group, Problem, Score, Slice, Solution
from .moves import flips
from .scorer import Scorer, never
from .search_space import SearchSpace, make_solution

MARGIN: Final = 0.005
"""Of the objective: by how much flips must pay. They cost little, but requests in flight finish
where they are."""

STEPS: Final = 15
"""Evaluations at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A replica that changes its phase: `now` is the group as it becomes."""

    was: Group
    now: Group
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """`solution` with its `score`; `before`: the score of what was running, as things are now. No
    flips: it stays."""

    solution: Solution
    score: Score
    before: Score
    flips: tuple[Flip, ...]


def find_surviving_groups(running: Solution, old: Cluster, new: Cluster) -> Solution:
    """What is left of a solution for `old` in `new`: the groups whose boxes are all still there, by
    id. Raises NoPlan where that is none."""
    place = {box.id: number for number, box in enumerate(new.boxes)}
    moved = {number: place[box.id] for number, box in enumerate(old.boxes) if box.id in place}
    left = make_solution(
        group._replace(slices=tuple(sorted(Slice(moved[box], gpus) for box, gpus in group.slices)))
        for group in running
        if all(box in moved for box, _ in group.slices)
    )
    if not left:
        raise NoPlan(f"none of the {len(running)} running replicas has all of its boxes left")
    return left


def keep_loaded_stages(problem: Problem, running: Solution, old: LowerLevel) -> LowerLevel:
    """An evaluator for `problem` that leaves every replica of `running` (a solution of the old
    evaluator's problem) in the stages that it has there."""
    ids = [box.id for box in old.problem.cluster.boxes]
    place = {box.id: number for number, box in enumerate(problem.cluster.boxes)}
    loaded: dict[tuple[Slice, ...], tuple[Stages, ...]] = {}
    for slices, stages in old.stages_of(running).items():
        if all(ids[box] in place for box, _ in slices):
            moved = [Slice(place[ids[box]], gpus) for box, gpus in slices]
            order = {number: rank for rank, number in enumerate(sorted(range(len(moved)), key=moved.__getitem__))}
            loaded[tuple(sorted(moved))] = tuple(
                tuple((order[part], tp, layers) for part, tp, layers in one) for one in stages
            )
    return LowerLevel(problem, loaded, old.copy_configurations(problem.services))


def reschedule_lightly(
    problem: Problem,
    evaluator: Evaluator,
    running: Solution,
    *,
    margin: float = MARGIN,
    steps: int = STEPS,
    spent: Callable[[], bool] = never,
) -> Adjustment:
    """The best phases for the running replicas until `spent()`; unchanged unless others gain
    `margin`. `evaluator` keeps their stages (`keep_loaded_stages`)."""
    space = SearchSpace.of(problem, evaluator)
    scorer = Scorer(space, limit=steps, spent=spent, same_groups=True)
    before = scorer.score(running)
    here, level = running, before.objective
    while not scorer.is_exhausted():
        near = [solution for _, solution in flips(space, here)]
        found = scorer.find_best_above(near, level)
        # one flip alone may leave a side without replicas, and only two together be better
        if found is None and not scorer.is_exhausted():
            found = scorer.find_best_above(list(_flip_twice(space, near)), level)
        if found is None:
            break
        level, here = found
    if level < before.objective + margin:
        return Adjustment(solution=running, score=before, before=before, flips=())
    return Adjustment(solution=here, score=scorer.score(here), before=before, flips=list_flips(space, running, here))


def _flip_twice(space: SearchSpace, near: list[Solution]) -> Iterator[Solution]:
    seen = set(near)
    for solution in near:
        for _, further in flips(space, solution):
            if further not in seen:
                seen.add(further)
                yield further


def list_flips(space: SearchSpace, old: Solution, new: Solution) -> tuple[Flip, ...]:
    """Pairs of groups on the same GPUs, those that stay as they are left out."""
    gone, come = list(old), list(new)
    for group in old:
        if group in come:
            gone.remove(group)
            come.remove(group)
    found: list[Flip] = []
    for was in gone:
        now = next(group for group in come if group.slices == was.slices)
        come.remove(now)
        found.append(Flip(was=was, now=now, why=_explain_flip(space, old, was, now)))
    return tuple(found)


def _explain_flip(space: SearchSpace, old: Solution, was: Group, now: Group) -> str:
    """One line: what was short, and what the flip gives and takes."""
    count = len(old)
    asked = space.problem.services[was.service].workload.rate
    rates = [space.evaluator.max_rates(group, count) for group in old if group.service == was.service]
    prefill, decode = sum(one for one, _ in rates), sum(one for _, one in rates)
    before, after = space.evaluator.max_rates(was, count), space.evaluator.max_rates(now, count)
    boxes = " + ".join(f"{count_of(gpus, 'GPU')} of {space.boxes[box].id}" for box, gpus in was.slices)
    return (
        f"{boxes}: {was.phase} -> {now.phase}; of {asked:.3g} requests/s asked for, all replicas prefill {prefill:.3g} "
        f"and decode {decode:.3g} at most; this one's share goes from {before[0]:.3g} and {before[1]:.3g} to "
        f"{after[0]:.3g} and {after[1]:.3g}"
    )
