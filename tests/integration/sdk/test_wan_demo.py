"""`p2pserve demo --wan`, with less time for each part: six real nodes, in namespaces that are gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import trio
from rich.console import Console

from p2pserve.sdk.demo.ocean import BOXES
from p2pserve.sdk.demo.wan_demo import WanDemo, WanDemoSettings
from p2pserve.sdk.demo.wan_report import WanReport, picture_lines
from p2pserve.sims.wan import namespaces

from ..node.engine.figures import measured_again

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "p2pserve.sdk.cli", "demo", "--wan"]
SHORT = WanDemoSettings(measure_s=2.0, learn_s=6.0, least_learn_s=2.0, steady_s=2.0, calm_s=3.0, answer_s=30.0)
WAIT_LIMIT_S = 150.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module", autouse=True)
def _has_namespaces() -> None:
    reason = namespaces.unavailable()
    if reason is not None:
        pytest.skip(reason)


def run_short() -> WanReport:
    report = trio.run(WanDemo(SHORT, WAIT_LIMIT_S, Console(quiet=True)).run)
    assert report is not None
    return report


def find_processes() -> set[psutil.Process]:
    """Those of this process, which other tests may have begun as well."""
    return set(psutil.Process().children(recursive=True))


def test_a_link_degrades_and_a_box_is_lost_and_no_request_is() -> None:
    def once() -> None:
        before, processes = set(namespaces.running()), find_processes()
        report = run_short()
        assert set(namespaces.running()) <= before
        assert find_processes() <= processes
        assert report.problems == (), picture_lines(report)
        assert report.ok
        assert report.closed == (BOXES[-1].name,)
        assert report.answers >= sum(stretch.asked for stretch in report.stretches) > 0
        assert all(stretch.lost == 0 for stretch in report.stretches)
        link, box = report.events
        assert link.planned_s is not None or link.routed_s is not None
        assert box.planned_s is not None
        assert box.noticed_s is not None
        assert 0 < box.noticed_s <= box.planned_s
        shares = {(each.prefill, each.decode): each.shares for each in report.links}
        before_it, after, _ = shares[report.degraded]
        assert link.planned_s is None or after < before_it
        assert all(last == 0 for ends, (_, _, last) in shares.items() if report.died in ends)

    measured_again(once)


@pytest.mark.parametrize("moment", ["three sites are up", "makes the network", "a client asks"])
def test_an_interrupt_leaves_nothing(moment: str, tmp_path: Path) -> None:
    """When there are namespaces alone, while nodes join, and with requests under way."""
    before = set(namespaces.running())
    process = subprocess.Popen(
        [*COMMAND, "--timeout-s", str(2 * WAIT_LIMIT_S)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    timer = threading.Timer(WAIT_LIMIT_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            if moment in raw.decode():
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(set(namespaces.running()) - before) == len(BOXES) + 1
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_LIMIT_S)
    finally:
        timer.cancel()
        process.kill()
        process.communicate()
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert family
    assert [member for member in family if member.is_running()] == []
    assert set(namespaces.running()) <= before
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_time_says_so_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(namespaces.running())
    done = subprocess.run(
        [*COMMAND, "--timeout-s", "4"],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("p2pserve: error: not done after 4 s, while ")
    assert set(namespaces.running()) <= before
    assert list(tmp_path.iterdir()) == []
