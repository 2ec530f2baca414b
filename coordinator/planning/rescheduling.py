"""New plans for replicas that run, after boxes came or went, links changed or the workload shifted.

Lightly (ThunderServe section 3.4): phases and shares alone, so that no weights are loaded. In full:
a new search, whose groups keep the weights of replicas that they happen to agree with and load the
others. Both take plans as they run and return plans to follow; replicas that keep their weights
keep their ids and their GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ..plan import Plan, Replica, Stage
from ..settings import NetworkPlanSettings
from .lower.evaluator import LowerLevel
from .lower.parallel import Stages
from .model.cluster import Cluster
from .model.errors import NoPlan
from .model.problem import Group, Problem, Slice, Solution
from .upper.light_rescheduling import Adjustment, Flip, reschedule_lightly
from .upper.scorer import never
from .upper.search import search
from .upper.search_space import SearchSpace, make_solution
from .upper.settings import SearchSettings

DEFAULTS: Final = NetworkPlanSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescheduling:
    """Plans by service. `loading`: ids of replicas by service that have to load weights. Shares of
    the requests that are expected in time: `before` with what ran, as things are now, in its old
    phases; `meanwhile` by the replicas that do not load; `after`. `flips`: a line for each."""

    plans: tuple[Plan, ...]
    loading: tuple[frozenset[str], ...]
    before: float
    meanwhile: float
    after: float
    flips: tuple[str, ...] = ()


class _RunningGroup(NamedTuple):
    """A replica that runs, its service's number, and both as the planner has them."""

    service: int
    replica: Replica
    group: Group
    stages: Stages


def without_boxes(problem: Problem, box_ids: Collection[str]) -> Problem:
    """The problem when these boxes are gone. Raises NoPlan where none is left."""
    gone = frozenset(box_ids)
    if all(box.id in gone for box in problem.cluster.boxes):
        raise NoPlan("no box is left")
    return replace(
        problem,
        cluster=problem.cluster.without(gone),
        pinned={box: phase for box, phase in problem.pinned.items() if box not in gone},
        excluded=problem.excluded - gone,
    )


def reschedule_phases(
    problem: Problem,
    plans: Sequence[Plan],
    *,
    joined: Collection[str] = (),
    settings: NetworkPlanSettings = DEFAULTS,
) -> Rescheduling:
    """New phases and shares for the replicas whose boxes are all in the problem's cluster, by the
    running network's rules. Of the boxes `joined`, with the model loaded, each that no replica uses
    becomes one. Raises NoPlan or UnservedError."""
    running = _find_running(problem.cluster, plans)
    evaluator = LowerLevel(problem, _loaded_stages(running))
    phases = make_solution(_obey_pins(problem, each.group) for each in running)
    here = _add_boxes(problem, evaluator, phases, joined)
    if not here:
        raise NoPlan("none of the running replicas has all of its boxes left")
    steps = min(settings.most_flips, settings.flips_per_replica * len(here))
    flips: list[Flip] = []
    first: Adjustment | None = None
    while True:
        found = reschedule_lightly(problem, evaluator, here, margin=settings.margin, steps=steps)
        first = first or found
        if not found.flips:
            break
        flips += found.flips
        here = found.solution
    proposals = evaluator.propose(here, epoch=plans[0].epoch, version=plans[0].version + 1)
    renamed = [
        _keep_replicas(proposal.plan, [each.replica for each in running if each.service == number])
        for number, proposal in enumerate(proposals)
    ]
    after = proposals[0].score.attainment
    return Rescheduling(
        plans=tuple(renamed),
        loading=(frozenset(),) * len(renamed),
        before=first.before.attainment,
        meanwhile=after,
        after=after,
        flips=tuple(flip.why for flip in flips),
    )


def reschedule_groups(
    problem: Problem,
    plans: Sequence[Plan],
    *,
    rng: np.random.Generator,
    settings: SearchSettings | None = None,
    keep_loaded: bool = True,
    spent: Callable[[], bool] = never,
) -> Rescheduling:
    """New groups by a new search, which ends early when `spent()`. A replica that comes out as one
    that runs, in the same boxes with the same layers, keeps its weights, unless all are to load
    theirs anew (`keep_loaded` False). Raises NoPlan or UnservedError."""
    running = _find_running(problem.cluster, plans)
    evaluator = LowerLevel(problem)
    here = make_solution(each.group for each in running)
    before = LowerLevel(problem, _loaded_stages(running)).score(here).attainment if here else 0.0
    found = search(problem, evaluator, rng=rng, spent=spent, start=here or None, settings=settings or SearchSettings())
    proposals = evaluator.propose(found.solution, epoch=plans[0].epoch, version=plans[0].version + 1)
    wanted = [proposal.plan for proposal in proposals]
    placed, loading = place_replicas(problem.cluster, wanted, plans if keep_loaded else ())
    kept = [each for each in _find_running(problem.cluster, placed) if each.replica.id not in loading[each.service]]
    staying = make_solution(each.group for each in kept)
    return Rescheduling(
        plans=placed,
        loading=loading,
        before=before,
        meanwhile=evaluator.score(staying).attainment if staying else 0.0,
        after=proposals[0].score.attainment,
    )


