"""Whole events of a stream (`text/event-stream`), so that one which breaks off ends between two of them. No I/O."""

from __future__ import annotations

from typing import Final, final

MAX_EVENT_BYTES: Final = 1 << 20
_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


@final
class EventSplitter:
    """Bytes in, whole events out. An event of more than MAX_EVENT_BYTES is let through as it comes."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now."""
        # An end may stand across the old and the new bytes; what is before them was looked at.
        start = max(0, len(self.rest) - 3)
        self.rest += data
        end = max(at + len(mark) if (at := self.rest.rfind(mark, start)) >= 0 else 0 for mark in _ENDS)
        if not end and len(self.rest) > MAX_EVENT_BYTES:
            end = len(self.rest)
        whole, self.rest = self.rest[:end], self.rest[end:]
        return whole
