"""A node's folder: one node at a time, and leaving it."""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pserve.node.box.errors import NodeError
from p2pserve.node.box.home import ask_to_leave, lock_home, running_pid, wait_until_left


class Kill:
    """Stands in for `os.kill`; notes what was sent and may raise."""

    def __init__(self, error: OSError | None = None) -> None:
        self.sent: list[tuple[int, int]] = []
        self.error = error

    def __call__(self, pid: int, number: int) -> None:
        self.sent.append((pid, number))
        if self.error is not None:
            raise self.error


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps = 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


def leave(home: Path, clock: Clock, sleep: Callable[[float], None] | None = None) -> None:
    pid = ask_to_leave(home)
    if pid is not None:
        wait_until_left(home, pid, 3.0, clock=clock, sleep=sleep or clock.sleep)


def test_a_home_is_made_and_names_its_pid(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    assert running_pid(home) is None
    with lock_home(home):
        assert running_pid(home) == os.getpid()
        assert home.stat().st_mode & 0o777 == 0o700
    assert running_pid(home) is None
    with lock_home(home):
        assert running_pid(home) == os.getpid()


def test_a_second_node_in_the_same_home_is_refused(tmp_path: Path) -> None:
    with lock_home(tmp_path):
        with pytest.raises(NodeError, match=r"a node is running there already.*--home"), lock_home(tmp_path):
            pytest.fail("two nodes hold one home")
        assert running_pid(tmp_path) == os.getpid()


def test_the_lock_is_released_when_the_node_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_home(tmp_path):
        raise KeyError
    with lock_home(tmp_path):
        pass


def test_a_home_that_is_a_file_or_below_one_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for home in (file, file / "below"):
        with pytest.raises(NodeError, match=r"cannot be used: .*--home") as caught, lock_home(home):
            pytest.fail("a file is no home")
        assert "\n" not in str(caught.value)


def test_a_home_that_may_not_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, so the system call says it."""

    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NodeError, match=r"cannot be used: Permission denied; give another folder"), lock_home(tmp_path):
        pytest.fail("nothing can be written there")


def test_a_full_disk_is_one_line_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(NodeError, match="cannot be written: No space left"), lock_home(tmp_path):
            pytest.fail("the pid is not there")
    assert running_pid(tmp_path) is None


def test_a_file_system_without_locks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(NodeError, match="cannot be locked: No locks available"), lock_home(tmp_path):
        pytest.fail("nothing is locked")


def test_leaving_where_no_node_runs_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with lock_home(tmp_path / "old"):
        pass
    for home in (tmp_path / "none", tmp_path / "old", tmp_path / "file"):
        with pytest.raises(NodeError, match=r"no node is running there.*--home"):
            leave(home, Clock())


def test_a_home_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "node.lock").mkdir()
    with pytest.raises(NodeError, match="cannot be read: Is a directory"):
        leave(tmp_path, Clock())


def test_leaving_asks_the_node_and_waits_until_it_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill, clock = Kill(), Clock()
    monkeypatch.setattr(os, "kill", kill)
    holder = lock_home(tmp_path)
    holder.__enter__()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.naps == 5:
            holder.__exit__(None, None, None)

    leave(tmp_path, clock, sleep)
    assert kill.sent == [(os.getpid(), signal.SIGTERM)]
    assert clock.naps == 5


def test_a_node_that_drains_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", Kill())
    clock = Clock()
    with lock_home(tmp_path), pytest.raises(NodeError, match=rf"pid {os.getpid()}\) is still draining after 3 s"):
        leave(tmp_path, clock)
    assert 3.0 < clock.now < 3.5


def test_a_node_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", Kill(PermissionError()))
    with lock_home(tmp_path), pytest.raises(NodeError, match="belongs to another user"):
        leave(tmp_path, Clock())


def test_a_node_that_has_just_ended_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", Kill(ProcessLookupError()))
    with lock_home(tmp_path):
        leave(tmp_path, Clock())


@pytest.mark.parametrize("content", [b"", b"garbage\n", b"-5\n", "٣".encode(), b"0\n"])
def test_nobody_is_signalled_for_a_pid_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    kill = Kill()
    monkeypatch.setattr(os, "kill", kill)
    with lock_home(tmp_path):
        (lock,) = tmp_path.iterdir()
        lock.write_bytes(content)
        with pytest.raises(NodeError, match="no node is running"):
            leave(tmp_path, Clock())
    assert kill.sent == []
