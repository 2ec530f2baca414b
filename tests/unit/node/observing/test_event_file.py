"""Events on disk: plain MessagePack, bounded, and of use after whatever has happened to the file."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from p2pserve.node.observing.event_file import EventFile, EventFileError, merge, read_events
from p2pserve.node.observing.values import EventKind, NodeEvent

from .logs import event, request_events

FIRST = [event(number, float(number), "here", EventKind.LINK_MEASURED, gbps=1.5) for number in range(1, 4)]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def file(tmp_path: Path, said: list[str]) -> EventFile:
    return EventFile(tmp_path, said.append)


def test_plain_msgpack_reads_the_file(file: EventFile) -> None:
    file.append(FIRST[:1])
    file.append(FIRST[1:])
    with file.path.open("rb") as raw:
        found = list(msgpack.Unpacker(raw))
    assert next((each["number"], each["kind"], each["facts"]) for each in found) == (1, "link.measured", {"gbps": 1.5})
    assert read_events(file.path) == FIRST
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_layers_of_a_transfer_survive(file: EventFile) -> None:
    events = request_events()
    file.append(events)
    assert file.load() == events


def test_a_full_file_is_replaced_and_the_one_before_kept(tmp_path: Path, said: list[str]) -> None:
    file = EventFile(tmp_path, said.append, max_bytes=300)
    for each in FIRST * 3:
        file.append([each])
    assert file.older.exists()
    assert file.path.stat().st_size <= 300
    assert file.older.stat().st_size <= 300
    assert file.load()[-1] == FIRST[-1]


def test_what_a_power_cut_has_left_is_read_and_not_written_behind(file: EventFile, said: list[str]) -> None:
    file.append(FIRST)
    file.path.write_bytes(file.path.read_bytes()[:-5])
    assert file.load() == FIRST[:2]
    file.append(FIRST[2:])
    assert read_events(file.path) == FIRST[2:]
    assert said == []


def test_a_file_that_is_none_is_set_aside(file: EventFile, said: list[str]) -> None:
    file.path.write_bytes(b"\xc1 this is no event log")
    assert file.load() == []
    assert "holds no events" in said[0]
    file.append(FIRST)
    assert file.load() == FIRST


def test_nothing_at_all_is_no_fault(file: EventFile, said: list[str]) -> None:
    assert file.load() == []
    file.append([])
    assert not file.path.exists()
    file.path.write_bytes(b"")
    assert (file.load(), said) == ([], [])


def test_a_disk_that_fails_is_told_once(tmp_path: Path, said: list[str]) -> None:
    file = EventFile(tmp_path / "not" / "there", said.append)
    file.append(FIRST)
    file.append(FIRST)
    assert len(said) == 1
    assert "events are not kept" in said[0]


def test_readers_hear_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    with pytest.raises(EventFileError, match=r"missing\.msgpack: cannot be read: No such file"):
        read_events(tmp_path / "missing.msgpack")
    other = tmp_path / "other.bin"
    other.write_bytes(b"\x93\x01\x02\x03")
    with pytest.raises(EventFileError, match="holds no events"):
        read_events(other)


def test_logs_are_merged_without_repetition() -> None:
    other = [event(1, 0.5, "there", EventKind.ENGINE_STATE)]
    assert merge([FIRST, other, FIRST[:2]]) == [*FIRST, *other]


def test_events_are_taken_from_when_the_file_follows(file: EventFile) -> None:
    from p2pserve.node.observing.event_log import EventLog

    log = EventLog("here", lambda: 1.0)
    file.follow(log)
    log.record(EventKind.ENGINE_STATE, state="ready")
    taken: list[NodeEvent] = file._waiting
    assert [each.kind for each in taken] == ["engine.state"]
