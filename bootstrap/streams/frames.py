"""Frames on a byte stream, and the bounded queue between whoever makes them and whoever moves them.

A frame is a 4-byte big-endian length and that many bytes, at most 4 MiB::

    | 00 00 00 05 | h e l l o | 00 00 ...

"""

import struct
from collections import deque
from typing import Final

import trio

from ..errors import PeerLost, ProtocolError

MAX_FRAME: Final = 4 * 1024 * 1024
MAX_STRANGER_FRAME: Final = 128 * 1024  # from whom was not let in yet: a greeting, with a member record inside
_LENGTH = struct.Struct("!I")


def encode_frame(payload: bytes) -> bytes:
    """``payload`` with its length in front."""
    check_frame(payload)
    return _LENGTH.pack(len(payload)) + payload


def check_frame(payload: bytes) -> None:
    """Refuse a frame that the other side would refuse."""
    if len(payload) > MAX_FRAME:
        raise ProtocolError(
            f"a control message of {len(payload)} bytes exceeds {MAX_FRAME}; send bulk data over the data sockets"
        )


class FrameDecoder:
    """Bytes in, whole frames out. Keeps one unfinished frame at most; ``max_frame`` may change."""

    __slots__ = ("_buffer", "max_frame")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.max_frame = MAX_FRAME

    def feed(self, data: bytes) -> list[bytes]:
        """The frames completed by ``data``; :class:`ProtocolError` for a length out of bounds."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.max_frame:
                raise ProtocolError(
                    f"a peer announced a control message of {length} bytes; the limit is {self.max_frame}"
                )
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        if start:  # once for all frames: deleting at the front moves what is behind
            del buffer[:start]
        return frames


class FrameQueue:
    """A queue bounded in frames and bytes; many may put, one takes. Waits may be cancelled.

    When empty it accepts one larger frame, so that nothing waits for ever."""

    __slots__ = ("_bytes", "_changed", "_closed_because", "_frames", "_max_bytes", "_max_frames")

    def __init__(self, *, max_frames: int = 1024, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._changed = trio.Event()
        self._closed_because: str | None = None

    def __len__(self) -> int:
        return len(self._frames)

    def put_nowait(self, frame: bytes) -> None:
        """Add a frame; ``trio.WouldBlock`` if the taker lags, :class:`PeerLost` when closed."""
        if self._closed_because is not None:
            raise PeerLost(self._closed_because)
        if self._frames and (len(self._frames) >= self._max_frames or self._bytes + len(frame) > self._max_bytes):
            raise trio.WouldBlock
        self._frames.append(frame)
        self._bytes += len(frame)
        self._notify()

    async def put(self, frame: bytes) -> None:
        """Add a frame, waiting for room."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                self.put_nowait(frame)
            except trio.WouldBlock:
                await self._changed.wait()
            else:
                return

    async def take_batch(self, *, max_frames: int, max_bytes: int) -> list[bytes]:
        """At least one frame and as many more as fit; :class:`PeerLost` once closed and empty."""
        while not self._frames:
            if self._closed_because is not None:
                raise PeerLost(self._closed_because)
            await self._changed.wait()
        batch = [self._frames.popleft()]
        size = len(batch[0])
        while self._frames and len(batch) < max_frames and size + len(self._frames[0]) <= max_bytes:
            size += len(self._frames[0])
            batch.append(self._frames.popleft())
        self._bytes -= size
        self._notify()
        return batch

    async def take(self) -> bytes:
        """One frame; :class:`PeerLost` once closed and empty."""
        return (await self.take_batch(max_frames=1, max_bytes=0))[0]

    def resize(self, max_frames: int) -> None:
        """Change the bound in frames; what is inside stays."""
        self._max_frames = max_frames
        self._notify()

    def close(self, because: str) -> None:
        """No more frames go in; those inside can still be taken. The first reason stays."""
        if self._closed_because is None:
            self._closed_because = because
            self._notify()

    def _notify(self) -> None:
        if self._changed.statistics().tasks_waiting:  # an event costs more than the frame it announces
            self._changed.set()
            self._changed = trio.Event()
