"""Frames on the control stream of one libp2p connection, whatever carries it."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import trio

from ..addresses import Address
from ..errors import PeerLost, ProtocolError
from ..reasons import MappedErrors, close_quietly
from ..trust.keys import PeerId
from .frames import MAX_FRAME, MAX_STRANGER_FRAME, FrameDecoder, FrameQueue, encode_frame

_log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 1.0
_GOODBYE_SECONDS: Final = 0.5
_READ_BYTES: Final = 64 * 1024
_INBOX_FRAMES: Final = 256
_STRANGER_INBOX_FRAMES: Final = 4
_BATCH_FRAMES: Final = 64
_BATCH_BYTES: Final = 256 * 1024


class ByteStream(Protocol):
    """Both directions of a stream. Whatever it raises means that the connection is gone."""

    async def read(self, n: int | None = None) -> bytes:
        """At most so many bytes; none at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of it."""
        ...

    async def close(self) -> None:
        """Say that no more will be written."""
        ...


class FramedConnection:
    """See :class:`.transport.Connection`. Two tasks own ``stream``; callers touch only queues.
    ``close`` closes the connection below it."""

    def __init__(
        self, peer: PeerId, remote: Address | None, stream: ByteStream, close: Callable[[], Awaitable[None]]
    ) -> None:
        self.peer = peer
        self.remote = remote
        self.finished = trio.Event()
        self.stream = stream
        self._hang_up = close
        self._decoder = FrameDecoder()
        self._inbox = FrameQueue(max_frames=_INBOX_FRAMES)
        self._on_admitted: Callable[[], None] | None = None
        self._outbox = FrameQueue()
        self._closing = trio.Event()
        self._written = trio.Event()
        self._read = trio.Event()

    async def send(self, frame: bytes) -> None:
        """See :class:`.transport.Connection`."""
        await self._outbox.put(encode_frame(frame))

    def send_nowait(self, frame: bytes) -> None:
        """See :class:`.transport.Connection`."""
        self._outbox.put_nowait(encode_frame(frame))

    async def receive(self) -> bytes:
        """See :class:`.transport.Connection`."""
        return await self._inbox.take()

    @property
    def waiting(self) -> int:
        """How many frames have come and not been taken."""
        return len(self._inbox)

    def restrict(self, on_admitted: Callable[[], None]) -> None:
        """Take little from the other side, which may be anybody, until :meth:`admit`."""
        self._decoder.max_frame = MAX_STRANGER_FRAME
        self._inbox.resize(_STRANGER_INBOX_FRAMES)
        self._on_admitted = on_admitted

    def admit(self) -> None:
        """See :class:`.transport.Connection`."""
        if self._on_admitted is not None:
            self._decoder.max_frame = MAX_FRAME
            self._inbox.resize(_INBOX_FRAMES)
            self._on_admitted()
            self._on_admitted = None

    async def aclose(self) -> None:
        """See :class:`.transport.Connection`."""
        self._close("the connection was closed here")
        await self.finished.wait()

    async def run(self) -> None:
        """Move bytes until closed by either side; the transport keeps this running."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_loop)
                nursery.start_soon(self._write_loop)
                await self._closing.wait()
                with trio.move_on_after(_FLUSH_SECONDS):
                    await self._written.wait()
                # Closing a libp2p connection throws away what the other side has not read yet, so say goodbye first
                # and give it a moment to hang up.
                with trio.move_on_after(_GOODBYE_SECONDS):
                    await self._read.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._close("the transport was closed")
            with trio.CancelScope(shield=True):
                await close_quietly(self._hang_up)
            self.finished.set()

    async def _read_loop(self) -> None:
        try:
            while True:
                with MappedErrors("the peer closed the connection"):
                    data = await self.stream.read(_READ_BYTES)
                if not data:
                    raise PeerLost("the peer closed the connection")
                for frame in self._decoder.feed(data):
                    await self._inbox.put(frame)
        except (PeerLost, ProtocolError) as error:
            self._close(str(error))
        finally:
            self._read.set()

    async def _write_loop(self) -> None:
        try:
            while True:
                batch = await self._outbox.take_batch(max_frames=_BATCH_FRAMES, max_bytes=_BATCH_BYTES)
                with MappedErrors("the connection broke while sending"):
                    await self.stream.write(b"".join(batch))
        except PeerLost as error:
            self._close(str(error))
        try:
            with MappedErrors("closing the stream"):
                await self.stream.close()
        except PeerLost as error:
            _log.debug("%s", error)
        self._written.set()

    def _close(self, because: str) -> None:
        self._outbox.close(because)
        self._inbox.close(because)
        self._closing.set()

    def __repr__(self) -> str:
        state = "closing" if self._closing.is_set() else "open"
        return f"FramedConnection({self.peer}, {self.remote}, {state})"
