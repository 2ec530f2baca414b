"""A node's own log: what its process has to say, as lines of JSON in two files of bounded size.

    {"time": 1795600000.25, "level": "warning", "part": "bootstrap.sessions", "text": "...", "request": "5f3a..."}

What the node tells its owner is in it, warnings and errors with their tracebacks, and each event of the network as a
line. Lines are written by a thread: no request waits for the disk.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

NAME: Final = "node.log"
OTHERS: Final = {"engine": "engine.log", "api": "api.log"}
"""What the processes of a node print: vLLM's own lines."""

MAX_BYTES: Final = 8 << 20
"""Of each of the two files: some 40,000 lines. More: more of the past, and of the disk."""

_PACKAGE: Final = __name__.partition(".")[0]
_MAX_TEXT: Final = 4000
_MAX_WAITING: Final = 10_000  # lines for a disk that hangs; what comes then is lost
TOLD: Final = f"{_PACKAGE}.node"
"""The logger of what the owner is told beside it."""

_told = logging.getLogger(TOLD)


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line: `time` in unix seconds, `level` one of debug, info, warning and error, `part` of the program."""

    time: float
    level: str
    part: str
    text: str
    request: str = ""
    peer: str = ""
    traceback: str = ""


class _Formatter(logging.Formatter):
    """A record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = LogLine(
            time=round(record.created, 3),
            level="error" if record.levelno >= logging.ERROR else record.levelname.lower(),
            part=record.name.removeprefix(f"{_PACKAGE}."),
            text=record.getMessage()[:_MAX_TEXT],
            request=getattr(record, "request", ""),
            peer=getattr(record, "peer", ""),
            traceback=getattr(record, "traceback", ""),
        )
        return msgspec.json.encode(line).decode()


class _File(logging.handlers.RotatingFileHandler):
    """The two files. What fails is said once, and costs the log alone."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._has_failed = False
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="replace")
        self.setFormatter(_Formatter())

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return os.fdopen(descriptor, self.mode, encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the library's name)
        """Called in the handler of that error, by the thread that writes."""
        if not self._has_failed:
            self._has_failed = True
            self._say(f"{self.baseFilename}: the log is not kept: {sys.exc_info()[1]}; free some space there")


class _Handler(logging.handlers.QueueHandler):
    """Hands lines to the thread that writes them; those beyond _MAX_WAITING are dropped."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """In the thread of whoever logs: what is logged may change later, and errors hold their frames."""
        if record.exc_info and record.exc_info[1] is not None:
            record.traceback = "".join(traceback.format_exception(record.exc_info[1]))[-4 * _MAX_TEXT :]
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


@contextmanager
def keep_log(home: Path, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """While the body runs, what this process logs is kept in `home`; yields a `say` whose lines are kept too. Where
    the log cannot be written, that is said once, and the node runs without."""
    for name in OTHERS.values():
        _set_aside(home / name)
    try:
        file = _File(home / NAME, say)
    except OSError as error:
        say(f"{home / NAME}: the log cannot be written: {error.strerror}")
        yield say
        return
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
    handler = _Handler(lines)
    listener = logging.handlers.QueueListener(lines, file)
    root, ours = logging.getLogger(), logging.getLogger(_PACKAGE)
    before = ours.level
    ours.setLevel(logging.INFO)
    root.addHandler(handler)
    listener.start()

    def tell(text: str) -> None:
        _told.log(logging.WARNING if text.startswith("warning") else logging.INFO, "%s", text)
        say(text)

    try:
        yield tell
    except Exception as error:
        _told.error("the node ends: %s", "; ".join(_leaves(error)))
        raise
    finally:
        root.removeHandler(handler)
        ours.setLevel(before)
        listener.stop()
        file.close()


def _set_aside(log: Path) -> None:
    """What its processes have printed is bounded when a node starts."""
    with suppress(OSError):
        if log.stat().st_size > MAX_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


def _leaves(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [line for inner in error.exceptions for line in _leaves(inner)]
    return [f"{type(error).__name__}: {error}"]
