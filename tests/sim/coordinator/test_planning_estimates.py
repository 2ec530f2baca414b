"""The planner's estimates against the simulator: the same plan, the same lengths, other random numbers."""

from typing import NamedTuple

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.problem import Group, Problem, Slice, Solution
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import meets
from p2pserve.sims.scenario import ServiceRun
from p2pserve.sims.world import simulate

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
A40, GEFORCE, H100 = "A40-48GB", "RTX-3090TI-24GB", "H100-SXM5-80GB"
CHAT = {"prompts": (6.6, 0.8), "outputs": (4.7, 0.9)}
CODE = {"prompts": (7.2, 0.9), "outputs": (2.7, 0.8)}
"""Lengths as logarithms' means and deviations: answers as in conversations, and very short ones."""


class Setting(NamedTuple):
    """Boxes of so many GPUs, what groups of them do, and how they are asked. `parts` of the highest rate that is
    expected are simulated; the share in time may be `off` by so much."""

    boxes: tuple[tuple[str, int], ...]
    groups: Solution
    lengths: dict[str, tuple[float, float]] = CHAT
    gbps: float = 20.0
    slo: Slo = Slo(ttft_s=2.5, tpot_s=0.08)
    parts: tuple[float, ...] = (0.3, 0.7)
    off: float = 0.06


THREE = ((A40, 4), (GEFORCE, 4), (GEFORCE, 4))
SETTINGS = {
    "split": Setting(THREE, (Group((Slice(0, 4),), P), Group((Slice(1, 4),), D), Group((Slice(2, 4),), D))),
    "mixed": Setting(THREE, tuple(Group((Slice(box, 4),), M) for box in range(3))),
    # KV of a prompt takes most of a second and prompts come from two boxes: what is waited for counts into few tokens
    "one link": Setting(
        ((H100, 4),) * 3, (Group((Slice(0, 4),), P), Group((Slice(1, 4),), P), Group((Slice(2, 4),), D)),
        lengths=CODE, gbps=10.0, slo=Slo(ttft_s=5.0, tpot_s=0.4, e2e_s=20.0), parts=(0.5, 0.9), off=0.08,
    ),
    # stages in two boxes, and answers of which each sees either prompts that are prefilled beside it or none
    "mixed pipeline": Setting(
        ((A40, 4), (GEFORCE, 4)), (Group((Slice(0, 4), Slice(1, 4)), M),),
        lengths=CODE, gbps=10.0, slo=Slo(ttft_s=5.0, tpot_s=0.4, e2e_s=20.0), parts=(0.5, 0.8), off=0.08,
    ),
}  # fmt: skip


def problem(setting: Setting, rate: float) -> Problem:
    """With lengths drawn for it."""
    table, rng = gpu_table(), np.random.default_rng(4)
    boxes = tuple(
        Box(id=f"box{number}", gpu=table.find(name, Specs.MEASURED), gpus=gpus)
        for number, (name, gpus) in enumerate(setting.boxes)
    )
    prompts, outputs = setting.lengths["prompts"], setting.lengths["outputs"]
    workload = Workload(
        name="drawn", prompts=np.clip(rng.lognormal(*prompts, 2000), 16, 4000).astype(np.int64),
        outputs=np.clip(rng.lognormal(*outputs, 2000), 1, 800).astype(np.int64), rate=rate,
    )  # fmt: skip
    square = (len(boxes), len(boxes))
    cluster = Cluster(
        boxes=boxes, gbps=np.full(square, setting.gbps), rtt_s=np.full(square, 1e-3), usd_per_gb=np.zeros(square)
    )
    service = Service(name="s", model=model_shape("llama-30b"), workload=workload, slo=setting.slo)
    return Problem(cluster=cluster, services=(service,), pinned={})


def trace(given: Problem, requests: int) -> Trace:
    """Poisson arrivals at the problem's rate, of lengths drawn from its workload."""
    workload, rng = given.services[0].workload, np.random.default_rng(9)
    rows = rng.integers(0, len(workload.prompts), requests)
    return Trace(
        ids=np.arange(requests), arrival_s=np.cumsum(rng.exponential(1.0 / workload.rate, requests)),
        prompt=workload.prompts[rows], output=workload.outputs[rows], lengths="drawn", arrivals="Poisson",
    )  # fmt: skip


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("place", [0, 1])
def test_the_estimate_is_near_the_simulation(name: str, place: int) -> None:
    setting, requests = SETTINGS[name], 1200
    (most,) = LowerLevel(problem(setting, 1.0)).propose(setting.groups, epoch=0, version=0)
    given = problem(setting, setting.parts[place] * most.max_rate)
    (expected,) = LowerLevel(given).propose(setting.groups, epoch=0, version=0)
    run = ServiceRun(service=given.services[0], plan=expected.plan, trace=trace(given, requests))
    found = simulate(given.cluster, [run]).services[0].outcomes
    steady = slice(requests // 10, requests)
    assert expected.score.attainment == pytest.approx(meets(found, setting.slo)[steady].mean(), abs=setting.off)
    for estimate, figures in (
        (expected.ttft_s, found.ttft_s),
        (expected.tpot_s, found.tpot_s),
        (expected.e2e_s, found.e2e_s),
    ):
        assert estimate.p50 == pytest.approx(np.nanmedian(figures[steady]), rel=0.35)
        assert estimate.p90 == pytest.approx(np.nanpercentile(figures[steady], 90), rel=0.35)
