"""The transport of whoever only dials, as clients do: libp2p's wire, without libp2p.

`import libp2p` takes half a second and 60 MB, and its package cannot be installed everywhere; none of it is needed for
one connection that was dialled, with one stream.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from ..addresses import Address
from ..errors import PeerLost, Unreachable
from ..reasons import MappedErrors, close_quietly, explain
from ..settings import TransportSettings
from ..trust.identity import Identity
from ..trust.keys import PeerId
from .framed import FramedConnection
from .hosts import open_connection, try_hosts
from .noise import encode_offer, read_agreement, secure_outbound
from .strangers import IsMemberHost
from .transport import CONTROL_PROTOCOL, ConnectionHandler, knows_nobody
from .yamux import OneStream

_YAMUX = "/yamux/1.0.0"

T = TypeVar("T")


class DiallingTransport:
    """See :class:`.transport.Transport`. ``announced`` is what :meth:`serve` says, where nobody listens."""

    def __init__(self, identity: Identity, announced: Address, *, settings: TransportSettings | None = None) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.announced = announced
        self.settings = settings or TransportSettings()
        self._identity = identity
        self._nursery: trio.Nursery | None = None
        self._open = 0

    async def serve(
        self,
        on_connection: ConnectionHandler,
        is_member_host: IsMemberHost = knows_nobody,
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Keep the connections that are dialled; nobody dials this one."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started(self.announced)
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def dial(self, address: Address, peer_id: PeerId) -> FramedConnection:
        """See :class:`.transport.Transport`."""
        return await self._try_hosts(address, peer_id, lambda there: self._dial_one(there, address, peer_id))

    async def dial_over(self, stream: trio.SocketStream, address: Address, peer_id: PeerId) -> FramedConnection:
        """See :class:`.transport.Transport`."""
        try:
            with trio.fail_after(self.settings.dial_s), MappedErrors("dialling"):
                async with _closed_unless_well(stream):
                    return await self._upgrade(stream, address, peer_id)
        except (PeerLost, trio.TooSlowError) as error:
            reason = explain(error, peer_id) if isinstance(error, PeerLost) else "it does not answer"
            raise Unreachable(f"cannot reach {peer_id} over another member: {reason}") from error

    async def identify(self, address: Address) -> PeerId:
        """See :class:`.transport.Transport`."""
        return await self._try_hosts(address, None, self._identify_one)

    async def _try_hosts(
        self, address: Address, peer_id: PeerId | None, attempt: Callable[[Address], Awaitable[T]]
    ) -> T:
        if self._nursery is None:
            raise RuntimeError("dialling needs a running serve(): start it in a nursery first")
        return await try_hosts(
            address, peer_id, lambda host: attempt(Address(host, address.port)), dial_s=self.settings.dial_s
        )

    @asynccontextmanager
    async def _connected(self, there: Address) -> AsyncIterator[trio.SocketStream]:
        """A TCP connection, which is closed unless the body ends well."""
        async with _closed_unless_well(await open_connection(there, self.settings.segment_bytes)) as socket:
            yield socket

    async def _identify_one(self, there: Address) -> PeerId:
        with MappedErrors("dialling"):
            async with self._connected(there) as socket:
                peer, _ = await secure_outbound(socket, self._identity)
                await socket.aclose()
                return peer

    async def _dial_one(self, there: Address, address: Address, peer_id: PeerId) -> FramedConnection:
        with MappedErrors("dialling"):
            async with self._connected(there) as socket:
                return await self._upgrade(socket, address, peer_id)

    async def _upgrade(self, socket: trio.SocketStream, address: Address, peer_id: PeerId) -> FramedConnection:
        """The control stream over a connection to this peer, and a task that serves it."""
        nursery = self._nursery
        if nursery is None:
            raise PeerLost("the transport is closing")
        peer, secure = await secure_outbound(socket, self._identity)
        if peer != peer_id:
            raise PeerLost(f"peer id mismatch: {peer} answers")
        await secure.write(encode_offer(_YAMUX))
        await read_agreement(secure.read_some, _YAMUX)
        muxed = OneStream(secure, peer, self.settings.stalled_s)
        stream = await muxed.open_stream()
        await stream.write(encode_offer(CONTROL_PROTOCOL))
        await read_agreement(stream.read, CONTROL_PROTOCOL)
        connection = FramedConnection(peer_id, address, stream, muxed.close)
        nursery.start_soon(self._run, connection, muxed)
        return connection

    async def _run(self, connection: FramedConnection, muxed: OneStream) -> None:
        self._open += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(muxed.start)
                await connection.run()
                nursery.cancel_scope.cancel()
        finally:
            self._open -= 1
            with trio.CancelScope(shield=True):
                await close_quietly(muxed.close)

    def __repr__(self) -> str:
        return f"DiallingTransport({self.peer_id}, connections={self._open})"


@asynccontextmanager
async def _closed_unless_well(socket: trio.SocketStream) -> AsyncIterator[trio.SocketStream]:
    try:
        yield socket
    except trio.BrokenResourceError as error:
        await trio.aclose_forcefully(socket)
        # Somebody was there: that the system calls it a reset says nothing of why.
        raise PeerLost(f"the other side hung up during the handshake: {error}") from None
    except BaseException:
        await trio.aclose_forcefully(socket)
        raise
