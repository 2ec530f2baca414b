"""Boxes that are killed or stopped in the middle of their work, as a client sees it."""

import pytest
import trio

from p2pserve.bootstrap import NetworkSettings
from p2pserve.sdk.live.losses import LossSettings, run_losses

pytestmark = [pytest.mark.beside, pytest.mark.timeout(400)]

SETTINGS = LossSettings(times=1, output=120, lost_at=20)


def find_slowest_s(said: list[str]) -> float:
    """The longest that a client waited for a token after a loss."""
    found = trio.run(run_losses, SETTINGS, ("decode", "prefill"), said.append)
    gaps = (found[lost]["worst_gap_s"] for lost in ("decode stopped", "decode killed"))
    return max(*gaps, *(found[lost]["worst_ttft_s"] for lost in ("prefill stopped", "prefill killed")))


def test_answers_go_on_elsewhere_before_the_lost_box_is_given_up() -> None:
    said: list[str] = []
    if find_slowest_s(said) >= NetworkSettings().dead_s:  # this machine itself may have stood still, but not twice
        assert find_slowest_s(said) < NetworkSettings().dead_s, said
    assert any("decode node" in line and "did not answer" in line for line in said)
    assert any("prefill node" in line and "did not answer" in line for line in said)


def test_an_answer_goes_on_at_another_box_when_its_own_is_told_to_leave() -> None:
    settings = LossSettings(times=1, output=300, lost_at=20, drain_s=3.0)
    said: list[str] = []
    found = trio.run(run_losses, settings, ("leaves",), said.append)
    assert found["decode leaves"]["streams"] == 1
    assert any("decode node" in line and "it is about to leave" in line for line in said)
