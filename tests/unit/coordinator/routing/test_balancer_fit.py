"""The balancer's predictors: what the roofline expects, and what an engine's own steps make of it."""

from itertools import product

import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.costs.step_times import StepTimes, chunk_pairs
from p2pserve.coordinator.profile import StepSample
from p2pserve.coordinator.routing.balancer import ChunkLine, PrefillLine
from p2pserve.coordinator.routing.balancer_fit import (
    expected_chunk_line,
    expected_prefill_line,
    fit_chunk_line,
    fit_prefill_line,
    quality,
)

STEP = 512
PREFILL = PrefillLine(token_s=1e-4, base_s=5e-3)
CHUNK = ChunkLine(prefill_context_s=1e-6, decode_context_s=2e-7, base_s=0.05)
TWICE = ChunkLine(prefill_context_s=2e-6, decode_context_s=4e-7, base_s=0.1)
OTHER_SHAPE = ChunkLine(prefill_context_s=4e-6, decode_context_s=1e-7, base_s=0.08)


def prefill_step(tokens: int, line: PrefillLine = PREFILL, *, late_s: float = 0.0) -> StepSample:
    return StepSample(line.seconds(tokens) + late_s, 1, tokens, 0, 0)


def chunk_step(
    context: int, decoded: int, line: ChunkLine = CHUNK, *, tokens: int = STEP - 10, late_s: float = 0.0
) -> StepSample:
    return StepSample(line.seconds(context, decoded) + late_s, 1, tokens, 10, decoded, context)


CHUNK_STEPS = [
    chunk_step(context, decoded) for context, decoded in product(range(0, 4096, 512), range(0, 60_000, 9999))
]


def times_of(card: str) -> StepTimes:
    model = model_shape("llama3-8b")
    return replica_times(model, [StageHardware(gpu_table().find(card), 1, model.layers, 160.0)])


def test_the_expected_lines_say_what_the_roofline_does() -> None:
    times = times_of("A30")
    line = expected_prefill_line(times)
    for tokens in (256, 1000, 2048):
        assert line.seconds(tokens) == pytest.approx(times.prefill_s(tokens, chunk_pairs(0, tokens)), rel=0.15)
    line_of_chunks = expected_chunk_line(times_of("A100"), STEP)
    for context, requests in ((0, 0), (1500, 20), (3000, 60)):
        tokens = STEP - requests
        there = times_of("A100").mixed_s(tokens, chunk_pairs(context, tokens), requests, requests * 1024)
        assert line_of_chunks.seconds(context, requests * 1024) == pytest.approx(there, rel=0.05)


def test_few_steps_say_nothing_yet() -> None:
    assert fit_prefill_line([prefill_step(100)] * 3, PrefillLine(token_s=1.0, base_s=1.0)).token_s == 1.0
    assert fit_chunk_line(CHUNK_STEPS[:3], TWICE, STEP) is TWICE


@pytest.mark.parametrize("prior", [PrefillLine(token_s=5e-5, base_s=1e-3), PrefillLine(token_s=3e-4, base_s=0.1)])
def test_many_prefills_count_for_more_than_what_was_expected(prior: PrefillLine) -> None:
    found = fit_prefill_line([prefill_step(tokens) for tokens in range(40, 2040, 40)], prior)
    assert found.seconds(1000) == pytest.approx(PREFILL.seconds(1000), rel=0.02)
    assert found.seconds(100) == pytest.approx(PREFILL.seconds(100), rel=0.05)


@pytest.mark.parametrize("prior", [TWICE, OTHER_SHAPE])
def test_many_chunks_count_for_more_than_what_was_expected(prior: ChunkLine) -> None:
    found = fit_chunk_line(CHUNK_STEPS, prior, STEP)
    for context, decoded in ((0, 0), (2000, 30_000), (4000, 50_000)):
        assert found.seconds(context, decoded) == pytest.approx(CHUNK.seconds(context, decoded), rel=0.02)


def test_steps_of_one_length_alone_raise_or_lower_what_was_expected_of_all() -> None:
    alike = [prefill_step(200, PrefillLine(token_s=2e-4, base_s=1e-2))] * 20
    found = fit_prefill_line(alike, PREFILL)  # twice as slow as expected
    assert found.seconds(2000) == pytest.approx(2 * PREFILL.seconds(2000), rel=1e-6)
    short = fit_chunk_line([chunk_step(0, 0, TWICE)] * 20, CHUNK, STEP)
    assert short.seconds(3000, 40_000) == pytest.approx(TWICE.seconds(3000, 40_000), rel=1e-6)


def test_steps_that_the_machine_held_up_say_little() -> None:
    held_up = [chunk_step(0, 0, late_s=2.0), chunk_step(3000, 100, late_s=1.0), chunk_step(500, 9000, late_s=5.0)]
    found = fit_chunk_line([*CHUNK_STEPS, *held_up], TWICE, STEP)
    assert found.seconds(2000, 30_000) == pytest.approx(CHUNK.seconds(2000, 30_000), rel=0.02)


def test_steps_that_are_not_of_the_kind_are_left_out() -> None:
    beside = [StepSample(9.0, 1, 100, 5, 500)] * 20  # prefilled beside decoding
    assert fit_prefill_line(beside, PREFILL) is PREFILL
    partly = [chunk_step(0, 0, tokens=100, late_s=9.0)] * 20  # the end of a prompt: not filled up
    two = [StepSample(9.0, 2, STEP, 0, 0, 0)] * 20  # of two prompts: neither's context is known
    assert fit_chunk_line([*partly, *two], CHUNK, STEP) is CHUNK


def test_the_quality_of_a_fit() -> None:
    # Squares of what it is off by: 1 and 1; of what was measured, around its mean of 4: 4, 4 and 0.
    assert quality([3.0, 6.0, 3.0], [2.0, 6.0, 4.0]) == pytest.approx((1.0 - 2.0 / 8.0, (1 / 2 + 1 / 4) / 3))
