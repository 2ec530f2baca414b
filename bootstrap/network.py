"""The network as the rest of a node uses it: the one place of this room that holds tasks.

Everything is decided elsewhere, by pure machines: who may come in (:mod:`.admission`), who is a member and alive
(:mod:`.membership`), who coordinates (:mod:`.election`), whom to dial (:mod:`.mesh`). This module moves messages
between them and the control streams::

    pulse   tick membership -> drop, ping, elect, dial; sleeps until one of them wants to be woken
    gossip  each second, with two random peers: digests, then what either lacks
    session one per admitted peer: reads until the connection is lost
"""

import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import msgspec
import trio

from .addresses import Address
from .errors import (
    DECODE_ERRORS,
    NetworkError,
    PeerLost,
    ProtocolError,
    Refused,
    RequestTimeout,
    TokenError,
    Unreachable,
)
from .handlers import Handlers
from .members.election import CLAIM_KIND, SETTLE_SECONDS, Election, decode_claim, encode_claim
from .members.entries import MEMBER_KIND, Entry, MemberRecord
from .members.gossip import Gossip
from .members.membership import Member, Membership, MemberState, Timeouts
from .members.mesh import Dial, DialBook
from .methods import Answer, AsyncHandler, Body, Method, Notice, NoticeHandler
from .sessions import PeerSessions
from .streams.control import encode_body, encode_notice
from .streams.transport import Transport
from .trust.admission import Admission
from .trust.identity import Identity
from .trust.keys import PeerId
from .trust.tokens import Bootstrap, Credential, JoinToken, Role, admit

__all__ = ["Network", "NetworkStatistics"]

_log = logging.getLogger(__name__)

JOIN_SECONDS: Final = 5.0
JOIN_RETRY_SECONDS: Final = 0.3
CLIENT_LINKS: Final = 1  # a client dials other members only when no bootstrap is left
_SHORTEST_NAP_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStatistics:
    """Counts since the start, and the state now."""

    members: int
    alive: int
    connected: int
    coordinator: str | None
    epoch: int
    revision: int
    requests_served: int
    requests_failed: int
    strangers_refused: int
    entries_forged: int
    messages_shed: int
    dials_failed: int


