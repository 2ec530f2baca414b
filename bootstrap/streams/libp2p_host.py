"""The transport over libp2p. Nothing else imports libp2p, and nothing here decides anything.

One TCP port serves two kinds of connections. The first eight bytes, peeked at and never consumed, tell
them apart::

    accept -> peek -> "p2p....."    -> on_data_socket(sock, peeked, origin)   bulk data, our own formats
                   -> anything else -> Noise -> yamux -> /p2pserve/ctl/1      the control stream

Only the swarm of libp2p is used, without its host: identify, identify-push and ping would run for
strangers before they are admitted, and cost a second stream per connection. Each libp2p
connection carries exactly one control stream and dies with it, so that a cancelled read or write,
which kills a libp2p connection, costs nothing else. Knowing that there is one stream only,
:mod:`.yamux` is several times cheaper for each message than libp2p's own muxer.
"""

import logging
from typing import cast

import trio

from .lean_libp2p import import_lean

with import_lean():
    import libp2p.network.connection.swarm_connection as swarm_connection_module
    from libp2p import new_swarm
    from libp2p.abc import IListener, IMuxedConn, INetConn, INetStream, IRawConnection, ISecureConn
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
    from libp2p.custom_types import THandler, TProtocol
    from libp2p.io.trio import TrioTCPStream
    from libp2p.network.auto_connector import AutoConnector
    from libp2p.network.config import ConnectionConfig, RetryConfig
    from libp2p.network.connection.raw_connection import RawConnection
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from libp2p.protocol_muxer.multiselect import Multiselect
    from libp2p.protocol_muxer.multiselect_client import MultiselectClient
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
    from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
    from libp2p.security.noise.io import NoiseTransportReadWriter
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
    from libp2p.security.noise.transport import Transport as NoiseTransport
    from libp2p.security.secure_session import SecureSession
    from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from libp2p.tools.anyio_service import background_trio_service
    from libp2p.transport.tcp.tcp import TCP
    from multiaddr import Multiaddr

from ..addresses import Address
from ..errors import PeerLost, Unreachable
from ..reasons import MappedErrors, close_quietly, explain
from ..settings import TransportSettings
from ..trust.identity import Identity
from ..trust.keys import PeerId
from .framed import ByteStream, FramedConnection
from .hosts import open_connection, try_hosts
from .noise import NoiseMessages
from .shared_port import DataSocketHandler, SharedPort
from .strangers import IsMemberHost, Origin, Strangers
from .transport import CONTROL_PROTOCOL, ConnectionHandler, knows_nobody, run_handler
from .yamux import OneStream

_log = logging.getLogger(__name__)


