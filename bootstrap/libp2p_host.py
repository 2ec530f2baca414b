"""The transport over libp2p. Nothing else imports libp2p, and nothing here decides anything.

One TCP port serves two kinds of guests. The first eight bytes, peeked at and never consumed, tell them apart::

    accept -> peek -> "p2pKV/1\\n"  -> on_data_socket(sock, peeked)      bulk data, our own wire format
                   -> anything else -> Noise -> yamux -> /p2pserve/ctl/1   the control stream

Only the swarm of libp2p is used, without its host: identify, identify-push and ping would run for strangers before
they are admitted, and cost a second stream per connection. Each libp2p connection carries exactly one control stream
and dies with it, so that a cancelled read or write, which kills a libp2p connection, costs nothing else.
"""

import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

import libp2p.network.connection.swarm_connection as swarm_connection_module
import trio
from libp2p import new_swarm
from libp2p.abc import IListener, INetConn, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import THandler, TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from .addresses import Address
from .errors import AddressError, PeerLost, PortInUse, ProtocolError, Unreachable
from .frames import FrameDecoder, FrameQueue, encode_frame
from .identity import Identity
from .keys import PeerId
from .transport import CONTROL_PROTOCOL, DATA_MAGIC, DIAL_SECONDS, ConnectionHandler, TaskStatus

__all__ = ["Libp2pConnection", "Libp2pTransport"]

_log = logging.getLogger(__name__)

_PEEK_SECONDS: Final = 10.0
_PEEK_RETRY_SECONDS: Final = 0.02
_UNDECIDED_LIMIT: Final = 512  # accepted sockets that have not said what they are; the next ones are closed at once
_UPGRADE_SECONDS: Final = 5
_FLUSH_SECONDS: Final = 1.0
_GOODBYE_SECONDS: Final = 0.5
_READ_BYTES: Final = 64 * 1024
_BATCH_FRAMES: Final = 64
_BATCH_BYTES: Final = 256 * 1024

DataSocketHandler = Callable[[socket.socket, bytes], None]


