"""An engine that waits for KV sleeps, but not between the step that has found it and the one that goes on with it."""

import pytest

from p2pserve.node.engine.transfers.idle import IdleSteps


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_what_news_bring_is_known_before_the_engine_sleeps_again(in_flight: int) -> None:
    """A loop around steps whose outcome comes when `in_flight` of them have been launched; KV comes during a sleep."""
    idle = IdleSteps(in_flight)
    launched: list[bool] = []  # of each step: whether it found KV
    arrived, running, slept = False, False, []
    for _ in range(20):
        launched.append(arrived)
        running = any(launched[: len(launched) - in_flight + 1])
        if running:
            break
        idle.on_step(idle=True)
        if idle.may_sleep:
            slept.append(len(launched))
            if len(slept) == 2:
                arrived = True
                idle.on_news()
    assert running
    assert slept == [in_flight, in_flight + 1]
    assert len(launched) == slept[-1] + in_flight


def test_an_engine_that_has_just_been_busy_does_not_sleep() -> None:
    idle = IdleSteps(2)
    assert not idle.may_sleep
    for was_idle, may_sleep in ((True, False), (True, True), (True, True), (False, False), (True, False), (True, True)):
        idle.on_step(idle=was_idle)
        assert idle.may_sleep == may_sleep