class Libp2pTransport:
    """See :class:`.transport.Transport`.

    ``listen`` is where to bind (``None``: dial only); port 0 of ``announce`` stands for the bound
    one. ``on_data_socket(sock, peeked, origin)`` owns the unread blocking socket; it must neither
    block nor raise."""

    def __init__(
        self,
        identity: Identity,
        listen: Address | None,
        announce: Address,
        on_data_socket: DataSocketHandler | None = None,
        *,
        settings: TransportSettings | None = None,
    ) -> None:
        self.peer_id: PeerId = identity.peer_id
        self.listen = listen
        self.announced = announce
        self.bound: Address | None = None
        self.settings = settings or TransportSettings()
        self._identity = identity
        self._on_data_socket = on_data_socket
        self._on_connection: ConnectionHandler | None = None
        self._nursery: trio.Nursery | None = None
        self.swarm: Swarm | None = None
        self._multiselect = Multiselect({TProtocol(CONTROL_PROTOCOL): None})
        self._open: set[FramedConnection] = set()
        self._tcp: _SharedPortTcp | None = None

    async def serve(
        self,
        on_connection: ConnectionHandler,
        is_member_host: IsMemberHost = knows_nobody,
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See :class:`.transport.Transport`."""
        _quieten_libp2p()
        self._on_connection = on_connection
        port = None
        if self.listen is not None:
            port = await SharedPort.open(self.listen, self._on_data_socket, self.settings)
        tcp = self._tcp = _SharedPortTcp(port, is_member_host, self.settings)
        self.swarm = swarm = _build_swarm(self._identity, tcp, self.new_muxer(), self.settings)
        swarm.set_stream_handler(self._on_stream)
        ready, stop = trio.Event(), trio.Event()
        try:
            async with trio.open_nursery() as outer:
                try:
                    # Not `outer.start`: cancelled meanwhile, it would wait for the shielded task before `stop` is set.
                    outer.start_soon(self._run_swarm, swarm, tcp, ready, stop)
                    await ready.wait()
                    task_status.started(self.announced)
                    await trio.sleep_forever()
                finally:
                    stop.set()
        finally:
            self._nursery = self.swarm = None
            if port is not None:
                port.close()

    async def _run_swarm(self, swarm: Swarm, tcp: "_SharedPortTcp", ready: trio.Event, stop: trio.Event) -> None:
        """Run the swarm until `stop`. Shielded, so that connections end before the swarm that
        carries them: one that is cancelled along with it never closes its socket."""
        with trio.CancelScope(shield=True):
            async with background_trio_service(swarm), trio.open_nursery() as nursery:
                self._nursery = tcp.nursery = nursery
                if tcp.port is not None:
                    self.bound = tcp.port.bound
                    await swarm.listen(_multiaddr(self.bound))
                    if self.announced.port == 0:
                        self.announced = Address(self.announced.host, self.bound.port)
                ready.set()
                await stop.wait()
                nursery.cancel_scope.cancel()

    async def dial(self, address: Address, peer_id: PeerId) -> FramedConnection:
        """See :class:`.transport.Transport`."""
        self._check_serving()
        return await try_hosts(
            address, peer_id, lambda host: self._dial_one(host, address, peer_id), dial_s=self.settings.dial_s
        )

    async def dial_over(self, stream: trio.SocketStream, address: Address, peer_id: PeerId) -> FramedConnection:
        """See :class:`.transport.Transport`."""
        self._check_serving()
        try:
            with trio.fail_after(self.settings.dial_s):
                return await self._open_control(stream, address, peer_id)
        except (PeerLost, trio.TooSlowError) as error:
            reason = explain(error, peer_id) if isinstance(error, PeerLost) else "it does not answer"
            raise Unreachable(f"cannot reach {peer_id} over another member: {reason}") from error

    def adopt(self, stream: trio.SocketStream) -> None:
        """Serve a connection that was dialled here as if it had been accepted."""
        if self._tcp is None or self._tcp.port is None or self.swarm is None:
            stream.socket.close()
            raise PeerLost("the transport is closing, or listens nowhere")
        self._tcp.port.adopt(stream)

    async def identify(self, address: Address) -> PeerId:
        """See :class:`.transport.Transport`."""
        self._check_serving()
        return await try_hosts(
            address, None, lambda host: self._identify_one(Address(host, address.port)), dial_s=self.settings.dial_s
        )

    def _check_serving(self) -> None:
        if self._nursery is None:
            raise RuntimeError("dialling needs a running serve(): start it in a nursery first")

    async def _identify_one(self, address: Address) -> PeerId:
        """A Noise handshake and no more: it proves who answers."""
        swarm = self.swarm
        if swarm is None:
            raise PeerLost("the transport is closing")
        raw: IRawConnection | None = None
        try:
            with MappedErrors("dialling"):
                stream = await open_connection(address, self.settings.segment_bytes)
                raw = RawConnection(TrioTCPStream(stream), True)
                noise = await swarm.upgrader.security_multistream.select_transport(raw, True)
                assert isinstance(noise, NoiseTransport)
                secure = await noise.get_pattern().handshake_outbound(raw, None)
                return PeerId(str(secure.get_remote_peer()))
        finally:
            if raw is not None:
                with trio.CancelScope(shield=True):
                    await close_quietly(raw.close)

    async def _dial_one(self, host: str, address: Address, peer_id: PeerId) -> FramedConnection:
        with MappedErrors("dialling"):
            stream = await open_connection(Address(host, address.port), self.settings.segment_bytes)
        return await self._open_control(stream, address, peer_id)

    async def _open_control(self, below: trio.SocketStream, address: Address, peer_id: PeerId) -> FramedConnection:
        """The control stream over a TCP connection to a peer, and a task that serves it; else `below` is closed."""
        swarm, nursery = self.swarm, self._nursery
        conn: INetConn | None = None
        kept = False
        try:
            if swarm is None or nursery is None:
                raise PeerLost("the transport is closing")
            with MappedErrors("dialling"):
                raw = RawConnection(TrioTCPStream(below), True)
                conn = await swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(peer_id))
                stream = await conn.new_stream()
                await MultiselectClient().select_one_of(
                    [TProtocol(CONTROL_PROTOCOL)], MultiselectCommunicator(stream), self.settings.upgrade_s
                )
            connection = FramedConnection(peer_id, address, _bytes_of(stream), conn.close)
            nursery.start_soon(self._run, connection)
            kept = True
            return connection
        finally:
            if conn is not None and not kept and nursery is not None:
                nursery.start_soon(close_quietly, conn.close)
            elif not kept:
                await trio.aclose_forcefully(below)

    async def _on_stream(self, stream: INetStream) -> None:
        """An inbound stream. Nothing may escape: libp2p would take the whole host down with it."""
        conn = stream.swarm_conn  # type: ignore[attr-defined]  # of every NetStream, and of no interface
        try:
            with MappedErrors("accepting a stream"):
                await self._multiselect.negotiate(MultiselectCommunicator(stream), self.settings.upgrade_s)
                watched = _watched_below(stream)
        except PeerLost as error:
            _log.debug("an inbound stream was dropped: %s", error)
            await close_quietly(conn.close)
            return
        remote = stream.get_remote_address()
        peer = PeerId(str(stream.muxed_conn.peer_id))
        connection = FramedConnection(peer, None if remote is None else Address(*remote), _bytes_of(stream), conn.close)
        assert self._tcp is not None
        strangers = self._tcp.strangers
        connection.restrict(lambda: strangers.remove(watched))
        watched.speaks.set()
        if self._nursery is not None:
            self._nursery.start_soon(self._run_inbound, connection)
            await connection.finished.wait()

    async def _run_inbound(self, connection: FramedConnection) -> None:
        assert self._on_connection is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, connection)
            await run_handler(self._on_connection, connection)
            await connection.aclose()

    async def _run(self, connection: FramedConnection) -> None:
        self._open.add(connection)
        try:
            await connection.run()
        finally:
            self._open.discard(connection)

    @property
    def strangers(self) -> int:
        """How many inbound connections have not been let in yet."""
        return len(self._tcp.strangers) if self._tcp is not None else 0

    def new_muxer(self) -> MuxerMultistream:
        """Our one-stream muxer, which speaks libp2p's own wire."""
        muxer = _OneStreamMuxer({TProtocol(YAMUX_PROTOCOL_ID): Yamux})
        muxer.stalled_s = self.settings.stalled_s
        return muxer

    def __repr__(self) -> str:
        return f"Libp2pTransport({self.peer_id}, bound={self.bound}, connections={len(self._open)})"


class _SharedPortTcp(TCP):
    """TCP whose listener is a socket we bound ourselves; ``port`` is None where nobody listens."""

    def __init__(self, port: SharedPort | None, is_member_host: IsMemberHost, settings: TransportSettings) -> None:
        super().__init__()
        self.port = port
        self.is_member_host = is_member_host
        self.settings = settings
        self.nursery: trio.Nursery | None = None
        self.strangers = Strangers[_WatchedStream](settings.strangers)

    def create_listener(self, handler_function: THandler) -> IListener:  # type: ignore[override]
        """Called by the swarm once, for the one address we listen on."""
        return _SharedPortListener(self, handler_function)


class _SharedPortListener(IListener):
    """What the swarm sees of the port."""

    def __init__(self, tcp: _SharedPortTcp, handler: THandler) -> None:
        assert tcp.port is not None
        self._tcp = tcp
        self._port = tcp.port
        self._handler = handler
        self._scope = trio.CancelScope()

    async def listen(self, maddr: Multiaddr) -> None:
        """Start the accept loop; the socket is bound already."""
        assert self._tcp.nursery is not None
        self._tcp.nursery.start_soon(self._serve, self._tcp.nursery)

    async def _serve(self, nursery: trio.Nursery) -> None:
        with self._scope:
            await self._port.serve(self._serve_libp2p, self._tcp.is_member_host, nursery)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        """Where we are bound."""
        return (_multiaddr(self._port.bound),)

    async def close(self) -> None:
        """Stop accepting."""
        self._scope.cancel()
        self._port.close()

    async def _serve_libp2p(self, stream: trio.SocketStream, origin: Origin) -> None:
        """Run libp2p's handler. It would wait for the end of the swarm, holding one of its
        limited inbound slots for every connection there ever was; so it is released when the
        socket closes, when nobody has opened a control stream in time, or for somebody else."""
        strangers = self._tcp.strangers
        watched = _WatchedStream(stream)
        victim = strangers.add(watched, origin, trio.current_time())
        if victim is not None:
            _log.debug("one of %r was turned away", strangers)
            victim.end()
        if victim is watched:
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._handle, watched)
                with trio.move_on_after(self._tcp.settings.upgrade_s):
                    await watched.speaks.wait()
                if watched.speaks.is_set():
                    await watched.closed.wait()
                nursery.cancel_scope.cancel()
        finally:
            strangers.remove(watched)

    async def _handle(self, watched: "_WatchedStream") -> None:
        try:
            with MappedErrors("an inbound connection failed"):
                await self._handler(watched)
        except PeerLost as error:  # garbage and hang-ups of strangers
            _log.debug("%s", error)
        finally:
            watched.end()


