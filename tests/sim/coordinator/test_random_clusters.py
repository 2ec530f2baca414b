"""Any cluster that a file can describe is planned, or is said in one line to have no plan: 500, drawn at random.

Figures that are far from each other on purpose: one card beside many, links of 1 Mb/s and of 1 Tb/s, some missing, a
request a minute and a thousand a second.
"""

from __future__ import annotations

import random
from math import isfinite
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster import Cluster, ClusterError
from p2pserve.coordinator.planning.model.cluster_file import parse_cluster
from p2pserve.coordinator.planning.model.errors import NoPlan
from p2pserve.coordinator.planning.model.problem import Problem, Proposal
from p2pserve.coordinator.planning.model.slo import parse_slo
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.planning.reasons import explain_replicas
from p2pserve.coordinator.planning.upper.search import search
from p2pserve.coordinator.planning.upper.settings import SearchSettings

CLUSTERS, BATCHES = 500, 10
STEPS = 6
GPUS = sorted(gpu_table().names)
SHAPES = sorted(MODELS)


def draw_link(rng: random.Random) -> dict[str, float]:
    return {"gbps": 10 ** rng.uniform(-3, 3), "rtt_ms": 10 ** rng.uniform(-2, 3), "usd_per_gb": rng.choice([0, 0, 0.1])}


def draw_cluster(rng: random.Random) -> bytes:
    kinds = range(rng.choice([1, 1, 2, 3, 4]))
    boxes = [
        {
            "id": f"box{kind}",
            "gpu": rng.choice(GPUS),
            "gpus": rng.choice([1, 1, 2, 4, 8]),
            "count": rng.choice([1, 1, 1, 2, 3]),
            **({"site": rng.choice("ab")} if rng.random() < 0.5 else {}),
            **({"usd_per_hour": rng.choice([0.0, 0.5, 1000.0])} if rng.random() < 0.3 else {}),
        }
        for kind in kinds
    ]
    described: dict[str, Any] = {"name": "drawn", "boxes": boxes}
    if rng.random() < 0.9:
        described["default"] = draw_link(rng)
    if rng.random() < 0.3:
        described["within_site"] = draw_link(rng)
    return msgspec.json.encode(described)


def draw_problem(rng: random.Random, cluster: Cluster) -> Problem:
    shape = MODELS[rng.choice(SHAPES)]
    drawn = np.random.default_rng(rng.randrange(1 << 30))
    prompts, outputs = (1 + drawn.geometric(1.0 / 10 ** rng.uniform(0, high), 100) for high in (4, 3))
    rate = 10 ** rng.uniform(-2, 3)
    workload = Workload(
        name="drawn", prompts=prompts, outputs=outputs, rate=rate, arrival_cv=rng.choice([0.0, 1.0, 4.0])
    )
    slo = parse_slo(rng.choice(["3x", "5x", "ttft=2", "tpot=100ms", "e2e=30", "ttft=0.001,e2e=1"]), shape, workload)
    weight = rng.choice([0.0, 0.0, 0.01])
    service = Service(name="drawn", model=shape, workload=workload, slo=slo)
    return Problem(cluster=cluster, services=(service,), pinned={}, price_weight=weight)


def plan(problem: Problem, seed: int) -> tuple[Proposal, ...]:
    evaluator = LowerLevel(problem)
    found = search(problem, evaluator, rng=np.random.default_rng(seed), settings=SearchSettings(steps=STEPS))
    proposals = evaluator.propose(found.solution, epoch=0, version=1)
    explain_replicas(problem, evaluator, found.solution, proposals, found.evaluated)
    return proposals


def check(problem: Problem, proposal: Proposal) -> None:
    """Nothing is used twice, every layer is there once, and every figure is one."""
    layers = problem.services[0].model.layers
    cards = {box.id: box.gpus for box in problem.cluster.boxes}
    used: dict[str, int] = dict.fromkeys(cards, 0)
    for replica in proposal.plan.replicas:
        edges = [edge for stage in replica.stages for edge in (stage.first_layer, stage.last_layer)]
        assert (edges[0], edges[-1]) == (0, layers)
        assert edges[1:-1:2] == edges[2:-1:2]
        for stage in replica.stages:
            used[stage.peer] += stage.tp
    assert all(used[box] <= count for box, count in cards.items())
    assert sum(pairing.weight for pairing in proposal.plan.pairings) == pytest.approx(1.0)
    assert -1e-9 <= proposal.attainment <= 1.0 + 1e-9  # a sum of shares, each of which is rounded
    assert all(isfinite(value) for value in (*proposal.score, proposal.max_rate, proposal.tokens_s))
    assert all(each >= 0.0 for each in (*proposal.ttft_s, *proposal.tpot_s, *proposal.e2e_s))  # false for NaN


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_cluster_has_a_plan_or_a_reason(batch: int) -> None:
    planned = 0
    for number in range(batch, CLUSTERS, BATCHES):
        proposals, reason = try_to_plan(number)
        assert bool(proposals) != bool(reason), f"cluster {number}"
        assert "\n" not in reason
        planned += bool(proposals)
        if proposals and planned % 10 == 0:
            again, _ = try_to_plan(number)
            plans, others = (msgspec.json.encode([each.plan for each in found]) for found in (proposals, again))
            assert plans == others, f"cluster {number} has two plans"
    assert planned > CLUSTERS // BATCHES // 3  # else this test shows little


def try_to_plan(number: int) -> tuple[tuple[Proposal, ...], str]:
    """What is proposed for a cluster, or why nothing is."""
    rng = random.Random(number)
    try:
        problem = draw_problem(rng, parse_cluster(draw_cluster(rng), Specs.MEASURED))
        proposals = plan(problem, number)
    except (ClusterError, NoPlan) as error:
        return (), str(error)
    for proposal in proposals:
        check(problem, proposal)
    return proposals, ""
