"""`p2pserve logs`: nodes' own logs, and what their processes have printed, as lines that can be chosen among."""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
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
from .own_nodes import find_own_nodes

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


@final
class OpenLog:
    """The log of one node, or what one of its processes has printed, with the file before it. `node`: what stands
    before its lines. Closed by `close`."""

    def __init__(self, node: str, path: Path, reader: LogReader, wanted: LogFilter) -> None:
        self.node = node
        self._path = path
        self._reader = reader
        self._wanted = wanted
        self._file = _open(path)
        self._rest = b""

    def read_all(self) -> Iterator[LogLine]:
        """What is in both files."""
        older = self._path.with_name(f"{self._path.name}.1")
        if older.exists():
            with _open(older) as file:
                yield from self._choose(file)
        yield from self._choose(self._file)

    def read_new(self) -> Iterator[LogLine]:
        """What has been written since; on in the next file when this one is set aside."""
        while True:
            raw = self._file.readline()
            if raw:
                self._rest += raw
                if self._rest.endswith(b"\n"):
                    found, self._rest = self._choose((self._rest,)), b""
                    yield from found
            elif _is_other(self._path, self._file) and not self._file.peek(1):
                self._file.close()
                self._file, self._rest = _open(self._path), b""
            else:
                return

    def close(self) -> None:
        """Close its file."""
        self._file.close()

    def _choose(self, raw: Iterable[bytes]) -> Iterator[LogLine]:
        made = (line for each in raw if (line := self._reader.read(each)) is not None)
        return filter(self._wanted.wants, made)


def logs(arguments: SimpleNamespace) -> int:
    """`p2pserve logs`."""
    home = arguments.home.expanduser()
    wanted = LogFilter(
        since=time.time() - arguments.since if arguments.since is not None else 0.0,
        level=arguments.level,
        request=arguments.request.removesuffix("..."),
    )
    paths = {
        name: home / name / {"node": NAME, **OTHERS}[arguments.of] for name in find_own_nodes(home, arguments.node)
    }
    there = {name: path for name, path in paths.items() if path.exists()}  # of several, one may have none yet
    with ExitStack() as stack:
        opened: list[OpenLog] = []
        for name, path in (there or paths).items():
            opened.append(OpenLog(name if len(paths) > 1 else "", path, LogReader(arguments.of, time.time), wanted))
            stack.callback(opened[-1].close)
        # One by one by their times; without one they stay behind the line before them.
        merged = heapq.merge(*map(_with_node, opened), key=lambda each: each[0].time)
        found = deque(merged, maxlen=arguments.lines)
        for line, node in found:
            _print(line, node, arguments.format)
        if not found and not arguments.follow:
            print(f"{', '.join(map(str, there.values()))}: no such lines", file=sys.stderr)
        while arguments.follow:
            for log in opened:
                for line in log.read_new():
                    _print(line, log.node, arguments.format)
            time.sleep(LOOK_S)
    return 0


def _with_node(log: OpenLog) -> Iterator[tuple[LogLine, str]]:
    return ((line, log.node) for line in log.read_all())


def describe(line: LogLine) -> str:
    """`11-25 12:00:01.250  warning  text`, in UTC, and a traceback below it. Ids of boxes are shortened."""
    at = datetime.fromtimestamp(line.time, UTC).strftime("%m-%d %H:%M:%S.%f")[:-3] if line.time else " " * 18
    text = f"{at}  {line.level:<7}  {_PEER.sub(lambda found: name_of(found[0]), line.text)}"
    return f"{text}\n{line.traceback.rstrip()}" if line.traceback else text


def _print(line: LogLine, node: str, form: str) -> None:
    """`node`: who has written it, where several have."""
    if form == "json":
        fields = {**({"node": node} if node else {}), **msgspec.to_builtins(line)}
        print(msgspec.json.encode(fields).decode(), flush=True)
    else:
        print(printable(f"{node}  {describe(line)}" if node else describe(line)), flush=True)


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NodeError(f"{path}: there is no such log; name the home of a node that has run with --home") from None
    except OSError as error:
        raise NodeError(f"{path}: cannot be read: {error.strerror}") from error


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
