"""Anti-entropy: each second, with two random peers, swap digests and then what either side lacks.
It repairs what the pushes of urgent entries have missed."""

import logging
import random
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import trio

from ..errors import DECODE_ERRORS, NetworkError, PeerLost
from ..handlers import Handlers
from ..methods import EVERYONE, Method, Notice
from ..sessions import PeerSession, PeerSessions
from ..settings import NetworkSettings
from ..streams.control import encode_body, encode_notice
from ..trust.entries import MEMBER_KIND, Entry
from ..trust.keys import PeerId
from ..trust.tokens import Role
from .membership import Membership
from .states import Digest

_log = logging.getLogger(__name__)


class _Sync(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    digest: Digest
    vouchers: dict[str, float]


class _SyncReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    digest: Digest
    vouchers: dict[str, float]
    entries: tuple[Entry, ...]


class _Entries(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    entries: tuple[Entry, ...]


_SYNC: Final = Method("p2p.sync", _Sync, _SyncReply, EVERYONE)
_ENTRIES: Final = Notice("p2p.entries", _Entries, EVERYONE)
_sync_replies = msgspec.msgpack.Decoder(_SyncReply)


class Gossip:
    """Keeps a membership in step with the linked peers'. ``on_news(changed)``: False for mere signs
    of life.

    A client learns from everybody, tells only its own member record, and nobody passes that on."""

    def __init__(
        self,
        membership: Membership,
        sessions: PeerSessions,
        handlers: Handlers,
        rng: random.Random,
        on_news: Callable[[bool], None],
        settings: NetworkSettings,
    ) -> None:
        self.forged = 0
        self._membership = membership
        self._sessions = sessions
        self._rng = rng
        self._on_news = on_news
        self._settings = settings
        handlers.add_request(_SYNC, self._serve_sync)
        handlers.add_notice(_ENTRIES, self._take_entries)

    async def run(self) -> None:
        """Gossip for ever."""
        while True:
            await trio.sleep(self._settings.gossip_s * self._rng.uniform(0.9, 1.1))
            partners = [each for each in self._sessions.by_peer.values() if each.role is not Role.CLIENT]
            async with trio.open_nursery() as nursery:
                for session in self._rng.sample(partners, min(self._settings.gossip_partners, len(partners))):
                    nursery.start_soon(self.sync, session)

    async def sync(self, session: PeerSession) -> None:
        """One exchange. A failure is the next round's business."""
        # What is asked for is fixed here; by the time the answer comes more may be known. Merging is
        # idempotent, so what arrives twice does no harm.
        now = trio.current_time()
        ask = encode_body(_Sync(self._membership.digest(), self._membership.vouchers(now)))
        try:
            reply = _sync_replies.decode(await session.control.request(_SYNC.name, ask, self._settings.sync_s))
        except DECODE_ERRORS as error:
            # Only blamed: the connection is sound, and the next round may bring sense.
            session.control.blame()
            _log.warning("%s answered a digest with nonsense: %s", session.peer, error)
            return
        except NetworkError as error:
            _log.debug("gossip with %s failed: %s", session.peer, error)
            return
        self._merge(session, reply.entries)
        self._membership.on_vouched(reply.vouchers, trio.current_time())
        self.push_to(session.peer, self._membership.delta_for(reply.digest))
        self._on_news(False)

    def push(self, entries: Iterable[Entry]) -> None:
        """Urgent: to everybody now, instead of within seconds."""
        batch = self._tellable(entries)
        if batch:
            self._sessions.broadcast(encode_notice(_ENTRIES.name, encode_body(_Entries(batch))))
        self._on_news(True)

    def push_to(self, peer: PeerId, entries: Iterable[Entry]) -> None:
        """The same to one peer."""
        batch = self._tellable(entries)
        session = self._sessions.by_peer.get(peer)
        if batch and session is not None:
            try:
                session.control.send_nowait(encode_notice(_ENTRIES.name, encode_body(_Entries(batch))))
            except PeerLost as error:
                _log.debug("not pushed: %s", error)

    def __repr__(self) -> str:
        return f"Gossip({self._membership!r}, forged={self.forged})"

    def _tellable(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Others take from a client only its own record, and blame it for anything else."""
        if self._membership.role is not Role.CLIENT:
            return tuple(entries)
        me = self._membership.peer_id
        return tuple(entry for entry in entries if entry.origin == me and entry.kind == MEMBER_KIND)

    async def _serve_sync(self, peer: PeerId, role: Role, ask: _Sync) -> _SyncReply:
        now = trio.current_time()
        if role is not Role.CLIENT:  # a client may say who lives, and nobody would be the wiser
            self._membership.on_vouched(ask.vouchers, now)
            self._on_news(False)
        delta = self._membership.delta_for(ask.digest)
        return _SyncReply(self._membership.digest(), self._membership.vouchers(now), tuple(delta))

    def _take_entries(self, peer: PeerId, role: Role, notice: _Entries) -> None:
        session = self._sessions.by_peer.get(peer)
        if session is not None:
            self._merge(session, notice.entries)

    def _merge(self, session: PeerSession, entries: Iterable[Entry]) -> None:
        private = session.peer if session.role is Role.CLIENT else None
        result = self._membership.merge(entries, trio.current_time(), from_origin=private)
        if result.forged:
            self.forged += result.forged
            session.control.blame(result.forged)
            _log.warning("%s sent %d forged entries", session.peer, result.forged)
        own = [entry for entry in result.changed if entry.origin == self._membership.peer_id]
        if own:  # an older life of ours made us take a higher number
            self.push(own)
        if result.changed:
            self._on_news(True)
