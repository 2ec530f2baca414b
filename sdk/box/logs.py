"""`p2pserve logs`: a node's own log, and what its processes have printed, as lines that can be chosen among."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace
from typing import Final, final

import msgspec

from ...coordinator.names import name_of
from ...node.box.errors import NodeError
from ...node.observing.node_log import NAME, OTHERS, LogLine
from ..printing import printable
from .own_nodes import find_own_node

LOOK_S: Final = 0.3
LEVELS: Final = ("debug", "info", "warning", "error")
_VLLM: Final = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_PEER: Final = re.compile(r"\b12D3KooW\w{40,}")
_lines = msgspec.json.Decoder(LogLine)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which lines are wanted: from `since` (unix seconds) on, of `level` or worse, of a request whose id begins so."""

    since: float = 0.0
    level: str = LEVELS[0]
    request: str = ""

    def wants(self, line: LogLine) -> bool:
        """Whether this one is."""
        if line.time < self.since or not line.request.startswith(self.request):
            return False
        return line.level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(self.level)


@final
class LogReader:
    """Makes lines of what a file has, in order. `part` has printed it, where it is no node's own log; `now` is a clock
    of unix seconds."""

    def __init__(self, part: str, now: Callable[[], float]) -> None:
        self._part = part
        self._now = now
        self._last = LogLine(time=0.0, level="info", part=part, text="")

    def read(self, raw: bytes) -> LogLine | None:
        """A whole line of the file; None for one that is empty, or was damaged."""
        text = raw.decode("utf-8", "replace").rstrip()
        if not text:
            return None
        if self._part != "node":
            return self._read_print(text)
        try:
            return _lines.decode(text)
        except msgspec.MsgspecError:
            return None

    def _read_print(self, text: str) -> LogLine:
        """vLLM's lines say level and local time; what follows one belongs to it."""
        found = _VLLM.match(text)
        if found is None:
            return msgspec.structs.replace(self._last, text=text)
        level, at, rest = found.groups()
        level = "error" if level == "CRITICAL" else level.lower()
        self._last = LogLine(time=_unix(at, self._now()), level=level, part=self._part, text="")
        return msgspec.structs.replace(self._last, text=rest)


def logs(arguments: SimpleNamespace) -> int:
    """`p2pserve logs`."""
    home = arguments.home.expanduser()
    path = home / find_own_node(home, arguments.node) / {"node": NAME, **OTHERS}[arguments.of]
    wanted = LogFilter(
        since=time.time() - arguments.since if arguments.since is not None else 0.0,
        level=arguments.level,
        request=arguments.request.removesuffix("..."),
    )
    reader = LogReader(arguments.of, time.time)
    file = _open(path)
    with file:
        older = path.with_name(f"{path.name}.1")
        found = deque(_read_all((older, path), file, reader, wanted), maxlen=arguments.lines)
        for line in found:
            _print(line, arguments.format)
        if not found and not arguments.follow:
            print(f"{path}: no such lines", file=sys.stderr)
        if arguments.follow:
            for line in _follow(path, file, reader, lambda: time.sleep(LOOK_S)):
                if wanted.wants(line):
                    _print(line, arguments.format)
    return 0


def describe(line: LogLine) -> str:
    """`11-25 12:00:01.250  warning  text`, in UTC, and a traceback below it. Ids of boxes are shortened."""
    at = datetime.fromtimestamp(line.time, UTC).strftime("%m-%d %H:%M:%S.%f")[:-3] if line.time else " " * 18
    text = f"{at}  {line.level:<7}  {_PEER.sub(lambda found: name_of(found[0]), line.text)}"
    return f"{text}\n{line.traceback.rstrip()}" if line.traceback else text


def _print(line: LogLine, form: str) -> None:
    print(msgspec.json.encode(line).decode() if form == "json" else printable(describe(line)), flush=True)


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NodeError(f"{path}: there is no such log; name the home of a node that has run with --home") from None
    except OSError as error:
        raise NodeError(f"{path}: cannot be read: {error.strerror}") from error


def _read_all(
    paths: tuple[Path, Path], newest: BufferedReader, reader: LogReader, wanted: LogFilter
) -> Iterator[LogLine]:
    older, _ = paths
    if older.exists():
        with _open(older) as file:
            yield from filter(wanted.wants, _made(file, reader))
    yield from filter(wanted.wants, _made(newest, reader))


def _made(raw: Iterable[bytes], reader: LogReader) -> Iterator[LogLine]:
    return (line for each in raw if (line := reader.read(each)) is not None)


def _follow(
    path: Path, file: BufferedReader, reader: LogReader, wait: Callable[[], None]
) -> Generator[LogLine, None, None]:
    """Lines as they are written, for as long as somebody wants them; on in the next file when this one is set aside.
    Closes the file."""
    rest = b""
    try:
        while True:
            raw = file.readline()
            if raw:
                rest += raw
                if rest.endswith(b"\n"):
                    line, rest = reader.read(rest), b""
                    if line is not None:
                        yield line
                continue
            wait()
            if _is_other(path, file) and not file.peek(1):
                file.close()
                file, rest = _open(path), b""
    finally:
        file.close()


def _is_other(path: Path, file: BufferedReader) -> bool:
    """Whether the name stands for another file by now."""
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _unix(at: str, now: float) -> float:
    """A local time without its year: the latest that is not to come."""
    year = datetime.fromtimestamp(now).year  # noqa: DTZ006 (vLLM writes local times)
    for each in (year, year - 1):
        try:
            found = datetime.strptime(f"{each}-{at}", "%Y-%m-%d %H:%M:%S").timestamp()  # noqa: DTZ007 (as above)
        except ValueError:
            continue
        if found <= now + 86_400.0:
            return found
    return 0.0