@dataclass(kw_only=True, eq=False, repr=False)
class Network:
    """``async with network:`` joins, and stays a member until the block ends. Owns its nursery.

    Entering returns once one bootstrap has admitted us, or at once when there is none to ask. It raises Unreachable,
    Refused, TokenError, PortInUse or AddressError. Leaving the block without :meth:`leave` looks like a crash to
    others, which is safe: they notice within a second.
    """

    transport: Transport
    identity: Identity
    token: str | None = field(repr=False)
    network_key_public: bytes
    role: Role
    announce: Address
    bootstraps: tuple[Bootstrap, ...]
    rng: random.Random
    clock: Callable[[], float] = time.time  # unix seconds: for the expiry of tokens and the number of this life
    timeouts: Timeouts = field(default_factory=Timeouts)
    settle_s: float = SETTLE_SECONDS  # how long the candidates must be stable before one of them claims
    join_s: float = JOIN_SECONDS  # how long to keep asking bootstraps that do not answer

    def __post_init__(self) -> None:
        self.peer_id: PeerId = self.identity.peer_id
        self.address = self.announce
        self._token = JoinToken.parse(self.token) if self.token is not None else None
        self._others = tuple(each for each in self.bootstraps if each.peer_id != self.peer_id)
        named = (*self.bootstraps, *(self._token.bootstraps if self._token is not None else ()))
        admission = Admission(self.network_key_public, [each.peer_id for each in named])
        self._membership = Membership(
            self.identity,
            self.role,
            incarnation=max(1, int(self.clock() * 1000)),
            check=admission.check_record,
            timeouts=self.timeouts,
        )
        self._election = Election(self.peer_id, settle_s=self.settle_s)
        self._dials = DialBook(self.peer_id, self.rng)
        self._handlers = Handlers()
        self._sessions = PeerSessions(self.transport, self._membership, admission, self._handlers, self.clock)
        self._sessions.on_change = self._on_link_change
        self._gossip = Gossip(self._membership, self._sessions, self._handlers, self.rng, self._on_news)
        self._just_lost: set[PeerId] = set()
        self._lost_callbacks: list[Callable[[PeerId], None]] = []
        self._coordinator: tuple[PeerId, int] | None = None
        self._epoch = self._revision = self._shed = self._dials_failed = 0
        self._changed = trio.Event()
        self._kick = trio.Event()
        self._leaving = False
        self._nursery: trio.Nursery | None = None
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery, bool | None] | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._check_token()
        self._nursery_manager = trio.open_nursery()
        nursery = self._nursery = await self._nursery_manager.__aenter__()
        try:
            bound = await self._sessions.start(nursery)
            if self.address.port == 0:
                self.address = Address(self.address.host, bound.port)
            self._publish_record(left=False)
            nursery.start_soon(self._pulse)
            nursery.start_soon(self._gossip.run)
            await self._join(nursery)
        except BaseException as error:
            await self._close(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._close(error)

    async def _close(self, error: BaseException | None) -> bool:
        """End all tasks. An error of the block goes on as it is, not wrapped in a group with nothing else in it."""
        assert self._nursery is not None
        assert self._nursery_manager is not None
        self._leaving = True
        self._nursery.cancel_scope.cancel()
        if isinstance(error, Exception) and not isinstance(error, ExceptionGroup):
            await self._nursery_manager.__aexit__(None, None, None)
            return False
        kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
        return bool(await self._nursery_manager.__aexit__(kind, error, traceback))

    async def leave(self) -> None:
        """Tell everybody that we go, then hang up. The block may go on; nothing is sent or answered any more."""
        if not self._leaving:
            self._leaving = True
            self._gossip.push([self._publish_record(left=True)])
            await self._sessions.close()
            self._wake()

    # -- what everybody says ------------------------------------------------------------------------------------------

    def publish(self, kind: str, payload: bytes) -> None:
        """Say something to all members: at most 64 KiB, the newest of each kind counts. Pushed at once to all
        connected peers; the rest get it by gossip. What a client says stays with it."""
        if kind in (MEMBER_KIND, CLAIM_KIND):
            raise ValueError(f"kind {kind!r} belongs to the network itself; choose another name")
        self._gossip.push([self._membership.publish(kind, payload)])

    def entries(self, kind: str) -> dict[PeerId, bytes]:
        """What the live members say, our own word included."""
        return self._membership.entries(kind)

    def members(self) -> tuple[Member, ...]:
        """Everybody, ourselves and the recently dead included, by peer id."""
        return self._membership.members(self._rtt_s)

    @property
    def coordinator(self) -> tuple[PeerId, int] | None:
        """Who coordinates, and in which epoch."""
        return self._coordinator

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
        """Ask a peer; our own id is served here. Dials the peer when it is a member we have no connection to.

        Raises RemoteError (its handler refused), PeerLost, RequestTimeout, or ProtocolError (its answer is not of the
        method's type, or the body is too large).
        """
        encoded = encode_body(body)
        if peer == self.peer_id:
            answer = await self._request_locally(method.name, encoded, timeout)
        else:
            deadline = trio.current_time() + timeout
            session = await self._sessions.session_with(peer, timeout)
            answer = await session.control.request(method.name, encoded, max(deadline - trio.current_time(), 0.0))
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
        session = self._sessions.by_peer.get(peer)
        if session is None:
            raise PeerLost(f"{peer} is not connected; wait until it is back or choose another peer")
        if not session.control.send_nowait(encode_notice(notice.name, encode_body(body))):
            self._shed += 1
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

    def connected(self) -> frozenset[PeerId]:
        """The peers with an admitted control stream now."""
        return frozenset(self._sessions.by_peer)

    def statistics(self) -> NetworkStatistics:
        """Counts and state."""
        members = self._membership.members()
        return NetworkStatistics(
            members=len(members),
            alive=sum(member.state is MemberState.ALIVE for member in members),
            connected=len(self._sessions.by_peer),
            coordinator=self._coordinator[0] if self._coordinator else None,
            epoch=self._epoch,
            revision=self._revision,
            requests_served=self._handlers.served,
            requests_failed=self._handlers.failed,
            strangers_refused=self._sessions.refused,
            entries_forged=self._gossip.forged,
            messages_shed=self._shed + sum(s.control.statistics().shed for s in self._sessions.by_peer.values()),
            dials_failed=self._dials_failed,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables contradict each other."""
        self._membership.check_integrity()
        for peer, session in self._sessions.by_peer.items():
            assert session.peer == peer, f"the session of {session.peer} is filed under {peer}"
            assert self._membership.record(peer) is not None, f"{peer} is connected without a member record"

    def __repr__(self) -> str:
        return (
            f"Network({self.peer_id}, {self.role.value}, connected={len(self._sessions.by_peer)}, "
            f"coordinator={self._coordinator}, revision={self._revision})"
        )

    def _rtt_s(self, peer: PeerId) -> float | None:
        session = self._sessions.by_peer.get(peer)
        return None if session is None else session.control.rtt_s

    # -- joining ----------------------------------------------------------------------------------------------------

    def _check_token(self) -> None:
        """Find out here what the others would tell us."""
        if self.token is None:
            return
        role = admit(self.token, self.network_key_public, self.clock())
        if role is not self.role:
            raise TokenError(
                f"the join token is for the role {role.value!r}, not {self.role.value!r}; "
                f"start as {role.value!r} or use another token"
            )

    def _publish_record(self, *, left: bool) -> Entry:
        credential: Credential | None = self._token.credential(self.peer_id) if self._token is not None else None
        record = MemberRecord(self.role, self.address.host, self.address.port, credential, left)
        return self._membership.publish(MEMBER_KIND, msgspec.msgpack.encode(record))

    async def _join(self, nursery: trio.Nursery) -> None:
        """Ask all bootstraps at once, until one lets us in, all have refused, or the time is up."""
        if not self._others:
            return
        give_up_at = trio.current_time() + self.join_s
        while True:
            send, receive = trio.open_memory_channel[NetworkError | None](len(self._others))
            for bootstrap in self._others:
                nursery.start_soon(self._ask, bootstrap, send.clone())
            send.close()
            errors: list[NetworkError] = []
            async for outcome in receive:
                if outcome is None:
                    return
                errors.append(outcome)
            refusals = [error for error in errors if not isinstance(error, Unreachable)]
            if refusals:
                raise refusals[0]
            if trio.current_time() >= give_up_at:
                if len(errors) == 1:
                    raise errors[0]
                raise Unreachable(f"none of {len(errors)} bootstraps can be reached: " + " | ".join(map(str, errors)))
            await trio.sleep(JOIN_RETRY_SECONDS * self.rng.uniform(0.8, 1.2))

    async def _ask(self, bootstrap: Bootstrap, outcome: trio.MemorySendChannel[NetworkError | None]) -> None:
        with outcome:
            try:
                session = await self._sessions.connect(bootstrap.peer_id, Address(bootstrap.host, bootstrap.port))
                await self._gossip.sync(session)
            except (Unreachable, Refused, TokenError) as error:
                outcome.send_nowait(error)
            else:
                outcome.send_nowait(None)

    # -- the pulse --------------------------------------------------------------------------------------------------

    async def _pulse(self) -> None:
        while True:
            self._kick = trio.Event()
            now = trio.current_time()
            for session in self._sessions.by_peer.values():
                self._membership.on_heard(session.peer, session.control.heard_at)
            step = self._membership.tick(now)
            for peer in step.drop:
                self._sessions.drop(peer)
            for peer in step.ping:
                self._ping(peer)
            has_elected = self._elect(now)
            if step.changed or has_elected:
                self._touch()
            self._dial_missing(now)
            wake = min(
                (
                    moment
                    for moment in (
                        self._membership.wake_at(now),
                        self._dials.wake_at(self._sessions.by_peer),
                        self._election.wake_at(),
                    )
                    if moment is not None
                ),
                default=float("inf"),
            )
            with trio.move_on_at(max(wake, now + _SHORTEST_NAP_S)):
                await self._kick.wait()

    def _ping(self, peer: PeerId) -> None:
        session = self._sessions.by_peer.get(peer)
        if session is not None:
            try:
                session.control.ping()
            except PeerLost as error:
                _log.debug("not pinged: %s", error)

    def _elect(self, now: float) -> bool:
        """Apply the election's rule; whether the coordinator changed."""
        members = self._membership.members()
        candidates = frozenset(
            member.peer_id
            for member in members
            if member.role is not Role.CLIENT and member.state in (MemberState.ALIVE, MemberState.SUSPECT)
        )
        step = self._election.decide(candidates, self._claims(), now)
        if step.claim is not None and not self._leaving:
            _log.info("claiming epoch %d", step.claim)
            self._gossip.push([self._membership.publish(CLAIM_KIND, encode_claim(step.claim))])
            step = self._election.decide(candidates, self._claims(), now)
        before = self._coordinator
        self._coordinator = None if step.coordinator is None else (step.coordinator, step.epoch)
        self._epoch = step.epoch
        if self._coordinator != before:
            _log.info("coordinator is now %s", self._coordinator)
        return self._coordinator != before

    def _claims(self) -> dict[PeerId, int]:
        return {peer: decode_claim(payload) for peer, payload in self._membership.highest(CLAIM_KIND).items()}

    def _dial_missing(self, now: float) -> None:
        if self._leaving or self._nursery is None:
            return
        wanted: dict[PeerId, Address] = {}
        if self.role is not Role.CLIENT or len(self._sessions.by_peer) < CLIENT_LINKS:
            wanted = self._membership.dial_targets()
        # The addresses we were given win over announced ones: they are known to work from here.
        wanted |= {each.peer_id: Address(each.host, each.port) for each in self._others}
        for dial in self._dials.take_due(wanted, self._sessions.by_peer, now):
            self._nursery.start_soon(self._redial, dial)

    async def _redial(self, dial: Dial) -> None:
        try:
            session = await self._sessions.connect(dial.peer, dial.address)
        except (Unreachable, Refused, TokenError) as error:
            _log.debug("dial failed: %s", error)
            self._dials_failed += 1
            now = trio.current_time()
            self._dials.on_result(dial.peer, False, now)
            if dial.peer in self._just_lost and dial.peer not in self._sessions.by_peer:
                self._membership.on_lost(dial.peer, now)
        else:
            self._dials.on_result(dial.peer, True, trio.current_time())
            await self._gossip.sync(session)
        self._just_lost.discard(dial.peer)
        self._wake()

    def _on_link_change(self, peer: PeerId, opened: bool) -> None:
        now = trio.current_time()
        if opened:
            self._just_lost.discard(peer)
            self._gossip.push_to(peer, self._membership.own_entries())
        else:
            record = self._membership.record(peer)
            if record is not None and record.role is Role.CLIENT:
                self._membership.on_lost(peer, now)  # nobody can dial it: it is gone until it comes back itself
            else:
                self._just_lost.add(peer)
                self._dials.on_disconnected(peer, now)
            for callback in self._lost_callbacks:
                callback(peer)
        self._touch()
        self._wake()

    async def _request_locally(self, method: str, body: bytes, timeout: float) -> bytes:
        with trio.move_on_after(timeout):
            return await self._handlers.serve(self.peer_id, self.role, method, body)
        raise RequestTimeout(f"this node did not answer {method!r} within {timeout:g} s; its own handler is too slow")

    def _on_news(self, changed: bool) -> None:
        if changed:
            self._touch()
        self._wake()

    def _touch(self) -> None:
        self._revision += 1
        self._changed.set()
        self._changed = trio.Event()

    def _wake(self) -> None:
        self._kick.set()
