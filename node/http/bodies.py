"""The two ends of a body on its way: how much may be sent, and what has come. Counted in pieces."""

from __future__ import annotations

from collections import deque
from typing import final

import trio

from ...bootstrap.errors import ProtocolError
from .messages import WINDOW_PIECES

GRANT_PIECES = WINDOW_PIECES // 2  # granted together: less is said, and half a window is always under way


@final
class BodyOutlet:
    """The sending end. `end` wakes whoever waits for room."""

    def __init__(self) -> None:
        self.room = WINDOW_PIECES
        self.is_over = False
        self._changed = trio.Event()

    def grant(self, pieces: int) -> None:
        """The other side has taken so many. Raises ProtocolError when it was never sent them."""
        if self.room + pieces > WINDOW_PIECES:
            raise ProtocolError(f"{pieces} pieces of a body were granted, and {WINDOW_PIECES - self.room} were sent")
        self.room += pieces
        self._wake()

    def end(self) -> None:
        """Nothing more may be sent."""
        self.is_over = True
        self._wake()

    async def reserve(self) -> bool:
        """Wait until a piece may be sent, and count it; False when none may any more."""
        while not self.room and not self.is_over:
            await self._changed.wait()
        if self.is_over:
            return False
        self.room -= 1
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@final
class BodyInlet:
    """The receiving end: pieces until they are taken, at most WINDOW_PIECES."""

    def __init__(self) -> None:
        self.has_ended = False
        self._pieces: deque[bytes] = deque()
        self._held = 0  # pieces that were sent, and whose taking has not been granted
        self._taken = 0
        self._failure: Exception | None = None
        self._changed = trio.Event()

    def put(self, data: bytes, ended: bool) -> None:
        """What has come. Raises ProtocolError for what comes after the end, or is more than there was room for."""
        if self.has_ended:
            raise ProtocolError("a body goes on after its end")
        if data and self._held == WINDOW_PIECES:
            raise ProtocolError(f"more than {WINDOW_PIECES} pieces of a body were sent, which were not granted")
        if data:
            self._held += 1
            self._pieces.append(data)
        self.has_ended = ended
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        """No more will come; whoever takes gets what is here, then this. The first failure stays."""
        if not self.has_ended and self._failure is None:
            self._failure = failure
            self._changed.set()

    async def take(self) -> bytes:
        """The next piece; none at the end. Raises what `fail` was given."""
        while not self._pieces:
            if self.has_ended:
                return b""
            if self._failure is not None:
                raise self._failure
            self._changed = trio.Event()
            await self._changed.wait()
        self._taken += 1
        return self._pieces.popleft()

    def take_grant(self) -> int:
        """How many pieces to grant now: none until it is worth a message, or after the end."""
        if self.has_ended or self._taken < GRANT_PIECES:
            return 0
        granted, self._taken = self._taken, 0
        self._held -= granted
        return granted
