"""Phases, pipelines and splits beside sharing: whole placements by the search and by the planner, of which the best is
taken.

    chosen = choose_placement(problem, PeriodReplay(placed), judge=judge, rng=np.random.default_rng(0))
    chosen.placement.groups, chosen.placement.planned, chosen.tried

The search of engines within boxes (`search.py`) knows of sharing, but neither of phases nor of layers over several
boxes. The planner (`planning/`) knows of these, but of no engine of several services. So these are made, and compared
by whoever can `judge` both (by a simulation of the engines: this room knows none):

    engines within boxes    what the search finds, on all boxes
    all planned             replicas for each service by the planner, on all boxes
    SERVICE planned, ...    by the planner those services that share nothing in the search's placement, on their boxes;
                            those that no box holds alone, and those that have phases or pipelines, on the boxes that
                            they have where all are planned, while the others are searched for on what is left

A service that no box holds alone can only be planned. Boxes that keep what they have (`PlacementBox.held`), and their
services, have no part in plans. The planner is not told what boxes take (`PlacementBox.able`), nor of their disks: what
it makes against these is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple, final

import numpy as np

from ..plan import Phase, Plan, Replica, Stage
from ..planning.lower.evaluator import LowerLevel
from ..planning.model.errors import NoPlan, UnservedError
from ..planning.model.problem import Group, Problem, Proposal, Slice
from ..planning.rescheduling import without_boxes
from ..planning.upper.scorer import never
from ..planning.upper.search import search
from ..planning.upper.search_space import make_solution
from ..planning.upper.trials import TrialsOver
from .replay import Judged, PeriodReplay
from .search import PlacementGoals, judged_cost, keep_held, search_placement, with_boxes_and_loading
from .values import GpuGroup, Groups, PlacementError, PlacementProblem, describe_group

SURER: Final = 1.02
"""How many times less than engines within boxes a placement with plans has to cost, to be taken instead: nothing of
those depends on links."""

WITHIN_BOXES: Final = "engines within boxes"
ALL_PLANNED: Final = "all planned"


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedServices:
    """Services on boxes of their own. `services`: their numbers in the placement, in the order of the `problem`'s,
    which is of these boxes alone, and of `proposals`."""

    services: tuple[int, ...]
    problem: Problem
    proposals: tuple[Proposal, ...]

    def engines(self, placed: PlacementProblem) -> Groups:
        """What GPUs load, as groups: of a pipeline one for each stage, as if that had all of the model."""
        number = {box.id: place for place, box in enumerate(placed.boxes)}
        return tuple(
            sorted(
                GpuGroup(number[stage.peer], stage.tp, (service,))
                for service, proposal in zip(self.services, self.proposals, strict=True)
                for replica in proposal.plan.replicas
                for stage in replica.stages
            )
        )


class Placement(NamedTuple):
    """Engines within boxes, and services beside these that are planned."""

    groups: Groups
    planned: PlannedServices | None = None

    def engines(self, placed: PlacementProblem) -> Groups:
        """All that GPUs load."""
        return self.groups if self.planned is None else (*self.groups, *self.planned.engines(placed))


class ChosenPlacement(NamedTuple):
    """The best placement by what was judged, its cost, and the costs of all that were compared, by name."""

    placement: Placement
    cost: float
    judged: Judged
    tried: dict[str, float]


Judge = Callable[[Placement], Judged]
"""What becomes of the period's requests under a placement."""


def choose_placement(
    problem: Problem,
    replay: PeriodReplay,
    *,
    judge: Judge,
    rng: np.random.Generator,
    goals: PlacementGoals | None = None,
    before: Groups = (),
    within: Groups = (),
    spent: Callable[[], bool] = never,
) -> ChosenPlacement:
    """See the module. `problem`: the same boxes, and the same services in the same order, as the planner has them.
    `before`: what is there now. `within`: what a search has found already; else it is made here, and what it begins
    with is judged, too. `spent`: no time is left, and what has been found is enough. Raises PlacementError where the
    services have no room together, and TrialsOver where nothing could be judged."""
    aims = goals or PlacementGoals()
    tried: dict[str, tuple[float, Placement, Judged]] = {}

    def cost_of(placement: Placement) -> tuple[float, Judged]:
        return _cost_of(placement, judge, replay.problem, aims, before)

    def try_groups(groups: Groups) -> float:
        return cost_of(Placement(groups))[0]

    fault = ""
    if not within:
        try:
            within = search_placement(replay, rng=rng, goals=aims, before=before, spent=spent, trial=try_groups).groups
        except PlacementError as error:
            fault = str(error)
    planning = _Planning(problem, replay, rng, aims, spent)
    for name, placement in planning.make_all(within):
        try:
            cost, judged = cost_of(placement)
        except TrialsOver:
            if not tried:
                raise
            break
        tried[name] = cost, placement, judged
        if spent():
            break
    if not tried:
        raise PlacementError(fault)
    costs = {name: each[0] for name, each in tried.items()}
    best = min(costs, key=lambda name: costs[name] if name == WITHIN_BOXES else SURER * costs[name])
    return ChosenPlacement(tried[best][1], costs[best], tried[best][2], costs)


