"""Who is a member, in which state, and who is to be forgotten: what others may read of the table. Pure."""

from collections.abc import Callable, Iterable

from ..addresses import Address
from ..settings import NetworkSettings
from ..trust.keys import PeerId
from ..trust.tokens import Bootstrap
from .admission import is_client
from .liveness import Liveness
from .states import Member, MemberState
from .table import Table


class Roster:
    """The members of one network, as one node sees them. Methods get the time as ``now``, in seconds."""

    def __init__(self, table: Table, liveness: Liveness, settings: NetworkSettings) -> None:
        self.me = table.peer_id
        self._table = table
        self._liveness = liveness
        self._settings = settings
        self._has_lived: set[PeerId] = set()
        self._gone_since: dict[PeerId, float] = {}
        self._suspects: frozenset[PeerId] = frozenset()
        self._look_at = float("-inf")

    # -- looking around -----------------------------------------------------------------------------------------------

    def note_lived(self, peers: Iterable[PeerId]) -> None:
        """These have been seen alive, now or in an earlier run."""
        self._has_lived.update(peers)

    def has_lived(self, peer: PeerId) -> bool:
        """Whether this peer was ever alive."""
        return peer in self._has_lived

    def beat_s(self) -> float:
        """How often each member says something at least: seldom in a large network, or it would be filled by that."""
        return max(self._settings.beat_s, self._settings.beat_each_s * len(self._table))

    def look(self, now: float) -> tuple[bool, bool]:
        """See who lives: whether that is others than before, and whether others are suspect."""
        has_changed = self._liveness.update(now, self.beat_s())
        suspects = frozenset(peer for peer in self._liveness.watched if self._liveness.is_suspect(peer, now))
        is_suspicious, self._suspects = bool(suspects - self._suspects), suspects
        return has_changed, is_suspicious

    def find_forgotten(self, now: float, *, has_changed: bool) -> tuple[PeerId, ...]:
        """Who has been gone for long enough; say :meth:`forget` of each."""
        if not has_changed and now < self._look_at:
            return ()
        self._look_at = now + 1.0
        forgotten = []
        for peer in self._table.origins():
            if self._liveness.is_living(peer):
                if peer not in self._has_lived:
                    self._has_lived.add(peer)
                    self._table.note_seen(peer)
                self._gone_since.pop(peer, None)
                continue
            # Of whom nobody has ever heard itself, no trace is kept: anybody can invent such members.
            if now - self._gone_since.setdefault(peer, now) >= self._kept_s(peer):
                forgotten.append(peer)
        self._table.forget_forgotten(now)
        return tuple(forgotten)

    def forget(self, peer: PeerId, now: float) -> None:
        """Keep nothing of this peer, and do not hear of its life again from others for a while."""
        self._table.forget(peer, now + self._kept_s(peer))
        self._liveness.forget(peer)
        self._gone_since.pop(peer, None)
        self._has_lived.discard(peer)

    def _kept_s(self, peer: PeerId) -> float:
        return self._settings.forget_s if peer in self._has_lived else self._settings.orphan_s

    # -- what others may read -----------------------------------------------------------------------------------------

    @property
    def suspects(self) -> frozenset[PeerId]:
        """Those whose sessions are silent or broken, as of the last :meth:`look`."""
        return self._suspects

    def is_here(self, peer: PeerId) -> bool:
        """Whether a peer, or this node, is alive and has not left."""
        record = self._table.record(peer)
        return record is not None and not record.left and self._liveness.is_living(peer)

    def find_boxes(self) -> set[PeerId]:
        """The members that are here and no clients, this node included if it is none."""
        living = (self.me, *self._liveness.living)
        return {peer for peer in living if self.is_here(peer) and not is_client(self._table.record(peer))}

    def boxes_by_certificate(self) -> dict[str, set[PeerId]]:
        """The boxes that are here, this node included, by the names of their certificates."""
        found: dict[str, set[PeerId]] = {}
        for peer in self.find_boxes():
            grant = self._table.grant(peer)
            if grant is not None:
                found.setdefault(grant.certificate, set()).add(peer)
        return found

    def address_of(self, peer: PeerId) -> Address | None:
        """Where a box can be dialled that has not left."""
        record = self._table.record(peer)
        if record is None or is_client(record) or record.left:
            return None
        return Address(record.host, record.port)

    def find_addresses(self) -> dict[PeerId, Address]:
        """Where all other boxes can be dialled that have not left, dead or alive. Of two boxes that nobody can dial
        each looks for the other; anybody else is dialled by them."""
        others = (peer for peer in self._table.origins() if peer != self.me)
        if not self.is_closed(self.me):
            others = (peer for peer in others if not self.is_closed(peer))
        return {peer: at for peer in others if (at := self.address_of(peer)) is not None}

    def is_closed(self, peer: PeerId) -> bool:
        """Whether a peer, or this node, says that nobody can dial it."""
        record = self._table.record(peer)
        return record is not None and record.closed

    def state_of(self, peer: PeerId, now: float) -> MemberState:
        """The state of one member, as of the last :meth:`look`."""
        record = self._table.record(peer)
        if record is not None and record.left:
            return MemberState.LEFT
        if record is None or not self._liveness.is_living(peer):
            return MemberState.DEAD
        return MemberState.SUSPECT if self._liveness.is_suspect(peer, now) else MemberState.ALIVE

    def members(self, rtt_s: Callable[[PeerId], float | None], now: float) -> tuple[Member, ...]:
        """Everybody that was ever alive, by peer id; ``rtt_s`` knows the round trips."""
        found = []
        for peer in sorted(self._table.origins()):
            record, grant = self._table.record(peer), self._table.grant(peer)
            if record is None or not (peer == self.me or peer in self._has_lived or record.left):
                continue
            state, gone_at = self.state_of(peer, now), self._gone_since.get(peer)
            is_gone = state in (MemberState.DEAD, MemberState.LEFT) and gone_at is not None
            found.append(
                Member(
                    peer_id=peer,
                    role=record.role,
                    state=state,
                    gone_s=max(0.0, now - gone_at) if is_gone and gone_at is not None else None,
                    address=Address(record.host, record.port),
                    incarnation=self._table.life(peer),
                    is_closed=record.closed,
                    may_lead=grant is not None and grant.lead,
                    rtt_s=rtt_s(peer),
                )
            )
        return tuple(found)

    def entries(self, kind: str) -> dict[PeerId, bytes]:
        """What the living members say about ``kind``, those of this node included."""
        held = self._table.entries(kind)
        return {peer: entry.payload for peer, entry in held.items() if self.is_here(peer)}

    def addresses(self) -> tuple[Bootstrap, ...]:
        """Where other boxes that were ever alive can be dialled, last heard first."""
        heard = sorted((-self._liveness.heard_at(peer), peer) for peer in self._has_lived if peer != self.me)
        found = ((peer, self.address_of(peer)) for _, peer in heard)
        return tuple(Bootstrap(at.host, at.port, peer) for peer, at in found if at is not None and at.port != 0)
