"""Step times by an engine's own constants: as many times the hardware's model as they say, at sizes of a sweep and
beyond, and never further off than a box's word is believed."""

from __future__ import annotations

import msgspec
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import MODELS
from p2pserve.coordinator.costs.profiled_times import FURTHEST, KNOWN_REQUESTS, KNOWN_TOKENS, ProfiledTimes, scale_card
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.costs.step_times import chunk_pairs
from p2pserve.coordinator.costs.sweep import ENGINE_SWEEP, profile_times
from p2pserve.coordinator.profile import MeasuredCosts, PhaseCost, PhaseCosts

from ....linear_times import LinearTimes

MODEL = MODELS["llama3-8b"]
PRIOR = replica_times(MODEL, [StageHardware(gpu_table().find("A40-48GB"), 1, MODEL.layers, 160.0)])
SWEPT = profile_times(PRIOR, 0, ENGINE_SWEEP)
MODELLED = PhaseCosts(SWEPT.prefill, SWEPT.decode)
SIZES = [(1, 32), (1, 500), (4, 128), (8, 256), (16, 1024), (128, 1024)]


def scaled(cost: PhaseCost, factor: float) -> PhaseCost:
    return PhaseCost(**{name: factor * value for name, value in msgspec.structs.asdict(cost).items()})


def slower(prefill: float, decode: float) -> ProfiledTimes:
    """An engine that takes so many times as long as PRIOR."""
    return ProfiledTimes(
        PRIOR, MeasuredCosts(PhaseCosts(scaled(SWEPT.prefill, prefill), scaled(SWEPT.decode, decode)), MODELLED)
    )


@pytest.mark.parametrize(("requests", "length"), SIZES)
def test_steps_take_as_many_times_as_long_as_the_constants_say(requests: int, length: int) -> None:
    own, tokens, pairs = slower(1.43, 2.0), requests * length, requests * chunk_pairs(0, length)
    assert own.prefill_s(tokens, pairs) == pytest.approx(1.43 * PRIOR.prefill_s(tokens, pairs))
    assert own.prefill_interval_s(tokens, pairs) == pytest.approx(1.43 * PRIOR.prefill_interval_s(tokens, pairs))
    expected = 2.0 * PRIOR.decode_line(requests).step_s(tokens)
    assert own.decode_line(requests).step_s(tokens) == pytest.approx(expected)
    assert own.decode_line(requests) is own.decode_line(requests)


def test_another_engine_than_the_model_is_found_at_all_sizes_of_a_sweep() -> None:
    """One whose requests cost more, and whose tokens cost less, than the hardware's model has it."""
    modelled = LinearTimes(step=0.02, token=2e-4, request=1e-4, context=1e-6)
    real = LinearTimes(step=0.03, token=1.5e-4, request=1e-3, context=2e-6)
    found = [profile_times(times, 0, ENGINE_SWEEP) for times in (real, modelled)]
    own = ProfiledTimes(modelled, MeasuredCosts(*(PhaseCosts(each.prefill, each.decode) for each in found)))
    for requests, length in ((1, 64), (8, 1024), (32, 64)):
        tokens, pairs = requests * length, requests * chunk_pairs(0, length)
        assert own.decode_line(requests).step_s(tokens) == pytest.approx(
            real.decode_line(requests).step_s(tokens), rel=1e-3
        )
        if tokens <= KNOWN_TOKENS:
            assert own.prefill_s(tokens, pairs) == pytest.approx(real.prefill_s(tokens, pairs), rel=1e-3)
    beyond, last = own.decode_line(100), own.decode_line(KNOWN_REQUESTS)
    assert beyond.step_s(6400) / modelled.decode_line(100).step_s(6400) == pytest.approx(
        last.step_s(KNOWN_REQUESTS * 64) / modelled.decode_line(KNOWN_REQUESTS).step_s(KNOWN_REQUESTS * 64), rel=0.01
    )


def test_a_chunk_attends_to_earlier_ones() -> None:
    """What is in none of the constants is the model's, as many times as long."""
    later = chunk_pairs(8192, 512)
    assert slower(1.43, 1.0).prefill_s(512, later) == pytest.approx(1.43 * PRIOR.prefill_s(512, later))


def test_a_step_that_does_both_takes_as_much_longer_as_its_parts() -> None:
    at = (512, chunk_pairs(0, 512), 8, 8 * 300.0)
    assert slower(1.5, 1.5).mixed_s(*at) == pytest.approx(1.5 * PRIOR.mixed_s(*at))
    assert PRIOR.mixed_s(*at) < slower(1.0, 1.5).mixed_s(*at) < 1.5 * PRIOR.mixed_s(*at)


def test_what_is_not_told_is_the_hardware_s() -> None:
    same, at = ProfiledTimes(PRIOR, MeasuredCosts(PhaseCosts(), MODELLED)), (512, chunk_pairs(0, 512))
    assert same.prefill_s(*at) == PRIOR.prefill_s(*at)
    assert same.mixed_s(*at, 8, 2400.0) == pytest.approx(PRIOR.mixed_s(*at, 8, 2400.0))
    assert same.decode_line(8).step_s(2400) == pytest.approx(PRIOR.decode_line(8).step_s(2400))
    assert same.decode_line(0) == PRIOR.decode_line(0)
    assert same.prefill_s(0, 0.0) == PRIOR.prefill_s(0, 0.0)
    assert same.source == f"{PRIOR.source}, own steps"


@pytest.mark.parametrize(("claim", "believed"), [(1e-9, 1.0 / FURTHEST), (0.0, 1.0 / FURTHEST), (1e6, FURTHEST)])
def test_a_claim_is_believed_up_to_a_bound(claim: float, believed: float) -> None:
    told, tokens, pairs = PhaseCosts(PhaseCost(step_s=claim), PhaseCost(step_s=claim)), 512, chunk_pairs(0, 512)
    own = ProfiledTimes(PRIOR, MeasuredCosts(told, MODELLED))
    assert own.prefill_s(tokens, pairs) == pytest.approx(believed * PRIOR.prefill_s(tokens, pairs))
    for requests in (8, 2 * KNOWN_REQUESTS):
        expected = believed * PRIOR.decode_line(requests).step_s(requests * 500)
        assert own.decode_line(requests).step_s(requests * 500) == pytest.approx(expected)
    cautious = ProfiledTimes(PRIOR, MeasuredCosts(told, MODELLED), fastest=1.0)
    assert cautious.prefill_s(tokens, pairs) == pytest.approx(max(1.0, believed) * PRIOR.prefill_s(tokens, pairs))


def test_a_card_of_a_stage_falls_short_as_its_engine_s_steps_did() -> None:
    card = gpu_table().find("A40-48GB")
    costs = MeasuredCosts(PhaseCosts(scaled(SWEPT.prefill, 1.5), scaled(SWEPT.decode, 2.0)), MODELLED)
    slow = scale_card(card, costs)
    assert (slow.tflops, slow.memory_gbps) == pytest.approx((card.tflops / 1.5, card.memory_gbps / 2.0))
    assert msgspec.structs.replace(slow, tflops=card.tflops, memory_gbps=card.memory_gbps) == card
    absurd = MeasuredCosts(PhaseCosts(PhaseCost(step_s=1e-9), None), MODELLED)
    assert scale_card(card, absurd).tflops == pytest.approx(card.tflops * FURTHEST)
    assert scale_card(card, absurd).memory_gbps == card.memory_gbps
