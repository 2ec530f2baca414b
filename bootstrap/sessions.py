"""The control streams to other peers: letting peers in, dialling them, keeping exactly one stream for each.

Nothing a stranger says is looked at before admission, except one greeting of bounded size and time.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from .addresses import Address
from .errors import NetworkError, PeerLost, ProtocolError, Refused, TokenError, Unreachable
from .handlers import Handlers
from .members.entries import Entry, MemberRecord
from .members.membership import Membership
from .members.mesh import YOUNG_S, should_replace
from .streams.control import (
    MAX_OFFENCES,
    PROTOCOL_VERSION,
    ControlStream,
    Greeting,
    Hello,
    Rejected,
    Welcome,
    decode_greeting,
    encode_greeting,
)
from .streams.transport import Connection, Transport, run_handler
from .trust.admission import Admission
from .trust.keys import PeerId
from .trust.tokens import Role

__all__ = ["PeerSession", "PeerSessions"]

_log = logging.getLogger(__name__)

GREETING_SECONDS: Final = 5.0
BAN_SECONDS: Final = 60.0
RETIRE_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class PeerSession:
    """One admitted peer on one control stream."""

    control: ControlStream
    role: Role
    incarnation: int
    dialled_by_me: bool
    since: float

    @property
    def peer(self) -> PeerId:
        """Who it is."""
        return self.control.peer


class PeerSessions:
    """All control streams of one node. ``on_change`` is called, synchronously, when a stream opens or closes.

    Uses the nursery that :meth:`start` is given; runs nothing before.
    """

    def __init__(
        self,
        transport: Transport,
        membership: Membership,
        admission: Admission,
        handlers: Handlers,
        clock: Callable[[], float],
    ) -> None:
        self.by_peer: dict[PeerId, PeerSession] = {}
        self.refused = 0
        self.on_change: Callable[[PeerId, bool], None] = _ignore
        self._transport = transport
        self._membership = membership
        self._admission = admission
        self._handlers = handlers
        self._clock = clock
        self._connecting: dict[PeerId, trio.Event] = {}
        self._banned: dict[PeerId, float] = {}
        self._nursery: trio.Nursery | None = None
        self._closed = False

    async def start(self, nursery: trio.Nursery) -> Address:
        """Begin to accept; returns the address to announce."""
        self._nursery = nursery
        bound: Address = await nursery.start(self._transport.serve, self._on_inbound)
        return bound

    async def connect(self, peer: PeerId, address: Address) -> PeerSession:
        """The session with this peer, dialled if need be; several callers share one dial.

        Raises Unreachable, Refused (they do not let us in), or TokenError (we do not let them in).
        """
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
        """The session with a member, dialled within ``timeout`` if need be; PeerLost when there is none."""
        held = self.by_peer.get(peer)
        if held is not None:
            return held
        address = self._membership.dial_targets().get(peer)
        if address is None or address.port == 0:
            raise PeerLost(f"{peer} is not connected; wait until it is back or choose another peer")
        try:
            with trio.move_on_after(timeout):
                return await self.connect(peer, address)
        except NetworkError as error:
            raise PeerLost(f"{peer} is not connected and cannot be reached now: {error}") from error
        raise PeerLost(f"{peer} is not connected and did not answer within {timeout:g} s; choose another peer")

    def broadcast(self, frame: bytes) -> None:
        """Send one encoded notice to everybody; who is too slow gets it by gossip instead."""
        for session in list(self.by_peer.values()):
            try:
                session.control.send_nowait(frame)
            except PeerLost as error:
                _log.debug("not pushed: %s", error)

    def drop(self, peer: PeerId) -> None:
        """Hang up on a peer that is silent for too long."""
        session = self.by_peer.get(peer)
        if session is not None:
            self._hang_up(session, f"{peer} was silent for too long")

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
        connection = await self._transport.dial(address, peer)
        session: PeerSession | None = None
        try:
            welcome, record = await self._greet(connection, address)
            session = self._register(connection, welcome.member, record, dialled_by_me=True)
            # In our own nursery, and as safe as what the transport runs for those who dial us.
            self._nursery.start_soon(run_handler, lambda _: self._run(session), connection)
            return session
        finally:
            if session is None:
                with trio.CancelScope(shield=True):
                    await connection.aclose()

    async def _greet(self, connection: Connection, address: Address) -> tuple[Welcome, MemberRecord]:
        """Show who we are, and judge who answers."""
        peer = connection.peer
        try:
            await connection.send(encode_greeting(self._greeting(Hello)))
            answer = await _receive_greeting(connection)
        except (PeerLost, ProtocolError) as error:
            raise Unreachable(f"{peer} at {address} hung up during the greeting: {error}") from error
        if isinstance(answer, Rejected):
            raise Refused(f"{address} refused to let this node in: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise Unreachable(f"{peer} at {address} did not greet back; check that it is a p2pserve node")
        try:
            return answer, self._admission.check_greeting(answer, peer, self._membership.record(peer), self._clock())
        except ProtocolError as error:
            raise Refused(f"the node at {address} is not one of ours: {error}") from error
        except TokenError as error:
            raise TokenError(f"the node at {address} is not one of ours: {error}") from error

    async def _on_inbound(self, connection: Connection) -> None:
        """A stranger, until judged. Returning closes the connection, after what was sent has left."""
        peer = connection.peer
        try:
            greeting = await _receive_greeting(connection)
            if not isinstance(greeting, Hello):
                self.refused += 1
                return
            try:
                if self._closed:
                    raise ProtocolError("this node is leaving the network; join through another one")
                if peer == self._membership.peer_id:
                    raise ProtocolError("two nodes share one identity; give each node a home folder of its own")
                if self._is_banned(peer):
                    raise ProtocolError("this peer misbehaved; try again in a minute")
                record = self._admission.check_greeting(greeting, peer, self._membership.record(peer), self._clock())
            except (TokenError, ProtocolError) as error:
                self.refused += 1
                _log.info("refused %s: %s", peer, error)
                await connection.send(encode_greeting(Rejected(str(error))))
                return
            connection.admit()  # before it hears of it, and begins to send
            await connection.send(encode_greeting(self._greeting(Welcome)))
        except (PeerLost, ProtocolError) as error:
            self.refused += 1
            _log.info("a stranger (%s) went away before it was let in: %s", peer, error)
            return
        await self._run(self._register(connection, greeting.member, record, dialled_by_me=False))

    def _is_banned(self, peer: PeerId) -> bool:
        self._banned = {each: until for each, until in self._banned.items() if until > trio.current_time()}
        return peer in self._banned

    def _greeting(self, kind: type[Hello] | type[Welcome]) -> Hello | Welcome:
        return kind(PROTOCOL_VERSION, self._admission.network, self._membership.own_entries()[0])

    def _register(
        self, connection: Connection, member: Entry, record: MemberRecord, *, dialled_by_me: bool
    ) -> PeerSession:
        """File an admitted connection; of two to one peer, both ends keep the same one."""
        assert self._nursery is not None
        peer, now = connection.peer, trio.current_time()
        session = PeerSession(
            ControlStream(
                connection,
                serve=lambda method, body: self._handlers.serve(peer, record.role, method, body),
                notice=lambda method, body: self._handlers.notify(peer, record.role, method, body),
            ),
            record.role,
            member.incarnation,
            dialled_by_me,
            now,
        )
        held = self.by_peer.get(peer)
        if held is not None:
            me, age = self._membership.peer_id, now - held.since
            if not should_replace(
                me=me,
                peer=peer,
                new_dialled_by_me=dialled_by_me,
                new_incarnation=member.incarnation,
                held_dialled_by_me=held.dialled_by_me,
                held_incarnation=held.incarnation,
                held_age_s=age,
            ):
                self._nursery.start_soon(_retire, session)
                return session
            crossed = age <= YOUNG_S and held.dialled_by_me is not dialled_by_me
            if crossed and held.incarnation == member.incarnation:
                self._nursery.start_soon(_retire, held)
            else:  # the peer lost the old one, and with it what was on its way: here, too, it must be seen as lost
                self._hang_up(held, f"{peer} has lost this connection and opened another one")
        self.by_peer[peer] = session
        self._membership.admit(member, now, private=record.role is Role.CLIENT)
        self._membership.on_connected(peer, now)
        self.on_change(peer, True)
        return session

    async def _run(self, session: PeerSession) -> None:
        """Serve one peer until its stream ends."""
        try:
            await session.control.run()
        finally:
            if session.control.offences >= MAX_OFFENCES:
                self._banned[session.peer] = trio.current_time() + BAN_SECONDS
            self._forget(session)
            with trio.CancelScope(shield=True):
                await session.control.connection.aclose()

    def _hang_up(self, session: PeerSession, because: str) -> None:
        """A session is over as of now, for both sides."""
        assert self._nursery is not None
        session.control.abandon(because)
        self._forget(session)
        self._nursery.start_soon(session.control.connection.aclose)

    def _forget(self, session: PeerSession) -> None:
        if self.by_peer.get(session.peer) is session:
            del self.by_peer[session.peer]
            self._membership.on_disconnected(session.peer)
            self.on_change(session.peer, False)


def _ignore(peer: PeerId, opened: bool) -> None:
    """What happens on a change before anybody listens."""


async def _receive_greeting(connection: Connection) -> Greeting:
    with trio.move_on_after(GREETING_SECONDS):
        return decode_greeting(await connection.receive())
    raise PeerLost(f"no greeting came within {GREETING_SECONDS:g} s")


async def _retire(session: PeerSession) -> None:
    """Close a superseded stream after a moment: the other side may not have noticed yet, and still use it."""
    await trio.sleep(RETIRE_SECONDS)
    await session.control.connection.aclose()
