"""Yamux, as much of it as a connection with a single stream needs, at a fraction of a general
muxer's cost.

The wire is that of https://github.com/hashicorp/yamux/blob/master/spec.md, so the other side may
be any implementation. What makes it cheap:

* whoever reads the stream reads the connection: no task, lock or queue in between;
* what has been parsed has been consumed, so TCP holds back a peer that is not read, and the
  stream's own window can be as large as it gets: a general muxer answers each small message with
  a window update, which is a message itself.

:class:`Frames` is the protocol, without I/O; :class:`OneStream` carries it over a secure
connection, in the shape that libp2p's swarm expects of a muxed connection.
"""

import struct
from typing import Final, Protocol

import trio

from ..errors import PeerLost, ProtocolError
from ..reasons import MappedErrors

_HEADER: Final = struct.Struct("!BBHII")  # version, type, flags, stream, length
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = range(4)
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8
_FIRST_WINDOW: Final = 256 * 1024
_WINDOW: Final = 16 * 1024 * 1024  # the most that py-libp2p's own muxer takes
_MAX_ANSWERS: Final = 16 * 1024  # a thousand pings that wait to be answered
_SLOWEST_BYTES_S: Final = 16 * 1024
"""At which a peer may read what it is sent, on top of the time in which it takes anything at all. Lower lets slower
links be members, and whoever reads byte by byte hold what waits for it (16 MiB at most) for longer."""
_MAX_BODY: Final = 65519 - _HEADER.size  # with its header it fits one Noise message


class Frames:
    """One side's protocol: bytes in, the stream's data out; ``answers`` are to be sent back."""

    def __init__(self, *, dialler: bool) -> None:
        self.stream = 0  # its number; 0 until it is open
        self.ended = False  # the other side will send no more
        self.credit = _FIRST_WINDOW  # how many bytes it takes as yet
        self.answers = b""
        self._dialler = dialler
        self._granted = _FIRST_WINDOW  # how many bytes we take as yet
        self._rest = b""  # of a header
        self._body = 0  # bytes of a data frame that have not come yet

    def open(self) -> bytes:
        """Open the stream. The dialler does, once."""
        self.stream = 1
        return self._grant(_SYN)

    def data(self, body: bytes) -> bytes:
        """A frame with at most ``min(credit, 65507)`` bytes of data."""
        self.credit -= len(body)
        return _HEADER.pack(0, _DATA, 0, self.stream, len(body)) + body

    def finish(self) -> bytes:
        """No more data will be sent."""
        return _HEADER.pack(0, _WINDOW_UPDATE, _FIN, self.stream, 0)

    def feed(self, received: bytes) -> bytes:
        """The data in what has been received. Raises ProtocolError; nothing may follow that."""
        buffer = self._rest + received
        at, found = 0, []
        while True:
            if self._body:
                body = buffer[at : at + self._body]
                found.append(body)
                self._body -= len(body)
                at += len(body)
            if len(buffer) - at < _HEADER.size:  # the rest of this header comes with the next message
                break
            self._on_header(*_HEADER.unpack_from(buffer, at))
            at += _HEADER.size
        self._rest = buffer[at:]
        # Half a window at a time: an update for each message would double the number of messages.
        if self._granted < _WINDOW // 2 and self.stream:
            self.answers += self._grant(0)
        return b"".join(found)

    def _on_header(self, version: int, kind: int, flags: int, stream: int, length: int) -> None:
        if version != 0 or kind > _GO_AWAY:
            raise ProtocolError(f"a yamux frame of version {version} and type {kind}")
        if kind == _PING:
            if flags & _SYN:
                if len(self.answers) >= _MAX_ANSWERS:
                    raise ProtocolError("more yamux pings than the peer takes answers to")
                self.answers += _HEADER.pack(0, _PING, _ACK, 0, length)
            return
        if kind == _GO_AWAY:
            self.ended = True
            return
        if flags & _SYN:
            self._on_opened(stream)
        elif stream != self.stream or not stream:
            raise ProtocolError(f"a yamux frame of stream {stream}, which is not open")
        if kind == _WINDOW_UPDATE:
            self.credit += length
        elif length > self._granted:
            raise ProtocolError(f"a yamux frame of {length} bytes where {self._granted} may come")
        else:
            self._granted -= length
            self._body = length
        self.ended = self.ended or bool(flags & (_FIN | _RST))

    def _on_opened(self, stream: int) -> None:
        if self._dialler or self.stream or stream % 2 == 0:
            raise ProtocolError(f"stream {stream} was opened; a connection has one stream, which its dialler opens")
        self.stream = stream
        self.answers += self._grant(_ACK)

    def _grant(self, flags: int) -> bytes:
        """Let the other side send as much as ever."""
        more, self._granted = _WINDOW - self._granted, _WINDOW
        return _HEADER.pack(0, _WINDOW_UPDATE, flags, self.stream, more)


class SecureConnection(Protocol):
    """What is needed of libp2p's secure connections."""

    @property
    def is_initiator(self) -> bool:
        """Whether this side has dialled."""
        ...

    async def read(self) -> bytes:
        """What has come, at least one byte. Raises when the connection has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Send at most 65519 bytes."""
        ...

    async def close(self) -> None:
        """Close the socket."""
        ...

    def get_remote_address(self) -> tuple[str, int] | None:
        """Where packets come from."""
        ...

    def get_transport_addresses(self) -> object:
        """The same in libp2p's own form."""
        ...

    def get_connection_type(self) -> object:
        """Whether it is relayed."""
        ...


