"""A profile that follows an engine: noise, pauses and preemptions leave it alone, throttling does not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from p2pserve.coordinator.costs.profile_tracker import HALF_LIFE, LATEST, OF_A_KIND, ProfileTracker
from p2pserve.coordinator.profile import PhaseCost, StepSample
from p2pserve.coordinator.profile_fit import fit

PREFILL = PhaseCost(token_s=2e-4, request_s=1e-3, length_s=1e-5, step_s=8e-3)
DECODE = PhaseCost(token_s=3e-7, request_s=4e-5, length_s=2e-6, step_s=2e-3)
SWEPT = [(requests, length) for requests in (1, 4, 16) for length in (32, 128, 512) for _ in range(4)]
SLOWER = 1.43
"""A card with 30 % less of its clock."""


def decode_step(requests: int, length: int, factor: float = 1.0) -> StepSample:
    return StepSample(DECODE.seconds(requests, length) * factor, 0, 0, requests, requests * length)


def prefill_step(requests: int, length: int, factor: float = 1.0) -> StepSample:
    return StepSample(PREFILL.seconds(requests, length) * factor, requests, requests * length, 0, 0)


class Machine:
    """Steps of an engine under traffic: sizes that differ, noise of 5 %, and a step in twelve that was held up."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.factor = 1.0

    def noise(self) -> float:
        held_up = self._rng.uniform(3.0, 20.0) if self._rng.random() < 1 / 12 else 1.0
        return self.factor * self._rng.gauss(1.0, 0.05) * held_up

    def decode(self) -> StepSample:
        return decode_step(self._rng.randint(4, 7), self._rng.randint(128, 255), self.noise())

    def swept(self) -> Iterator[StepSample]:
        for at in SWEPT:
            yield decode_step(*at, self.noise())
            yield prefill_step(*at, self.noise())


def tracker_of(machine: Machine, steps: int = 100) -> ProfileTracker:
    """Of an engine that has been swept, and has served for a while."""
    tracker = ProfileTracker()
    tracker.add(machine.swept())
    refit(tracker)
    tracker.add(machine.decode() for _ in range(steps))
    refit(tracker)
    return tracker


def refit(tracker: ProfileTracker) -> None:
    tracker.profile = fit(tracker.samples(), tracker.weights())


def decode_s(tracker: ProfileTracker, requests: int, length: int) -> float:
    assert tracker.profile is not None
    assert tracker.profile.decode is not None
    return tracker.profile.decode.cost.seconds(requests, length)


@pytest.mark.parametrize("seed", range(8))
def test_throttling_is_seen_within_the_latest_steps_at_all_sizes(seed: int) -> None:
    machine = Machine(seed)
    tracker = tracker_of(machine)
    machine.factor = SLOWER
    needed = next(count for count in range(1, 1000) if tracker.add([machine.decode()]) is not None)
    assert needed <= LATEST
    refit(tracker)
    for requests, length in ((5, 200), (1, 32), (16, 512)):  # the last two have not been seen since
        expected = SLOWER * DECODE.seconds(requests, length)
        assert decode_s(tracker, requests, length) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("seed", range(8))
def test_noise_and_outliers_change_nothing(seed: int) -> None:
    machine = Machine(seed)
    tracker = tracker_of(machine)
    assert tracker.add(machine.decode() for _ in range(2000)) is None
    refit(tracker)
    for requests, length in ((5, 200), (1, 32), (16, 512)):
        assert decode_s(tracker, requests, length) == pytest.approx(DECODE.seconds(requests, length), rel=0.08)


def test_a_pause_of_a_few_steps_is_no_other_speed() -> None:
    tracker = tracker_of(Machine(1))
    assert tracker.add(decode_step(5, 200, 30.0) for _ in range(LATEST // 4)) is None
    refit(tracker)
    assert decode_s(tracker, 5, 200) == pytest.approx(DECODE.seconds(5, 200), rel=0.05)


def test_a_card_that_has_cooled_down_is_as_fast_as_before() -> None:
    machine = Machine(2)
    tracker = tracker_of(machine)
    factors = []
    for machine.factor in (SLOWER, 1.0):
        factors += [factor for _ in range(80) if (factor := tracker.add([machine.decode()])) is not None]
        refit(tracker)
    down, up = factors
    assert down == pytest.approx(SLOWER, rel=0.1)
    assert down * up == pytest.approx(1.0, rel=0.1)
    assert decode_s(tracker, 16, 512) == pytest.approx(DECODE.seconds(16, 512), rel=0.1)


def test_a_slow_drift_is_followed() -> None:
    """A card that warms: slower by a fifth in the end, by less than a tenth at a time."""
    machine = Machine(3)
    tracker = tracker_of(machine)
    for step in range(1200):
        machine.factor = 1.0 + 0.2 * min(1.0, step / 800)
        tracker.add([machine.decode()])
        if step % 40 == 0:
            refit(tracker)
    assert decode_s(tracker, 5, 200) == pytest.approx(1.2 * DECODE.seconds(5, 200), rel=0.05)


def test_traffic_of_other_sizes_is_no_other_speed() -> None:
    """Where the fit is off, as it is for batches beyond those it was fitted to, no engine has changed."""
    tracker = tracker_of(Machine(4))
    beyond = [decode_step(60, 200, 1.3) for _ in range(200)]  # the engine has another kernel for such batches
    assert tracker.add(beyond) is None
    refit(tracker)
    assert decode_s(tracker, 60, 200) == pytest.approx(1.3 * DECODE.seconds(60, 200), rel=0.1)


def test_decodes_do_not_push_out_the_one_prefill() -> None:
    tracker = ProfileTracker()
    tracker.add(prefill_step(1, length) for length in (16, 32, 64, 128, 256))
    tracker.add(decode_step(32, 100 + count % 3) for count in range(1000))
    assert len(tracker) <= 5 + OF_A_KIND + LATEST
    refit(tracker)
    assert tracker.profile is not None
    assert tracker.profile.prefill is not None


def test_old_steps_count_for_less() -> None:
    tracker = ProfileTracker()
    tracker.add([decode_step(1, 32), *(decode_step(8, 100) for _ in range(int(HALF_LIFE)))])
    weights = dict(zip(tracker.samples(), tracker.weights(), strict=True))
    assert weights[decode_step(1, 32)] == pytest.approx(0.5, rel=0.01)
    assert max(tracker.weights()) == 1.0


def test_impossible_steps_are_left_out() -> None:
    tracker = ProfileTracker()
    assert tracker.add([StepSample(0.0, 0, 0, 1, 10), StepSample(0.1, 0, 0, 0, 0)]) is None
    assert not len(tracker)
    assert "0 prefills" in repr(tracker)