class Libp2pTransport:
    """See :class:`.transport.Transport`.

    ``listen`` is where to bind (``None``: dial only), ``announce`` what others are told; its port 0 stands for the
    port that was bound. ``on_data_socket(sock, peeked)`` is called in the loop's thread and must not block: it owns
    the blocking socket, from which nothing has been read yet.
    """

    def __init__(
        self,
        identity: Identity,
        listen: Address | None,
        announce: Address,
        on_data_socket: DataSocketHandler | None = None,
    ) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.listen = listen
        self.announced = announce
        self.bound: Address | None = None
        self._identity = identity
        self._on_data_socket = on_data_socket
        self._on_connection: ConnectionHandler | None = None
        self._nursery: trio.Nursery | None = None
        self._swarm: Swarm | None = None
        self._multiselect = Multiselect({TProtocol(CONTROL_PROTOCOL): None})
        self._open: set[Libp2pConnection] = set()

    async def serve(
        self, on_connection: ConnectionHandler, *, task_status: TaskStatus = trio.TASK_STATUS_IGNORED
    ) -> None:
        """See :class:`.transport.Transport`."""
        _quieten_libp2p()
        self._on_connection = on_connection
        listener = await _open_listener(self.listen) if self.listen is not None else None
        tcp = _SharedPortTcp(listener, self._on_data_socket)
        self._swarm = swarm = _build_swarm(self._identity, tcp)
        swarm.set_stream_handler(self._on_stream)
        try:
            async with background_trio_service(swarm), trio.open_nursery() as nursery:
                self._nursery = tcp.nursery = nursery
                if listener is not None:
                    host, port = listener.socket.getsockname()[:2]
                    self.bound = Address(host, port)
                    await swarm.listen(_multiaddr(host, port))
                    if self.announced.port == 0:
                        self.announced = Address(self.announced.host, port)
                task_status.started(self.announced)
                await trio.sleep_forever()
        finally:
            self._nursery = self._swarm = None
            if listener is not None:
                listener.socket.close()

    async def dial(self, address: Address, peer_id: PeerId) -> "Libp2pConnection":
        """See :class:`.transport.Transport`."""
        if self._nursery is None:
            raise RuntimeError("dial() needs a running serve(): start it in a nursery first")
        deadline = trio.current_time() + DIAL_SECONDS
        problem = f"no answer within {DIAL_SECONDS:.0f} s; check the address and the firewall"
        with trio.move_on_at(deadline):
            targets = await _resolve(address)
            for index, host in enumerate(targets):
                share = (deadline - trio.current_time()) / (len(targets) - index)
                with trio.move_on_after(share):
                    try:
                        return await self._dial_one(host, address, peer_id)
                    except PeerLost as error:
                        problem = _explain(error, peer_id)
        raise Unreachable(f"cannot reach {peer_id} at {address}: {problem}")

    async def _dial_one(self, host: str, address: Address, peer_id: PeerId) -> "Libp2pConnection":
        swarm, nursery = self._swarm, self._nursery
        if swarm is None or nursery is None:
            raise PeerLost("the transport is closing")
        conn: INetConn | None = None
        kept = False
        try:
            with _mapped_errors("dialling"):
                conn = await swarm.dial_addr(_multiaddr(host, address.port), ID.from_base58(peer_id))
                stream = await conn.new_stream()
                await MultiselectClient().select_one_of(
                    [TProtocol(CONTROL_PROTOCOL)], MultiselectCommunicator(stream), _UPGRADE_SECONDS
                )
            connection = Libp2pConnection(peer_id, address, conn, stream)
            nursery.start_soon(self._run, connection)
            kept = True
            return connection
        finally:
            if conn is not None and not kept:
                nursery.start_soon(_close_quietly, conn)

    async def _on_stream(self, stream: INetStream) -> None:
        """An inbound stream. Nothing may escape: libp2p would take the whole host down with it."""
        conn = stream.swarm_conn  # type: ignore[attr-defined]  # of every NetStream, and of no interface
        try:
            with _mapped_errors("accepting a stream"):
                await self._multiselect.negotiate(MultiselectCommunicator(stream), _UPGRADE_SECONDS)
            if any(each.conn is conn for each in self._open):
                raise PeerLost("a second control stream on one connection")
        except PeerLost as error:
            _log.debug("an inbound stream was dropped: %s", error)
            await _close_quietly(conn)
            return
        remote = stream.get_remote_address()
        peer = PeerId(str(stream.muxed_conn.peer_id))
        connection = Libp2pConnection(peer, None if remote is None else Address(*remote), conn, stream)
        if self._nursery is not None:
            self._nursery.start_soon(self._run_inbound, connection)
            await connection.finished.wait()

    async def _run_inbound(self, connection: "Libp2pConnection") -> None:
        assert self._on_connection is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, connection)
            try:
                await self._on_connection(connection)
            except Exception:
                _log.exception("the handler of an inbound connection from %s failed", connection.peer)
            await connection.aclose()

    async def _run(self, connection: "Libp2pConnection") -> None:
        self._open.add(connection)
        try:
            await connection.run()
        finally:
            self._open.discard(connection)

    def __repr__(self) -> str:
        return f"Libp2pTransport({self.peer_id}, bound={self.bound}, connections={len(self._open)})"


class Libp2pConnection:
    """See :class:`.transport.Connection`. A reader and a writer task own the stream; callers touch only queues."""

    def __init__(self, peer: PeerId, remote: Address | None, conn: INetConn, stream: INetStream) -> None:
        self.peer = peer
        self.remote = remote
        self.conn = conn
        self.finished = trio.Event()
        self._stream = stream
        self._inbox = FrameQueue(max_frames=256)
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
                await _close_quietly(self.conn)
            self.finished.set()

    async def _read_loop(self) -> None:
        decoder = FrameDecoder()
        try:
            while True:
                with _mapped_errors("the peer closed the connection"):
                    data = await self._stream.read(_READ_BYTES)
                if not data:
                    raise PeerLost("the peer closed the connection")
                for frame in decoder.feed(data):
                    await self._inbox.put(frame)
        except (PeerLost, ProtocolError) as error:
            self._close(str(error))
        finally:
            self._read.set()

    async def _write_loop(self) -> None:
        try:
            while True:
                batch = await self._outbox.take_batch(max_frames=_BATCH_FRAMES, max_bytes=_BATCH_BYTES)
                with _mapped_errors("the connection broke while sending"):
                    await self._stream.write(b"".join(batch))
        except PeerLost as error:
            self._close(str(error))
        try:
            with _mapped_errors("closing the stream"):
                await self._stream.close()
        except PeerLost as error:
            _log.debug("%s", error)
        self._written.set()

    def _close(self, because: str) -> None:
        self._outbox.close(because)
        self._inbox.close(because)
        self._closing.set()

    def __repr__(self) -> str:
        state = "closing" if self._closing.is_set() else "open"
        return f"Libp2pConnection({self.peer}, {self.remote}, {state})"


