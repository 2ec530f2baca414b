"""Requests scheduled by `hetero` on unequal replicas, by one gateway and by four that hear of each other late."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.sims.policies import HETERO, LEAST_TOKENS, MEMORY, ROUND_ROBIN
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import SimResult
from p2pserve.sims.scenario import BoxLost, Change, PlanChange, ReplicaModel, ServiceRun, SimSettings, WorldError
from p2pserve.sims.world import simulate

from ....linear_times import LinearTimes

MODEL = ModelShape(name="toy", layers=4, hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=32, vocabulary=9)
BOXES = ("fast", "slow", "slower", "far")
FAST = ReplicaModel(LinearTimes(step=0.004, token=1e-5, request=1e-4, context=1e-7), 40_000)
SLOW = ReplicaModel(LinearTimes(step=0.02, token=5e-5, request=5e-4, context=5e-7), 10_000)
MODELS = {"fast": FAST, "slow": SLOW, "slower": SLOW}
COUNT = 400


def cluster(rtt_s: float = 0.02) -> Cluster:
    size = len(BOXES)
    return Cluster(
        boxes=tuple(Box(id=name, gpu=gpu_table().find("A40"), gpus=1, gpu_link_gbps=160.0) for name in BOXES),
        gbps=np.full((size, size), 1.0), rtt_s=np.full((size, size), rtt_s) * (1 - np.eye(size)),
        usd_per_gb=np.zeros((size, size)),
    )  # fmt: skip


def plan(*names: str, version: int = 1) -> Plan:
    replicas = tuple(
        Replica(id=name, phase=Phase.MIXED, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=4),))
        for name in names
    )
    pairings = tuple(Pairing(prefill=name, decode=name, weight=1 / len(names)) for name in names)
    return Plan(epoch=1, version=version, service="toy", codec="raw", why=(), replicas=replicas, pairings=pairings)


def go(policy: str, gateways: int = 0, report_s: float = 0.0, changes: tuple[Change, ...] = ()) -> SimResult:
    rng = np.random.default_rng(3)
    trace = Trace(
        ids=np.arange(COUNT), arrival_s=np.sort(rng.uniform(0.0, 10.0, COUNT)),
        prompt=rng.integers(50, 900, COUNT), output=rng.integers(5, 300, COUNT), lengths="made up", arrivals="even",
    )  # fmt: skip
    workload = Workload(name="w", prompts=trace.prompt, outputs=trace.output, rate=1.0)
    run = ServiceRun(
        service=Service(name="toy", model=MODEL, workload=workload), plan=plan("fast", "slow", "slower"), trace=trace
    )
    settings = SimSettings(
        routing=RoutingSettings(policy=policy, length_predictor="sampled"),
        gateways=BOXES[:gateways], report_s=report_s, detect_s=0.5,
    )  # fmt: skip
    return simulate(
        cluster(), [run], settings=settings, changes=changes, model_of=lambda _, __, replica: MODELS[replica.id]
    )


@cache
def makespan_s(policy: str, gateways: int = 0, report_s: float = 0.0) -> float:
    result = go(policy, gateways, report_s)
    assert (result.services[0].outcomes.e2e_s > 0.0).all()  # all were answered, and nothing is left anywhere
    return result.end_s


def shares(result: SimResult) -> dict[str, float]:
    """Of all requests, by replica."""
    decoded = Counter(result.services[0].decode.tolist())
    return {host.id: decoded[number] / COUNT for number, host in enumerate(result.replicas)}


def test_unequal_replicas_finish_sooner_than_in_turn() -> None:
    assert makespan_s(HETERO) < 0.75 * makespan_s(ROUND_ROBIN)
    assert makespan_s(HETERO) < makespan_s(LEAST_TOKENS)
    found = shares(go(HETERO))
    assert found["fast"] > 2 * found["slow"] > 0.0
    assert found["slow"] == pytest.approx(found["slower"], abs=0.05)


@pytest.mark.parametrize("policy", [HETERO, MEMORY])
def test_four_gateways_that_hear_each_other_a_second_late_do_nearly_as_well_as_one(policy: str) -> None:
    assert makespan_s(policy, 4, 1.0) < 1.15 * makespan_s(policy, 1, 1.0)


def test_later_reports_share_less_evenly_but_nothing_is_lost() -> None:
    late = makespan_s(HETERO, 4, 30.0)  # no report after the first
    assert late < 1.5 * makespan_s(HETERO, 4, 1.0)
    assert late < makespan_s(ROUND_ROBIN)


def test_the_same_run_is_the_same_with_gateways_apart() -> None:
    assert shares(go(HETERO, 4, 1.0)) == shares(go(HETERO, 4, 1.0))
    assert shares(go(HETERO, 4, 1.0)) != shares(go(HETERO))


@pytest.mark.parametrize("gateways", [1, 4])
def test_boxes_and_plans_may_change_meanwhile(gateways: int) -> None:
    changes = (
        BoxLost(3.0, "slow"),
        PlanChange(5.0, 0, plan("fast", "slower", version=2)),
    )
    result = go(HETERO, gateways, 1.0, changes)
    assert (result.services[0].outcomes.e2e_s > 0.0).all()
    assert result.services[0].replays.sum() > 0


def test_reports_cannot_come_before_they_are_made() -> None:
    with pytest.raises(WorldError, match=r"report_s is -1\.0; it must not be negative"):
        SimSettings(report_s=-1.0)
