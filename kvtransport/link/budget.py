"""A bound on bytes that several transfers of a process hold together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LOOK_AGAIN_S = 0.1


class ByteBudget:
    """Bytes that may be held at once, by all who share it. Any thread may use it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held = 0
        self._room = threading.Condition()

    def __repr__(self) -> str:
        return f"<ByteBudget {self._held} of {self.limit_bytes} bytes held>"

    @property
    def held(self) -> int:
        return self._held

    def take(self, size: int, timeout: float, wanted: Callable[[], bool]) -> bool:
        """Whether there was room within `timeout` s and while `wanted()`; the first always gets in."""
        until = time.monotonic() + timeout
        with self._room:
            while self._held and self._held + size > self.limit_bytes:
                left = until - time.monotonic()
                if left <= 0 or not wanted():
                    return False
                self._room.wait(min(left, _LOOK_AGAIN_S))
            self._held += size
            return True

    def give(self, size: int) -> None:
        with self._room:
            self._held -= size
            self._room.notify_all()