class _SharedPortTcp(TCP):
    """TCP whose listener is a socket we bound ourselves, so that a taken port is an error and not a silent twin."""

    def __init__(self, listener: trio.SocketListener | None, on_data_socket: DataSocketHandler | None) -> None:
        super().__init__()
        self.nursery: trio.Nursery | None = None
        self._listener = listener
        self._on_data_socket = on_data_socket

    def create_listener(self, handler_function: THandler) -> IListener:  # type: ignore[override]
        """Called by the swarm once, for the one address we listen on."""
        assert self._listener is not None and self.nursery is not None
        return _SharedPortListener(self._listener, self.nursery, handler_function, self._on_data_socket)


class _SharedPortListener(IListener):
    """Accepts, peeks, and routes."""

    def __init__(
        self,
        listener: trio.SocketListener,
        nursery: trio.Nursery,
        handler: THandler,
        on_data_socket: DataSocketHandler | None,
    ) -> None:
        self._listener = listener
        self._nursery = nursery
        self._handler = handler
        self._on_data_socket = on_data_socket
        self._undecided = 0
        self._scope = trio.CancelScope()

    async def listen(self, maddr: Multiaddr) -> None:
        """Start the accept loop; the socket is bound already."""
        self._nursery.start_soon(self._serve)

    async def _serve(self) -> None:
        with self._scope:
            await trio.serve_listeners(self._accepted, [self._listener], handler_nursery=self._nursery)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        """Where we are bound."""
        host, port = self._listener.socket.getsockname()[:2]
        return (_multiaddr(host, port),)

    async def close(self) -> None:
        """Stop accepting."""
        self._scope.cancel()
        await self._listener.aclose()

    async def _accepted(self, stream: trio.SocketStream) -> None:
        """One accepted socket, in a task of its own, so that an idle scanner delays nobody."""
        if self._undecided >= _UNDECIDED_LIMIT:
            await trio.aclose_forcefully(stream)
            return
        self._undecided += 1
        try:
            head = await _peek(stream.socket)
        except OSError as error:
            _log.debug("an accepted socket broke: %s", error)
            head = b""
        finally:
            self._undecided -= 1
        if head == DATA_MAGIC:
            self._hand_over(stream, head)
        elif head:
            await self._serve_libp2p(stream)
        await trio.aclose_forcefully(stream)

    def _hand_over(self, stream: trio.SocketStream, head: bytes) -> None:
        if self._on_data_socket is None:
            return
        raw = socket.fromfd(stream.socket.fileno(), stream.socket.family, stream.socket.type)  # a duplicate
        try:
            raw.setblocking(True)
            self._on_data_socket(raw, head)
        except Exception:
            raw.close()
            _log.exception("the handler of a data socket failed")

    async def _serve_libp2p(self, stream: trio.SocketStream) -> None:
        """Run libp2p's handler. It would wait for the end of the swarm, holding one of its limited inbound slots
        for every connection there ever was; so it is released when the socket closes."""
        watched = _WatchedStream(stream)
        async with trio.open_nursery() as nursery:

            async def handle() -> None:
                try:
                    await self._handler(watched)
                except Exception as error:  # garbage and hang-ups of strangers, reported here and nowhere else
                    _log.debug("an inbound connection failed: %r", error)
                finally:
                    watched.closed.set()

            nursery.start_soon(handle)
            await watched.closed.wait()
            nursery.cancel_scope.cancel()


