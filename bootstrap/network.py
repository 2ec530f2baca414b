"""The network as the rest of a node uses it: the one place of this room that holds tasks.

Everything is decided elsewhere, by pure machines: who may come in (:mod:`.members.admission`), and
who is a member, alive, told and dialled, and who coordinates (:mod:`.members.peering`). This module
moves messages between them and the control streams::

    pulse   ticks the machine: hangs up, pings, tells, dials; sleeps until it wants to be woken
    session one per admitted peer: reads until the connection is lost
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import trio

from .address_book import AddressBook, keep_address_book
from .addresses import Address
from .errors import (
    DECODE_ERRORS,
    IdentityInUse,
    PeerLost,
    ProtocolError,
    Refused,
    TokenError,
    Unreachable,
)
from .handlers import Handlers
from .joining import Joining
from .members import states
from .members.admission import Admission, Places
from .members.mesh import Dial
from .members.neighbours import Contacts
from .members.own_certificate import OwnCertificate
from .members.peering import OWN_KINDS, Peering
from .members.states import EntryRules, GossipMessage, Member, MemberState, NetworkState, NetworkStatistics
from .members.watch import AnswerWatch
from .methods import EVERYONE, Answer, AsyncHandler, Body, Method, Notice, NoticeHandler
from .sessions import PeerSessions
from .settings import NetworkSettings
from .state_file import StateFile, keep_state
from .streams.control import encode_body, encode_notice
from .streams.transport import Transport
from .trust.entries import MEMBER_KIND, Entry, MemberRecord
from .trust.identity import Identity
from .trust.keys import PeerId
from .trust.orders import Orders, SignedOrders
from .trust.tokens import Bootstrap, JoinToken, Role

_log = logging.getLogger(__name__)

_SHORTEST_NAP_S: Final = 0.01
_NOTICES: Final[dict[type[GossipMessage], Notice[Any]]] = {
    kind: Notice(f"p2p.{kind.__name__.lower()}", kind, EVERYONE)
    for kind in (states.Tell, states.Summary, states.Compare, states.Part)
}


@dataclass(kw_only=True, eq=False, repr=False)
class Network:
    """``async with network:`` joins, and stays a member until the block ends. Owns its nursery.

    ``bootstraps`` are the members to ask, each with or without a peer id. ``remembered`` are those
    that an earlier run has seen: asked when the others do not answer, or, when there are no others,
    in the background. Entering returns once one has admitted us, or at once when there are no
    ``bootstraps``. It raises Unreachable, Refused, IdentityInUse, TokenError, PortInUse or
    AddressError; IdentityInUse may end the block later, too, and TokenSpent: the owner has revoked
    this node's token. Leaving the block without :meth:`leave` looks like a crash to others, which
    is safe: they notice within a second.
    """

    transport: Transport
    identity: Identity
    token: str = field(repr=False)
    network_key_public: bytes
    role: Role
    announce: Address
    bootstraps: tuple[Bootstrap, ...]
    rng: random.Random
    clock: Callable[[], float] = time.time  # unix seconds: for the expiry of tokens and the number of this life
    remembered: tuple[Bootstrap, ...] = ()
    book: AddressBook | None = None  # where to remember who is seen, for the next run
    state_file: StateFile | None = None  # where to keep what the next run should know of this network
    settings: NetworkSettings = field(default_factory=NetworkSettings)
    rules: EntryRules = field(default_factory=EntryRules)
    release: str = ""  # of this program, for people
    say: Callable[[str], None] = _log.info  # tells the owner what is waited for

    def __post_init__(self) -> None:
        self.peer_id: PeerId = self.identity.peer_id
        self.address, self.is_closed = self.announce, False
        self._named = tuple(each for each in self.bootstraps if each.peer_id != self.peer_id)
        self._remembered = tuple(each for each in self.remembered if each.peer_id != self.peer_id)
        admission = self._admission = Admission(self.network_key_public)
        self._certificate = OwnCertificate(JoinToken.parse(self.token), self.peer_id, admission)
        started_ms = max(1, int(self.clock() * 1000))
        self._peering = Peering(
            self.identity,
            self.role,
            incarnation=started_ms,
            admission=admission,
            settings=self.settings,
            rng=self.rng,
            contacts=Contacts(named=self._named, standby=() if self._named else self._remembered),
            rules=self.rules,
        )
        self._table = self._peering.table
        # Two copies of a box may be started within one millisecond: the random bits tell them apart.
        self._born = (started_ms << 20) + self.rng.getrandbits(20)
        self._handlers = Handlers()
        self._sessions = PeerSessions(
            self.transport,
            self._table,
            admission,
            self._handlers,
            self.clock,
            self._born,
            self.release,
            self.settings,
        )
        contacts = Contacts(named=self._named, standby=self._remembered)
        self._joining = Joining(contacts, self._sessions, self._peering.on_named, self.say, self.settings, self.rng)
        self._sessions.on_opened, self._sessions.on_closed = self._on_opened, self._on_closed
        self._sessions.on_orders = self.order
        for notice in _NOTICES.values():
            self._handlers.add_notice(notice, self._on_gossip)
        self._watch = AnswerWatch(self.settings)
        self._lost_callbacks: list[Callable[[PeerId], None]] = []
        self._hung_callbacks: list[Callable[[PeerId, bool], None]] = []
        self._revision = 0
        self._changed = trio.Event()
        self._kick = trio.Event()
        self._wakes_at = float("inf")
        self._nursery: trio.Nursery | None = None
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery, bool | None] | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._joining.check_named(self.bootstraps, self.peer_id)
        kept = await trio.to_thread.run_sync(self.state_file.load) if self.state_file is not None else None
        if kept is not None:
            self._peering.restore(kept, trio.current_time())
        self._certificate.check(self.role, self.clock(), has_joined=kept is not None)
        self._certificate.heed_orders()
        self._nursery_manager = trio.open_nursery()
        nursery = self._nursery = await self._nursery_manager.__aenter__()
        try:
            bound = await self._sessions.start(nursery)
            if self.address.port == 0:
                self.address = Address(self.address.host, bound.port)
            if self.state_file is not None:
                nursery.start_soon(keep_state, self, self.state_file)
            self._publish_record(left=False)
            nursery.start_soon(self._pulse)
            if self.book is not None:
                nursery.start_soon(keep_address_book, self, self.book)
            if self._named:
                await self._joining.run()
                await self._hear_all()
        except BaseException as error:
            await self._close(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._close(error)

    async def _close(self, error: BaseException | None) -> bool:
        """End all tasks. A single error of the block is not wrapped in a group."""
        assert self._nursery is not None
        assert self._nursery_manager is not None
        self._peering.is_leaving = True
        self._nursery.cancel_scope.cancel()
        # trio would wrap the error of the block in a group, although nothing else has failed.
        if isinstance(error, Exception) and not isinstance(error, ExceptionGroup):
            await self._nursery_manager.__aexit__(None, None, None)
            return False
        kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
        return bool(await self._nursery_manager.__aexit__(kind, error, traceback))

    async def leave(self) -> None:
        """Tell everybody that we go, then hang up; nothing is sent or answered any more."""
        if not self._peering.is_leaving:
            self._peering.is_leaving = True
            # Pushed before the streams are flushed and closed: it is the last thing that others hear.
            self._publish_record(left=True)
            self._tick()
            await self._sessions.close()
            self._wake()

    # -- what everybody says ------------------------------------------------------------------------------------------

    def publish(self, kind: str, payload: bytes) -> None:
        """Say something to all members: at most 64 KiB, the newest of each kind counts. Pushed at
        once to all connected peers; the rest get it by gossip. What a client says stays with it."""
        if kind in OWN_KINDS:
            raise ValueError(f"kind {kind!r} belongs to the network itself; choose another name")
        self._peering.publish(kind, payload)
        self._wake()

    def object_to(self, leader: PeerId, epoch: int) -> None:
        """Tell all that this node refuses what the coordinator of this epoch plans."""
        self._peering.object_to(leader, epoch)
        self._wake()

    def entries(self, kind: str) -> dict[PeerId, bytes]:
        """What the live members say, those of this node included."""
        return self._peering.roster.entries(kind)

    def members(self) -> tuple[Member, ...]:
        """Everybody, ourselves and the recently dead included, by peer id."""
        return self._peering.roster.members(self._rtt_s, trio.current_time())

    def state(self) -> NetworkState:
        """What the next run should know."""
        return self._peering.state()

    def seen_members(self) -> tuple[Bootstrap, ...]:
        """Where other boxes can be dialled, last heard first: to remember for the next start."""
        return self._peering.roster.addresses()

    @property
    def orders(self) -> Orders:
        """What the owner of the network has ordered, as far as this node knows."""
        return self._admission.orders

    def order(self, orders: SignedOrders) -> None:
        """Follow the owner's orders, and pass them on."""
        self._peering.order(orders)
        self._wake()

    def boxes_by_certificate(self) -> dict[str, set[PeerId]]:
        """The boxes that are in the network, this node included, by the names of their certificates."""
        return self._peering.roster.boxes_by_certificate()

    @property
    def asks_as(self) -> Role:
        """As what others answer this node: its certificate says so."""
        return self._certificate.asks_as(self.role)

    def count_places(self, asker: PeerId, peer: str) -> Places | None:
        """See :meth:`.members.admission.Admission.count_places`."""
        return self._admission.count_places(asker, peer)

    @property
    def coordinator(self) -> tuple[PeerId, int] | None:
        """Who coordinates, and in which epoch."""
        return self._peering.coordinator

    @property
    def revision(self) -> int:
        """Grows with every change of entries, members, connections or coordinator."""
        return self._revision

    async def wait_changed(self, revision: int) -> int:
        """Wait until the revision is another than this one; returns the new one."""
        while self._revision == revision:
            await self._changed.wait()
        return self._revision

    # -- talking to one peer ------------------------------------------------------------------------------------------

    async def request(self, peer: PeerId, method: Method[Body, Answer], body: Body, timeout: float) -> Answer:
        """Ask a peer, dialled if it is a member without a connection; our own id is served here.

        Raises RemoteError (its handler refused), PeerLost, RequestTimeout, or ProtocolError (wrong
        type of answer, or body too large)."""
        encoded = encode_body(body)
        if peer == self.peer_id:
            answer = await self._handlers.serve_own(self.peer_id, self.role, method.name, encoded, timeout)
        else:
            deadline = trio.current_time() + timeout
            session = await self._sessions.session_with(peer, timeout)
            answer = await session.control.request(method.name, encoded, deadline - trio.current_time())
        try:
            return msgspec.msgpack.decode(answer, type=method.answer)
        except DECODE_ERRORS as error:
            raise ProtocolError(
                f"the answer of {peer} to {method.name!r} is malformed: {error}; run the same p2pserve release"
            ) from error

    def notify(self, peer: PeerId, notice: Notice[Body], body: Body) -> None:
        """Tell a peer something, without an answer. Raises PeerLost when it is not connected, or so slow that the
        bounded queue to it is full; it is then disconnected, so that neither side goes on with a gap in what it
        heard. The callbacks of :meth:`on_peer_lost` follow, not within this call."""
        if peer == self.peer_id:
            self._handlers.notify(peer, self.role, notice.name, encode_body(body))
            return
        if (session := self._sessions.by_peer.get(peer)) is None:
            raise PeerLost(f"{peer} is not connected; wait until it is back or choose another peer")
        session.control.used_at = trio.current_time()
        if not session.control.send_nowait(encode_notice(notice.name, encode_body(body))):
            session.control.abandon(f"{peer} does not read its messages and was disconnected; choose another peer")
            raise PeerLost(f"{peer} does not read its messages and was disconnected; choose another peer")

    def handle(self, method: Method[Body, Answer], handler: AsyncHandler[Body, Answer]) -> None:
        """Answer a method with ``await handler(peer, role, body)``."""
        self._handlers.add_request(method, handler)

    def on_notice(self, notice: Notice[Body], handler: NoticeHandler[Body]) -> None:
        """Take a notice with ``handler(peer, role, body)``, which must not block."""
        self._handlers.add_notice(notice, handler)

    def on_peer_lost(self, callback: Callable[[PeerId], None]) -> None:
        """Call this, without blocking, whenever the connection to a peer is lost."""
        self._lost_callbacks.append(callback)

    def expect(self, waiter: str, peers: Collection[PeerId]) -> None:
        """This `waiter` awaits something of these peers now, and of no others: :meth:`on_hung` tells when one does not
        answer."""
        if self._watch.expect(waiter, frozenset(peers) - {self.peer_id}):
            self._wake()

    def on_hung(self, callback: Callable[[PeerId, bool], None]) -> None:
        """Call this, without blocking, when a peer that is awaited does not answer (True), and does again (False)."""
        self._hung_callbacks.append(callback)

    async def prove(self, peer: PeerId, address: Address, is_allowed: Callable[[str], bool]) -> Address:
        """Dial an address that a peer announces: the IP address, of those that are allowed, at which it has proved its
        key. Raises NetworkError."""
        return await self._sessions.prove(peer, address, is_allowed)

    def move_to(self, address: Address, *, closed: bool) -> None:
        """From now on tell others this address; ``closed``: that nobody can dial it."""
        if (self.address, self.is_closed) != (address, closed):
            self.address, self.is_closed = address, closed
            self._publish_record(left=self._peering.is_leaving)
            self._wake()

    def go_around_by(self, dial: Callable[[PeerId], Awaitable[trio.SocketStream]]) -> None:
        """Have a connection to a member that nobody can dial made by ``dial``, which raises NetworkError."""
        self._sessions.dial_around = dial

    def seen_host(self, peer: PeerId) -> str | None:
        """The IP address from which this peer's session comes, or to which it was dialled."""
        return self._sessions.seen_host(peer)

    def connected(self) -> frozenset[PeerId]:
        """The peers with an admitted control stream now."""
        return frozenset(self._sessions.by_peer)

    def statistics(self) -> NetworkStatistics:
        """Counts and state."""
        members = self.members()
        return NetworkStatistics(
            members=len(members),
            alive=sum(member.state is MemberState.ALIVE for member in members),
            connected=len(self._sessions.by_peer),
            coordinator=self.coordinator[0] if self.coordinator else None,
            epoch=self._peering.epoch,
            revision=self._revision,
            strangers_refused=self._sessions.refused,
            entries_forged=self._peering.forged,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        self._table.check_integrity()
        for peer, session in self._sessions.by_peer.items():
            assert session.peer == peer, f"the session of {session.peer} is filed under {peer}"
            assert self._table.record(peer) is not None, f"{peer} is connected without a member record"

    def __repr__(self) -> str:
        return (
            f"Network({self.peer_id}, {self.role.value}, connected={len(self._sessions.by_peer)}, "
            f"coordinator={self.coordinator}, revision={self._revision})"
        )

    def _rtt_s(self, peer: PeerId) -> float | None:
        return None if (session := self._sessions.by_peer.get(peer)) is None else session.control.rtt_s

    # -- joining ----------------------------------------------------------------------------------------------------

    def _publish_record(self, *, left: bool) -> None:
        credential = self._certificate.credential()
        record = MemberRecord(self.role, self.address.host, self.address.port, credential, left, self.is_closed)
        self._peering.publish(MEMBER_KIND, msgspec.msgpack.encode(record))

    async def _hear_all(self) -> None:
        """Wait a moment for the one that let us in to tell what there is: who is in knows nothing yet."""
        with trio.move_on_after(self.settings.found_s):
            revision = self._revision
            while not self._peering.is_synced:
                revision = await self.wait_changed(revision)

    # -- the pulse --------------------------------------------------------------------------------------------------

    async def _pulse(self) -> None:
        """Do what the peers need, whenever something has happened or time has come."""
        while True:
            self._kick = trio.Event()
            if self._certificate.heed_orders():
                self._publish_record(left=self._peering.is_leaving)
            ticked_at = trio.current_time()
            self._wakes_at = self._tick()
            with trio.move_on_at(self._wakes_at):
                await self._kick.wait()
            # Never without a pause (where it is not over yet): machines that wake each other leave others room.
            if trio.current_time() < ticked_at + _SHORTEST_NAP_S:
                await trio.sleep_until(ticked_at + _SHORTEST_NAP_S)

    def _tick(self) -> float:
        """Do what is to be done now; returns when there is more to do."""
        assert self._nursery is not None
        heard = {peer: session.control.heard_at for peer, session in self._sessions.by_peer.items()}
        used = {peer: session.control.used_at for peer, session in self._sessions.by_peer.items()}
        actions = self._peering.tick(trio.current_time(), heard, used)
        for peer in actions.drop:
            self._sessions.drop(peer)
        for peer in actions.ping:
            self._ping(peer)
        for peer, message in actions.send:
            self._send(peer, message)
        for peer in actions.part:
            self._sessions.part(peer)
        if actions.changed:
            self._touch()
        for dial in actions.dial:
            self._nursery.start_soon(self._redial, dial)
        if not self._watch.is_idle:
            self._watch_awaited(heard)
        return min(actions.wake_at, self._watch.wake_at)

    def _watch_awaited(self, heard: dict[PeerId, float]) -> None:
        """Ping those that are awaited, and tell who does not answer."""
        sessions, before = self._sessions.by_peer.items(), self._watch.hung
        slowest = {peer: max(each.control.rtts) for peer, each in sessions if each.control.rtts}
        unanswered = {peer: at for peer, each in sessions if (at := each.control.unanswered_at) is not None}
        for peer in self._watch.tick(trio.current_time(), heard, slowest, unanswered):
            self._ping(peer)
        for peer in before ^ self._watch.hung:
            for callback in self._hung_callbacks:
                callback(peer, peer in self._watch.hung)

    def _send(self, peer: PeerId, message: GossipMessage) -> None:
        """Tell a peer something; one that is too slow hears of it when the two compare what they hold."""
        if (session := self._sessions.by_peer.get(peer)) is not None:
            try:
                session.control.send_nowait(encode_notice(_NOTICES[type(message)].name, encode_body(message)))
            except (PeerLost, ProtocolError) as error:
                _log.debug("not told: %s", error)

    def _on_gossip(self, peer: PeerId, role: Role, message: GossipMessage) -> None:
        if (session := self._sessions.by_peer.get(peer)) is None:
            return
        offences = self._peering.on_received(peer, message, trio.current_time())
        if offences:
            session.control.blame(offences)
            _log.warning("%s sent %d forged entries", peer, offences)
        if self._peering.next_at() < self._wakes_at:
            self._wake()

    def _ping(self, peer: PeerId) -> None:
        if (session := self._sessions.by_peer.get(peer)) is not None:
            try:
                session.control.ping()
            except PeerLost as error:
                _log.debug("not pinged: %s", error)

    async def _redial(self, dial: Dial) -> None:
        try:
            await self._sessions.connect(dial.peer, dial.address)
        except (Unreachable, Refused, TokenError) as error:
            _log.debug("dial failed: %s", error)
            # Of two nodes with one identity that both got in somewhere, the one that was started later goes. Anybody
            # can say that there are two: the other one has to have been heard.
            is_later = isinstance(error, IdentityInUse) and self._born > error.holder_born
            if is_later and self._peering.is_doubled:
                raise
            self._peering.on_dialled(dial.peer, False, trio.current_time())
        else:
            self._peering.on_dialled(dial.peer, True, trio.current_time())
        self._wake()

    def _on_opened(self, peer: PeerId, record: Entry) -> None:
        self._peering.on_opened(peer, record, trio.current_time())
        self._wake()

    def _on_closed(self, peer: PeerId) -> None:
        self._peering.on_closed(peer, trio.current_time())
        for callback in self._lost_callbacks:
            callback(peer)
        self._wake()

    def _touch(self) -> None:
        self._revision += 1
        self._changed.set()
        self._changed = trio.Event()

    def _wake(self) -> None:
        self._kick.set()
