"""A node's folder: identity, log, and a lock that says which process is using it."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import NodeError


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Hold `home` for this process; the lock file names its pid. Raises NodeError when another node runs there."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(_lock_file(home), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise NodeError(f"home {home}: cannot be used: {error.strerror}; give another folder with --home") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NodeError(
                f"home {home}: a node is running there already; stop it with `p2pserve leave`, or give --home"
            ) from None
        except OSError as error:
            raise NodeError(f"home {home}: cannot be locked: {error.strerror}; give another folder") from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise NodeError(f"home {home}: cannot be written: {error.strerror}") from error
        yield
    finally:
        # The file stays: removing it would let two processes hold "the" lock. An unlocked file means nothing.
        os.close(descriptor)


def running_pid(home: Path) -> int | None:
    """The pid of the node that holds `home`, or None. Raises NodeError for a folder that cannot be read."""
    try:
        with _lock_file(home).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read(32).decode("ascii", "replace").strip()
                return (int(text) or None) if text.isdigit() else None  # 0 would be everyone of this group
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NodeError(f"home {home}: cannot be read: {error.strerror}; give its folder with --home") from error
    return None


def ask_to_leave(home: Path) -> int | None:
    """Ask the node of `home` to drain and leave; its pid, or None where it has just ended. Raises NodeError."""
    pid = running_pid(home)
    if pid is None:
        raise NodeError(f"home {home}: no node is running there; give its folder with --home")
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return None
    except PermissionError:
        raise NodeError(f"home {home}: the node (pid {pid}) belongs to another user") from None
    return pid


def wait_until_left(
    home: Path,
    pid: int,
    timeout_s: float,
    *,
    look: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the node of `home` that has been asked is gone. `look` is called meanwhile. Raises NodeError."""
    give_up = clock() + timeout_s
    while running_pid(home) == pid:
        if clock() > give_up:
            raise NodeError(f"home {home}: the node (pid {pid}) is still draining after {timeout_s:g} s")
        look()
        sleep(0.05)


def _lock_file(home: Path) -> Path:
    return home / "node.lock"
