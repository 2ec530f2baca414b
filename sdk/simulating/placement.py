"""`p2pserve plan --placement`: which of several services share which GPUs of a described cluster."""

from __future__ import annotations

import json
import sys
import time
from math import inf
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
from rich.table import Table

from ...coordinator.placement.planned import ChosenPlacement, Placement, choose_placement, describe_placement
from ...coordinator.placement.replay import Judged, PeriodReplay
from ...coordinator.placement.seallm import place_seallm
from ...coordinator.placement.search import PlacementGoals, judged_cost
from ...coordinator.placement.values import PlacementBox, PlacementError, PlacementProblem, PlacementService
from ...coordinator.planning.model.problem import Problem
from ...sims.placement.fleet import period_of
from ...sims.placement.judging import SimulatedPlacements
from ...sims.records import Trace
from ...sims.workloads import Lengths, draw
from ..actions.plan_options import problem_of
from ..actions.status_view import open_console
from ..errors import UsageError

SECONDS: Final = 60.0
"""Of requests that placements are judged by."""


def run_placement(arguments: SimpleNamespace) -> int:
    """Search, and print the placement. Returns the exit code."""
    if arguments.services is None:
        raise UsageError("placement: it is about several services: give --services FILE")
    if arguments.pin:
        raise UsageError("pin: engines within boxes do both phases; leave it out beside --placement")
    problem, started = problem_of(arguments), time.monotonic()
    try:
        placed = placement_problem(problem, arguments.seed)
        chosen = _place(arguments, problem, PeriodReplay(placed), started)
    except PlacementError as error:
        raise UsageError(f"services: {error}") from None
    seconds = time.monotonic() - started
    if arguments.format == "json":
        print(json.dumps(placement_json(arguments.placement, placed, chosen, seconds)))
    else:
        _print(placed, chosen)
        print(f"placed in {seconds:.2f} s, judged by {len(placed.period)} simulated requests, seed {arguments.seed}")
    sys.stdout.flush()
    return 0


def placement_problem(problem: Problem, seed: int) -> PlacementProblem:
    """The cluster's boxes and services, with SECONDS of Poisson arrivals at the services' rates."""
    traces: dict[int, Trace] = {}
    for number, service in enumerate(problem.services):
        workload = service.workload
        traces[number] = draw(
            Lengths(workload.prompts, workload.outputs, workload.name), rate=workload.rate,
            rng=np.random.default_rng([31, seed, number]), cv=workload.arrival_cv, seconds=SECONDS,
        )  # fmt: skip
    return PlacementProblem(
        boxes=[
            PlacementBox(
                id=box.id, gpu=box.gpu, gpus=box.gpus, link_gbps=box.gpu_link_gbps, usd_per_hour=box.usd_per_hour
            )
            for box in problem.cluster.boxes
            if box.id not in problem.excluded
        ],
        services=[PlacementService(name=service.name, model=service.model) for service in problem.services],
        period=period_of(traces),
    )


def placement_json(policy: str, problem: PlacementProblem, chosen: ChosenPlacement, seconds: float) -> dict[str, Any]:
    """What `--format json` prints."""
    placement, judged = chosen.placement, chosen.judged
    planned = () if placement.planned is None else placement.planned.proposals
    return {
        "policy": policy,
        "seconds": round(seconds, 3),
        "engines": [
            {
                "box": problem.boxes[group.box].id,
                "gpus": group.tp,
                "services": [problem.services[each].name for each in group.services],
            }
            for group in placement.groups
        ],
        "plans": [msgspec.to_builtins(proposal.plan) for proposal in planned],
        "tried": chosen.tried,
        "services": {name: row for name, *row in _rows(problem, judged)},
        "attainment": judged.attainment,
        "normalized_latency": judged.normalized,
    }


def _place(arguments: SimpleNamespace, problem: Problem, replay: PeriodReplay, started: float) -> ChosenPlacement:
    judge, goals = SimulatedPlacements(replay.problem), PlacementGoals(usd_hour=arguments.price_weight)
    if arguments.placement == "seallm":
        placement = Placement(place_seallm(replay))
        judged = judge(placement)
        cost = judged_cost(judged, goals)
        return ChosenPlacement(placement, cost, judged, {"seallm": cost})
    until = started + (arguments.budget_s or inf)
    return choose_placement(
        problem, replay, judge=judge, rng=np.random.default_rng(arguments.seed), goals=goals,
        spent=lambda: time.monotonic() > until,
    )  # fmt: skip


def _rows(problem: PlacementProblem, judged: Judged) -> list[tuple[str, float, float]]:
    """Each service's name, attainment and normalized latency."""
    served = np.maximum(1, judged.requests - judged.unserved)
    latencies = (judged.normalized_sum / served).tolist()
    return list(zip([each.name for each in problem.services], judged.by_service.tolist(), latencies, strict=True))


def _print(problem: PlacementProblem, chosen: ChosenPlacement) -> None:
    out, judged = open_console(), chosen.judged
    for line in describe_placement(problem, chosen.placement):
        out.print(line)
    times = f"within {problem.slo_scale:g} x its time alone"
    table = Table("service", times, "latency / time alone", box=None, pad_edge=False)
    for name, attainment, latency in [*_rows(problem, judged), ("all", judged.attainment, judged.normalized)]:
        table.add_row(name, f"{100.0 * attainment:.1f} %", f"{latency:.2f}")
    out.print(table)
    if len(chosen.tried) > 1:
        out.print(f"compared: {', '.join(f'{name} {cost:.2f}' for name, cost in chosen.tried.items())}")
