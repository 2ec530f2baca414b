"""Whole replicas: pipelines, hops, memory, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.coordinator.costs.gpus import GpuSpec, Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.replica import Hop, ReplicaError, StageHardware, kv_capacity_tokens, replica_times
from p2pserve.coordinator.costs.roofline import TYPICAL_CONTEXT
from p2pserve.coordinator.costs.step_times import StepTimes, chunk_pairs

LLAMA = model_shape("llama-30b")
NEAR = Hop(rtt_s=0.0, gbps=1e9)
PROMPT, PAIRS = 1024, chunk_pairs(0, 1024)


def card(name: str = "A40", specs: Specs = Specs.DENSE) -> GpuSpec:
    return gpu_table().find(name, specs)


def even(stages: int, *, tp: int = 2, name: str = "A40") -> list[StageHardware]:
    return [StageHardware(card(name), tp, LLAMA.layers // stages, 160.0) for _ in range(stages)]


def pipeline(stages: int, hop: Hop = NEAR) -> StepTimes:
    return replica_times(LLAMA, even(stages), [hop] * stages)


def test_one_stage_has_one_time_for_all() -> None:
    times = replica_times(LLAMA, even(1))
    assert times.source == "roofline, dense"
    assert times.prefill_interval_s(PROMPT, PAIRS) == times.prefill_s(PROMPT, PAIRS)
    line = times.decode_line(8)
    assert line is times.decode_line(8)
    assert times.mixed_s(0, 0, 8, 8000) == pytest.approx(line.step_s(8000))
    assert times.mixed_s(PROMPT, PAIRS, 0, 0) == pytest.approx(times.prefill_s(PROMPT, PAIRS))


def test_a_pipeline_passes_prompts_at_the_pace_of_a_stage() -> None:
    one, two = replica_times(LLAMA, even(1)), pipeline(2)
    assert two.prefill_s(PROMPT, PAIRS) == pytest.approx(one.prefill_s(PROMPT, PAIRS), rel=0.02)
    assert two.prefill_interval_s(PROMPT, PAIRS) == pytest.approx(one.prefill_s(PROMPT, PAIRS) / 2, rel=0.05)


def test_a_pipeline_of_equals_decodes_two_batches_in_the_time_of_one() -> None:
    # Each batch of 8 goes through half of the layers at a time: 16 requests have the pace of 8 in one stage.
    one, two = replica_times(LLAMA, even(1)), pipeline(2)
    assert two.decode_line(16).step_s(16_000) == pytest.approx(one.decode_line(8).step_s(8_000), rel=0.05)
    assert two.decode_line(1).step_s(1000) == pytest.approx(one.decode_line(1).step_s(1000), rel=0.01)


def test_hops_by_hand() -> None:
    near, far = pipeline(2), pipeline(2, Hop(rtt_s=0.1, gbps=1.0))
    token_s = LLAMA.activation_bytes_per_token * 8 / 1e9
    # ahead: one hop of two; a token: ahead and back
    assert far.prefill_s(PROMPT, PAIRS) - near.prefill_s(PROMPT, PAIRS) == pytest.approx(0.05 + PROMPT * token_s)
    slower = far.decode_line(1).fixed_s - near.decode_line(1).fixed_s
    assert slower == pytest.approx(0.1 + token_s)
    assert far.prefill_interval_s(PROMPT, PAIRS) == near.prefill_interval_s(PROMPT, PAIRS)  # the stage is slower
    thin = pipeline(2, Hop(rtt_s=0.0, gbps=0.1))
    assert thin.prefill_interval_s(PROMPT, PAIRS) == pytest.approx(PROMPT * token_s * 10)  # the hop is


def test_the_slowest_stage_sets_the_pace_unless_hops_take_longer() -> None:
    stages = [StageHardware(card("A100"), 1, 20, 160.0), StageHardware(card("A40"), 1, 40, 160.0)]
    requests = 64
    near = replica_times(LLAMA, stages, [NEAR, NEAR]).decode_line(requests)
    slow = replica_times(model_shape("llama-30b"), [StageHardware(card("A40"), 1, 60, 160.0)]).decode_line(32)
    # two batches through 40 of 60 layers
    assert near.step_s(64_000) == pytest.approx(2 * slow.step_s(32_000) * 40 / 60, rel=0.05)
    far = replica_times(LLAMA, stages, [Hop(0.5, 10.0)] * 2).decode_line(requests)
    assert far.fixed_s > 0.5 + near.fixed_s / 2


def test_mixed_steps_hold_up_the_stage_that_they_are_in() -> None:
    two = pipeline(2)
    decode = two.decode_line(16).step_s(16_000)
    both = two.mixed_s(PROMPT, PAIRS, 16, 16_000)
    assert both > decode
    assert both > two.prefill_s(PROMPT, PAIRS)
    assert both < decode + two.prefill_s(PROMPT, PAIRS)


@settings(deadline=None)
@given(
    stages=st.integers(1, 4),
    requests=st.integers(1, 200),
    more=st.integers(1, 50),
    tokens=st.integers(1, 8192),
    rtt_s=st.floats(0, 0.2),
)
def test_more_is_never_faster_in_a_pipeline(stages: int, requests: int, more: int, tokens: int, rtt_s: float) -> None:
    hops = [Hop(rtt_s, 1.0)] * stages if stages > 1 else ()
    times = replica_times(LLAMA, even(stages), hops)
    context = requests * TYPICAL_CONTEXT
    decode = times.decode_line(requests).step_s(context)
    assert decode > 0
    assert times.decode_line(requests + more).step_s(context + more * TYPICAL_CONTEXT) >= decode
    assert times.decode_line(requests).step_s(context + more) > decode
    assert times.prefill_s(tokens + more, chunk_pairs(0, tokens + more)) > times.prefill_s(
        tokens, chunk_pairs(0, tokens)
    )
    assert times.prefill_interval_s(tokens, 0.0) <= times.prefill_s(tokens, 0.0)
    both = times.mixed_s(tokens, chunk_pairs(0, tokens), requests, context)
    assert both >= decode
    assert both >= times.prefill_s(tokens, chunk_pairs(0, tokens))


@settings(deadline=None)
@given(requests=st.integers(1, 300), context=st.integers(0, 500_000), steps=st.integers(1, 400))
def test_runs_add_up_steps(requests: int, context: int, steps: int) -> None:
    line = replica_times(LLAMA, even(1)).decode_line(requests)
    one_by_one = sum(line.step_s(context + requests * number) for number in range(steps))
    assert line.run_s(requests, context, steps) == pytest.approx(one_by_one)


def test_memory_by_hand() -> None:
    # 2 x 45 GiB x 0.9 beside 65.06 GB of weights, 1.597 MB of KV a token
    free = 2 * 45 * 2**30 * 0.9 - LLAMA.weight_bytes
    assert kv_capacity_tokens(LLAMA, even(1)) == int(free / LLAMA.kv_bytes_per_token)
    assert kv_capacity_tokens(LLAMA, even(1, tp=1)) < 0


def test_in_8_bits_twice_the_tokens_fit_and_decode_reads_each_in_half_the_time() -> None:
    kept = LLAMA.with_kv_cache_dtype("fp8")
    assert kv_capacity_tokens(kept, even(1)) in range(2 * kv_capacity_tokens(LLAMA, even(1)), 2**40)
    plain, eight = (replica_times(model, even(1)) for model in (LLAMA, kept))
    assert eight.decode_line(8).context_s == pytest.approx(plain.decode_line(8).context_s / 2)
    assert eight.decode_line(8).fixed_s == plain.decode_line(8).fixed_s
    assert eight.prefill_s(1000, 500_500.0) == plain.prefill_s(1000, 500_500.0)


def test_the_fullest_stage_limits_memory() -> None:
    small = StageHardware(card("RTX-3090-24GB"), 2, 20, 160.0)
    large = StageHardware(card("A100"), 2, 40, 160.0)
    alone = 2 * 24 * 2**30 * 0.9 - 20 * LLAMA.layer_weight_bytes - 2 * LLAMA.embedding_parameters
    assert kv_capacity_tokens(LLAMA, [small, large]) == int(alone // (20 * LLAMA.kv_bytes_per_token_layer))


def test_kv_heads_are_copied_when_there_are_more_cards() -> None:
    model = model_shape("qwen2-7b")  # 4 KV heads
    four, eight = ([StageHardware(card("A100"), tp, 28, 1840.0)] for tp in (4, 8))
    assert kv_capacity_tokens(model, eight) < 1.2 * kv_capacity_tokens(model, four)


@pytest.mark.parametrize(
    ("stages", "hops", "words"),
    [
        ([StageHardware(card(), 2, 30, 160.0)], (), r"hold \[30\] layers; llama-30b has 60"),
        ([], (), r"hold \[\] layers"),
        ([StageHardware(card(), 0, 60, 160.0)], (), "tp 0"),
        ([StageHardware(card(), 2, 60, 0.0)], (), "link 0.0"),
        (even(2), (), "need 2 hops"),
        (even(1), [NEAR], "need 0 hops"),
        (even(2), [NEAR, Hop(0.01, 0.0)], "hop 1 has 0.0"),
    ],
)
def test_what_makes_no_replica_is_refused(stages: list[StageHardware], hops: list[Hop], words: str) -> None:
    with pytest.raises(ReplicaError, match=words):
        replica_times(LLAMA, stages, hops)
