"""An encrypted pipe for messages, in both directions over one connection: what the stages of a
replica say to each other.

    dialling side                                   accepting side
    hello, as of a KV link (`channel`)      ->
                                            <-      welcome, greeting
    greeting, records                       ->      <-  records

    record   =  sealed head (16 + 16)  [sealed block (n + 16)] ...
    message  =  table of sizes (u32 each), buffers; each begins at a multiple of 16; cut into blocks of 128 KiB

A message is some buffers: they arrive apart, aligned, in one area of memory that nobody else uses.
What is large is encrypted where it lies and decrypted where it belongs; a block fits a core's
cache.

Keys are derived as those of a link are, from the ticket's secret and fresh nonces of both sides,
under a name of their own. The greeting proves both ends before anything they announce is believed.

*Alive.* Each side says something at least every `beat_s`, for which a thread must nearly always be
in `receive`: a peer that computes for long is not taken for lost, and one that has gone without a
word is, after `lost_s`.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Self, final

from ..errors import ConnectionClosed, KVProtocolError, TransferAborted, TransferError, TransferTimeout
from .channel import NONCE_BYTES, LinkHello, LinkRole
from .ciphers import TAG_BYTES, Cipher, RekeyBounds, derive_ciphers
from .dial_path import DialPath
from .frames import MAX_REASON_BYTES
from .sockets import dial, explain, fresh_nonce, hang_up, receive_exactly, tune
from .tickets import LinkTicket

Buffer = bytes | bytearray | memoryview

MAX_BUFFERS = 4096
_WELCOME_MAGIC = b"p2pPI/1\n"
_INFO = b"p2pserve pipe/1 keys "
_HEAD = struct.Struct("<BxHIQ")  # kind, buffers, 0, bytes that follow
_SEALED_HEAD_BYTES = _HEAD.size + TAG_BYTES
_BLOCK_BYTES = 128 << 10
_SEALED_BLOCK_BYTES = _BLOCK_BYTES + TAG_BYTES
_ALIGNMENT = 16
_GOODBYE_S = 0.5  # how long a `close` waits for the connection to take its reason


@dataclass(frozen=True, slots=True)
class PipeSettings:
    """Both ends need the same `bounds`; a shorter `lost_s` finds a dead box sooner, forgives less.
    `clock` times both, checked every `beat_s`."""

    max_bytes: int = 256 << 20  # of one message
    beat_s: float = 2.0
    lost_s: float = 20.0
    bounds: RekeyBounds = field(default_factory=RekeyBounds)
    clock: Callable[[], float] = time.monotonic


class RecordKind(IntEnum):
    """What a record is."""

    GREETING = 0
    MESSAGE = 1
    BEAT = 2
    CLOSE = 3


@dataclass(frozen=True, slots=True)
class RecordHead:
    """A record: `size` bytes follow, without tags; a message's `buffers`, or a close's reason."""

    kind: RecordKind
    buffers: int = 0
    size: int = 0

    def pack(self) -> bytes:
        """The 16 bytes before they are sealed."""
        return _HEAD.pack(self.kind, self.buffers, 0, self.size)


_GREETING = RecordHead(RecordKind.GREETING)
_KINDS = {kind.value: kind for kind in RecordKind}


def parse_head(data: bytes | bytearray, max_bytes: int) -> RecordHead:
    """Raises ProtocolError for what no peer may announce."""
    number, buffers, zero, size = _HEAD.unpack(data)
    kind = _KINDS.get(number)
    if kind is None or zero or data[1]:
        raise KVProtocolError(f"a record of kind {number}: of another version")
    most = max_bytes if kind is RecordKind.MESSAGE else MAX_REASON_BYTES if kind is RecordKind.CLOSE else 0
    if not 4 * buffers <= size <= most or (buffers and kind is not RecordKind.MESSAGE) or buffers > MAX_BUFFERS:
        raise KVProtocolError(f"a record of kind {kind.name} with {buffers} buffers and {size} bytes")
    return RecordHead(kind, buffers, size)


def dial_pipe(ticket: LinkTicket, path: DialPath, *, timeout: float, settings: PipeSettings | None = None) -> Pipe:
    """A pipe to whoever holds the same ticket at the end of `path`. Raises TransferError."""
    hello = LinkHello(ticket.link, fresh_nonce(), LinkRole.SENDER)
    return greet(dial(path, timeout), ticket, hello, dials=True, timeout=timeout, settings=settings)


def accept_pipe(
    ticket: LinkTicket, hello: LinkHello, sock: socket.socket, *, timeout: float, settings: PipeSettings | None = None
) -> Pipe:
    """The other end, from an accepted connection whose hello has been read. Raises TransferError."""
    return greet(sock, ticket, hello, dials=False, timeout=timeout, settings=settings)


def greet(
    sock: socket.socket,
    ticket: LinkTicket,
    hello: LinkHello,
    *,
    dials: bool,
    timeout: float,
    settings: PipeSettings | None = None,
) -> Pipe:
    """The handshake. Takes over the socket, also when it raises TransferError."""
    settings = settings or PipeSettings()
    until = time.monotonic() + timeout
    try:
        if sock.family != socket.AF_UNIX:
            tune(sock)
        sock.settimeout(timeout)
        nonce = _exchange_nonces(sock, ticket, hello, dials, until)
        # Both nonces and both hellos are in the key: nothing of an earlier connection can be replayed,
        # and who was told other parameters derives another key.
        salt, info = hello.nonce + nonce, _INFO + hello.pack()
        sealer, opener = derive_ciphers(ticket.secret, salt, info, settings.bounds, dials=dials)
        greeting = bytearray(_SEALED_HEAD_BYTES)
        # Each end proves that it has the key before anything is believed of it.
        sealer.seal(_GREETING.pack(), memoryview(greeting))
        sock.sendall(greeting)
        plain = bytearray(_HEAD.size)
        opener.open(memoryview(receive_exactly(sock, _SEALED_HEAD_BYTES, until)), plain)
        if parse_head(plain, settings.max_bytes) != _GREETING:
            raise KVProtocolError("a greeting comes first")
        return Pipe(sock, sealer, opener, settings)
    except TransferError:
        sock.close()
        raise
    except TimeoutError:
        sock.close()
        raise TransferTimeout(f"no pipe within {timeout:g} s") from None
    except OSError as error:
        sock.close()
        raise ConnectionClosed(f"the connection failed in its handshake: {explain(error)}") from None


def _exchange_nonces(sock: socket.socket, ticket: LinkTicket, hello: LinkHello, dials: bool, until: float) -> bytes:
    """The nonce of the accepting side; that of the dialling side is in the hello."""
    if dials:
        sock.sendall(hello.pack())
        welcome = receive_exactly(sock, len(_WELCOME_MAGIC) + NONCE_BYTES, until)
        if not welcome.startswith(_WELCOME_MAGIC):
            raise KVProtocolError(f"no end of a pipe: it answers {welcome[: len(_WELCOME_MAGIC)]!r}")
        return welcome[len(_WELCOME_MAGIC) :]
    if hello.link != ticket.link:
        raise KVProtocolError("the hello names another link")
    nonce = fresh_nonce()
    sock.sendall(_WELCOME_MAGIC + nonce)
    return nonce


@final
class Pipe:
    """One end. Any thread may `send` and `close`; one at a time, nearly always, is in `receive`.
    The first error is final: both raise it, `ended` says it."""

    def __init__(self, sock: socket.socket, sealer: Cipher, opener: Cipher, settings: PipeSettings) -> None:
        self._sock = sock
        self._sealer = sealer
        self._opener = opener
        self._settings = settings
        sock.settimeout(None)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._sending, self._receiving, self._state = threading.Lock(), threading.Lock(), threading.Lock()
        self._out = bytearray(_SEALED_HEAD_BYTES + _SEALED_BLOCK_BYTES)
        self._joined = bytearray(_BLOCK_BYTES)
        self._in = memoryview(bytearray(2 * (_SEALED_HEAD_BYTES + _SEALED_BLOCK_BYTES)))
        self._first = self._last = 0
        self._head = bytearray(_HEAD.size)
        self._spoke = self._heard = settings.clock()
        self._ended: TransferError | None = None
        self.bytes_in = self.bytes_out = 0

    def __repr__(self) -> str:
        state = "open" if self._ended is None else f"ended: {self._ended}"
        return f"<Pipe {state} in={self.bytes_in} out={self.bytes_out}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    @property
    def ended(self) -> TransferError | None:
        """Why nothing can be said any more."""
        return self._ended

    @property
    def rekeyed(self) -> int:
        """How many keys have been replaced, both directions together."""
        return self._sealer.rekeyed + self._opener.rekeyed

    def send(self, buffers: Sequence[Buffer]) -> None:
        """One message of byte buffers, until the kernel has all of it. Raises TransferError."""
        views = [memoryview(buffer) for buffer in buffers]
        laid_out, size = _laid_out(views)
        if len(views) > MAX_BUFFERS or size > self._settings.max_bytes:
            raise KVProtocolError(f"a message of {len(views)} buffers and {size} bytes: too large for a pipe")
        with self._sending:
            self._say(RecordHead(RecordKind.MESSAGE, len(views), size), laid_out)

    def receive(self) -> list[memoryview]:
        """The buffers of the next message. Raises TransferError; TransferAborted with the peer's
        reason when it has closed the pipe."""
        message = self.receive_within(math.inf)
        assert message is not None
        return message

    def receive_within(
        self, wait_s: float, look_s: float = 0.0, meanwhile: Callable[[], object] = os.sched_yield
    ) -> list[memoryview] | None:
        """The same; None if no message begins within `wait_s`. For the first `look_s` of that this
        thread does not sleep, but calls `meanwhile` again and again: it goes on sooner, and on a
        core that is awake."""
        with self._receiving:
            self._raise_if_ended()
            try:
                now = self._settings.clock()
                return self._next_message(now + wait_s, now + look_s, meanwhile)
            except TransferError as error:
                raise self._end(error) from None
            except OSError as error:
                raise self._end(ConnectionClosed(f"the connection failed: {explain(error)}")) from None

    def wait_gone(self, wait_s: float) -> bool:
        """Whether the connection has ended by then, unread bytes or not. For any thread."""
        descriptor = self._sock.fileno()
        if self._ended is not None or descriptor < 0:
            return True
        end = select.poll()
        end.register(descriptor, select.POLLRDHUP)
        return bool(end.poll(math.ceil(wait_s * 1000)))

    def close(self, reason: str = "") -> None:
        """End it, tell the other side why, and free the connection. May be called again."""
        with self._state:
            first = self._ended is None
            if first:
                self._ended = TransferAborted(reason or "closed")
        if first:
            self._say_goodbye(reason.encode()[:MAX_REASON_BYTES])
        hang_up(self._sock)
        with self._sending, self._receiving:
            self._sock.close()

    # ---- writing: under the lock `_sending` ------------------------------------------------------------------

    def _say(self, head: RecordHead, buffers: Iterable[Buffer]) -> None:
        self._raise_if_ended()
        out = memoryview(self._out)
        self._sealer.seal(head.pack(), out[:_SEALED_HEAD_BYTES])
        filled = _SEALED_HEAD_BYTES
        try:
            for block in self._blocks(buffers, head.size):
                end = filled + len(block) + TAG_BYTES
                self._sealer.seal(block, out[filled:end])
                self._write(out[:end])
                filled = 0
            if filled:
                self._write(out[:filled])
        except OSError as error:
            raise self._end(ConnectionClosed(f"the connection failed: {explain(error)}")) from None

    def _write(self, data: memoryview) -> None:
        self._sock.sendall(data)
        self.bytes_out += len(data)
        self._spoke = self._settings.clock()

    def _blocks(self, buffers: Iterable[Buffer], size: int) -> Iterator[bytes | memoryview]:
        """The same bytes, cut anew. What fills a block is not copied, the rest is joined."""
        if size <= _BLOCK_BYTES:  # nearly all messages
            if size:
                yield b"".join(buffers)
            return
        joined = memoryview(self._joined)
        filled = 0
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                if not filled and len(view) >= _BLOCK_BYTES:
                    yield view[:_BLOCK_BYTES]
                    view = view[_BLOCK_BYTES:]
                    continue
                count = min(_BLOCK_BYTES - filled, len(view))
                joined[filled : filled + count] = view[:count]
                filled, view = filled + count, view[count:]
                if filled == _BLOCK_BYTES:
                    yield joined
                    filled = 0
        if filled:
            yield joined[:filled]

    def _beat(self, now: float) -> None:
        """Say that this side is alive, unless something else says so: a send that is under way, or
        bytes of one that still fill the kernel's buffer. So the thread that reads never waits for
        one that writes."""
        if now - self._spoke < self._settings.beat_s or not self._sending.acquire(blocking=False):
            return
        try:
            if self._writable(0):
                self._say(RecordHead(RecordKind.BEAT), ())
        finally:
            self._sending.release()

    def _say_goodbye(self, reason: bytes) -> None:
        """Try to; a connection that takes nothing is cut without a word."""
        if not self._sending.acquire(timeout=_GOODBYE_S):
            return
        try:
            if self._writable(_GOODBYE_S):
                out = memoryview(bytearray(_SEALED_HEAD_BYTES + len(reason) + TAG_BYTES))
                self._sealer.seal(RecordHead(RecordKind.CLOSE, 0, len(reason)).pack(), out[:_SEALED_HEAD_BYTES])
                if reason:
                    self._sealer.seal(reason, out[_SEALED_HEAD_BYTES:])
                self._write(out if reason else out[:_SEALED_HEAD_BYTES])
        except OSError:
            pass  # it is gone already, and knows no less than we do
        finally:
            self._sending.release()

    def _writable(self, timeout: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poll.poll(timeout * 1000))

    # ---- reading: under the lock `_receiving` ----------------------------------------------------------------

    def _next_message(
        self, until: float, look_until: float, meanwhile: Callable[[], object]
    ) -> list[memoryview] | None:
        while self._first < self._last or self._read(until, look_until, meanwhile):
            self._opener.open(self._take(_SEALED_HEAD_BYTES), self._head)
            head = parse_head(self._head, self._settings.max_bytes)
            match head.kind:
                case RecordKind.MESSAGE:
                    data = memoryview(bytearray(head.size))
                    for first in range(0, head.size, _BLOCK_BYTES):
                        block = data[first : first + _BLOCK_BYTES]
                        self._opener.open(self._take(len(block) + TAG_BYTES), block)
                    return split(data, head.buffers)
                case RecordKind.CLOSE:
                    reason = bytearray(head.size)
                    if reason:
                        self._opener.open(self._take(head.size + TAG_BYTES), reason)
                    raise TransferAborted(reason.decode("utf-8", "replace") or "closed", by_peer=True)
                case RecordKind.GREETING:
                    raise KVProtocolError("a greeting comes first, and once")
                case RecordKind.BEAT:
                    pass
        return None

    def _take(self, count: int) -> memoryview:
        """The next `count` sealed bytes, good until the next call."""
        while self._last - self._first < count:
            if self._first + count > len(self._in):
                left = self._last - self._first
                self._in[:left] = self._in[self._first : self._last]
                self._first, self._last = 0, left
            self._read()
        taken = self._in[self._first : self._first + count]
        self._first += count
        if self._first == self._last:
            self._first = self._last = 0
        return taken

    def _read(
        self,
        until: float = math.inf,
        look_until: float = -math.inf,
        meanwhile: Callable[[], object] = os.sched_yield,
    ) -> bool:
        """Add to `_in` what has come, or what comes next. False if that is nothing until then."""
        settings = self._settings
        while True:
            try:
                # Only this call does not wait: a socket that never does would not wait for sends either.
                count = self._sock.recv_into(self._in[self._last :], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = None
            now = settings.clock()
            self._beat(now)
            if count:
                self._heard = now
                self.bytes_in += count
                self._last += count
                return True
            if count == 0:
                raise ConnectionClosed("the other side is gone")
            if now - self._heard > settings.lost_s:
                raise TransferTimeout(f"nothing was heard for {settings.lost_s:g} s")
            if now >= until:
                return False
            if now < look_until:
                meanwhile()
            else:
                self._readable.poll(math.ceil(min(settings.beat_s, until - now) * 1000))

    # ---- the end ---------------------------------------------------------------------------------------------

    def _end(self, error: TransferError) -> TransferError:
        """This error, or the one before it, is final."""
        with self._state:
            if self._ended is None:
                self._ended = error
        hang_up(self._sock)
        return self._ended

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended


def _laid_out(views: Sequence[memoryview]) -> tuple[list[Buffer], int]:
    """Table and buffers with the gaps between them, and how many bytes that is."""
    table = struct.pack(f"<{len(views)}I", *map(len, views))
    laid_out: list[Buffer] = []
    size = 0
    contents: list[Buffer] = [table, *views]
    for content in contents:
        laid_out.append(content)
        size += len(content)
        gap = -size % _ALIGNMENT
        if gap:
            laid_out.append(bytes(gap))
            size += gap
    return laid_out, size


def split(data: memoryview, count: int) -> list[memoryview]:
    """The buffers of a message, whose table says how long they are. Raises ProtocolError."""
    sizes = struct.unpack_from(f"<{count}I", data)
    found: list[memoryview] = []
    at = _aligned(4 * count)
    for size in sizes:
        found.append(data[at : at + size])
        at += _aligned(size)
    if at != len(data):
        raise KVProtocolError(f"a message of {len(data)} bytes whose buffers take {at}")
    return found


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT
