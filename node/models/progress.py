"""How far a download has come, and how that is shown on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TextIO, final

import msgspec

Bytes = Annotated[int, msgspec.Meta(ge=0)]

TERMINAL_INTERVAL_S = 0.2  # a bar that is rewritten in place
LOG_INTERVAL_S = 10.0  # lines that stay


class DownloadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A download: bytes that are here, of all that are wanted, and the file that the latest of them belong to."""

    done_bytes: Bytes
    total_bytes: Bytes
    file: str

    @property
    def percent(self) -> int:
        """Rounded down, so that 100 means all of it."""
        return 100 * self.done_bytes // self.total_bytes if self.total_bytes else 100


Report = Callable[[DownloadProgress], None]
"""Called from the threads of a download, one call at a time. What it raises stops the download."""


@final
class ProgressLine:
    """When a line is due and what it says: at once, every `interval_s`, and at the end. The speed
    is that since the first call."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._start: tuple[float, int] | None = None
        self._due_at = 0.0
        self._finished = False

    def line(self, progress: DownloadProgress, now: float) -> str | None:
        """The line for this moment (seconds of any clock), or None while none is due."""
        finished = progress.done_bytes >= progress.total_bytes
        if self._start is None:
            self._start = (now, progress.done_bytes)
        elif self._finished or (now < self._due_at and not finished):
            return None
        self._finished, self._due_at = finished, now + self._interval_s
        begun_at, begun_bytes = self._start
        text = f"{progress.file}: {_size(progress.done_bytes)} of {_size(progress.total_bytes)} ({progress.percent} %)"
        fetched, elapsed_s = progress.done_bytes - begun_bytes, now - begun_at
        if fetched > 0 and elapsed_s > 0:
            speed = fetched / elapsed_s
            text += f", {_size(speed)}/s"
            if not finished:
                text += f", {_duration((progress.total_bytes - progress.done_bytes) / speed)} left"
        return text


@final
class TerminalProgress:
    """A `Report` for people: one line rewritten in place on a terminal, a line now and then anywhere else."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._in_place = stream.isatty()
        self._line = ProgressLine(TERMINAL_INTERVAL_S if self._in_place else LOG_INTERVAL_S)

    def __call__(self, progress: DownloadProgress) -> None:
        """Write a line if one is due."""
        text = self._line.line(progress, self._clock())
        if text is None:
            return
        if not self._in_place:
            text += "\n"
        else:
            text = f"\r\x1b[K{text}"
            if progress.done_bytes >= progress.total_bytes:
                text += "\n"
        self._stream.write(text)
        self._stream.flush()


def _size(count: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