class _NoAutoConnector(AutoConnector):
    """Who is dialled is decided above. No setting switches libp2p's own idea of it off."""

    async def start(self) -> None:
        """Do nothing."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        """Do nothing."""

    async def maybe_connect(self) -> None:
        """Do nothing."""


class _WatchedStream(TrioTCPStream):
    """A TCP stream that tells when its control stream is open or failed, and when it closed."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.speaks = trio.Event()
        self.closed = trio.Event()

    def end(self) -> None:
        """Tell."""
        self.closed.set()
        self.speaks.set()

    async def close(self) -> None:
        """Close and tell."""
        try:
            await super().close()
        finally:
            self.end()


class _Libp2pMessages(NoiseMessages):
    """The messages of libp2p's own Noise session, without its five layers of locks and split reads."""

    def __init__(self, session: SecureSession, rest: bytes) -> None:
        """``rest`` has been read of a message and not been used."""
        noise = session.conn
        assert isinstance(noise, NoiseTransportReadWriter)
        assert isinstance(noise.conn, RawConnection)
        assert isinstance(noise.conn.stream, TrioTCPStream)
        super().__init__(noise.conn.stream.stream, noise.encrypt, noise.decrypt, rest)
        self.conn = noise
        self.is_initiator = session.is_initiator
        # libp2p's own, which know of addresses and close what lies between.
        self.close = session.close  # type: ignore[method-assign]
        self.get_remote_address = session.get_remote_address  # type: ignore[method-assign]
        self.get_transport_addresses = session.get_transport_addresses  # type: ignore[method-assign]
        self.get_connection_type = session.get_connection_type  # type: ignore[method-assign]


