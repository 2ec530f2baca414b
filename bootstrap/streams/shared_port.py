"""One TCP port for two kinds of connections, told apart by their first eight bytes, which are
peeked at and never consumed."""

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from ..addresses import Address
from ..errors import AddressError, PortInUse
from ..settings import TransportSettings
from .transport import DATA_HEAD_BYTES, DATA_PREFIX

_log = logging.getLogger(__name__)

_PEEK_RETRY_SECONDS: Final = 0.02

DataSocketHandler = Callable[[socket.socket, bytes], None]
StreamHandler = Callable[[trio.SocketStream], Awaitable[None]]


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
        self._undecided = 0

    @classmethod
    async def open(
        cls, listen: Address, on_data_socket: DataSocketHandler | None, settings: TransportSettings
    ) -> "SharedPort":
        """Bind; raises PortInUse or AddressError."""
        return cls(await _open_listener(listen), on_data_socket, settings)

    async def serve(self, on_other: StreamHandler, nursery: trio.Nursery) -> None:
        """Accept for ever, each socket in a task of ``nursery``; the rest goes to ``on_other``."""

        async def accepted(stream: trio.SocketStream) -> None:
            try:
                await self._dispatch(stream, on_other)
            finally:
                await trio.aclose_forcefully(stream)

        await trio.serve_listeners(accepted, [self._listener], handler_nursery=nursery)

    def close(self) -> None:
        """Stop listening. Safe to call again."""
        self._listener.socket.close()

    def __repr__(self) -> str:
        return f"SharedPort({self.bound}, undecided={self._undecided})"

    async def _dispatch(self, stream: trio.SocketStream, on_other: StreamHandler) -> None:
        if self._undecided >= self._settings.max_undecided:
            return
        self._undecided += 1
        try:
            head = await _peek(stream.socket, self._settings.peek_s)
        except OSError as error:
            _log.debug("an accepted socket broke: %s", error)
            return
        finally:
            self._undecided -= 1
        if len(head) == DATA_HEAD_BYTES and head.startswith(DATA_PREFIX):
            self._pass_on(stream, head)
        elif head:
            await on_other(stream)

    def _pass_on(self, stream: trio.SocketStream, head: bytes) -> None:
        if self._on_data_socket is None:
            return
        try:
            raw = socket.fromfd(stream.socket.fileno(), stream.socket.family, stream.socket.type)  # a duplicate
            raw.setblocking(True)
        except OSError as error:  # no file descriptor left
            _log.warning("a data socket was dropped: %s", error)
            return
        self._on_data_socket(raw, head)


async def _peek(sock: trio.socket.SocketType, within_s: float) -> bytes:
    """The first bytes, unconsumed: a data socket's whole head, or enough to rule it out."""
    with trio.move_on_after(within_s):
        while True:
            head = await sock.recv(DATA_HEAD_BYTES, socket.MSG_PEEK)
            compared = min(len(head), len(DATA_PREFIX))
            if len(head) in (0, DATA_HEAD_BYTES) or head[:compared] != DATA_PREFIX[:compared]:
                return head
            await trio.sleep(_PEEK_RETRY_SECONDS)  # part of the head is here already, so recv would not wait
    return b""


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
                f"port {listen.port} on {listen.host} is in use; stop what holds it, or listen on another port"
            ) from error
        raise AddressError(
            f"cannot listen on {listen}: {error}; name an address of this box, such as 0.0.0.0"
        ) from error
    return trio.SocketListener(sock)
