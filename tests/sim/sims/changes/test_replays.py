"""Simulated requests that change their route, and replicas whose steps the plan limits: times added up by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.plan import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.planning.model.cluster import Box, Cluster
from p2pserve.coordinator.planning.model.workload import Service, Workload
from p2pserve.sims.engine.values import SimEngineSettings
from p2pserve.sims.records import Trace
from p2pserve.sims.results.outcomes import SimResult
from p2pserve.sims.scenario import (
    BoxJoined,
    BoxLost,
    Change,
    PlanChange,
    Replan,
    ReplicaModel,
    ServiceRun,
    SimSettings,
    Situation,
    WorldError,
)
from p2pserve.sims.world import simulate

from ....linear_times import LinearTimes

MODEL = ModelShape(name="toy", layers=10, hidden=16, heads=1, kv_heads=1, head_dim=16, intermediate=32, vocabulary=9)
TOKEN_GBPS = MODEL.kv_bytes_per_token * 8e-9
"""A link that carries the KV of one token per second."""
STEPS = LinearTimes(step=1.0)


def plan_of(
    phases: dict[str, Phase], pairs: dict[tuple[str, str], float] | None = None, *, share: float = 1.0, steps: int = 0
) -> Plan:
    replicas = tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=10),), step_tokens=steps)
        for name, phase in phases.items()
    )
    weights = pairs or {(name, name): 1.0 / len(phases) for name in phases}
    pairings = tuple(
        Pairing(prefill=a, decode=b, weight=weight, prefill_share=share if a != b else 1.0)
        for (a, b), weight in weights.items()
    )
    return Plan(epoch=1, version=1, service="toy", replicas=replicas, pairings=pairings, codec="raw", why=())


def go(
    plan: Plan,
    requests: Sequence[tuple[float, int, int]],
    *,
    boxes: str,
    times: LinearTimes = STEPS,
    changes: Sequence[Change] = (),
    settings: SimSettings | None = None,
    replan: Replan | None = None,
) -> SimResult:
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    trace = Trace(
        ids=np.arange(len(requests)), arrival_s=arrival.astype(float), prompt=prompt, output=output,
        lengths="by hand", arrivals="by hand",
    )  # fmt: skip
    workload = Workload(name="by hand", prompts=prompt, outputs=output, rate=1.0)
    service = Service(name="toy", model=MODEL, workload=workload, codec="raw", kv_bits=16.0)
    count, gpu = len(boxes), gpu_table().find("A40")
    cluster = Cluster(
        boxes=tuple(Box(id=name, gpu=gpu, gpus=1, gpu_link_gbps=160.0) for name in boxes),
        gbps=np.full((count, count), TOKEN_GBPS),
        rtt_s=np.zeros((count, count)),
        usd_per_gb=np.zeros((count, count)),
    )
    return simulate(
        cluster,
        [ServiceRun(service=service, plan=plan, trace=trace)],
        changes=changes,
        settings=settings or SimSettings(layerwise=False),
        replan=replan,
        model_of=lambda *_: ReplicaModel(times, 1600),
        record=True,
    )


P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
PDE = {"p": P, "d": D, "e": D}
TO_D = {("p", "d"): 0.999, ("p", "e"): 0.001}


def test_a_decode_replica_that_begins_the_answer_computes_the_last_token_only() -> None:
    settings = SimSettings(layerwise=False, first_token_at_decode=True)
    result = go(plan_of({"p": P, "d": D}, {("p", "d"): 1.0}), [(0.0, 20, 2)], boxes="pd",
                times=LinearTimes(step=1.0, token=0.5), settings=settings)  # fmt: skip
    # 11 s of prefill, 20 s of KV transfer, and two decode steps
    assert result.services[0].outcomes.ttft_s.tolist() == [pytest.approx(32.0)]
    assert result.services[0].outcomes.e2e_s.tolist() == [pytest.approx(33.0)]


def test_a_request_whose_decode_replica_fails_goes_on_from_its_tokens() -> None:
    result = go(plan_of(PDE, TO_D), [(0.0, 20, 6)], boxes="pde", changes=[BoxLost(24.5, "d")])
    outcome = result.services[0]
    # Token 1 at 1, KV until 21, tokens 2 to 4 until 24. Noticed at 25.5; 24 tokens are prefilled, which makes token 5
    # at 26.5, and transferred until 50.5; token 6 is decoded.
    assert outcome.outcomes.e2e_s.tolist() == [pytest.approx(51.5)]
    assert outcome.outcomes.ttft_s.tolist() == [1.0]
    assert (outcome.replays.tolist(), outcome.decode.tolist()) == ([1], [2])
    assert [(transfer.tokens, transfer.target) for transfer in result.transfers] == [(20, 1), (24, 2)]


def test_a_replay_that_prefills_only_a_part_takes_its_first_token_from_the_decode_replica() -> None:
    plan = plan_of(PDE, TO_D, share=0.5)
    result = go(plan, [(0.0, 20, 30)], boxes="pde", changes=[BoxLost(31.5, "d")])
    outcome = result.services[0]
    # Half of the prompt until 1, its KV until 11, the other half until 12: token 1; token 20 at 31. Noticed at 32.5:
    # 20 of 40 tokens until 33.5, their KV until 53.5, the others until 54.5: token 21; token 30 nine steps later.
    assert outcome.outcomes.ttft_s.tolist() == [pytest.approx(12.0)]
    assert outcome.outcomes.e2e_s.tolist() == [pytest.approx(63.5)]


def test_a_request_with_one_token_to_go_needs_no_transfer() -> None:
    result = go(plan_of({"p": P, "d": D}, {("p", "d"): 1.0}), [(0.0, 20, 1), (5.0, 20, 2)], boxes="pd")
    assert result.services[0].outcomes.e2e_s.tolist() == [1.0, pytest.approx(22.0)]
    assert [transfer.row for transfer in result.transfers] == [1]
    assert result.services[0].decode.tolist() == [0, 1]


def test_a_box_that_joins_leaves_the_others_alone() -> None:
    result = go(plan_of({"a": M, "b": M}), [(0.0, 20, 20), (6.0, 20, 5)], boxes="ab", changes=[BoxJoined(5.0, "b")])
    outcome = result.services[0]
    assert outcome.outcomes.e2e_s.tolist() == [20.0, 5.0]
    assert (outcome.replays.tolist(), outcome.decode.tolist()) == ([0, 0], [0, 2])
    assert len(result.replicas) == 3  # the missing one was there as a replica without a box


@pytest.mark.parametrize(
    ("of_plan", "common", "chunks"),
    [
        (0, None, [100]),
        (0, SimEngineSettings(max_batched_tokens=60, max_sequences=8), [60, 40]),
        (40, SimEngineSettings(max_batched_tokens=60, max_sequences=8), [40, 40, 20]),
        (80, SimEngineSettings(max_batched_tokens=60, max_sequences=8), [60, 40]),
    ],
)
def test_steps_are_as_large_as_the_plan_and_the_settings_allow(
    of_plan: int, common: SimEngineSettings | None, chunks: list[int]
) -> None:
    result = go(plan_of({"a": M}, steps=of_plan), [(0.0, 100, 1)], boxes="a", settings=SimSettings(engine=common))
    assert [log.step.prompt_tokens for log in result.steps] == chunks


def test_a_plan_for_a_moment_that_has_passed_is_followed_at_once() -> None:
    asked: list[float] = []

    def replan(situation: Situation) -> list[PlanChange]:
        asked.append(situation.now)
        return [PlanChange(0.0, 0, plan_of({"b": M}))]

    result = go(plan_of({"a": M}), [(0.0, 20, 5)], boxes="ab", changes=[BoxLost(2.5, "a")], replan=replan)
    assert asked == [3.5]
    assert result.services[0].outcomes.e2e_s.tolist() == [3.5 + 1.0 + 2.0]  # two tokens were there


def test_a_plan_for_a_service_that_there_is_none_of() -> None:
    def replan(situation: Situation) -> list[PlanChange]:
        return [PlanChange(situation.now, 1, plan_of({"b": M}))]

    with pytest.raises(WorldError, match="a plan for service 1; there are 1"):
        go(plan_of({"a": M}), [(0.0, 20, 5)], boxes="ab", changes=[BoxLost(2.5, "a")], replan=replan)
