"""Times of pipelines, put together by hand from the costs of their stages."""

from __future__ import annotations

import pytest

from p2pserve.coordinator.costs.efficiency import efficiency_of
from p2pserve.coordinator.costs.gpus import GpuSpec, gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.costs.replica import Hop, ReplicaError, StageHardware, kv_capacity_tokens, replica_times
from p2pserve.coordinator.costs.roofline import TYPICAL_CONTEXT, StageCost, stage_cost
from p2pserve.coordinator.costs.step_times import StepTimes

MODEL = ModelShape(
    name="m", layers=6, hidden=1024, heads=8, kv_heads=2, head_dim=128, intermediate=4096, vocabulary=32000
)
FAST, SLOW = gpu_table().find("A100"), gpu_table().find("T4")
AHEAD, BACK = Hop(rtt_s=0.02, gbps=2.0), Hop(rtt_s=0.06, gbps=0.001)
TOKEN_S = MODEL.activation_bytes_per_token * 8 / 2e9


def cost(gpu: GpuSpec, layers: int, *, last: bool) -> StageCost:
    return stage_cost(MODEL, gpu, efficiency_of(gpu), layers=layers, tp=1, link_gbps=100.0, last=last)


FIRST, LAST = cost(FAST, 4, last=False), cost(SLOW, 2, last=True)


def pipeline(*hops: Hop) -> StepTimes:
    stages = [StageHardware(FAST, 1, 4, 100.0), StageHardware(SLOW, 1, 2, 100.0)]
    return replica_times(MODEL, stages, hops or (AHEAD, BACK))


def test_prefill_takes_both_stages_and_the_hop_between_them() -> None:
    expected = FIRST.step_s(300, 9000, 0, 0) + LAST.step_s(300, 9000, 0, 0) + 0.01 + 300 * TOKEN_S
    assert pipeline().prefill_s(300, 9000) == pytest.approx(expected)


def test_the_next_prefill_waits_for_the_slower_of_stage_and_hop() -> None:
    stages = [FIRST.step_s(300, 9000, 0, 0), LAST.step_s(300, 9000, 0, 0)]
    assert pipeline().prefill_interval_s(300, 9000) == pytest.approx(max(*stages, 300 * TOKEN_S))
    thin = pipeline(Hop(0.02, 0.01), BACK)
    assert thin.prefill_interval_s(300, 9000) == pytest.approx(300 * 200 * TOKEN_S)
    assert thin.prefill_interval_s(300, 9000) > max(stages)


def test_the_way_back_has_the_round_trip_only() -> None:
    """One request: both stages, half of both round trips, and its activations on the hop ahead."""
    first, last = FIRST.decode_line(1), LAST.decode_line(1)
    line = pipeline().decode_line(1)
    assert line.fixed_s == pytest.approx(first.fixed_s + last.fixed_s + 0.01 + 0.03 + TOKEN_S)
    assert line.context_s == pytest.approx(first.context_s + last.context_s)


def test_many_requests_are_spread_over_two_batches() -> None:
    first, last = FIRST.decode_line(4), LAST.decode_line(4)
    line = pipeline().decode_line(8)
    assert line.fixed_s == pytest.approx(first.fixed_s + last.fixed_s + 0.04 + 4 * TOKEN_S)
    assert line.context_s == pytest.approx((first.context_s + last.context_s) / 2)


def test_without_distance_the_slowest_stage_sets_the_pace() -> None:
    near = Hop(0.0, 1e6)
    line = pipeline(near, near).decode_line(8)
    first, last = FIRST.decode_line(4), LAST.decode_line(4)
    slower = max(first, last, key=lambda one: 2 * one.fixed_s + one.context_s * 8 * TYPICAL_CONTEXT)
    assert line == pytest.approx((2 * slower.fixed_s, slower.context_s))