class _OneStreamMuxer(MuxerMultistream):
    """Agrees on yamux as ever, and uses ours."""

    stalled_s = TransportSettings().stalled_s

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Called by the swarm for each connection."""
        await self.select_transport(conn)
        assert isinstance(conn, SecureSession)
        rest = await conn.read(conn.high_watermark - conn.low_watermark)  # sent along with the end of the negotiation
        return cast(IMuxedConn, OneStream(_Libp2pMessages(conn, rest), peer_id, self.stalled_s))


def _bytes_of(stream: INetStream) -> ByteStream:
    """The stream below libp2p's lock for each read and write."""
    assert isinstance(stream, NetStream)
    return stream.muxed_stream


def _watched_below(stream: INetStream) -> _WatchedStream:
    """The socket under a stream's muxer, secure session, Noise and raw connection."""
    found = stream.muxed_conn.secured_conn.conn.conn.stream  # type: ignore[attr-defined]  # of no interface
    if not isinstance(found, _WatchedStream):
        raise TypeError(f"an inbound stream runs over {found!r}")
    return found


def _multiaddr(address: Address) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in address.host else 'ip4'}/{address.host}/tcp/{address.port}")


def _build_swarm(identity: Identity, tcp: TCP, muxer: MuxerMultistream, settings: TransportSettings) -> Swarm:
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
            # Inbound slots are counted over the life of the swarm.
            max_connections=many,
            high_watermark=many,
            min_connections=0,
            low_watermark=0,
            max_connections_per_peer=many,
            inbound_upgrade_timeout=settings.upgrade_s,
            outbound_upgrade_timeout=settings.upgrade_s,
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
    swarm.upgrader.muxer_multistream = muxer
    swarm.auto_connector = _NoAutoConnector(swarm)
    return swarm


def _quieten_libp2p() -> None:
    """Silence libp2p's logs: errors reach us as exceptions. A module that logs through the ROOT
    logger, installing a handler, gets a logger of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("libp2p."):
            logging.getLogger(name).setLevel(logging.NOTSET)  # some set a level of their own
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    logging.getLogger("multiaddr").setLevel(logging.WARNING)  # twenty lines of DEBUG for each address
    setattr(swarm_connection_module, "logging", logging.getLogger("libp2p.network.connection"))  # noqa: B010
