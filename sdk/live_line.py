"""What long work says of itself: a line that is rewritten in place on a terminal, lines that stay anywhere else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final, Self, TextIO, final

from .printing import printable

REPEAT_S: Final = 10.0  # before a line of the same words is written again with other figures, where lines stay
_CLEAR: Final = "\r\x1b[K"
_FIGURES: Final = re.compile(r"[\d.,:]+")


@final
class LiveLine:
    """Leaving it clears what is not to stay. `clock` has seconds; `columns` None: those of the terminal."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], columns: int | None = None) -> None:
        self._stream = stream
        self._clock = clock
        self._columns = columns
        self._in_place = stream.isatty()
        self._shown = ""
        self._words = ""
        self._due_at = 0.0

    def __repr__(self) -> str:
        return f"<LiveLine {self._shown!r}>"

    def show(self, text: str) -> None:
        """How far the work is; "" where there is nothing to tell any more."""
        text = " ".join(printable(text).split())
        if text == self._shown:
            return
        self._shown = text
        if self._in_place:
            self._write(_CLEAR + self._fit(text))
            return
        # New words are news. Of figures that move all the time, some are enough.
        words, now = _FIGURES.sub("", text), self._clock()
        if text and (words != self._words or now >= self._due_at):
            self._words, self._due_at = words, now + REPEAT_S
            self._write(f"{text}\n")

    def say(self, text: str) -> None:
        """A line that stays, whatever is being shown."""
        text = printable(text)
        if self._in_place and self._shown:
            self._write(f"{_CLEAR}{text}\n{self._fit(self._shown)}")
        else:
            self._write(f"{text}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.show("")

    def _fit(self, text: str) -> str:
        """On one line of the terminal: one that wraps could not be rewritten."""
        columns = self._columns
        if columns is None:
            try:
                columns = os.get_terminal_size(self._stream.fileno()).columns
            except OSError:
                columns = 80
        return text if len(text) < columns else f"{text[: columns - 4]}..."

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