def test_a_mixed_step_goes_through_the_pipeline_with_one_of_the_batches() -> None:
    both = [stage.step_s(50, 1275, 4, 500) for stage in (FIRST, LAST)]
    alone = [stage.step_s(0, 0, 4, 500) for stage in (FIRST, LAST)]
    through = sum(both) + 0.04 + 54 * TOKEN_S
    assert pipeline().mixed_s(50, 1275, 8, 1000) == pytest.approx(through)
    near = Hop(0.0, 1e6)
    slowest = max(one + other for one, other in zip(both, alone, strict=True))
    expected = max(sum(both), slowest)
    assert pipeline(near, near).mixed_s(50, 1275, 8, 1000) == pytest.approx(expected, rel=1e-6)


def test_equal_stages_one_behind_the_other_each_take_their_time() -> None:
    """Two of two layers on the fast card before the last one, and nine requests in three batches."""
    equal = cost(FAST, 2, last=False)
    stages = [StageHardware(FAST, 1, 2, 100.0)] * 2 + [StageHardware(SLOW, 1, 2, 100.0)]
    times = replica_times(MODEL, stages, (AHEAD, AHEAD, BACK))
    prefill = 2 * equal.step_s(300, 9000, 0, 0) + LAST.step_s(300, 9000, 0, 0) + 2 * (0.01 + 300 * TOKEN_S)
    assert times.prefill_s(300, 9000) == pytest.approx(prefill, rel=1e-10)
    line, one, last = times.decode_line(9), equal.decode_line(3), LAST.decode_line(3)
    assert line.fixed_s == pytest.approx(2 * one.fixed_s + last.fixed_s + 0.05 + 2 * 3 * TOKEN_S, rel=1e-10)
    assert line.context_s == pytest.approx((2 * one.context_s + last.context_s) / 3, rel=1e-10)
    both = 2 * equal.step_s(50, 1275, 3, 300) + LAST.step_s(50, 1275, 3, 300)
    assert times.mixed_s(50, 1275, 9, 900) == pytest.approx(both + 0.05 + 2 * 53 * TOKEN_S, rel=1e-10)


def test_a_single_request_holds_up_nobody() -> None:
    both = [stage.step_s(50, 1275, 1, 500) for stage in (FIRST, LAST)]
    assert pipeline().mixed_s(50, 1275, 1, 500) == pytest.approx(sum(both) + 0.04 + 51 * TOKEN_S)


def test_memory_of_both_ends_by_hand() -> None:
    stages = [StageHardware(SLOW, 1, 4, 100.0), StageHardware(SLOW, 1, 2, 100.0)]
    room = SLOW.memory_gib * 2**30 * 0.5
    first = (room - 4 * MODEL.layer_weight_bytes - 2 * 32000 * 1024) // (4 * 2 * 2 * 128 * 2)
    assert kv_capacity_tokens(MODEL, stages, memory_share=0.5) == int(first)
    last = (room - 5 * MODEL.layer_weight_bytes - 2 * 32000 * 1024) // (5 * 2 * 2 * 128 * 2)
    turned = [StageHardware(SLOW, 1, 1, 100.0), StageHardware(SLOW, 1, 5, 100.0)]
    assert kv_capacity_tokens(MODEL, turned, memory_share=0.5) == int(last)


def test_cards_beyond_the_kv_heads_keep_copies() -> None:
    """Two KV heads on eight cards: four copies of each, and as much room as eight cards have less the weights."""
    (stage,) = (StageHardware(SLOW, 8, 6, 100.0),)
    free = 8 * SLOW.memory_gib * 2**30 * 0.9 - MODEL.weight_bytes
    assert kv_capacity_tokens(MODEL, [stage]) == int(free // (MODEL.kv_bytes_per_token * 4))


def test_the_source_names_the_columns() -> None:
    assert pipeline().source == "roofline, dense"


def test_hops_are_checked_one_by_one() -> None:
    with pytest.raises(ReplicaError, match=r"hop 0 has 2\.0 Gb/s and a round trip of -0\.1 s"):
        pipeline(Hop(-0.1, 2.0), BACK)
    with pytest.raises(ReplicaError, match="stage 1 has 0 layers"):
        replica_times(MODEL, [StageHardware(FAST, 1, 6, 1.0), StageHardware(FAST, 1, 0, 1.0)], (AHEAD, BACK))
    assert pipeline(Hop(0.0, 2.0), BACK).prefill_s(1, 1) > 0.0
