"""One TCP port for two kinds of connections, told apart by their first eight bytes, which are
peeked at and never consumed."""

import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

import trio

from ..addresses import Address
from ..errors import AddressError, PeerLost, PortInUse
from ..settings import TransportSettings
from .strangers import IsMemberHost, Origin, Strangers, source_of
from .transport import DATA_HEAD_BYTES, DATA_PREFIX

_log = logging.getLogger(__name__)

_PEEK_RETRY_SECONDS: Final = 0.02
_FULL_RETRY_SECONDS: Final = 0.1
_COMPLAINT_SECONDS: Final = 60.0
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

DataSocketHandler = Callable[[socket.socket, bytes, Origin], None]
StreamHandler = Callable[[trio.SocketStream, Origin], Awaitable[None]]


class SharedPort:
    """A bound, listening port. ``on_data_socket`` gets and owns each blocking data socket."""

    def __init__(
        self, listener: trio.SocketListener, on_data_socket: DataSocketHandler | None, settings: TransportSettings
    ) -> None:
        self._settings = settings
        host, port = listener.socket.getsockname()[:2]
        self.bound = Address(host, port)
        self._listener = listener
        self._on_data_socket = on_data_socket
        self._undecided = Strangers[trio.CancelScope](settings.undecided)
        self._complained_at = -float("inf")
        self.adopt: Callable[[trio.SocketStream], None] = _refuse
        """Serves a connection that was dialled here like one that was accepted."""

    @classmethod
    async def open(
        cls, listen: Address, on_data_socket: DataSocketHandler | None, settings: TransportSettings
    ) -> "SharedPort":
        """Bind; raises PortInUse or AddressError."""
        return cls(await _open_listener(listen), on_data_socket, settings)

    async def serve(self, on_other: StreamHandler, is_member_host: IsMemberHost, nursery: trio.Nursery) -> NoReturn:
        """Accept for ever, each socket in a task of ``nursery``; the rest goes to ``on_other``."""

        async def accepted(stream: trio.SocketStream) -> None:
            try:
                await self._dispatch(stream, on_other, is_member_host)
            finally:
                await trio.aclose_forcefully(stream)

        self.adopt = lambda stream: nursery.start_soon(accepted, stream)
        while True:
            try:
                stream = await self._listener.accept()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._make_room(error)
                await trio.sleep(_FULL_RETRY_SECONDS)
            else:
                nursery.start_soon(accepted, stream)

    def close(self) -> None:
        """Stop listening. Safe to call again."""
        self._listener.socket.close()

    def __repr__(self) -> str:
        return f"SharedPort({self.bound}, undecided={len(self._undecided)})"

    def _make_room(self, error: OSError) -> None:
        """No file or memory is left for another socket: give up one that has said nothing."""
        scope = self._undecided.evict()
        if scope is not None:
            scope.cancel()
        now = trio.current_time()
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            _log.warning(
                "nobody can connect to port %d for now: %s; let this process open more files (ulimit -n)",
                self.bound.port,
                error.strerror or error,
            )

    async def _dispatch(self, stream: trio.SocketStream, on_other: StreamHandler, is_member_host: IsMemberHost) -> None:
        scope, head = trio.CancelScope(), b""
        try:
            host = str(stream.socket.getpeername()[0])
            origin = Origin(source_of(host), is_member_host(host))
            victim = self._undecided.add(scope, origin, trio.current_time())
            if victim is not None:
                victim.cancel()
            with scope:
                head = await _peek(stream.socket, self._settings.peek_s)
        except OSError as error:
            _log.debug("an accepted socket broke: %s", error)
            return
        finally:
            self._undecided.remove(scope)
        if len(head) == DATA_HEAD_BYTES and head.startswith(DATA_PREFIX):
            self._pass_on(stream, head, origin)
        elif head:
            await on_other(stream, origin)

    def _pass_on(self, stream: trio.SocketStream, head: bytes, origin: Origin) -> None:
        if self._on_data_socket is not None:
            sock = stream.socket
            # The same file under another object: a duplicate would need a number, and there may be none left.
            raw = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())
            raw.setblocking(True)
            self._on_data_socket(raw, head, origin)


def _refuse(stream: trio.SocketStream) -> None:
    stream.socket.close()
    raise PeerLost("nobody serves this port yet")


async def _peek(sock: trio.socket.SocketType, within_s: float) -> bytes:
    """The first bytes, unconsumed: a data socket's whole head, or enough to rule it out."""
    with trio.move_on_after(within_s), wake_for(sock, DATA_HEAD_BYTES):
        while True:
            await trio.lowlevel.wait_readable(sock)
            head = await sock.recv(DATA_HEAD_BYTES, socket.MSG_PEEK)
            compared = min(len(head), len(DATA_PREFIX))
            if len(head) in (0, DATA_HEAD_BYTES) or head[:compared] != DATA_PREFIX[:compared]:
                return head
            await trio.sleep(_PEEK_RETRY_SECONDS)  # where the kernel wakes for less all the same
    return b""


@contextmanager
def wake_for(sock: socket.socket | trio.socket.SocketType, size: int) -> Iterator[None]:
    """Whoever waits for this socket is woken for so many bytes at once, or for its end: one who sends them one by one,
    and there may be hundreds, wakes nobody."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
    try:
        yield
    finally:
        with suppress(OSError):  # it may be closed
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def _open_listener(listen: Address) -> trio.SocketListener:
    """Bind without SO_REUSEPORT, with which two processes on one port would both seem to succeed."""
    family = trio.socket.AF_INET6 if ":" in listen.host else trio.socket.AF_INET
    sock = trio.socket.socket(family, trio.socket.SOCK_STREAM)
    try:
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)  # only past TIME_WAIT
        await sock.bind((listen.host, listen.port))
        sock.listen(512)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {listen.port} on {listen.host} is in use; stop what holds it, or name another one (--listen)"
            ) from error
        raise AddressError(
            f"cannot listen on {listen}: {error}; name an address of this box, such as 0.0.0.0"
        ) from error
    return trio.SocketListener(sock)