class OneStream:
    """A muxed connection with one stream; a cancelled or failed read or write ends it."""

    def __init__(self, connection: SecureConnection, peer_id: object, stalled_s: float) -> None:
        self.stalled_s = stalled_s
        self.secured_conn = connection
        self.peer_id = peer_id
        self.event_started = trio.Event()
        # libp2p asks these of the connection; the answers are the secure connection's.
        self.get_remote_address = connection.get_remote_address
        self.get_transport_addresses = connection.get_transport_addresses
        self.get_connection_type = connection.get_connection_type
        self.is_initiator = connection.is_initiator
        self._frames = Frames(dialler=connection.is_initiator)
        self._stream = YamuxStream(self)
        self._accepted = False
        self._arrived = bytearray()
        self._writing = trio.Lock()
        self._over = trio.Event()
        self._stirred = trio.Event()  # there is something to answer, or it is over
        self._credited = trio.Event()

    @property
    def is_established(self) -> bool:
        """Whether it works."""
        return self.event_started.is_set() and not self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    async def start(self) -> None:
        """Answer what the other side asks, until the end. libp2p runs this in a task of its own."""
        self.event_started.set()
        while True:
            await self._stirred.wait()
            if self.is_closed:
                return
            self._stirred = trio.Event()
            answers, self._frames.answers = self._frames.answers, b""
            try:
                with MappedErrors("answering the peer"):
                    await self._write(answers)
            except PeerLost:
                return  # whoever reads the stream finds out as well

    async def open_stream(self) -> "YamuxStream":
        """The stream. The dialler opens it, once."""
        if not self.is_initiator or self._frames.stream:
            raise ProtocolError("a connection has one stream, which its dialler opens")
        await self._write(self._frames.open())
        return self._stream

    async def accept_stream(self) -> "YamuxStream":
        """The stream, when the other side has dialled and opened it. Whoever waits for another
        one waits until the end, and gets PeerLost."""
        if self.is_initiator or self._accepted:
            await self._over.wait()
            raise PeerLost("the connection has ended")
        while not self._frames.stream:
            self._arrived += await self._pull()
        self._accepted = True
        return self._stream

    async def read(self, n: int | None = None) -> bytes:
        """At most so many bytes of the stream; none at its end."""
        while not self._arrived:
            if self._frames.ended or self.is_closed:
                return b""
            self._arrived += await self._pull()
        size = len(self._arrived) if n is None or n < 0 else n
        data = bytes(self._arrived[:size])
        del self._arrived[:size]
        return data

    async def write(self, data: bytes) -> None:
        """Send data. Raises PeerLost when the other side takes nothing for five seconds, or all of it so slowly that
        what waits here would be held for long."""
        sent, ends_at = 0, trio.current_time() + self.stalled_s + len(data) / _SLOWEST_BYTES_S
        while sent < len(data):
            if not self._frames.credit:
                await self._wait_for_credit()
            if trio.current_time() > ends_at:
                self._end()
                raise PeerLost(f"the peer reads less than {_SLOWEST_BYTES_S} bytes per second")
            body = data[sent : sent + min(self._frames.credit, _MAX_BODY)]
            await self._write(self._frames.data(body))
            sent += len(body)

    async def finish(self) -> None:
        """Nothing more will be written."""
        if not self.is_closed:
            await self._write(self._frames.finish())

    async def close(self) -> None:
        """Close the connection, whatever is under way."""
        self._end()
        await self.secured_conn.close()

    def _end(self) -> None:
        self._over.set()
        self._stirred.set()
        self._credited.set()

    async def _pull(self) -> bytes:
        """What the next message of the secure connection has for the stream."""
        try:
            data = self._frames.feed(await self.secured_conn.read())
        except BaseException:  # a read that was cut short may have taken half a message with it
            self._end()
            raise
        if self._frames.answers:
            self._stirred.set()
        if self._frames.credit:
            self._credited.set()
        return data

    async def _wait_for_credit(self) -> None:
        self._credited = trio.Event()
        with trio.move_on_after(self.stalled_s):
            await self._credited.wait()
        if not self._frames.credit or self.is_closed:
            self._end()
            raise PeerLost(f"the peer has read nothing for {self.stalled_s:g} s")

    async def _write(self, frame: bytes) -> None:
        if self.is_closed:
            raise PeerLost("the connection has ended")
        try:
            with trio.move_on_after(self.stalled_s) as limit:
                try:
                    self._writing.acquire_nowait()
                except trio.WouldBlock:
                    await self._writing.acquire()
                # It is nearly always free, and to await it costs a pass of the event loop: one of three for a message.
                try:
                    await self.secured_conn.write(frame)
                finally:
                    self._writing.release()
        except BaseException:  # half a frame may have gone: whatever followed would be read as its rest
            self._end()
            raise
        if limit.cancelled_caught:
            self._end()
            raise PeerLost(f"the peer has taken nothing for {self.stalled_s:g} s")


class YamuxStream:
    """The stream of a :class:`OneStream`, as libp2p sees it."""

    def __init__(self, connection: OneStream) -> None:
        self.muxed_conn = connection
        self.read = connection.read
        self.write = connection.write
        self.close = connection.finish
        self.reset = connection.close
        self.get_remote_address = connection.get_remote_address
