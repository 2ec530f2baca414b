"""The transport's in-memory twin, for tests of this project and of what builds on it.

It is a whole network in one process, with latency, loss and partitions on request.
Time is trio's clock only, so under ``trio.testing.MockClock`` hours pass in an instant. A frame
travels like a TCP segment: it may be late (latency, or a retransmission where ``loss`` strikes),
it waits while its link is partitioned, but it never overtakes another and never disappears from
the middle of a stream.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import trio

from .addresses import Address
from .errors import PeerLost, PortInUse, Unreachable
from .settings import TransportSettings
from .streams.frames import MAX_STRANGER_FRAME, check_frame
from .streams.strangers import IsMemberHost
from .streams.transport import ConnectionHandler, knows_nobody, run_handler
from .trust.identity import Identity
from .trust.keys import PeerId

_QUEUE_FRAMES = 1024
_RETRANSMIT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """What crossed a :class:`MemoryNetwork` so far."""

    nodes: int
    connections: int
    dials: int
    frames: int
    payload_bytes: int


class MemoryNetwork:
    """Where in-memory transports meet. All controls may be turned at any time."""

    def __init__(self, *, latency_s: float = 0.0, loss: float = 0.0, rng: random.Random | None = None) -> None:
        self.dial_s = TransportSettings().dial_s
        self.latency_s = latency_s
        self.loss = loss
        self._rng = rng if rng is not None else random.Random(0)
        self._latencies: dict[frozenset[PeerId], float] = {}
        self._blocked: set[frozenset[PeerId]] = set()
        self._listeners: dict[Address, MemoryTransport] = {}
        self._connections: set[MemoryConnection] = set()
        self._next_port = 10_000
        self._conditions_changed = trio.Event()
        self._dials = self._frames = self._bytes = 0

    def transport(self, identity: Identity, address: Address) -> "MemoryTransport":
        """A transport that listens on ``address``; port 0 picks a free one."""
        return MemoryTransport(self, identity, address)

    def set_latency(self, one: PeerId, other: PeerId, seconds: float) -> None:
        """One-way latency between two peers, in place of the general one."""
        self._latencies[frozenset((one, other))] = seconds

    def partition(self, *groups: Iterable[PeerId]) -> None:
        """Let only peers of the same group reach each other. Peers in no group reach everybody."""
        sides = [set(group) for group in groups]
        self._blocked = {
            frozenset((one, other))
            for index, side in enumerate(sides)
            for rest in sides[index + 1 :]
            for one in side
            for other in rest
        }
        self._announce_conditions()

    def block(self, one: PeerId, other: PeerId) -> None:
        """Cut one link, both ways."""
        self._blocked.add(frozenset((one, other)))
        self._announce_conditions()

    def heal(self) -> None:
        """Undo every partition; what waited is delivered now."""
        self._blocked.clear()
        self._announce_conditions()

    def drop_connections(self, one: PeerId, other: PeerId) -> None:
        """Sever the open connections between two peers; both notice at once and may dial again."""
        for connection in [c for c in self._connections if {c.peer, c.owner} == {one, other}]:
            connection.sever("the connection was dropped")

    def end_of(self, owner: PeerId, peer: PeerId) -> "MemoryConnection":
        """The end that ``owner`` holds of its open connection to ``peer``. Raises KeyError when there is none."""
        for connection in self._connections:
            if (connection.owner, connection.peer) == (owner, peer):
                return connection
        raise KeyError(f"{owner} has no open connection to {peer}")

    def kill(self, peer: PeerId) -> None:
        """Die, as seen from outside: connections reset, port closed."""
        self._listeners = {a: t for a, t in self._listeners.items() if t.peer_id != peer}
        for connection in [c for c in self._connections if peer in (c.peer, c.owner)]:
            connection.sever("the peer's process died")

    def statistics(self) -> MemoryStatistics:
        """Counts since the start."""
        return MemoryStatistics(
            len(self._listeners), len(self._connections) // 2, self._dials, self._frames, self._bytes
        )

    def __repr__(self) -> str:
        return f"MemoryNetwork(nodes={len(self._listeners)}, connections={len(self._connections) // 2})"

    # The rest of this class is for the transports.

    def is_blocked(self, one: PeerId, other: PeerId) -> bool:
        """Whether nothing passes between two peers now."""
        return frozenset((one, other)) in self._blocked

    def travel_seconds(self, one: PeerId, other: PeerId) -> float:
        """How long the next frame takes."""
        latency = self._latencies.get(frozenset((one, other)), self.latency_s)
        if self.loss > 0 and self._rng.random() < self.loss:
            return latency * 2 + _RETRANSMIT_SECONDS
        return latency

    async def wait_conditions_changed(self) -> None:
        """Wait until somebody partitions or heals."""
        await self._conditions_changed.wait()

    def count(self, frame: bytes) -> None:
        """Note one frame sent."""
        self._frames += 1
        self._bytes += len(frame)

    def bind(self, transport: "MemoryTransport", address: Address) -> Address:
        """Take an address."""
        if address.port == 0:
            self._next_port += 1
            address = Address(address.host, self._next_port)
        if address in self._listeners:
            raise PortInUse(f"port {address} is in use; stop the process that holds it or listen on another port")
        self._listeners[address] = transport
        return address

    def unbind(self, address: Address, transport: "MemoryTransport") -> None:
        """Give an address back, unless :meth:`kill` already gave it to somebody else."""
        if self._listeners.get(address) is transport:
            del self._listeners[address]

    async def connect(self, dialler: "MemoryTransport", address: Address, peer_id: PeerId) -> "MemoryConnection":
        """Find the listener and make both ends."""
        self._dials += 1
        with trio.move_on_after(self.dial_s):
            listener = await self.find_listener(dialler, address, peer_id)
            if listener.peer_id != peer_id:
                raise Unreachable(f"another peer answers at {address}: {listener.peer_id} instead of {peer_id}")
            near = MemoryConnection(self, dialler.peer_id, peer_id, address)
            far = MemoryConnection(self, peer_id, dialler.peer_id, dialler.announced)
            near.admit()  # whoever dialled knows whom it asked for
            near.join(far)
            self._connections |= {near, far}
            dialler.adopt(near)
            listener.accept(far)
            return near
        raise self.no_answer(address)

    async def find_listener(
        self, dialler: "MemoryTransport", address: Address, expected: PeerId | None
    ) -> "MemoryTransport":
        """Who listens at an address, after a round trip to it."""
        listener = self._listeners.get(address)
        peer = expected or (listener.peer_id if listener is not None else dialler.peer_id)
        with trio.move_on_after(2 * self.travel_seconds(dialler.peer_id, peer)):
            await trio.sleep_forever()
        while self.is_blocked(dialler.peer_id, peer):
            await self.wait_conditions_changed()
        listener = self._listeners.get(address)  # it may have come or gone meanwhile
        if listener is None:
            raise Unreachable(f"nobody listens at {address}; check that the node there is running")
        return listener

    def no_answer(self, address: Address) -> Unreachable:
        """What a dial says that found nobody in time."""
        return Unreachable(f"no answer from {address} within {self.dial_s:.0f} s; check the address and the firewall")

    def forget(self, connection: "MemoryConnection") -> None:
        """A connection is over."""
        self._connections.discard(connection)

    def _announce_conditions(self) -> None:
        self._conditions_changed.set()
        self._conditions_changed = trio.Event()


class MemoryConnection:
    """One end of an in-memory connection."""

    def __init__(self, network: MemoryNetwork, owner: PeerId, peer: PeerId, remote: Address | None) -> None:
        self._network = network
        self.owner = owner
        self.peer = peer
        self.remote = remote
        self.other: MemoryConnection | None = None
        self.inbox: deque[tuple[float, bytes | None]] = deque()  # (when it arrives, frame or end of stream)
        self.changed = trio.Event()
        self._lost: str | None = None
        self._is_stranger = True

    def join(self, other: "MemoryConnection") -> None:
        """Tie two ends together."""
        self.other, other.other = other, self

    @property
    def is_open(self) -> bool:
        """Whether this end has not noticed any end yet."""
        return self._lost is None

    async def send(self, frame: bytes) -> None:
        """See :class:`p2pserve.bootstrap.streams.transport.PeerConnection`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                self.send_nowait(frame)
            except trio.WouldBlock:
                assert self.other is not None
                await self.other.changed.wait()
            else:
                return

    def send_nowait(self, frame: bytes) -> None:
        """See :class:`p2pserve.bootstrap.streams.transport.PeerConnection`."""
        check_frame(frame)
        if self._lost is not None or self.other is None:
            raise PeerLost(self._lost or "the connection is not open")
        if len(self.other.inbox) >= _QUEUE_FRAMES:
            raise trio.WouldBlock
        self._network.count(frame)
        self.other.deliver(frame)

    async def receive(self) -> bytes:
        """See :class:`p2pserve.bootstrap.streams.transport.PeerConnection`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._lost is not None and not self.inbox:
                raise PeerLost(self._lost)
            if not self.inbox:
                await self.changed.wait()
            elif self._network.is_blocked(self.owner, self.peer):
                await self._wait_for_either()
            elif (wait := self.inbox[0][0] - trio.current_time()) > 0:
                with trio.move_on_after(wait):
                    await self._wait_for_either()
            else:
                frame = self.inbox.popleft()[1]
                self._notify()
                if frame is not None and self._is_stranger and len(frame) > MAX_STRANGER_FRAME:
                    await self.aclose()
                elif frame is not None:
                    return frame
                else:
                    self._end("the peer closed the connection")

    def admit(self) -> None:
        """See :class:`p2pserve.bootstrap.streams.transport.PeerConnection`."""
        self._is_stranger = False

    async def aclose(self) -> None:
        """See :class:`p2pserve.bootstrap.streams.transport.PeerConnection`."""
        if self._lost is None:
            if self.other is not None:
                self.other.deliver(None)
            self.inbox.clear()
            self._end("the connection was closed here")
        await trio.lowlevel.checkpoint()

    def sever(self, because: str) -> None:
        """Break this end now."""
        if self._lost is None:
            self.inbox.clear()
            self._end(because)

    def deliver(self, frame: bytes | None) -> None:
        """Put a frame, or the end of the stream, on its way here."""
        if self._lost is not None:
            return
        arrival = trio.current_time() + self._network.travel_seconds(self.peer, self.owner)
        # A stream keeps its order: what was sent later arrives no sooner, however lucky it was.
        if self.inbox:
            arrival = max(arrival, self.inbox[-1][0])
        self.inbox.append((arrival, frame))
        self._notify()

    def _end(self, because: str) -> None:
        self._lost = because
        self._network.forget(self)
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def _wait_for_either(self) -> None:
        async with trio.open_nursery() as nursery:

            async def first(wait: trio.Event) -> None:
                await wait.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(first, self.changed)
            await self._network.wait_conditions_changed()
            nursery.cancel_scope.cancel()

    def __repr__(self) -> str:
        return f"MemoryConnection({self.owner[-6:]} -> {self.peer[-6:]}, {self._lost or 'open'})"


class MemoryTransport:
    """See :class:`p2pserve.bootstrap.streams.transport.Transport`."""

    def __init__(self, network: MemoryNetwork, identity: Identity, address: Address) -> None:
        self._network = network
        self.peer_id = identity.peer_id
        self.announced = address
        self._on_connection: ConnectionHandler | None = None
        self._nursery: trio.Nursery | None = None
        self._open: set[MemoryConnection] = set()

    async def dial(self, address: Address, peer_id: PeerId) -> MemoryConnection:
        """See :class:`p2pserve.bootstrap.streams.transport.Transport`."""
        if self._nursery is None:
            raise RuntimeError("dial() needs a running serve(): start it in a nursery first")
        return await self._network.connect(self, address, peer_id)

    async def dial_over(self, stream: trio.SocketStream, address: Address, peer_id: PeerId) -> MemoryConnection:
        """See :class:`p2pserve.bootstrap.streams.transport.Transport`: here without that connection."""
        await trio.aclose_forcefully(stream)
        return await self._network.connect(self, address, peer_id)

    async def identify(self, address: Address) -> PeerId:
        """See :class:`p2pserve.bootstrap.streams.transport.Transport`."""
        with trio.move_on_after(self._network.dial_s):
            return (await self._network.find_listener(self, address, None)).peer_id
        raise self._network.no_answer(address)

    async def serve(
        self,
        on_connection: ConnectionHandler,
        is_member_host: IsMemberHost = knows_nobody,
        *,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See :class:`p2pserve.bootstrap.streams.transport.Transport`."""
        self.announced = self._network.bind(self, self.announced)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery, self._on_connection = nursery, on_connection
                task_status.started(self.announced)
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._network.unbind(self.announced, self)
            with trio.CancelScope(shield=True):
                for connection in list(self._open):
                    await connection.aclose()

    def adopt(self, connection: MemoryConnection) -> None:
        """Remember a connection, to close it at the end."""
        self._open = {each for each in self._open if each.is_open}
        self._open.add(connection)

    def accept(self, connection: MemoryConnection) -> None:
        """Hand an inbound connection to its handler."""
        assert self._nursery is not None
        self.adopt(connection)
        self._nursery.start_soon(self._run, connection)

    async def _run(self, connection: MemoryConnection) -> None:
        assert self._on_connection is not None
        try:
            await run_handler(self._on_connection, connection)
        finally:
            with trio.CancelScope(shield=True):
                await connection.aclose()

    def __repr__(self) -> str:
        return f"MemoryTransport({self.peer_id} at {self.announced})"
