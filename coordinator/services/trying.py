"""Placements of the running network tried by simulation, with phases for services whose boxes are their own.

    decided = try_placements(problem, rates, links, running, goals, judge=judge, spent=spent)

A box counts as one card. So a plan gives each box to one replica of one service; which phases those have in the end is
decided when they run, by what they carry then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from ..capacity import Links, LinkView
from ..placement.planned import Judge, choose_placement, judge_running
from ..placement.replacement import DecidedPlacement
from ..placement.replay import PeriodReplay
from ..placement.search import PlacementGoals
from ..placement.values import Groups, PlacementProblem
from ..planning.model.cluster import Box, Cluster
from ..planning.model.problem import Problem
from ..planning.model.slo import SloScale, slo_by
from ..planning.model.workload import Service, Workload

_SEED: Final = 0


def try_placements(
    placed: PlacementProblem,
    rates: Sequence[float],
    links: Iterable[LinkView],
    running: Groups,
    goals: PlacementGoals,
    *,
    judge: Judge,
    spent: Callable[[], bool],
) -> DecidedPlacement:
    """`rates`: requests per second of each service. Raises PlacementError, and what `judge` does."""
    problem, replay = pose_for_planner(placed, rates, links), PeriodReplay(placed)
    rng = np.random.default_rng(_SEED)
    cost, judged = judge_running(problem, replay, running, judge=judge, rng=rng, goals=goals)
    chosen = choose_placement(
        problem, replay, judge=judge, rng=rng, goals=goals, before=running, judges_starts=False, spent=spent
    )
    return DecidedPlacement(
        groups=tuple(sorted(chosen.placement.engines(placed))),
        cost=chosen.cost,
        normalized=chosen.judged.normalized,
        running_cost=cost,
        running_normalized=judged.normalized,
    )


def pose_for_planner(placed: PlacementProblem, rates: Sequence[float], links: Iterable[LinkView]) -> Problem:
    """The same boxes and services, with deadlines of as many times a request alone as placements are judged by."""
    between, ids, period = Links(links), [box.id for box in placed.boxes], placed.period
    gbps, rtt_s, usd_per_gb = (
        np.array([[figure(one, two) for two in ids] for one in ids])
        for figure in (between.gbps, between.rtt_s, between.usd_per_gb)
    )
    services = []
    for number, (service, rate) in enumerate(zip(placed.services, rates, strict=True)):
        rows = period.service == number
        workload = Workload(name="period", prompts=period.prompt[rows], outputs=period.output[rows], rate=rate)
        slo = slo_by(placed.alone_times(number), workload, SloScale(placed.slo_scale))
        services.append(Service(name=service.name, model=service.model, workload=workload, slo=slo))
    return Problem(
        cluster=Cluster(
            boxes=tuple(
                Box(id=box.id, gpu=box.gpu, gpus=box.gpus, gpu_link_gbps=box.link_gbps, atomic=True)
                for box in placed.boxes
            ),
            gbps=gbps,
            rtt_s=rtt_s,
            usd_per_gb=usd_per_gb,
        ),
        services=tuple(services),
        pinned={},
        within_boxes=True,
    )