def judge_running(
    problem: Problem,
    replay: PeriodReplay,
    running: Groups,
    *,
    judge: Judge,
    rng: np.random.Generator,
    goals: PlacementGoals,
    spent: Callable[[], bool] = never,
) -> tuple[float, Judged]:
    """What engines within boxes cost that run now, and what becomes of the requests; where that is better, with phases
    for the services that share nothing, each on the boxes that it has. Raises TrialsOver where there is no time for
    these: without them other placements would look better than they are."""
    planned = _Planning(problem, replay, rng, goals, spent).plan_as_hosted(running)
    placements = [Placement(running), *([] if planned is None else [planned])]
    return min((_cost_of(each, judge, replay.problem, goals) for each in placements), key=lambda found: found[0])


def _cost_of(
    placement: Placement, judge: Judge, problem: PlacementProblem, goals: PlacementGoals, before: Groups = ()
) -> tuple[float, Judged]:
    judged, engines = judge(placement), placement.engines(problem)
    return with_boxes_and_loading(judged_cost(judged, goals), problem, engines, goals, before), judged


@final
class _Planning:
    """Makes placements with planned services."""

    def __init__(
        self,
        problem: Problem,
        replay: PeriodReplay,
        rng: np.random.Generator,
        goals: PlacementGoals,
        spent: Callable[[], bool],
    ) -> None:
        self._problem = problem
        self._placed = replay.problem
        self._rng = rng
        self._goals = goals
        self._spent = spent
        self._kept = keep_held(self._placed, ())
        kept = {service for group in self._kept for service in group.services}
        self._free = frozenset(range(len(self._placed.boxes))) - {group.box for group in self._kept}
        self._services = frozenset(range(len(self._placed.services))) - kept

    def make_all(self, within: Groups) -> Iterator[tuple[str, Placement]]:
        """By name, `within` boxes first (empty: that cannot be). Those that cannot be are left out."""
        if within:
            yield WITHIN_BOXES, Placement(within)
        alone, _ = self._find_alone(within)
        everything = self._plan(self._services, self._free, within if alone == self._services else ())
        if everything is not None:
            yield ALL_PLANNED, Placement(self._kept, everything)
        beside = self.plan_alone(within) if within and alone != self._services else None
        if beside is not None:
            yield self._name(alone), beside
        beyond = {} if everything is None else self._find_beyond_boxes(everything)
        for some, boxes in beyond.items():
            rest = self._search_rest(some, boxes)
            planned = self._plan(some, boxes) if rest is not None else None
            if rest is not None and planned is not None:
                yield self._name(some), Placement(rest, planned)

    def plan_alone(self, within: Groups) -> Placement | None:
        """These engines, with plans for the services that share nothing; None where there are none."""
        alone, boxes = self._find_alone(within)
        planned = self._plan(alone, boxes, within)
        if planned is None:
            return None
        return Placement(tuple(group for group in within if alone.isdisjoint(group.services)), planned)

    def plan_as_hosted(self, running: Groups) -> Placement | None:
        """These engines, with plans for each of the services that share nothing, on the boxes that it has. None: there
        are no such services, or two of them are on one box."""
        alone, _ = self._find_alone(running)
        boxes = {each: frozenset(group.box for group in running if each in group.services) for each in sorted(alone)}
        if sum(map(len, boxes.values())) > len(frozenset[int]().union(*boxes.values())):
            return None
        found = []
        for each, some in boxes.items():
            if self._spent():
                raise TrialsOver
            part = self._plan(frozenset({each}), some, running) if some else None
            if part is not None:
                found.append(part)
        if not found:
            return None
        services = frozenset(each for part in found for each in part.services)
        theirs = frozenset(box for each in services for box in boxes[each])
        planned = PlannedServices(
            services=tuple(sorted(services)),
            problem=self._pose(services, theirs),
            proposals=tuple(proposal for part in found for proposal in part.proposals),
        )
        return Placement(tuple(group for group in running if services.isdisjoint(group.services)), planned)

    def _name(self, services: frozenset[int]) -> str:
        return f"{', '.join(self._placed.services[each].name for each in sorted(services))} planned"

    def _plan(self, services: frozenset[int], boxes: frozenset[int], start: Groups = ()) -> PlannedServices | None:
        """These services on these boxes, by the planner; it may begin at groups of one service each. None: it finds
        nothing that may be."""
        if not services or not boxes:
            return None
        problem, order = self._pose(services, boxes), sorted(services)
        places = {each: problem.cluster.index(self._placed.boxes[each].id) for each in boxes}
        running = make_solution(
            Group((Slice(places[group.box], group.tp),), Phase.MIXED, order.index(group.services[0]))
            for group in start
            if group.box in boxes and services.issuperset(group.services) and len(group.services) == 1
        )
        evaluator = LowerLevel(problem)
        with suppress(NoPlan, UnservedError):
            found = search(problem, evaluator, rng=self._rng, spent=self._spent, start=running or None)
            proposals = evaluator.propose(found.solution, epoch=0, version=1)
            planned = PlannedServices(services=tuple(order), problem=problem, proposals=proposals)
            return planned if self._may_be(planned) else None
        return None

    def _may_be(self, planned: PlannedServices) -> bool:
        """Whether boxes take what they get, and have the disk for it: nobody tells the planner."""
        hosted: defaultdict[int, set[int]] = defaultdict(set)
        for group in planned.engines(self._placed):
            hosted[group.box].update(group.services)
        return all(
            self._placed.fits_disk(box, sorted(services))
            and all(self._placed.boxes[box].takes((each,)) for each in services)
            for box, services in hosted.items()
        )

    def _pose(self, services: frozenset[int], boxes: frozenset[int]) -> Problem:
        """Of these alone."""
        ids = {self._placed.boxes[each].id for each in boxes}
        others = [box.id for box in self._problem.cluster.boxes if box.id not in ids]
        some = tuple(self._problem.services[each] for each in sorted(services))
        return replace(without_boxes(self._problem, others), services=some)

    def _find_alone(self, within: Groups) -> tuple[frozenset[int], frozenset[int]]:
        """The services that share neither an engine nor a box with others of which that is not so, and the boxes that
        are theirs or nobody's."""
        alone = self._services - {each for group in within if len(group.services) > 1 for each in group.services}
        while True:
            taken = {group.box for group in within if not alone.issuperset(group.services)}
            left = alone - {each for group in within if group.box in taken for each in group.services}
            if left == alone:
                return alone, self._free - taken
            alone = left

    def _find_beyond_boxes(self, everything: PlannedServices) -> dict[frozenset[int], frozenset[int]]:
        """The services that no box holds alone, and those that have phases or pipelines where all are planned; each
        time with those that are on the same boxes, and with these boxes. Without what would be all services."""
        plans = zip(everything.services, everything.proposals, strict=True)
        beyond = {service for service, proposal in plans if _is_beyond_boxes(proposal.plan)}
        homeless = {service for service in everything.services if self._placed.fits_nowhere(service)}
        engines = everything.engines(self._placed)
        found = dict(_with_neighbours(engines, some) for some in (homeless, beyond) if some)
        return {some: boxes for some, boxes in found.items() if some != self._services}

    def _search_rest(self, without: frozenset[int], taken: frozenset[int]) -> Groups | None:
        """The other services on the other boxes, by the search; None where these have no room."""
        services = [each for each in range(len(self._placed.services)) if each not in without]
        boxes = [each for each in range(len(self._placed.boxes)) if each not in taken]
        with suppress(PlacementError):
            part = PeriodReplay(self._placed.part(boxes, services))
            found = search_placement(part, rng=self._rng, goals=self._goals, spent=self._spent)
            return tuple(
                GpuGroup(boxes[group.box], group.tp, tuple(services[each] for each in group.services))
                for group in found.groups
            )
        return None


