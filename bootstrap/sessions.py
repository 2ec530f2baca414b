"""The control streams to other peers: admission, dialling, exactly one stream for each. Before
admission a stranger's single greeting, of bounded size and time, is all that is read."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import trio

from .addresses import Address, plain_ip
from .errors import (
    IdentityInUse,
    NetworkError,
    OtherProtocol,
    PeerLost,
    ProtocolError,
    Refused,
    TokenError,
    Unreachable,
)
from .handlers import Handlers
from .members.admission import Admission, is_client
from .members.mesh import should_replace
from .members.table import Table
from .settings import NetworkSettings
from .streams.control import (
    PROTOCOL_VERSION,
    ControlStream,
    Greeting,
    Hello,
    Rejected,
    Welcome,
    decode_greeting,
    encode_greeting,
)
from .streams.hosts import resolve_host
from .streams.transport import PeerConnection, Transport, run_handler
from .trust.entries import Entry, MemberRecord, read_record
from .trust.keys import PeerId
from .trust.orders import SignedOrders
from .trust.tokens import Bootstrap, Role

_log = logging.getLogger(__name__)

_HOSTS_EVERY_S: Final = 1.0


@dataclass(slots=True, eq=False)
class PeerSession:
    """One admitted peer on one control stream."""

    control: ControlStream
    role: Role
    born: int  # of the node's run at the other end
    dialled_by_me: bool
    since: float

    @property
    def peer(self) -> PeerId:
        """Who it is."""
        return self.control.peer


class PeerSessions:
    """All control streams of one node. ``on_opened`` (with the peer's member record) and ``on_closed``
    are called synchronously; ``on_orders`` hears what a member that refuses us says the owner has ordered.

    ``born`` tells this run of the node from others with its identity. Runs in the nursery
    :meth:`start` is given."""

    def __init__(
        self,
        transport: Transport,
        table: Table,
        admission: Admission,
        handlers: Handlers,
        clock: Callable[[], float],
        born: int,
        release: str,
        settings: NetworkSettings,
    ) -> None:
        self.by_peer: dict[PeerId, PeerSession] = {}
        self.refused = 0
        self.on_opened: Callable[[PeerId, Entry], None] = _ignore
        self.on_closed: Callable[[PeerId], None] = _ignore
        self.on_orders: Callable[[SignedOrders], None] = _ignore
        self.dial_around: Callable[[PeerId], Awaitable[trio.SocketStream]] | None = None
        self._transport = transport
        self._table = table
        self._admission = admission
        self._handlers = handlers
        self._clock = clock
        self._born = born
        self._release = release
        self._settings = settings
        self._hosts: frozenset[IPv4Address | IPv6Address] = frozenset()
        self._hosts_at = -float("inf")
        self._connecting: dict[PeerId, trio.Event] = {}
        self._banned: dict[PeerId, float] = {}
        self._nursery: trio.Nursery | None = None
        self._closed = False

    async def start(self, nursery: trio.Nursery) -> Address:
        """Begin to accept; returns the address to announce."""
        self._nursery = nursery
        bound: Address = await nursery.start(self._transport.serve, self._on_inbound, self.is_member_host)
        return bound

    def is_member_host(self, host: str) -> bool:
        """Whether a box that is a member announces this IP address, or has come from it."""
        if trio.current_time() - self._hosts_at >= _HOSTS_EVERY_S:
            self._hosts, self._hosts_at = self._find_hosts(), trio.current_time()
        return plain_ip(host) in self._hosts

    async def find_peer(self, member: Bootstrap) -> PeerId:
        """Who is at this member's address; not yet whether it is ours, as greeting it shows. Raises
        Unreachable."""
        if member.peer_id is not None:
            return member.peer_id
        peer = await self._transport.identify(Address(member.host, member.port))
        if peer == self._table.peer_id:
            raise Unreachable(f"this node itself, or a copy of it, answers at {member}; name another member")
        return peer

    async def prove(self, peer: PeerId, address: Address, is_allowed: Callable[[str], bool]) -> Address:
        """The IP address at which this peer has just proved its key, of those that are allowed. Raises Unreachable."""
        for host in filter(is_allowed, await resolve_host(address)):
            there = Address(host, address.port)
            if await self._transport.identify(there) == peer:
                return there
        raise Unreachable(f"{peer} is not at {address}, or may not be dialled there for others")

    async def connect(self, peer: PeerId, address: Address) -> PeerSession:
        """The session with this peer, dialled if need be; several callers share one dial. Raises
        Unreachable, Refused (by them), IdentityInUse, or TokenError (by us)."""
        # Whoever waited finds the session, or dials itself: the other's failure may be the other's.
        while (event := self._connecting.get(peer)) is not None:
            await event.wait()
        held = self.by_peer.get(peer)
        if held is not None:
            return held
        if self._closed:
            raise Unreachable(f"cannot reach {peer}: this node has left the network; start it again to rejoin")
        if self._is_banned(peer):
            raise Refused(f"{peer} misbehaved and is not dialled for a minute; look at its log")
        event = self._connecting[peer] = trio.Event()
        try:
            return await self._dial(peer, address)
        finally:
            del self._connecting[peer]
            event.set()

    async def session_with(self, peer: PeerId, timeout: float) -> PeerSession:
        """The session with a member, dialled within ``timeout`` if need be; else PeerLost."""
        held = self.by_peer.get(peer)
        if held is not None:
            return held
        record = self._table.record(peer)
        if record is None or is_client(record) or record.left or record.port == 0:
            raise PeerLost(f"{peer} is not connected; wait until it is back or choose another peer")
        address = Address(record.host, record.port)
        try:
            with trio.move_on_after(max(timeout, 0.0)):
                return await self.connect(peer, address)
        except NetworkError as error:
            raise PeerLost(f"{peer} is not connected and cannot be reached now: {error}") from error
        raise PeerLost(f"{peer} is not connected and did not answer within {timeout:g} s; choose another peer")

    def seen_host(self, peer: PeerId) -> str | None:
        """The IP address from which a peer's session comes, or to which it was dialled."""
        session = self.by_peer.get(peer)
        remote = session.control.connection.remote if session is not None else None
        return remote.host if remote is not None else None

    def drop(self, peer: PeerId) -> None:
        """Hang up on a peer that is silent for too long, or was expelled."""
        session = self.by_peer.get(peer)
        if session is not None:
            self._hang_up(session, f"{peer} was silent for too long, or expelled")

    def part(self, peer: PeerId) -> None:
        """Close a session that neither end needs, once what was sent is out."""
        session = self.by_peer.get(peer)
        if session is not None and not session.control.is_busy:
            assert self._nursery is not None
            self._nursery.start_soon(session.control.connection.aclose)

    async def close(self) -> None:
        """Flush and close all streams; no new ones after that."""
        self._closed = True
        async with trio.open_nursery() as nursery:
            for session in list(self.by_peer.values()):
                nursery.start_soon(session.control.connection.aclose)

    def __repr__(self) -> str:
        return f"PeerSessions(open={len(self.by_peer)}, dialling={len(self._connecting)}, refused={self.refused})"

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _dial(self, peer: PeerId, address: Address) -> PeerSession:
        assert self._nursery is not None
        connection = await self._connect(peer, address)
        session: PeerSession | None = None
        try:
            welcome, record = await self._greet(connection, address)
            try:
                await self._check_life(peer, welcome.born)
            except IdentityInUse as error:
                raise Unreachable(f"{peer} at {address} is not dialled: it is connected from elsewhere") from error
            session = self._register(connection, welcome, record, dialled_by_me=True)
            # In our own nursery, and as safe as what the transport runs for those who dial us.
            self._nursery.start_soon(run_handler, lambda _: self._run(session), connection)
            return session
        finally:
            if session is None:  # refused, failed or cancelled: the other side should not wait for us
                with trio.CancelScope(shield=True):
                    await connection.aclose()

    async def _connect(self, peer: PeerId, address: Address) -> PeerConnection:
        """Dialled, or made some other way, where the peer itself says that it cannot be dialled there."""
        record = self._table.record(peer)
        is_closed = record is not None and record.closed and address == Address(record.host, record.port)
        if self.dial_around is None or not is_closed:
            return await self._transport.dial(address, peer)
        try:
            stream = await self.dial_around(peer)
        except NetworkError as error:
            raise Unreachable(f"{peer} cannot be dialled, and no member brings us together now: {error}") from error
        return await self._transport.dial_over(stream, address, peer)

    async def _greet(self, connection: PeerConnection, address: Address) -> tuple[Welcome, MemberRecord]:
        """Show who we are, and check who answers."""
        peer = connection.peer
        try:
            await connection.send(encode_greeting(self._greeting(Hello)))
            answer = await self._receive_greeting(connection)
        except OtherProtocol as error:
            raise Refused(f"the node at {address} is not one of ours: {error}") from error
        except (PeerLost, ProtocolError) as error:
            raise Unreachable(f"{peer} at {address} hung up during the greeting: {error}") from error
        if isinstance(answer, Rejected) and answer.holder_born:
            raise IdentityInUse(answer.reason, answer.holder_born)
        if isinstance(answer, Rejected):
            if answer.orders is not None:
                self.on_orders(answer.orders)
            raise Refused(f"{address} refused to let this node in: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise Unreachable(f"{peer} at {address} did not greet back; check that it is a p2pserve node")
        try:
            return answer, self._admission.check_greeting(answer, peer, self._clock())
        except ProtocolError as error:
            raise Refused(f"the node at {address} is not one of ours: {error}") from error
        except TokenError as error:
            raise TokenError(f"the node at {address} is not one of ours: {error}") from error

    async def _on_inbound(self, connection: PeerConnection) -> None:
        """A stranger until its greeting is checked. Returning closes, once what was sent is out."""
        peer = connection.peer
        record: MemberRecord | None = None
        try:
            try:
                greeting = await self._receive_greeting(connection)
            except OtherProtocol as error:  # of a later release, perhaps, which can tell its owner
                await connection.send(encode_greeting(Rejected(str(error))))
                raise
            if not isinstance(greeting, Hello):
                self.refused += 1
                return
            try:
                if self._closed:
                    raise ProtocolError("this node is leaving the network; join through another one")
                if peer == self._table.peer_id:
                    raise IdentityInUse(self._describe_holder(peer), self._born)
                if self._is_banned(peer):
                    raise ProtocolError("this peer misbehaved; try again in a minute")
                record = self._admission.check_greeting(greeting, peer, self._clock())
                await self._check_life(peer, greeting.born)
            except (TokenError, ProtocolError, IdentityInUse) as error:
                self.refused += 1
                _log.info("refused %s: %s", peer, error)
                holder_born = error.holder_born if isinstance(error, IdentityInUse) else 0
                await connection.send(encode_greeting(Rejected(str(error), holder_born, self._orders_for(greeting))))
                return
            connection.admit()  # before it hears of it, and begins to send
            await connection.send(encode_greeting(self._greeting(Welcome)))
            await self._check_life(peer, greeting.born)  # once more: copies of a box may be started all at once
        except (PeerLost, ProtocolError, IdentityInUse) as error:
            self.refused += 1
            if is_client(record) and peer not in self.by_peer:
                self._admission.release(peer)  # let in, and gone before it was filed: nobody else would free its place
            _log.info("a stranger (%s) went away before it was let in: %s", peer, error)
            return
        assert record is not None
        await self._run(self._register(connection, greeting, record, dialled_by_me=False))

    def _orders_for(self, greeting: Hello) -> SignedOrders | None:
        """The orders by which a former member was revoked: it ends when it has seen them. Others are told nothing."""
        record, peer = read_record(greeting.member.payload), greeting.member.origin
        try:
            grant = None if record is None else self._admission.read_grant(peer, record)
        except TokenError:
            return None
        if grant is None or not self._admission.is_revoked(grant) or not self._admission.was_admitted(peer, grant):
            return None
        return self._admission.signed_orders

    async def _check_life(self, peer: PeerId, born: int) -> None:
        """Raise IdentityInUse when another living node has the identity of the one that greeted us.
        Asking tells a copied image from the dead connection of a restarted node."""
        while (held := self.by_peer.get(peer)) is not None and held.born != born:
            is_alive = await held.control.is_answering(self._settings.identity_check_s)
            if self.by_peer.get(peer) is not held:
                continue  # somebody came or went while we waited
            if is_alive:
                raise IdentityInUse(self._describe_holder(peer), held.born)
            self._hang_up(held, f"{peer} does not answer here any more, and has come back as another run")

    def _describe_holder(self, peer: PeerId) -> str:
        record = self._table.record(peer)
        where = f" at {Address(record.host, record.port)}" if record is not None else ""
        return (
            f"another node{where} is in the network with this node's identity (..{peer[-6:]}), as after a box was "
            "copied; delete identity.key in the home folder of one of the two and start it again: it makes its own"
        )

    def _find_hosts(self) -> frozenset[IPv4Address | IPv6Address]:
        records = (self._table.record(peer) for peer in self._table.origins() if peer != self._table.peer_id)
        announced = (record.host for record in records if record is not None and not is_client(record))
        seen = (s.control.connection.remote for s in self.by_peer.values() if s.role is not Role.CLIENT)
        found = {plain_ip(host) for host in (*announced, *(each.host for each in seen if each is not None))}
        return frozenset(each for each in found if each is not None)

    def _is_banned(self, peer: PeerId) -> bool:
        self._banned = {each: until for each, until in self._banned.items() if until > trio.current_time()}
        return peer in self._banned

    def _greeting(self, kind: type[Hello] | type[Welcome]) -> Hello | Welcome:
        record = self._table.own_entries()[0]
        return kind(PROTOCOL_VERSION, self._admission.network, record, self._born, self._release)

    def _register(
        self, connection: PeerConnection, greeting: Hello | Welcome, record: MemberRecord, *, dialled_by_me: bool
    ) -> PeerSession:
        """File an admitted connection; of two to one peer, both ends keep the same one."""
        assert self._nursery is not None
        peer, now = connection.peer, trio.current_time()
        asks_as = self._admission.read_grant(peer, record).asks_as(record.role)
        session = PeerSession(
            ControlStream(
                connection,
                serve=lambda method, body: self._handlers.serve(peer, asks_as, method, body),
                notice=lambda method, body: self._handlers.notify(peer, asks_as, method, body),
                settings=self._settings,
            ),
            record.role,
            greeting.born,
            dialled_by_me,
            now,
        )
        held = self.by_peer.get(peer)
        if held is not None:
            me, age = self._table.peer_id, now - held.since
            if not should_replace(
                me=me,
                peer=peer,
                new_dialled_by_me=dialled_by_me,
                held_dialled_by_me=held.dialled_by_me,
                held_age_s=age,
                crossing_s=self._settings.crossing_s,
            ):
                self._nursery.start_soon(self._retire, session)
                return session
            if age <= self._settings.crossing_s and held.dialled_by_me is not dialled_by_me:
                self._nursery.start_soon(self._retire, held)
            else:  # the peer lost the old one, and with it what was on its way: here, too, it must be seen as lost
                self._hang_up(held, f"{peer} has lost this connection and opened another one")
        # From here on others may use the session: the record comes first, which its messages need.
        self.by_peer[peer] = session
        self.on_opened(peer, greeting.member)
        return session

    async def _run(self, session: PeerSession) -> None:
        """Serve one peer until its stream ends."""
        try:
            await session.control.run()
        finally:
            # Noted before the session is forgotten, which lets the redial begin.
            if session.control.offences >= self._settings.max_offences:
                self._banned[session.peer] = trio.current_time() + self._settings.ban_s
            self._forget(session)
            with trio.CancelScope(shield=True):
                await session.control.connection.aclose()

    def _hang_up(self, session: PeerSession, because: str) -> None:
        """A session is over as of now, for both sides."""
        assert self._nursery is not None
        session.control.abandon(because)
        self._forget(session)
        self._nursery.start_soon(session.control.connection.aclose)

    async def _receive_greeting(self, connection: PeerConnection) -> Greeting:
        with trio.move_on_after(self._settings.greeting_s):
            return decode_greeting(await connection.receive())
        raise PeerLost(f"no greeting came within {self._settings.greeting_s:g} s")

    async def _retire(self, session: PeerSession) -> None:
        """Close a superseded stream after a moment, as the other side may still use it."""
        await trio.sleep(self._settings.retire_s)
        await session.control.connection.aclose()

    def _forget(self, session: PeerSession) -> None:
        # A session that was replaced ends later than it was forgotten; its successor stays.
        if self.by_peer.get(session.peer) is session:
            del self.by_peer[session.peer]
            self.on_closed(session.peer)


def _ignore(*_: object) -> None:
    """What happens on a change before anybody listens."""
