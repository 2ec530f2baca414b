"""Placements judged by engines simulated step by step: shared ones, and services that are planned."""

from dataclasses import replace

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.placement.planned import WITHIN_BOXES, Placement, PlannedServices, choose_placement
from p2pserve.coordinator.placement.replay import PeriodReplay
from p2pserve.coordinator.placement.search import PlacementGoals, judged_cost
from p2pserve.coordinator.placement.values import GpuGroup, Period, PlacementBox, PlacementProblem, PlacementService
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.sims.placement.judging import SimulatedPlacements

MODELS = ("llama2-7b", "llama2-13b")
CARD = gpu_table().find("RTX A6000", Specs.MEASURED)


def _problems(rates: tuple[float, float], seconds: float = 30.0) -> tuple[PlacementProblem, Problem]:
    """Two boxes of two cards, and two services; as the search has them, and as the planner has."""
    rng = np.random.default_rng(5)
    counts = [round(rate * seconds) for rate in rates]
    service = np.repeat([0, 1], counts)
    arrival = rng.uniform(0.0, seconds, len(service))
    order = np.argsort(arrival)
    period = Period(
        service=service[order], arrival_s=arrival[order], prompt=rng.integers(200, 1500, len(order)),
        output=rng.integers(20, 120, len(order)),
    )  # fmt: skip
    boxes = tuple(Box(id=f"box-{number}", gpu=CARD, gpus=2, gpu_link_gbps=160.0) for number in range(2))
    placed = PlacementProblem(
        boxes=[PlacementBox(id=box.id, gpu=CARD, gpus=2, link_gbps=160.0) for box in boxes],
        services=[PlacementService(name=model, model=model_shape(model)) for model in MODELS],
        period=period,
    )
    services = []
    for number, rate in enumerate(rates):
        rows = period.service == number
        workload = Workload(name="period", prompts=period.prompt[rows], outputs=period.output[rows], rate=rate)
        services.append(
            Service(name=MODELS[number], model=model_shape(MODELS[number]), workload=workload, slo=Slo(ttft_s=2.0))
        )
    links = Cluster(boxes=boxes, gbps=np.full((2, 2), 10.0), rtt_s=np.full((2, 2), 1e-3), usd_per_gb=np.zeros((2, 2)))
    return placed, Problem(cluster=links, services=tuple(services), pinned={})


def test_a_planned_replica_is_as_fast_as_an_engine_on_the_same_gpus() -> None:
    placed, problem = _problems((1.0, 1.0))
    judge = SimulatedPlacements(placed)
    within = judge(Placement((GpuGroup(0, 2, (0,)), GpuGroup(1, 2, (1,)))))
    alone = replace(problem, cluster=problem.cluster.without(frozenset({"box-0"})), services=problem.services[1:])
    proposals = LowerLevel(alone, {(Slice(0, 2),): (((0, 2, 40),),)}).propose(
        (Group((Slice(0, 2),), Phase.MIXED),), epoch=0, version=0
    )
    planned = PlannedServices(services=(1,), problem=alone, proposals=proposals)
    beside = judge(Placement((GpuGroup(0, 2, (0,)),), planned))
    assert beside.is_complete
    assert within.is_complete
    assert beside.normalized_sum.tolist() == within.normalized_sum.tolist()


def test_who_has_no_engine_is_not_served() -> None:
    placed, _ = _problems((1.0, 0.5))
    judged = SimulatedPlacements(placed)(Placement((GpuGroup(0, 2, (0,)),)))
    assert judged.unserved.tolist() == judged.late.tolist() == [0, placed.counts[1]]
    assert judged.normalized_sum[1] == 0.0
    assert not judged.is_complete


@pytest.mark.parametrize("rates", [(0.5, 0.5), (8.0, 3.0)])
def test_what_is_chosen_is_never_worse_than_engines_within_boxes(rates: tuple[float, float]) -> None:
    placed, problem = _problems(rates)
    judge, goals = SimulatedPlacements(placed), PlacementGoals()
    found = choose_placement(problem, PeriodReplay(placed), judge=judge, rng=np.random.default_rng(0), goals=goals)
    assert len(found.tried) > 1
    assert judged_cost(found.judged, goals) <= found.tried[WITHIN_BOXES]
    assert judged_cost(judge(found.placement), goals) == judged_cost(found.judged, goals)
    assert found.judged.is_complete
