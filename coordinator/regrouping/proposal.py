"""Which groups of boxes would serve more than those that run, and what changing to them costs.

The search is the simulator's (`planning/rescheduling.py`): new phases alone beside new groups that
keep the weights they can. Both are compared at more requests than the running replicas carry: as
long as all are in time, all groups look alike. What a change costs is counted step by step: the
boxes of one step are away while they load, and the others go on; boxes with room for their new part
beside what they serve are away for no longer than they take to finish their requests.

Importing this takes a solver with it: import it where plans are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

import numpy as np

from ..capacity import BoxView
from ..costs.loading import LoadRates, load_seconds
from ..network_problem import NetworkProblem
from ..plan import Phase, Plan, PlanError, RegroupingStep, Replica
from ..planning.model.errors import NoPlan, UnservedError
from ..planning.model.problem import Problem
from ..planning.rescheduling import (
    Rescheduling,
    pays_reload,
    reschedule_groups,
    reschedule_phases,
    without_boxes,
)
from ..planning.upper.scorer import never
from ..planning.upper.settings import SearchSettings
from .steps import PAYBACK_S, RegroupProposal, make_regrouping

GO_OVER_S: Final = 30.0
"""For how long boxes are counted as away that go over to what they have loaded beside: they finish their requests."""

LOAD: Final = 2.0
"""Groups are compared at so many times the requests that the running ones carry in time; a gain beyond
that does not show. Higher: it shows, and small gains are lost in what estimates are off by."""


def propose_regrouping(
    network: NetworkProblem,
    plan: Plan,
    boxes: Sequence[BoxView],
    *,
    rate: float | None = None,
    rates: LoadRates | None = None,
    search: SearchSettings | None = None,
    spent: Callable[[], bool] = never,
    keeping: Collection[str] = (),
) -> RegroupProposal | None:
    """The best groups found for the boxes of a network that runs a plan until `spent()`; None where
    none is better than new phases alone, or boxes cannot be grouped otherwise. `rate`: requests per
    second to compare them at, instead of LOAD times what runs. `keeping`: boxes that keep their part,
    with those of their group: they are counted as if they served by themselves, and the others are
    grouped for what is left."""
    if plan.regrouping is not None or len(network.problem.cluster.boxes) < 2:
        return None
    if any(box.emulated and box.phase is not Phase.MIXED for box in boxes):  # emulated stages transfer no KV
        return None
    rate = rate or LOAD * (network.colocated_rate or network.service.workload.rate)
    problem = at_rate(network, rate)
    kept = [replica.stages for replica in plan.replicas if not set(keeping).isdisjoint(replica.peers)]
    aside = {stage.peer for group in kept for stage in group} | set(keeping)
    served = _serve_only(problem, plan, aside) * rate if kept else 0.0
    left = rate - served
    if left <= 0.0 or aside >= set(_ids(problem)):
        return None
    problem = without_boxes(at_rate(network, left), aside)
    try:
        light = reschedule_phases(problem, [plan])
        full = reschedule_groups(problem, [plan], rng=np.random.default_rng(0), settings=search, spent=spent)
    except (NoPlan, UnservedError):
        return None
    wanted = full.plans[0]
    groups = (*kept, *(replica.stages for replica in wanted.replicas))
    if full.after - light.after <= network.settings.margin:
        return None
    try:
        regrouping = make_regrouping(plan, groups, boxes, before=0.0, after=0.0, reload_s=0.0)
    except PlanError:
        return None  # some box has no room for its part, by its own word
    on_disk = {box.peer: frozenset(range(box.layers)) if box.whole else frozenset[int]() for box in boxes}
    reload_s = tuple(_step_seconds(network, step, on_disk, rates or LoadRates()) for step in regrouping.steps)
    meanwhile = tuple(serve_without(problem, plan, step) for step in regrouping.steps)
    total_s = sum(reload_s)
    served_s = 0.0
    for step, share, seconds in zip(regrouping.steps, meanwhile, reload_s, strict=True):
        away_s = min(seconds, GO_OVER_S) if _loads_beside(step, boxes) else seconds
        served_s += share * away_s + light.after * (seconds - away_s)
    lost = served_s / total_s
    pays = pays_reload(light, replace(full, meanwhile=lost), reload_s=total_s, payback_s=PAYBACK_S)
    found = make_regrouping(
        plan, groups, boxes,
        before=served + light.before * left, after=served + full.after * left, reload_s=max(reload_s),
    )  # fmt: skip
    return RegroupProposal(
        regrouping=found, groups=groups, rate=rate, light=served + light.after * left,
        meanwhile=tuple(served + share * left for share in meanwhile), reload_s=reload_s, pays=pays,
    )  # fmt: skip


def at_rate(network: NetworkProblem, rate: float) -> Problem:
    """The problem of a network, with so many requests per second."""
    service = network.service
    return replace(network.problem, services=(replace(service, workload=replace(service.workload, rate=rate)),))


def _loads_beside(step: RegroupingStep, boxes: Iterable[BoxView]) -> bool:
    """Whether all its boxes have room for their new part beside what they serve, and so go on while they load."""
    room = {box.peer: box.beside for box in boxes}
    return all(stage.layers <= room.get(stage.peer, 0) for group in step.form for stage in group)


def serve_without(problem: Problem, plan: Plan, step: RegroupingStep) -> float:
    """The share of requests in time while the boxes of a step are away."""
    away = {*step.boxes, *(stage.peer for group in step.undo for stage in group)}
    return _serve(problem, plan, away & set(_ids(problem)))


def _serve(problem: Problem, plan: Plan, away: Collection[str]) -> float:
    """The share of requests in time without these boxes."""
    try:
        left: Rescheduling = reschedule_phases(without_boxes(problem, away), [plan])
    except (NoPlan, UnservedError):
        return 0.0
    return left.after


def _serve_only(problem: Problem, plan: Plan, boxes: Collection[str]) -> float:
    """The share of requests in time that these boxes of the plan serve by themselves."""
    return _serve(problem, plan, set(_ids(problem)) - set(boxes))


def _ids(problem: Problem) -> tuple[str, ...]:
    return tuple(box.id for box in problem.cluster.boxes)


def _step_seconds(
    network: NetworkProblem, step: RegroupingStep, on_disk: Mapping[str, AbstractSet[int]], rates: LoadRates
) -> float:
    """Until all groups of a step are ready."""
    coming = [Replica(id=group[0].peer, phase=Phase.MIXED, stages=group) for group in step.form]
    return max(load_seconds(network.service.model, coming, on_disk, rates).values())
