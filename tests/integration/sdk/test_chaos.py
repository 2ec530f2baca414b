"""A short run of chaos with real processes. `make chaos` runs longer ones."""

import pytest
import trio

from p2pserve.sdk.chaos.running import run_chaos
from p2pserve.sdk.chaos.schedule import ChaosSettings

pytestmark = pytest.mark.timeout(300)

SETTINGS = ChaosSettings(seed=5, faults=5, requests=40, seconds=13.0, boxes=4)


def test_every_answer_is_right_or_ends_in_time_and_nothing_is_left_over() -> None:
    said: list[str] = []
    report = trio.run(run_chaos, SETTINGS, said.append)
    assert report.wrong == report.lost == (), said
    assert report.left_over == report.troubles == (), said
    assert report.requests == SETTINGS.requests
    assert report.completed + sum(report.failed.values()) == report.requests
    assert report.completed > 0.9 * report.requests, report.failed
    assert sum(report.faults.values()) == SETTINGS.faults
