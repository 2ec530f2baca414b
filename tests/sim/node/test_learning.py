"""A node learns how fast its engine is from the engine's own steps."""

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2pserve.coordinator import StepSample
from p2pserve.coordinator.costs.profile_tracker import LATEST
from p2pserve.node.engine.protocol import Iterations
from p2pserve.node.learning import Learner
from p2pserve.node.settings import WAN


def iterations(*samples: StepSample) -> Iterations:
    return Iterations(
        steps=len(samples),
        seconds=sum(sample.seconds for sample in samples),
        longest_s=max((sample.seconds for sample in samples), default=0.0),
        prefill_tokens=sum(sample.prefill_tokens for sample in samples),
        decode_tokens=sum(sample.decode_requests for sample in samples),
        decode_context=sum(sample.decode_context for sample in samples),
        preemptions=0,
        samples=samples,
    )


def decode_steps() -> tuple[StepSample, ...]:
    """Of an engine that takes 10 ms a step and 1 ms a request."""
    return tuple(StepSample(0.010 + 0.001 * batch, 0, 0, batch, batch * 100) for batch in range(1, 9))


@pytest.fixture
def autojump_clock() -> MockClock:
    return MockClock(autojump_threshold=0.05)


async def learn(learner: Learner, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await learner.run()


def test_steps_become_a_profile(autojump_clock: MockClock) -> None:
    async def main() -> None:
        learner = Learner()
        await learn(learner, 1.5 * WAN.profile_interval_s)
        before = learner.profile
        assert before is None, "nothing has been seen yet"
        learner.add(iterations(*decode_steps()))
        await learn(learner, 1.5 * WAN.profile_interval_s)
        learned = learner.profile
        assert learned is not None
        assert learned.prefill is None
        assert learned.decode is not None
        cost = learned.decode.cost
        assert cost.seconds(4, 100) == pytest.approx(0.014, rel=0.02)
        learner.begin("alone")
        forgotten = learner.profile
        assert forgotten is None, "that engine is gone"
        learner.add(iterations(*decode_steps()))
        await learner.refit()
        again = learner.profile
        assert again is not None
        learner.begin("alone")
        assert learner.profile is again, "started again for the same layers, it is as fast as before"

    trio.run(main, clock=autojump_clock)


def test_another_speed_is_fitted_at_once(autojump_clock: MockClock) -> None:
    """Steps that suddenly take 1.5 times as long do not wait for the next fit."""

    async def main() -> None:
        told: list[float] = []
        learner = Learner(interval_s=3600.0, on_change=told.append)
        for _ in range(8):
            learner.add(iterations(*decode_steps()))
        await learner.refit()
        for _ in range(4):
            learner.add(iterations(*decode_steps()))
        slower = [msgspec.structs.replace(step, seconds=1.5 * step.seconds) for step in decode_steps()]
        for _ in range(2 * LATEST // len(slower)):
            learner.add(iterations(*slower))
        await learn(learner, 60.0)
        assert told == [pytest.approx(1.5, rel=0.02)]
        found = learner.profile
        assert found is not None
        assert found.decode is not None
        assert found.decode.cost.seconds(4, 100) == pytest.approx(1.5 * 0.014, rel=0.03)

    trio.run(main, clock=autojump_clock)