def pays_reload(
    light: Rescheduling, full: Rescheduling, *, reload_s: float, payback_s: float, margin: float = DEFAULTS.margin
) -> bool:
    """Whether new groups serve more requests in time than new phases alone within `payback_s`,
    although some replicas are away for the first `reload_s` of it. A gain below `margin` is within
    what estimates are off by."""
    gain, loss = full.after - light.after, light.after - full.meanwhile
    return gain > margin and gain * max(0.0, payback_s - reload_s) > loss * reload_s


# --- what runs


def _find_running(cluster: Cluster, plans: Sequence[Plan]) -> list[_RunningGroup]:
    """The replicas of these plans whose boxes are all in the cluster."""
    places = {box.id: number for number, box in enumerate(cluster.boxes)}
    return [
        _as_group(number, replica, places)
        for number, plan in enumerate(plans)
        for replica in plan.replicas
        if places.keys() >= set(replica.peers)
    ]


def _loaded_stages(running: Iterable[_RunningGroup]) -> dict[tuple[Slice, ...], tuple[Stages, ...]]:
    """In which stages groups of these slices have their weights."""
    loaded: dict[tuple[Slice, ...], tuple[Stages, ...]] = {}
    for each in running:
        loaded[each.group.slices] = tuple(dict.fromkeys((*loaded.get(each.group.slices, ()), each.stages)))
    return loaded


def _as_group(service: int, replica: Replica, places: Mapping[str, int]) -> _RunningGroup:
    gpus = Counter[int]()
    for stage in replica.stages:
        gpus[places[stage.peer]] += stage.tp
    slices = tuple(Slice(box, count) for box, count in sorted(gpus.items()))
    parts = {part.box: number for number, part in enumerate(slices)}
    stages = tuple((parts[places[stage.peer]], stage.tp, stage.layers) for stage in replica.stages)
    return _RunningGroup(service, replica, Group(slices, replica.phase, service), stages)


def _obey_pins(problem: Problem, group: Group) -> Group:
    """The group in the phase that its boxes are pinned to, if they are."""
    ids = (problem.cluster.boxes[part.box].id for part in group.slices)
    pins = {problem.pinned[box] for box in ids if box in problem.pinned}
    return group._replace(phase=pins.pop()) if len(pins) == 1 else group


def _add_boxes(problem: Problem, evaluator: LowerLevel, running: Solution, joined: Iterable[str]) -> Solution:
    """With a replica for each of these boxes that is idle and holds a model alone, in the phase, and
    of the service, that help most."""
    space = SearchSpace.of(problem, evaluator)
    idle = space.idle_gpus(running)
    for box in sorted(problem.cluster.index(name) for name in joined):
        gpus = problem.cluster.boxes[box].gpus
        slices = (Slice(box, gpus),)
        others = [
            make_solution((*running, Group(slices, phase, service)))
            for service in range(len(problem.services))
            if idle.get(box) == gpus and space.can_hold(slices, service)
            for phase in space.phases_of(slices)
        ]
        if others:
            running = max(others, key=lambda solution: evaluator.score(solution).objective)
    return running


# --- what goes on


def _keep_replicas(plan: Plan, running: Sequence[Replica]) -> Plan:
    """The plan with the replicas that run, by the GPUs that they have of each box, in the phases and
    with the step budgets that it gives them. Of several that fit, one in its phase already."""
    left = list(running)
    replicas: list[Replica] = []
    names: dict[str, str] = {}
    for wanted in sorted(plan.replicas, key=lambda replica: not any(_continues(one, replica) for one in running)):
        fitting = [one for one in left if _gpus_of(one) == _gpus_of(wanted)]
        kept = wanted
        if fitting:
            old = max(fitting, key=lambda one: one.phase is wanted.phase)
            left.remove(old)
            kept = msgspec.structs.replace(old, phase=wanted.phase, step_tokens=wanted.step_tokens)
        names[wanted.id] = kept.id
        replicas.append(kept)
    return _rename(plan, replicas, names)


def _continues(old: Replica, new: Replica) -> bool:
    return old.phase is new.phase and _gpus_of(old) == _gpus_of(new)


