"""What goes wrong in a live run, as options and files say it."""

from pathlib import Path

import pytest

from p2pserve.sdk.errors import UsageError
from p2pserve.sdk.live.schedule import (
    LiveFaultKind,
    ScheduledFault,
    check_schedule,
    needs_links,
    parse_fault,
    read_schedule,
)

LOSE = ScheduledFault(20.0, LiveFaultKind.LOSE, (3,))
JOIN = ScheduledFault(50.0, LiveFaultKind.JOIN, (3,))
DEGRADE = ScheduledFault(30.0, LiveFaultKind.DEGRADE, (1, 2), 0.05)


def test_a_file_has_a_fault_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "faults.txt"
    file.write_text("# of eight nodes\njoin 3@50\n\nlose 3@20  # is killed\ndegrade 1:2=0.05@30\n")
    assert read_schedule(file) == (LOSE, DEGRADE, JOIN)
    assert needs_links((LOSE, DEGRADE))
    assert not needs_links((LOSE, JOIN))


@pytest.mark.parametrize("fault", [LOSE, JOIN, DEGRADE])
def test_a_fault_reads_as_it_is_written(fault: ScheduledFault) -> None:
    kind, _, words = str(fault).partition(" ")
    assert parse_fault(LiveFaultKind(kind), words) == fault


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lose", "3"),
        ("lose", "3@-1"),
        ("lose", "3@nan"),
        ("lose", "3@600"),
        ("lose", "1:2@3"),
        ("lose", "3=0.1@20"),
        ("join", "x@3"),
        ("degrade", "1:2@3"),
        ("degrade", "1=0.1@3"),
        ("degrade", "1:1=0.1@3"),
        ("degrade", "1:2=0@3"),
        ("degrade", "1:2=inf@3"),
    ],
)
def test_what_is_no_fault_is_refused(kind: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{kind}: '{text}' is not like"):
        parse_fault(LiveFaultKind(kind), text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lose 3@20\nlosing 3@20", "line 2 of .* is not like `lose 3@20`"),
        ("lose 3 @ 20", "line 1 of .* is not like"),
        ("lose 3@x", "line 1 of .*: lose: '3@x' is not like"),
        ("lose 3@20\n" * 101, "has 101 faults; 100 are the most"),
    ],
)
def test_a_file_is_refused_by_the_line_that_is_wrong(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "faults.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"schedule: {words}" if "101" not in words else words):
        read_schedule(file)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "faults.bin"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="it is no text"):
        read_schedule(file)


def test_nodes_are_lost_and_started_in_turn() -> None:
    check_schedule((JOIN, LOSE, ScheduledFault(60.0, LiveFaultKind.LOSE, (3,))), 8)


@pytest.mark.parametrize(
    ("faults", "nodes", "words"),
    [
        ((LOSE,), 2, "there is no node 3"),
        ((LOSE, ScheduledFault(25.0, LiveFaultKind.LOSE, (3,))), 8, "is lost twice"),
        ((JOIN,), 8, "node 3 is running at 50 s"),
        ((ScheduledFault(1.0, LiveFaultKind.LOSE, (1,)),), 1, "one node has to be left"),
    ],
)
def test_a_schedule_that_cannot_be_carried_out(faults: tuple[ScheduledFault, ...], nodes: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_schedule(faults, nodes)
