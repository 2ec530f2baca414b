"""A short contest, on two real engines."""

import pytest

from p2pserve.sdk.contest.command import ContestSettings, run_contest

pytestmark = [pytest.mark.beside, pytest.mark.timeout(300)]


def test_a_policy_is_asked_every_workload_and_prefixes_come_from_other_boxes() -> None:
    said: list[str] = []
    settings = ContestSettings(policies=("round-robin",), boxes=2, rounds=1, requests=8, rate=4.0)
    report = run_contest(settings, said.append)
    assert report.alike, report
    assert said == ["round-robin: 8 requests"] * 3
    assert [row.workload for row in report.rows] == ["alone", "files", "turns"]
    assert all(row.ttft_mean_s > 0.0 and row.tpot_mean_s > 0.0 for row in report.rows)
    turns = report.prefixes[-1]
    assert (turns.workload, turns.fetched + turns.late >= 1, turns.found >= 1) == ("turns", True, True), report