def describe_placement(problem: PlacementProblem, placement: Placement) -> list[str]:
    """A line for each box: `a40: 4 x chat+code, 2 x big decode, 4 x big prefill (layers 1 to 30, 4 stages)`."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for group in sorted(placement.groups):
        texts[problem.boxes[group.box].id].append(describe_group(problem, group))
    planned = placement.planned
    for proposal in planned.proposals if planned is not None else ():
        for replica in proposal.plan.replicas:
            for peer, stages in groupby(replica.stages, key=lambda stage: stage.peer):
                texts[peer].append(_describe_part(proposal.plan.service, replica, list(stages)))
    return [f"{box.id}: {', '.join(texts[box.id])}" for box in problem.boxes if box.id in texts]


def _describe_part(service: str, replica: Replica, stages: Sequence[Stage]) -> str:
    """Of a replica, what one box has."""
    gpus, notes = sum(stage.tp for stage in stages), []
    if len(stages) < len(replica.stages):
        notes.append(f"layers {stages[0].first_layer + 1} to {stages[-1].last_layer}")
    if len(stages) > 1:
        notes.append(f"{len(stages)} stages")
    doing = "" if replica.phase is Phase.MIXED else f" {replica.phase.value}"
    more = f" ({', '.join(notes)})" if notes else ""
    return f"{gpus} x {service}{doing}{more}"


def _with_neighbours(engines: Groups, some: set[int]) -> tuple[frozenset[int], frozenset[int]]:
    """These services, those on the same boxes, and so on; and all of their boxes."""
    while True:
        boxes = {group.box for group in engines if not some.isdisjoint(group.services)}
        more = {each for group in engines if group.box in boxes for each in group.services}
        if more == some:
            return frozenset(some), frozenset(boxes)
        some = more


def _is_beyond_boxes(plan: Plan) -> bool:
    return any(replica.phase is not Phase.MIXED or len(replica.stages) > 1 for replica in plan.replicas)
