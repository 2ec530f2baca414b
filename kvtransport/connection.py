"""The part of a stream that both ends share: one socket, one end state, and every failure mapped to this
room's errors.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from .errors import ConnectionClosed, ProtocolError, TransferAborted, TransferError, TransferTimeout
from .messages import Abort, Message
from .tickets import Ticket
from .wire import LENGTH_BYTES, Direction, Opener, Sealer

__all__ = ["Connection", "StreamState"]

_ABORT_PATIENCE_S = 1.0
"""How long giving up may take when the other side does not read."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """`open`, then exactly one of `delivered` and `failed`, for ever."""

    name: Literal["open", "delivered", "failed"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.reason})" if self.reason else self.name


class Connection:
    """One socket with a sealer and an opener. One thread sends and reads; any thread may abort or close.

    The file descriptor is closed only when no call is inside the socket: closing it under a thread that
    waits in `recv` would let that thread read from whatever connection gets the same number next. `close`
    therefore shuts the connection down first, which wakes the waiting thread, and takes the lock after
    that.
    """

    def __init__(
        self,
        sock: socket.socket,
        ticket: Ticket,
        direction: Direction,
        *,
        timeout: float,
        clock: Callable[[], float],
        begun: float | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout} s; it must be positive")
        self._sock = sock
        self._timeout = timeout
        self._clock = clock
        self._deadline = (clock() if begun is None else begun) + ticket.deadline_s
        peer = Direction.FROM_RECEIVER if direction is Direction.FROM_SENDER else Direction.FROM_SENDER
        self._sealer = Sealer(ticket.key, direction)
        self._opener = Opener(ticket.key, peer)
        self._io = threading.RLock()  # held while a call is inside the socket
        self._settling = threading.Lock()
        self._state = StreamState("open")
        self._error: TransferError | None = None
        self._mid_record = False
        self._buffer = bytearray(0)
        self._socket_timeout: float | None = None
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def state(self) -> StreamState:
        return self._state

    def require_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._state.name != "open":
            raise ProtocolError("the transfer has already been delivered")

    def delivered(self) -> None:
        """Settle as delivered. If another thread has made it a failure meanwhile, that is raised."""
        if not self._settle(StreamState("delivered"), None) and self._error is not None:
            raise self._error

    def deliver_and_say(self, message: Message) -> None:
        """Settle as delivered, then tell the other side. In this order, so that no abort from another thread
        can turn into a failure what the other side has been told is delivered. If telling fails, that is as
        if the message was lost on the way: this end has everything all the same.
        """
        with self._io:
            self.require_open()
            self.delivered()
            self._send_last(message)

    def fail(self, error: TransferError) -> TransferError:
        """Settle as failed unless settled before. Returns the error that counts: the first one."""
        self._settle(StreamState("failed", f"{type(error).__name__}: {error}"), error)
        return self._error or error

    def fail_and_tell(self, error: TransferError) -> TransferError:
        """As `fail`, and if this is what settled it: tell the other side why, as far as the connection
        allows, and hang up.
        """
        if not self._settle(StreamState("failed", f"{type(error).__name__}: {error}"), error):
            return self._error or error
        # Another thread inside the socket may be half way through a record; then nothing more can be said.
        if self._io.acquire(blocking=False):
            try:
                if not self._mid_record:
                    self._send_last(Abort.because(str(error)))
            finally:
                self._io.release()
        self.close()
        return error

    def send(self, message: Message) -> None:
        with self._guard():
            buffers = self._sealer.seal(message)
            self._mid_record = True
            for buffer in buffers:
                self._send_all(buffer)
            self._mid_record = False

    def send_hello(self, data: bytes) -> None:
        with self._guard():
            self._mid_record = True
            self._send_all(data)
            self._mid_record = False

    def read(self, *, until_deadline: bool = False) -> Message:
        """The next message; an `Abort` is raised instead. Waits for `timeout` of silence, or as long as the
        ticket allows.
        """
        with self._guard():
            return self._read(until_deadline)

    def readable(self) -> bool:
        """Whether the other side has said something, or is gone. Never waits."""
        with self._guard():
            poll = select.poll()
            poll.register(self._sock.fileno(), select.POLLIN)
            return bool(poll.poll(0))

    def close(self) -> None:
        """Idempotent, from any thread. A transfer that is still open has failed."""
        self.fail(ConnectionClosed("closed by this side"))
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # never connected, or the other side was faster: there is nothing left to shut down
        with self._io:
            self._sock.close()

    def _settle(self, state: StreamState, error: TransferError | None) -> bool:
        """The one place where a stream ends. True for the first to get here."""
        with self._settling:
            if self._state.name != "open":
                return False
            self._state = state
            self._error = error
            return True

    def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        # Not `sendall`: its timeout is for the whole buffer, and a slow link is not a silent one.
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                self._be_patient(until_deadline=False)
                count = self._sock.send(view[at:])
                at += count
                self.bytes_sent += count

    def _read(self, until_deadline: bool) -> Message:
        prefix = bytearray(LENGTH_BYTES)
        self._fill(memoryview(prefix), at_boundary=True, until_deadline=until_deadline)
        length = self._opener.length(prefix)
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        sealed = memoryview(self._buffer)[:length]
        self._fill(sealed, at_boundary=False, until_deadline=False)
        message = self._opener.open(sealed)
        if isinstance(message, Abort):
            raise TransferAborted(message.reason, by_peer=True)
        return message

    def _fill(self, view: memoryview, *, at_boundary: bool, until_deadline: bool) -> None:
        got = 0
        while got < len(view):
            self._be_patient(until_deadline)
            count = self._sock.recv_into(view[got:])
            if not count:
                where = "between records" if at_boundary and not got else "inside a record"
                raise ConnectionClosed(f"the other side closed the connection {where}")
            got += count
            self.bytes_received += count

    def _be_patient(self, until_deadline: bool) -> None:
        """Set how long the next call into the socket may wait."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise TransferTimeout("the deadline of the ticket has passed")
        patience = left if until_deadline else min(self._timeout, left)
        if patience != self._socket_timeout:  # a system call, worth saving
            self._sock.settimeout(patience)
            self._socket_timeout = patience

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Only while open. A failure inside becomes a TransferError, the stream settled and closed."""
        with self._io:
            self.require_open()
            try:
                yield
            except TimeoutError:
                raise self.fail_and_tell(self._timed_out()) from None
            except OSError as error:
                raise self._fail_and_close(self._parting_words(error)) from error
            except (ProtocolError, TransferTimeout) as error:
                raise self.fail_and_tell(error) from None
            except TransferError as error:
                raise self._fail_and_close(error) from None

    def _fail_and_close(self, error: TransferError) -> TransferError:
        counted = self.fail(error)
        self.close()
        return counted

    def _timed_out(self) -> TransferTimeout:
        if self._clock() >= self._deadline:
            return TransferTimeout("the deadline of the ticket has passed")
        return TransferTimeout(f"no progress for {self._timeout:g} s")

    def _parting_words(self, error: OSError) -> TransferError:
        """Why the connection broke. The other side may have said so before it hung up, in bytes we have not
        read yet.
        """
        closed = ConnectionClosed(f"the connection broke: {error.strerror or error}")
        if self._state.name != "open":
            return closed
        try:
            self._read(until_deadline=False)
        except TransferAborted as aborted:
            return aborted
        except (OSError, TransferError):
            return closed
        return closed

    def _send_last(self, message: Message) -> None:
        try:
            self._socket_timeout = None
            self._sock.settimeout(min(self._timeout, _ABORT_PATIENCE_S))
            for buffer in self._sealer.seal(message):
                self._sock.sendall(buffer)
                self.bytes_sent += len(buffer)
        except (OSError, TransferError):
            pass  # the end state is recorded; the other side finds a closed connection instead of the word
