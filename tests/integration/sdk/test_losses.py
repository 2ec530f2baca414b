"""Boxes that are killed or stopped in the middle of their work, as a client sees it."""

import pytest
import trio

from p2pserve.bootstrap import NetworkSettings
from p2pserve.sdk.live.losses import LossSettings, run_losses

pytestmark = pytest.mark.timeout(400)

SETTINGS = LossSettings(times=1, output=120, lost_at=20)


def test_answers_go_on_elsewhere_before_the_lost_box_is_given_up() -> None:
    said: list[str] = []
    found = trio.run(run_losses, SETTINGS, ("decode", "prefill"), said.append)
    given_up_s = NetworkSettings().dead_s
    for lost in ("decode stopped", "decode killed"):
        assert found[lost]["worst_gap_s"] < given_up_s, said
    for lost in ("prefill stopped", "prefill killed"):
        assert found[lost]["worst_ttft_s"] < given_up_s, said
    assert any("decode node" in line and "did not answer" in line for line in said)
    assert any("prefill node" in line and "did not answer" in line for line in said)
