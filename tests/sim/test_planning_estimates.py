"""The planner's estimates against the simulator: the same plan, the same lengths, other random numbers."""

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.cluster import Box, Cluster
from p2pserve.coordinator.planning.evaluator import LowerLevel
from p2pserve.coordinator.planning.problem import Group, Problem, Slice
from p2pserve.coordinator.planning.workload import Service, Slo, Workload
from p2pserve.sims.outcomes import meets
from p2pserve.sims.records import Trace
from p2pserve.sims.scenario import ServiceRun
from p2pserve.sims.world import simulate

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
SOLUTIONS = {
    "split": (Group((Slice(0, 4),), P), Group((Slice(1, 4),), D), Group((Slice(2, 4),), D)),
    "mixed": (Group((Slice(0, 4),), M), Group((Slice(1, 4),), M), Group((Slice(2, 4),), M)),
}
SLO = Slo(ttft_s=2.5, tpot_s=0.08)


def problem(rate: float) -> Problem:
    """Lengths about like conversations, on three boxes of four GPUs."""
    table, rng = gpu_table(), np.random.default_rng(4)
    boxes = tuple(
        Box(id=f"box{number}", gpu=table.find(name, Specs.TABLE1), gpus=4)
        for number, name in enumerate(("A40-48GB", "RTX-3090TI-24GB", "RTX-3090TI-24GB"))
    )
    workload = Workload(
        name="drawn", prompts=np.clip(rng.lognormal(6.6, 0.8, 2000), 16, 4000).astype(np.int64),
        outputs=np.clip(rng.lognormal(4.7, 0.9, 2000), 1, 800).astype(np.int64), rate=rate,
    )  # fmt: skip
    cluster = Cluster(boxes=boxes, gbps=np.full((3, 3), 20.0), rtt_s=np.full((3, 3), 1e-3), usd_per_gb=np.zeros((3, 3)))
    return Problem(
        cluster=cluster, services=(Service(name="s", model=model_shape("llama-30b"), workload=workload, slo=SLO),),
        pinned={},
    )  # fmt: skip


@pytest.mark.parametrize("name", list(SOLUTIONS))
@pytest.mark.parametrize("part", [0.3, 0.7])
def test_the_estimate_is_near_the_simulation(name: str, part: float) -> None:
    """At 30 and 70 % of the highest rate that the plan is expected to carry in time."""
    (most,) = LowerLevel(problem(1.0)).propose(SOLUTIONS[name], epoch=0, version=0)
    given = problem(part * most.max_rate)
    (expected,) = LowerLevel(given).propose(SOLUTIONS[name], epoch=0, version=0)
    service = given.services[0]
    rng, requests = np.random.default_rng(9), 1200
    rows = rng.integers(0, len(service.workload.prompts), requests)
    trace = Trace(
        ids=np.arange(requests), arrival_s=np.cumsum(rng.exponential(1.0 / service.workload.rate, requests)),
        prompt=service.workload.prompts[rows], output=service.workload.outputs[rows],
        lengths="drawn", arrivals="Poisson",
    )  # fmt: skip
    found = simulate(given.cluster, [ServiceRun(service=service, plan=expected.plan, trace=trace)]).services[0].outcomes
    steady = slice(requests // 10, requests)
    assert expected.score.attainment == pytest.approx(meets(found, SLO)[steady].mean(), abs=0.06)
    for estimate, figures in (
        (expected.ttft_s, found.ttft_s),
        (expected.tpot_s, found.tpot_s),
        (expected.e2e_s, found.e2e_s),
    ):
        assert estimate.p50 == pytest.approx(np.median(figures[steady]), rel=0.35)
        assert estimate.p90 == pytest.approx(np.percentile(figures[steady], 90), rel=0.35)
