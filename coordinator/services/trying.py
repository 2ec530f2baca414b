"""Placements of the running network tried by simulation, with phases for services whose boxes are their own.

    decided = try_placements(problem, rates, network, running, found, goals, judge=judge, spent=spent)

A box counts as one card. So a plan gives each box to one replica of one service; which phases those have in the end is
decided when they run, by what they carry then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..capacity import KvNetwork, Links
from ..placement.planned import Judge, choose_placement, judge_running
from ..placement.replacement import DecidedPlacement
from ..placement.replay import PeriodReplay
from ..placement.search import PlacementGoals, is_short
from ..placement.values import Groups, PlacementProblem
from ..planning.model.cluster import Box, Cluster
from ..planning.model.problem import Problem
from ..planning.model.slo import SloScale, slo_by
from ..planning.model.workload import Service, Workload

_SEED: Final = 0


def try_placements(
    placed: PlacementProblem,
    rates: Sequence[float],
    network: KvNetwork,
    running: Groups,
    found: Groups,
    goals: PlacementGoals,
    *,
    judge: Judge,
    spent: Callable[[], bool],
) -> DecidedPlacement:
    """What the search has `found`, and placements with plans, beside what runs. `rates`: requests per second of each
    service. Raises TrialsOver where there is no time for that."""
    problem, replay = pose_for_planner(placed, rates, network), PeriodReplay(placed)
    rng = np.random.default_rng(_SEED)
    cost, judged = judge_running(problem, replay, running, judge=judge, rng=rng, goals=goals, spent=spent)
    chosen = choose_placement(
        problem, replay, judge=judge, rng=rng, goals=goals, before=running, within=found, spent=spent
    )
    return DecidedPlacement(
        groups=tuple(sorted(chosen.placement.engines(placed))),
        cost=chosen.cost,
        normalized=chosen.judged.normalized,
        running_cost=cost,
        running_normalized=judged.normalized,
        is_short=is_short(judged, goals),
        untried="",
    )


def pose_for_planner(placed: PlacementProblem, rates: Sequence[float], network: KvNetwork) -> Problem:
    """The same boxes and services, with deadlines of as many times a request alone as placements are judged by."""
    between, ids, period = Links(network.links), [box.id for box in placed.boxes], placed.period
    gbps, rtt_s, usd_per_gb = (
        np.array([[figure(one, two) for two in ids] for one in ids])
        for figure in (between.gbps, between.rtt_s, between.usd_per_gb)
    )
    services = []
    for number, (service, rate) in enumerate(zip(placed.services, rates, strict=True)):
        rows = period.service == number
        workload = Workload(
            name="period", prompts=period.prompt[rows], outputs=period.output[rows], rate=rate,
            arrival_cv=_variation_of(np.diff(period.arrival_s[rows])),
        )  # fmt: skip
        slo = slo_by(placed.alone_times(number), workload, SloScale(placed.slo_scale))
        services.append(
            Service(
                name=service.name, model=service.model, workload=workload, slo=slo, codec=network.codec,
                kv_bits=network.kv_bits,
            )
        )  # fmt: skip
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


def _variation_of(gaps: NDArray[np.float64]) -> float:
    """Of the times between requests; of too few, as of Poisson arrivals."""
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0.0 else 1.0
