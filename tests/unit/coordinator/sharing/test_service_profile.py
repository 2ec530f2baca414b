"""What is learned of a service, from what is expected of it."""

import numpy as np
import pytest

from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.costs.replica import StageHardware, replica_times
from p2pserve.coordinator.sharing.doubling_budget import DoublingBudget
from p2pserve.coordinator.sharing.service_profile import (
    MEMORY,
    ExpectedMoments,
    LearnedMoments,
    ServiceProfile,
    expect_service,
    lone_execution_s,
)
from p2pserve.coordinator.sharing.turn_queue import TurnQueue
from p2pserve.coordinator.sharing.values import SharingError

from .shared_services import expected, profiles_of, step


def test_what_is_seen_replaces_what_was_expected() -> None:
    learned = LearnedMoments(ExpectedMoments(100.0, 0.0))
    rng = np.random.default_rng(0)
    for value in rng.normal(5.0, 2.0, 3000):
        learned.note(float(value))
    assert learned.mean == pytest.approx(5.0, rel=0.1)
    assert learned.deviation == pytest.approx(2.0, rel=0.2)


def test_at_first_the_expectation_counts() -> None:
    learned = LearnedMoments(ExpectedMoments(10.0, 0.0))
    learned.note(19.0)
    assert learned.mean == pytest.approx(11.0)  # a ninth
    for value in (-1.0, float("inf"), float("nan")):
        learned.note(value)
    assert learned.mean == pytest.approx(11.0)


def test_new_traffic_is_followed() -> None:
    learned = LearnedMoments(ExpectedMoments(1.0, 0.0))
    for _ in range(5000):
        learned.note(1.0)
    for _ in range(3 * int(MEMORY)):
        learned.note(3.0)
    assert learned.mean == pytest.approx(3.0, rel=0.05)


def test_profiles_are_learned_from_the_requests_of_a_queue() -> None:
    profiles = profiles_of(one=(4.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    for number in range(400):
        request = queue.add(number, "one", 50, float(number))
        step(queue, float(number), 0.5)
        step(queue, float(number), 0.25)
        step(queue, float(number), 0.25)
        queue.finish(request, 3)
    assert profiles["one"].execution.mean == pytest.approx(1.0, rel=0.3)
    assert profiles["one"].output_tokens.mean == pytest.approx(3.0, rel=0.3)
    assert profiles["one"].decode_step.mean == pytest.approx(0.25, rel=0.1)


def test_requests_that_are_cancelled_teach_nothing() -> None:
    profiles = profiles_of(one=(4.0, 0.0))
    queue = TurnQueue(DoublingBudget(profiles), profiles)
    queue.add("a", "one", 50, 0.0)
    step(queue, 0.0, 0.5)
    queue.remove(queue.requests["a"])
    assert profiles["one"].execution.mean == 4.0


def test_what_the_planner_expects_is_the_time_of_lone_requests() -> None:
    shape = model_shape("llama2-7b")
    times = replica_times(shape, [StageHardware(gpu_table().find("A100-SXM4-80GB"), 1, shape.layers, 160.0)])
    prompts, outputs = np.array([100, 300]), np.array([10, 200])
    found = expect_service(times, prompts, outputs)
    alone = [lone_execution_s(times, 100, 10), lone_execution_s(times, 300, 200)]
    assert found.execution.mean == pytest.approx(np.mean(alone))
    assert found.execution.deviation == pytest.approx(np.std(alone))
    assert found.prompt_tokens == ExpectedMoments(200.0, 100.0)
    with pytest.raises(SharingError, match="2 prompts and 1 answers"):
        expect_service(times, prompts, outputs[:1])


def test_a_profile_that_moves_to_faster_gpus_is_scaled() -> None:
    profile = ServiceProfile(expected(4.0, 1.0))
    for _ in range(100):
        profile.execution.note(6.0)
    moved = profile.rescaled(expected(4.0, 1.0), expected(2.0, 0.5))
    assert moved.execution.mean == pytest.approx(profile.execution.mean / 2.0)
    assert moved.execution.deviation == pytest.approx(profile.execution.deviation / 2.0)
    assert moved.output_tokens.mean == profile.output_tokens.mean


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (float("nan"), 0.0)])
def test_what_cannot_be_expected_is_refused(mean: float, deviation: float) -> None:
    with pytest.raises(SharingError, match="cannot be expected"):
        ExpectedMoments(mean, deviation)