def _gpus_of(replica: Replica) -> Counter[str]:
    """By box."""
    return Counter(peer for peer, _ in replica.gpus)


def _shape_of(replica: Replica) -> tuple[tuple[str, int, int, int], ...]:
    """Its stages, whichever GPUs of their boxes they are on."""
    return tuple((stage.peer, stage.tp, stage.first_layer, stage.last_layer) for stage in replica.stages)


def place_replicas(
    cluster: Cluster, plans: Sequence[Plan], running: Sequence[Plan]
) -> tuple[tuple[Plan, ...], tuple[frozenset[str], ...]]:
    """The plans on GPUs that leave running replicas where they are, and by service the ids of those
    that load: replicas that run in the same boxes with the same layers do not.

    A stage's GPUs follow each other. Where those that are left of a box do not, all of its replicas
    load anew.
    """
    wanted = [(number, replica) for number, plan in enumerate(plans) for replica in plan.replicas]
    kept = _match_running(wanted, _find_running(cluster, running))
    placed, crowded = _assign_gpus(cluster, wanted, kept)
    while crowded:
        kept = {place: old for place, old in kept.items() if crowded not in old.peers}
        placed, crowded = _assign_gpus(cluster, wanted, kept)
    heads = Counter(replica.head for _, replica in wanted)
    renamed: list[Plan] = []
    loading: list[frozenset[str]] = []
    for number, plan in enumerate(plans):
        mine = [place for place, (service, _) in enumerate(wanted) if service == number]
        ids = {
            place: kept[place].id
            if place in kept
            else _name_replica(placed[place], alone=heads[placed[place].head] == 1)
            for place in mine
        }
        names = {wanted[place][1].id: ids[place] for place in mine}
        renamed.append(_rename(plan, [msgspec.structs.replace(placed[place], id=ids[place]) for place in mine], names))
        loading.append(frozenset(ids[place] for place in mine if place not in kept))
    return tuple(renamed), tuple(loading)


def _match_running(wanted: Sequence[tuple[int, Replica]], running: Sequence[_RunningGroup]) -> dict[int, Replica]:
    """By place in `wanted`, the running replica with the same weights in the same boxes."""
    left = list(running)
    found: dict[int, Replica] = {}
    for place, (service, replica) in enumerate(wanted):
        alike = [one for one in left if one.service == service and _shape_of(one.replica) == _shape_of(replica)]
        if alike:
            old = max(alike, key=lambda one: one.replica.phase is replica.phase)
            left.remove(old)
            found[place] = old.replica
    return found


def _assign_gpus(
    cluster: Cluster, wanted: Sequence[tuple[int, Replica]], kept: Mapping[int, Replica]
) -> tuple[dict[int, Replica], str]:
    """By place, replicas with the numbers of their GPUs; or the box that has no GPUs in a row left."""
    free = {box.id: set(range(box.gpus)) for box in cluster.boxes}
    for old in kept.values():
        for peer, gpu in old.gpus:
            free[peer].discard(gpu)
    placed: dict[int, Replica] = {}
    # The widest stages first: narrow ones find a place in what these leave.
    for place, (_, replica) in sorted(
        enumerate(wanted), key=lambda item: -max(stage.tp for stage in item[1][1].stages)
    ):
        stages = kept[place].stages if place in kept else replica.stages
        if place not in kept:
            numbered: list[Stage] = []
            for stage in replica.stages:
                first = _find_row(free[stage.peer], stage.tp)
                if first is None:
                    return {}, stage.peer
                free[stage.peer].difference_update(range(first, first + stage.tp))
                numbered.append(msgspec.structs.replace(stage, first_gpu=first))
            stages = tuple(numbered)
        placed[place] = msgspec.structs.replace(replica, stages=stages)
    return placed, ""


def _find_row(free: Collection[int], count: int) -> int | None:
    """The first of so many free GPUs in a row."""
    return next((first for first in sorted(free) if all(first + more in free for more in range(count))), None)


def _name_replica(replica: Replica, *, alone: bool) -> str:
    """As the planner names them: by the first box, and by the GPU where several begin there."""
    return replica.head if alone else f"{replica.head}/{replica.stages[0].first_gpu}"


def _rename(plan: Plan, replicas: Sequence[Replica], names: Mapping[str, str]) -> Plan:
    """The plan with these replicas, whose new names its pairs take."""
    pairings = tuple(
        msgspec.structs.replace(pair, prefill=names[pair.prefill], decode=names[pair.decode]) for pair in plan.pairings
    )
    return msgspec.structs.replace(plan, replicas=tuple(replicas), pairings=pairings)
