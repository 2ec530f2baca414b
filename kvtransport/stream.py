"""The blocking ends of one KV transfer, for the threads of an engine process. Everything they decide is in
`wire`.

    sender                                   receiver (its agent has accepted and read the hello)
    with SendStream.connect(ticket, ...) as stream:      stream = ReceiveStream(sock, ticket, timeout=...)
        stream.send(frame) ...                           for frame in stream: ...
        stream.finish(tokens)                            stream.acknowledge()

Both ends settle in exactly one of `delivered` and `failed(reason)`. The sender counts as delivered only
when the receiver has acknowledged. If the connection breaks around the acknowledgement the receiver may
hold KV that the sender calls failed; never the reverse.

`timeout` bounds the silence of the other side; the ticket's deadline bounds the transfer. One thread drives
a stream; `abort` and `close` may come from any thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from .connection import Connection, StreamState
from .errors import ConnectionClosed, ProtocolError, TransferAborted, TransferTimeout
from .messages import Ack, End, KVFrame
from .tickets import Ticket
from .wire import HELLO_BYTES, Direction, hello, parse_hello

__all__ = ["ReceiveStream", "SendStream", "StreamState", "read_hello"]


class _Coverage:
    """What has passed: number of frames, and the positions from the first to the last."""

    def __init__(self) -> None:
        self.frames = 0
        self._first: int | None = None
        self._last = 0

    def add(self, frame: KVFrame) -> None:
        self.frames += 1
        self._first = frame.start if self._first is None else min(self._first, frame.start)
        self._last = max(self._last, frame.end)

    @property
    def tokens(self) -> int:
        return 0 if self._first is None else self._last - self._first


class _Stream:
    """What both ends have in common."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._coverage = _Coverage()

    @property
    def state(self) -> StreamState:
        return self._connection.state

    @property
    def bytes_sent(self) -> int:
        return self._connection.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._connection.bytes_received

    def abort(self, reason: str) -> None:
        """Give up and tell the other side why. Never raises and hardly waits; a settled stream stays as it
        is.
        """
        self._connection.fail_and_tell(TransferAborted(reason))

    def close(self) -> None:
        """Free the socket. A thread inside this stream wakes up with ConnectionClosed. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.state} "
            f"frames={self._coverage.frames} tokens={self._coverage.tokens} "
            f"sent={self.bytes_sent} received={self.bytes_received}>"
        )


class SendStream(_Stream):
    """The prefill end."""

    def __init__(
        self,
        sock: socket.socket,
        ticket: Ticket,
        *,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        begun: float | None = None,
    ) -> None:
        """Over a connected socket, which it owns from now on. The hello is sent by `connect`; the deadline
        counts from `begun`.
        """
        role = Direction.FROM_SENDER
        super().__init__(Connection(sock, ticket, role, timeout=timeout, clock=clock, begun=begun))

    @classmethod
    def connect(
        cls, ticket: Ticket, *, timeout: float, clock: Callable[[], float] = time.monotonic, bbr: bool = False
    ) -> SendStream:
        """Dial the ticket's address and say hello. `bbr`: ask for that congestion control (long links only:
        on a LAN it halves the rate) and carry on without it where the kernel says no. Buffer sizes are left
        to the kernel: setting one ends its tuning.
        """
        begun = clock()
        try:
            sock = socket.create_connection((ticket.host, ticket.port), min(timeout, ticket.deadline_s))
        except TimeoutError:
            text = f"{ticket.host}:{ticket.port} did not answer within {min(timeout, ticket.deadline_s):g} s"
            raise TransferTimeout(text) from None
        except (OSError, UnicodeError) as error:
            raise ConnectionClosed(f"cannot connect to {ticket.host}:{ticket.port}: {error}") from error
        _tune(sock, bbr=bbr)
        stream = cls(sock, ticket, timeout=timeout, clock=clock, begun=begun)
        try:
            stream._connection.send_hello(hello(ticket.transfer))
        except BaseException:
            stream.close()
            raise
        return stream

    def send(self, frame: KVFrame) -> None:
        """Blocks while the network is slower than prefill. Raises TransferAborted as soon as the receiver
        has given up.
        """
        self._look_for_abort()
        self._connection.send(frame)
        self._coverage.add(frame)

    def finish(self, tokens: int) -> None:
        """Say that all is sent and wait until the receiver has it. `tokens`: positions from the first to
        the last one sent.
        """
        if tokens != self._coverage.tokens:
            covered = self._coverage.tokens
            raise ProtocolError(f"finish({tokens}), but the frames sent cover {covered} positions")
        self._look_for_abort()
        self._connection.send(End(tokens, self._coverage.frames))
        # Can only be an Ack: the opener lets nothing else through, and an Abort is raised.
        self._connection.read(until_deadline=True)
        self._connection.delivered()

    def _look_for_abort(self) -> None:
        if self._connection.readable():
            message = self._connection.read()
            raise self._connection.fail_and_tell(ProtocolError(f"{type(message).__name__} before the End"))


class ReceiveStream(_Stream):
    """The decode end: iterate to get the frames, then `acknowledge`."""

    def __init__(
        self,
        sock: socket.socket,
        ticket: Ticket,
        *,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Over an accepted socket, its hello already read by `read_hello`. The stream owns the socket from
        now on.
        """
        super().__init__(Connection(sock, ticket, Direction.FROM_RECEIVER, timeout=timeout, clock=clock))
        _tune(sock, bbr=False)
        self._ended = False

    def __iter__(self) -> Iterator[KVFrame]:
        """Frames in the order sent, until End. A frame's payload is memory of its own and may be kept."""
        while not self._ended:
            message = self._connection.read()
            if isinstance(message, KVFrame):
                self._coverage.add(message)
                yield message
            elif isinstance(message, End):
                self._check_end(message)
                self._ended = True

    def acknowledge(self) -> None:
        """Everything has arrived and is kept. Only after the last frame."""
        if not self._ended:
            self._connection.require_open()
            raise ProtocolError("acknowledge() before the End of the transfer")
        self._connection.deliver_and_say(Ack())

    def _check_end(self, end: End) -> None:
        got = self._coverage
        if (end.frames, end.tokens) != (got.frames, got.tokens):
            text = f"{end.frames} frames, {end.tokens} tokens sent; {got.frames}, {got.tokens} arrived"
            raise self._connection.fail_and_tell(ProtocolError(text))


def read_hello(sock: socket.socket, timeout: float) -> bytes:
    """The transfer id a new connection asks for. Takes the hello from the socket and not a byte more."""
    data = bytearray()
    limit = time.monotonic() + timeout
    try:
        while len(data) < HELLO_BYTES:
            # One byte at a time would hold a slot for ever; the time is for the whole hello.
            sock.settimeout(max(limit - time.monotonic(), 0.001))
            piece = sock.recv(HELLO_BYTES - len(data))
            if not piece:
                raise ConnectionClosed(f"the connection ended {len(data)} bytes into its hello")
            data += piece
            if time.monotonic() >= limit and len(data) < HELLO_BYTES:
                raise TransferTimeout(f"no hello within {timeout:g} s")
    except TimeoutError:
        raise TransferTimeout(f"no hello within {timeout:g} s") from None
    except OSError as error:
        raise ConnectionClosed(f"the connection broke during its hello: {error}") from error
    return parse_hello(bytes(data))


def _tune(sock: socket.socket, *, bbr: bool) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # a connection that is already gone again: the first call into it will say so
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if bbr:
        # The module may be missing or not allowed here: the default works, more slowly on lossy links.
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