class _WatchedStream(TrioTCPStream):
    """A TCP stream that tells when libp2p has closed it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.closed = trio.Event()

    async def close(self) -> None:
        """Close and tell."""
        try:
            await super().close()
        finally:
            self.closed.set()


class _mapped_errors:
    """Everything libp2p raises, as PeerLost: it uses some forty classes, a few of them undocumented."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise PeerLost(f"{self._doing} ({type(error).__name__}: {error})") from error


async def _peek(sock: trio.socket.SocketType) -> bytes:
    """The first bytes, left where they are: the whole magic, or enough to see that it is something else."""
    with trio.move_on_after(_PEEK_SECONDS):
        while True:
            head = await sock.recv(len(DATA_MAGIC), socket.MSG_PEEK)
            if head == DATA_MAGIC or not DATA_MAGIC.startswith(head) or not head:
                return head
            await trio.sleep(_PEEK_RETRY_SECONDS)  # part of the magic is here already, so recv would not wait
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
                f"port {listen.port} on {listen.host} is in use; stop the process that holds it or listen on another port"
            ) from error
        raise AddressError(f"cannot listen on {listen}: {error}; name an address of this box, such as 0.0.0.0") from error
    return trio.SocketListener(sock)


async def _resolve(address: Address) -> list[str]:
    """The IP addresses of a host, in order of preference. libp2p's own resolver ignores the hosts file."""
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"cannot resolve host {address.host!r}: {error}; check the spelling") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _multiaddr(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def _explain(error: BaseException, peer_id: PeerId) -> str:
    """The innermost reason, in words a person can act on."""
    reasons: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        reasons.append(str(cause) or type(cause).__name__)
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror.lower()}; check the address, and that the node there is running"
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__
    text = " ".join(reasons)
    if "mismatch" in text or "does not correspond" in text:
        return f"another peer answers there; check that the node still has the identity {peer_id}"
    if "refused" in text:
        return "connection refused; check the address, and that the node there is running"
    return "something other than a p2pserve node answers there; check the address"


async def _close_quietly(conn: INetConn) -> None:
    with trio.move_on_after(2.0):
        try:
            with _mapped_errors("closing a connection"):
                await conn.close()
        except PeerLost as error:
            _log.debug("%s", error)


def _build_swarm(identity: Identity, tcp: TCP) -> Swarm:
    key_pair = create_new_key_pair(identity.seed)
    noise = NoiseTransport(key_pair, noise_privkey=create_x25519_key_pair().private_key)
    many = 1_000_000
    swarm = new_swarm(
        key_pair=key_pair,
        # The default also offers secio and plain text.
        sec_opt={NOISE_PROTOCOL_ID: noise},
        muxer_opt={TProtocol(YAMUX_PROTOCOL_ID): Yamux},
        transports=[tcp],
        retry_config=RetryConfig(max_retries=0),  # who dials again, and when, is decided above
        connection_config=ConnectionConfig(
            # Inbound slots are counted over the life of the swarm; min and low at 0 switch off the auto-connector.
            max_connections=many,
            high_watermark=many,
            min_connections=0,
            low_watermark=0,
            max_connections_per_peer=many,
            inbound_upgrade_timeout=_UPGRADE_SECONDS,
            outbound_upgrade_timeout=_UPGRADE_SECONDS,
        ),
        resource_manager=ResourceManager(  # the default one blocks a peer for 60 s after five failures
            limits=ResourceLimits(max_connections=many, max_streams=many),
            enable_memory_limits=False,
            enable_circuit_breaker=False,
            enable_graceful_degradation=False,
            enable_rate_limiting=False,
            enable_connection_tracking=False,
            enable_metrics=False,
        ),
    )
    assert isinstance(swarm, Swarm)
    return swarm


def _quieten_libp2p() -> None:
    """Whatever concerns us arrives as an exception; libp2p's own lines would repeat it at ERROR, with tracebacks.

    One of its modules logs through the helpers of the ROOT logger, which also install a handler there as a side
    effect; it gets a logger of its own instead.
    """
    logger = logging.getLogger("libp2p")
    logger.setLevel(logging.CRITICAL)
    setattr(swarm_connection_module, "logging", logging.getLogger("libp2p.network.connection"))  # noqa: B010
