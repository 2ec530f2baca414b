"""A node learns how fast its engine is from the engine's own steps."""

import pytest
import trio
from trio.testing import MockClock

from p2pserve.coordinator import StepSample
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
        learner.forget()
        await learn(learner, 1.5 * WAN.profile_interval_s)
        forgotten = learner.profile
        assert forgotten is None, "that engine is gone"

    trio.run(main, clock=autojump_clock)
