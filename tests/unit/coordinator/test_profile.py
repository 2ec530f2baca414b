"""The eight-constant profile: found again in samples of a known engine, and fitted to those of a real one."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import msgspec
import pytest

from p2pserve.coordinator.profile import LatencyProfile, PhaseCost, PhaseFit, StepSample, prompt_s
from p2pserve.coordinator.profile_fit import MIN_SAMPLES, fit

PREFILL = PhaseCost(token_s=2e-4, request_s=1e-3, length_s=1e-5, step_s=8e-3)
DECODE = PhaseCost(token_s=3e-7, request_s=4e-5, length_s=2e-6, step_s=2e-3)
MEASURED = Path(__file__).parent / "data" / "engine_steps.json"


def decode_step(requests: int, length: int, noise: float = 1.0) -> StepSample:
    return StepSample(DECODE.seconds(requests, length) * noise, 0, 0, requests, requests * length)


def prefill_step(requests: int, length: int, noise: float = 1.0) -> StepSample:
    return StepSample(PREFILL.seconds(requests, length) * noise, requests, requests * length, 0, 0)


GRID = [(requests, length) for requests in (1, 2, 4, 8, 16) for length in (16, 64, 200, 500)]


def costs(profile: LatencyProfile) -> tuple[PhaseCost, PhaseCost]:
    assert profile.prefill is not None
    assert profile.decode is not None
    return profile.prefill.cost, profile.decode.cost


def same(found: PhaseCost, truth: PhaseCost, tolerance: float) -> None:
    """Each constant, to within a share of what it adds to a middling step."""
    for requests, length in GRID:
        assert found.seconds(requests, length) == pytest.approx(truth.seconds(requests, length), rel=tolerance)


def test_exact_samples_give_the_constants_back() -> None:
    profile = fit([prefill_step(*at) for at in GRID] + [decode_step(*at) for at in GRID])
    for found, truth in zip(costs(profile), (PREFILL, DECODE), strict=True):
        for constant in ("token_s", "request_s", "length_s", "step_s"):
            assert getattr(found, constant) == pytest.approx(getattr(truth, constant), rel=1e-4)
    assert profile.prefill is not None
    assert profile.prefill.error < 1e-6
    assert profile.prefill.samples == len(GRID)


def test_noise_and_a_machine_that_was_held_up_hardly_matter() -> None:
    rng = random.Random(3)

    def noise() -> float:
        return rng.gauss(1.0, 0.03) * (rng.uniform(3.0, 20.0) if rng.random() < 0.1 else 1.0)

    steps = [step(*at, noise=noise()) for at in GRID * 3 for step in (prefill_step, decode_step)]
    profile = fit(steps)
    prefill, decode = costs(profile)
    same(prefill, PREFILL, 0.05)
    same(decode, DECODE, 0.05)
    assert profile.decode is not None
    assert 0.005 < profile.decode.error < 0.06


def test_steps_that_do_both_say_what_prefill_costs() -> None:
    both = [
        StepSample(PREFILL.seconds(requests, length) + DECODE.marginal_s(8, 100), requests, requests * length, 8, 800)
        for requests, length in GRID
    ]
    assert fit(both).prefill is None  # nobody knows what of it was decoding
    prefill, _ = costs(fit(both + [decode_step(*at) for at in GRID]))
    same(prefill, PREFILL, 1e-4)


def test_terms_that_samples_cannot_tell_apart_are_left_out() -> None:
    """With one request in each step b * L and L are one column: all of it counts as the cost of tokens."""
    profile = fit([prefill_step(1, length) for length in (16, 32, 64, 128, 256)])
    assert profile.decode is None
    assert profile.prefill is not None
    cost = profile.prefill.cost
    assert (cost.request_s, cost.length_s) == (0.0, 0.0)
    assert cost.token_s == pytest.approx(PREFILL.token_s + PREFILL.length_s)
    assert cost.step_s == pytest.approx(PREFILL.step_s + PREFILL.request_s)
    alike = fit([decode_step(4, 100)] * 10).decode
    assert alike is not None
    assert alike.cost.step_s == pytest.approx(DECODE.seconds(4, 100))
    assert alike.cost == PhaseCost(step_s=alike.cost.step_s)


def test_no_constant_is_negative() -> None:
    """Batches that get cheaper with length, as noise on a flat engine looks like."""
    steps = [StepSample(0.002 - 1e-6 * length, 0, 0, 4, 4 * length) for length in range(10, 500, 30)]
    found = fit(steps).decode
    assert found is not None
    assert min(msgspec.structs.astuple(found.cost)) >= 0.0
    assert found.cost.seconds(4, 250) == pytest.approx(0.00175, rel=0.15)


@pytest.mark.parametrize("count", [0, MIN_SAMPLES - 1])
def test_too_few_samples_are_no_profile(count: int) -> None:
    assert fit([decode_step(1, 10)] * count) == LatencyProfile()


def test_impossible_samples_are_left_out() -> None:
    broken = [StepSample(0.0, 0, 0, 1, 10), StepSample(0.1, 0, 0, 0, 0)]
    assert fit(broken * 10 + [decode_step(*at) for at in GRID]) == fit([decode_step(*at) for at in GRID])


def test_predictions() -> None:
    assert prompt_s(PREFILL, 1000, 512) == pytest.approx(PREFILL.seconds(1, 512) + PREFILL.seconds(1, 488))
    assert prompt_s(PREFILL, 1024, 512) == pytest.approx(2 * PREFILL.seconds(1, 512))
    assert DECODE.marginal_s(0, 0.0) == 0.0


def test_a_profile_can_be_sent() -> None:
    profile = LatencyProfile(prefill=PhaseFit(cost=PREFILL, samples=9, error=0.02))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(profile), type=LatencyProfile) == profile
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(PhaseCost(token_s=bad)), type=PhaseCost)


def test_samples_count_by_their_weights() -> None:
    """What an engine did before it was throttled hardly counts beside what it does now."""
    old, now = [decode_step(*at) for at in GRID], [decode_step(*at, noise=1.4) for at in GRID]
    found = fit([*old, *now], [0.01] * len(old) + [1.0] * len(now)).decode
    assert found is not None
    same(found.cost, PhaseCost(**{each: 1.4 * value for each, value in msgspec.structs.asdict(DECODE).items()}), 0.02)
    assert found.error < 0.02, "of the steps that count"
    assert fit([*old, *now], [1.0] * (2 * len(GRID))) == fit([*old, *now])
    with pytest.raises(ValueError, match="zip"):
        fit(old, [1.0])


def test_few_samples_are_not_fitted_to_their_noise() -> None:
    steps = [prefill_step(*at, noise=noise) for at, noise in zip(GRID, (0.9, 1.1, 1.1, 0.9), strict=False)]
    found = fit(steps).prefill
    assert found is not None
    assert found.samples == 4
    assert found.error > 0.01


def test_a_real_engine_keeps_to_the_model() -> None:
    """Steps of the bundled model on a busy machine, from the report of `python -m p2pserve.node.engine.bench`."""
    steps = msgspec.json.decode(MEASURED.read_bytes(), type=list[StepSample])
    profile = fit(steps)
    assert profile.prefill is not None
    assert profile.decode is not None
    assert profile.prefill.error < 0.1
    assert profile.decode.error < 0.2
    decodes = [step for step in steps if step.decode_requests and not step.prefill_requests]
    half = fit(decodes[::2]).decode
    assert half is not None
    off = [
        abs(half.cost.seconds(step.decode_requests, step.decode_context / step.decode_requests) / step.seconds - 1)
        for step in decodes[1::2]
    ]
    assert statistics.median(off) < 0.2  # of what it has not seen
