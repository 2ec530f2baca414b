"""A node's events on disk: MessagePack maps one after the other, which plain `msgpack` reads.

    for event in msgpack.Unpacker(open("events.msgpack", "rb")):
        print(event["time"], event["kind"], event["facts"])

The file is replaced when it is full, and the one before is kept: `events.1.msgpack`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

import msgpack
import msgspec
import trio

from .event_log import KEPT, EventLog
from .values import NodeEvent

NAME: Final = "events.msgpack"
MAX_BYTES: Final = 16 << 20
"""Of each of the two files: some 80,000 events. More: more of the past, and of the disk."""

WRITE_S: Final = 0.5
_MAX_EVENT_BYTES: Final = 1 << 20
_encode = msgspec.msgpack.Encoder().encode


class EventFileError(Exception):
    """A file of events cannot be read. The text is one line that names it."""


def read_events(path: Path) -> list[NodeEvent]:
    """The events of a file, as far as they are whole: its node may be writing, or have lost power. Raises
    EventFileError for a file that cannot be read, or is none."""
    try:
        with path.open("rb") as file:
            events = list(_decode(file))
            is_empty = path.stat().st_size == 0
    except OSError as error:
        raise EventFileError(f"{path}: cannot be read: {error.strerror}") from error
    if not events and not is_empty:
        raise EventFileError(f"{path}: holds no events; name a node's {NAME}")
    return events


def _decode(file: Any) -> Iterator[NodeEvent]:
    try:
        for value in msgpack.Unpacker(file, max_buffer_size=_MAX_EVENT_BYTES, strict_map_key=False):
            yield msgspec.convert(value, NodeEvent)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, msgspec.ValidationError):
        return  # what follows is of no use without what is broken


@final
class EventFile:
    """Of the node whose folder is `home`. What fails is said once, and costs only the file."""

    def __init__(self, home: Path, say: Callable[[str], None], max_bytes: int = MAX_BYTES) -> None:
        self.path = home / NAME
        self.older = self.path.with_name(f"{self.path.stem}.1{self.path.suffix}")
        self._say = say
        self._max_bytes = max_bytes
        self._has_failed = False
        self._waiting: list[NodeEvent] = []
        self._has_news = trio.Event()

    def __repr__(self) -> str:
        return f"<EventFile {self.path}>"

    def load(self) -> list[NodeEvent]:
        """What an earlier run has logged last. New events begin a new file where this one ends in something broken."""
        found: list[NodeEvent] = []
        for path in (self.older, self.path):
            try:
                found += read_events(path) if path.exists() else []
            except EventFileError as error:
                self._say(f"{error}; it is set aside")
                self._rename(path, path.with_suffix(".damaged"))
                continue
            if path == self.path and path.exists() and not self._is_whole():
                self._rename(path, self.older)
        return found[-KEPT:]

    def append(self, events: Sequence[NodeEvent]) -> None:
        """Add these."""
        if not events:
            return
        data = b"".join(map(_encode, events))
        try:
            if self.path.exists() and self.path.stat().st_size + len(data) > self._max_bytes:
                self.path.replace(self.older)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._say(f"{self.path}: events are not kept: {error.strerror}; free some space there")
            self._has_failed = True

    def follow(self, log: EventLog) -> None:
        """Take what is logged from now on; `keep` writes it."""
        log.followers.append(self._take)

    async def keep(self) -> None:
        """Write what is logged, at most twice a second, until cancelled; and the rest then."""
        try:
            while True:
                await self._has_news.wait()
                await trio.sleep(WRITE_S)
                self._has_news = trio.Event()
                batch, self._waiting[:] = self._waiting[:], ()
                await trio.to_thread.run_sync(self.append, batch)
        finally:
            self.append(self._waiting)

    def _take(self, event: NodeEvent) -> None:
        self._waiting.append(event)
        self._has_news.set()

    def _is_whole(self) -> bool:
        """Whether the file ends where an event does: the next one can follow."""
        try:
            whole = sum(len(_encode(event)) for event in read_events(self.path))
            return whole == self.path.stat().st_size
        except (OSError, EventFileError):
            return False

    def _rename(self, path: Path, other: Path) -> None:
        try:
            path.replace(other)
        except OSError as error:
            self._say(f"{path}: cannot be set aside: {error.strerror}")


def merge(logs: Iterable[Sequence[NodeEvent]]) -> list[NodeEvent]:
    """The events of several logs without repetition, by node and number."""
    found = {(event.node, event.number, event.time): event for log in logs for event in log}
    return [found[key] for key in sorted(found)]
