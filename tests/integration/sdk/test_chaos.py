"""A short run of chaos with real processes, and what it is made of. `make chaos` runs longer ones."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from p2pserve.node.models import BUNDLED
from p2pserve.sdk.chaos.boxes import MARK, find_marked
from p2pserve.sdk.chaos.disks import fill_disk, open_disks
from p2pserve.sdk.chaos.engines import find_clear_answers
from p2pserve.sdk.chaos.links import open_links, why_no_links
from p2pserve.sdk.chaos.running import run_chaos
from p2pserve.sdk.chaos.schedule import LOOPBACK, WAN, ChaosSettings

from ..node.engine.answers.answers import greedy

pytestmark = pytest.mark.timeout(300)

REASON = why_no_links()
needs_root = pytest.mark.skipif(REASON is not None, reason=f"links cannot be emulated here: {REASON}")
SETTINGS = ChaosSettings(
    seed=7, faults=5, requests=40, seconds=13.0, boxes=4, links=WAN if REASON is None else LOOPBACK, liar=True
)


def test_every_answer_is_right_or_ends_in_time_and_nothing_is_left_over() -> None:
    said: list[str] = []
    report = trio.run(run_chaos, SETTINGS, said.append)
    assert report.wrong == report.lost == (), said
    assert report.left_over == report.troubles == (), said
    assert report.requests == SETTINGS.requests
    assert report.completed + report.lied + sum(report.failed.values()) == report.requests
    assert report.completed + report.lied > 0.9 * report.requests, report.failed
    assert report.completed > 0.5 * report.requests, "the one that lies looks like the best of five boxes"
    assert sum(report.faults.values()) == SETTINGS.faults


def test_a_process_that_outlives_its_box_is_found_by_its_mark() -> None:
    mark = secrets.token_hex(8)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}, stdin=subprocess.PIPE) as left:
        assert [process.pid for process in find_marked(mark)] == [left.pid]
        left.communicate(b"\n")
    assert find_marked(mark) == []


def test_right_answers_are_those_of_transformers() -> None:
    answers = find_clear_answers(longest=40, count=6)
    for prompt, answer in list(answers.items())[:3]:
        assert list(answer) == greedy(BUNDLED, prompt, 6)


@needs_root
def test_a_run_is_where_its_clients_are_and_comes_back() -> None:
    here = Path("/proc/thread-self/ns/net")
    before = here.readlink()
    with open_links(1) as links:
        assert here.readlink() != before
        (place,) = links.places()
        inside = subprocess.check_output([*place.prefix, "readlink", "/proc/self/ns/net"], text=True)
        assert inside.strip() not in {"", str(before), str(here.readlink())}
    assert here.readlink() == before


@needs_root
def test_a_full_disk_takes_nothing_until_it_is_free_again(tmp_path: Path) -> None:
    folder = tmp_path / "home"

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill_disk, folder, 600.0)
            with trio.fail_after(60):
                while (status := os.statvfs(folder)).f_bavail * status.f_frsize:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            with pytest.raises(OSError, match="No space left"):
                (folder / "more").write_bytes(bytes(100_000))
            nursery.cancel_scope.cancel()
        (folder / "more").write_bytes(bytes(100_000))

    with open_disks([folder]):
        trio.run(main)
    assert list(folder.iterdir()) == [], "what was written is gone with its file system"
