"""What one node does about its peers, as a pure machine: whom to hang up on, ping and dial, what to
tell whom, and whether to lead.

Events come in, each with the time; :meth:`Peering.tick` answers with :class:`Actions`. No clock,
task or socket::

    opened, closed, dialled, heard, received  -->  Table, Liveness, Election, Spread, DialBook  -->  Actions

:mod:`..network` runs it over connections, :mod:`..dev.simulation` a thousand of it over a simulated
network, and tests/sim/bootstrap/scripts over lines of text.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from ..addresses import Address
from ..errors import DECODE_ERRORS, TokenError
from ..settings import NetworkSettings
from ..trust.entries import MEMBER_KIND, Entry, Lie, is_sound, read_record
from ..trust.identity import Identity
from ..trust.keys import PeerId
from ..trust.orders import SignedOrders
from ..trust.tokens import Bootstrap, Role
from .admission import Admission, is_client
from .allowance import Allowance
from .election import CLAIM_KIND, Claim, Election, ElectionView, Say, decode_claim, encode_claim
from .gossip import Spread
from .liveness import HEARS_KIND, Liveness, encode_heard
from .mesh import Dial, DialBook
from .overlay import choose_neighbours
from .states import (
    Compare,
    GossipMessage,
    HeldClaim,
    Holding,
    Member,
    MemberState,
    MergeResult,
    NetworkState,
    Part,
    Summary,
    Tell,
)
from .table import BEAT_KIND, ReadNumber, Table

_log = logging.getLogger(__name__)

CLIENT_SESSIONS: Final = 1  # a client dials other members only when no session is left
OBJECTION_KIND: Final = "objection"
OWN_KINDS: Final = frozenset({MEMBER_KIND, CLAIM_KIND, HEARS_KIND, BEAT_KIND, OBJECTION_KIND})
_PAUSE_S: Final = 0.5  # so late, a tick shows that this node itself had no time


class _Objection(msgspec.Struct, frozen=True, array_like=True):
    leader: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What to do now, in this order; each ``dial`` is answered by :meth:`Peering.on_dialled`."""

    drop: tuple[PeerId, ...] = ()  # hang up BEFORE the rest, so that nothing more is sent to them
    ping: tuple[PeerId, ...] = ()
    send: tuple[tuple[PeerId, GossipMessage], ...] = ()
    part: tuple[PeerId, ...] = ()  # close these sessions, once what is sent is out
    dial: tuple[Dial, ...] = ()
    changed: bool = False  # who reads members or coordinator should look again
    wake_at: float = float("inf")  # when to tick again, unless an event comes first


class Peering:
    """The peers of one node.

    Args:
        named: members that the join token names, or that were given by hand; their addresses are known to work from
            here, and win over announced ones.
        standby: remembered members, dialled while nobody is connected.
        urgent: kinds of entries that are told to everybody at once.
        numbered, is_sound: see :class:`Table`.
    """

    def __init__(
        self,
        identity: Identity,
        role: Role,
        *,
        incarnation: int,
        admission: Admission,
        settings: NetworkSettings,
        rng: random.Random,
        named: Iterable[Bootstrap] = (),
        standby: Iterable[Bootstrap] = (),
        urgent: Collection[str] = (),
        numbered: Mapping[str, ReadNumber] | None = None,
        is_sound: Callable[[Entry], bool] = is_sound,
    ) -> None:
        self.table = Table(
            identity, admission, incarnation=incarnation, settings=settings, numbered=numbered, is_sound=is_sound
        )
        self.liveness = Liveness(identity.peer_id, settings)
        self.coordinator: tuple[PeerId, int] | None = None
        self.epoch = 0
        self.forged = 0
        self.is_leaving = False
        self._me = identity.peer_id
        self._role = role
        self._settings = settings
        self._rng = rng
        self._admission = admission
        self._is_sound = is_sound
        self._named = {each.peer_id: Address(each.host, each.port) for each in named if each.peer_id is not None}
        self._standby = {each.peer_id: Address(each.host, each.port) for each in standby if each.peer_id is not None}
        self._election = Election(identity.peer_id, settings)
        self._spread = Spread(rng, settings, self.liveness.hears, urgent)
        self._dials = DialBook(identity.peer_id, rng, settings, {*self._named, *self._standby})
        self._boxes: set[PeerId] = set()  # connected
        self._clients: set[PeerId] = set()  # connected
        self._answers: dict[PeerId, Allowance] = {}  # comparisons answered to each connected peer
        self._replies: list[tuple[PeerId, GossipMessage]] = []
        self._expelled: set[PeerId] = set()  # to be hung up on
        self._parted: set[PeerId] = set()  # sessions that are being closed because neither end needs them
        self._part_at = 0.0  # when to look for such
        self._gone_since: dict[PeerId, float] = {}
        self._has_lived: set[PeerId] = set()
        self._suspects: frozenset[PeerId] = frozenset()
        self._leaders: set[PeerId] = set()  # who may lead
        self._claims: dict[PeerId, Claim] = {}  # of those
        self._objections: dict[PeerId, tuple[PeerId, int]] = {}  # box -> the leader and epoch whose plans it refuses
        self._latest: HeldClaim | None = None  # the highest epoch known of
        self._witnessed = 0
        self._candidates: frozenset[PeerId] = frozenset()  # those of them that are here
        self._neighbours: dict[PeerId, Address] = {}
        self._is_shifted = True  # who is here, or where, is otherwise than when neighbours were chosen
        self.is_synced = not self._named and not self._standby  # whether this node knows what there is
        self._synced_by: float | None = None  # when it has waited long enough for those it remembers
        self._told_hears = b""
        self._hears_at = self._beat_at = self._compare_at = self._look_at = float("-inf")
        self._retry_at = float("inf")  # when to try another one of those gone
        self._elect_at = float("-inf")  # when to apply the election's rule, if nothing happens before
        self._due_at = float("inf")  # when the next tick is expected
        self._is_due = False  # something came that is to be looked at
        self._is_news = False  # which those who read members and entries should look at, too

    # -- events -----------------------------------------------------------------------------------------------------

    def publish(self, kind: str, payload: bytes) -> None:
        """Say something to everybody, with the next tick."""
        self._tell_own((self.table.publish(kind, payload),))
        self._read(self._me)
        self._is_news = True
        self._is_shifted = self._is_shifted or kind == MEMBER_KIND

    def object_to(self, leader: PeerId, epoch: int) -> None:
        """Tell everybody that this node refuses what the leader of this epoch plans."""
        self.publish(OBJECTION_KIND, msgspec.msgpack.encode(_Objection(leader, epoch)))

    def order(self, orders: SignedOrders) -> None:
        """Follow the orders of the network's owner, if they are news, and pass them on."""
        if self._admission.take_orders(orders):
            self._expelled.update(self.table.recheck())
            self._spread.tell_orders((*self._boxes, *self._clients), orders)
            self._is_news = True

    def state(self) -> NetworkState:
        """What is worth keeping for the next run."""
        admission = self._admission
        kinds = (MEMBER_KIND, CLAIM_KIND)
        return NetworkState(
            entries=tuple(entry for entry in self.table.shared_entries() if entry.kind in kinds),
            lies=tuple(self.table.lies.values()),
            orders=admission.signed_orders,
            latest=self._latest,
            holders={name: sorted(peers) for name, peers in admission.holders.items()},
        )

    def restore(self, state: NetworkState, now: float) -> None:
        """Take up what an earlier run has kept, before anything else happens."""
        self._admission.restore_holders(state.holders)
        if state.orders is not None:
            self._admission.take_orders(state.orders)
        self.table.take_lies(state.lies)
        if state.latest is not None:
            self._take_latest(state.latest)
        for entry in self.table.merge(state.entries, now).changed:
            peer = PeerId(entry.origin)
            self._has_lived.add(peer)
            self._dials.prefer(peer)
            self._read(peer)
        # Who was here before asks the others first.
        self.is_synced = self.is_synced and not self._has_lived

    def on_named(self, peer: PeerId, address: Address) -> None:
        """It turned out who answers at an address that was given by hand."""
        self._named[peer] = address
        self._dials.prefer(peer)

    def on_opened(self, peer: PeerId, record: Entry, now: float) -> None:
        """A session with this peer is open; it came with this member record."""
        is_box = not is_client(read_record(record.payload))
        result = self.table.admit(record, now, private=not is_box)
        (self._boxes if is_box else self._clients).add(peer)
        self._answers[peer] = Allowance(self._settings.answers_s, self._settings.answers_burst, at=now)
        if is_box:
            self._dials.prefer(peer)
            if self._synced_by is None:  # who let us in may be gone before it has told us anything
                self._synced_by = now + self._settings.sync_s
        self.liveness.on_opened(peer, now, counts=is_box)
        self._take(result, peer, now)
        self._tell_own(self.table.own_entries(), (peer,))
        # One of two asks, and hears in turn what the other lacks. Boxes ask nothing of clients.
        if is_box and (self._role is Role.CLIENT or self._me < peer):
            self._replies.append((peer, self._summarise()))
        self._is_news = True

    def on_closed(self, peer: PeerId, now: float) -> None:
        """Its last session closed: it may be dead, or only the connection may be."""
        record = self.table.record(peer)
        is_box = peer in self._boxes
        self._boxes.discard(peer)
        self._clients.discard(peer)
        self._answers.pop(peer, None)
        if peer in self._parted:
            self._parted.discard(peer)
            self.liveness.on_parted(peer)
            self._is_news = True
            return
        comes_back = is_box and record is not None and not record.left
        self.liveness.on_closed(peer, now, redialled=comes_back)
        if comes_back:
            self._dials.on_disconnected(peer, now)
        elif not is_box:
            self._forget(peer, now)  # a client: nobody can dial it, and nobody else knows it
        self._is_news = True

    def on_dialled(self, peer: PeerId, succeeded: bool, now: float) -> None:
        """A dial that :attr:`Actions.dial` asked for has ended."""
        self._dials.on_result(peer, succeeded, now)
        # A closed connection, and nobody at its address: together they tell a death at once. Silence
        # alone takes seconds.
        if not succeeded and peer not in self._boxes:
            self.liveness.on_unreachable(peer)

    def on_received(self, peer: PeerId, message: GossipMessage, now: float) -> int:
        """A peer tells or asks something. Returns how many offences there were in it."""
        if peer not in self._answers:
            return 0  # it was hung up on a moment ago
        match message:
            case Tell():
                return self._on_tell(peer, message, now)
            case Summary() if self._answers[peer].take(now):
                self._on_summary(peer, message)
            case Part():
                self._parted.add(peer)
            case Compare() if self._answers[peer].take(now):
                self._on_compare(peer, message)
            case _:
                pass  # it asks too often: the next time will do
        return 0

    # -- decisions --------------------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When to tick next, as what has come since the last tick may have made it sooner."""
        is_urgent = self._is_news or self._is_due or self._replies or self._expelled or self.liveness.is_news
        return float("-inf") if is_urgent else min(self._due_at, self._spread.wake_at(), self.liveness.look_at)

    def tick(self, now: float, heard: Mapping[PeerId, float], used: Mapping[PeerId, float]) -> Actions:
        """Decide what to do now; ``heard`` says when anything last came from each connected peer, and ``used`` when
        anything but gossip last went to or from it."""
        late_s = now - self._due_at
        paused_s = late_s if late_s > _PAUSE_S else 0.0
        if paused_s:
            _log.info("this node got no time for %.1f s", paused_s)
            self.liveness.on_paused(paused_s)
        for peer, heard_at in heard.items():
            self.liveness.on_heard(peer, heard_at)
        drop = self._find_dropped(now)
        has_changed = self._look(now) or self._is_news
        is_due = has_changed or self._is_due or self._is_shifted or now >= self._elect_at
        self._is_news = self._is_due = False
        if self._is_shifted or now >= self._retry_at:
            self._candidates = frozenset(peer for peer in self._leaders if self._is_here(peer))
            self._neighbours = self._choose_neighbours(now)
            self._is_shifted = False
        before = self.coordinator
        said_at = self._say_own(now)
        if is_due or paused_s:
            self._elect_at = self._elect(now, paused_s)
        compared_at = self._compare(now)
        part = self._choose_parted(now, used)
        dial = () if self.is_leaving else self._dials.take_due(self._find_wanted(), self._boxes, now)
        send = (*self._replies, *self._spread.take(self._boxes, now), *((peer, Part()) for peer in part))
        self._replies = []
        moments = (
            said_at,
            self._elect_at,
            compared_at,
            self._retry_at,
            self._spread.wake_at(),
            self.liveness.wake_at(),
        )
        self._due_at = max(min(*moments, self._dials.wake_at(self._boxes)), now)
        return Actions(
            drop=drop,
            ping=self.liveness.take_pings(now),
            send=send,
            part=part,
            dial=dial,
            changed=has_changed or self.coordinator != before,
            wake_at=self._due_at,
        )

    # -- what others may read -----------------------------------------------------------------------------------------

    def members(self, rtt_s: Callable[[PeerId], float | None], now: float) -> tuple[Member, ...]:
        """Everybody that was ever alive, by peer id; ``rtt_s`` knows the round trips."""
        found = []
        for peer in sorted(self.table.origins()):
            record, grant = self.table.record(peer), self.table.grant(peer)
            if record is None or not (peer == self._me or peer in self._has_lived or record.left):
                continue
            found.append(
                Member(
                    peer_id=peer,
                    role=record.role,
                    state=self.state_of(peer, now),
                    address=Address(record.host, record.port),
                    incarnation=self.table.life(peer),
                    may_lead=grant is not None and grant.lead,
                    rtt_s=rtt_s(peer),
                )
            )
        return tuple(found)

    def state_of(self, peer: PeerId, now: float) -> MemberState:
        """The state of one member, as of the last tick."""
        record = self.table.record(peer)
        if record is not None and record.left:
            return MemberState.LEFT
        if record is None or not self.liveness.is_living(peer):
            return MemberState.DEAD
        return MemberState.SUSPECT if self.liveness.is_suspect(peer, now) else MemberState.ALIVE

    def entries(self, kind: str) -> dict[PeerId, bytes]:
        """What the living members say about ``kind``, those of this node included."""
        held = self.table.entries(kind)
        return {peer: entry.payload for peer, entry in held.items() if self._is_here(peer)}

    def address_of(self, peer: PeerId) -> Address | None:
        """Where a box can be dialled that has not left."""
        record = self.table.record(peer)
        if record is None or is_client(record) or record.left:
            return None
        return Address(record.host, record.port)

    def addresses(self) -> tuple[Bootstrap, ...]:
        """Where other boxes that were ever alive can be dialled, last heard first."""
        heard = sorted((-self.liveness.heard_at(peer), peer) for peer in self._has_lived)
        found = ((peer, self.address_of(peer)) for _, peer in heard)
        return tuple(Bootstrap(at.host, at.port, peer) for peer, at in found if at is not None and at.port != 0)

    def __repr__(self) -> str:
        return f"Peering({self.table!r}, connected={len(self._boxes)}, coordinator={self.coordinator})"

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _on_tell(self, peer: PeerId, message: Tell, now: float) -> int:
        from_client = peer if peer in self._clients else None
        result = self.table.merge(message.entries, now, from_client=from_client)
        self._take(result, peer, now)
        if from_client is None:
            lies = self.table.take_lies(message.lies)
            self._expel(lies, peer)
            if message.orders is not None:
                self.order(message.orders)
            if message.latest is not None:
                self._take_latest(message.latest)
            if message.complete and not self.is_synced:
                self.is_synced = self._is_news = True
        self.forged += result.forged
        return result.forged

    def _on_summary(self, peer: PeerId, message: Summary) -> None:
        self._repair(peer, message.holding)
        differing = self.table.find_differing(message.hashes)
        if differing:
            self._replies.append((peer, self._describe(bytes(sorted(differing)), asks_back=True)))
        else:
            self._spread.tell((peer,), (), complete=self.is_synced)

    def _on_compare(self, peer: PeerId, message: Compare) -> None:
        self._repair(peer, message.holding)
        if self._role is not Role.CLIENT:
            delta = self.table.delta_for(message.digest, message.buckets)
            self._spread.tell((peer,), delta, complete=self.is_synced)
        if message.asks_back:
            self._replies.append((peer, self._describe(message.buckets, asks_back=False)))

    def _repair(self, peer: PeerId, theirs: Holding) -> None:
        """Tell a peer of orders, liars and epochs that it has not heard of."""
        signed, mine = self._admission.signed_orders, self._holding()
        if signed is not None and theirs.orders < mine.orders:
            self._spread.tell_orders((peer,), signed)
        if theirs.lies < mine.lies:
            self._spread.tell_lies((peer,), self.table.lies.values())
        if self._latest is not None and theirs.epoch < mine.epoch:
            self._spread.tell_latest(peer, self._latest)

    def _take_latest(self, latest: HeldClaim) -> None:
        """Believe in a higher epoch, if who claimed it was allowed to."""
        record, claim = read_record(latest.record.payload), _read_claim(latest.claim)
        is_fitting = (latest.record.kind, latest.claim.kind) == (MEMBER_KIND, CLAIM_KIND)
        if record is None or claim is None or not is_fitting or latest.record.origin != latest.claim.origin:
            return
        if claim.epoch <= self._witnessed or not (self._is_sound(latest.record) and self._is_sound(latest.claim)):
            return
        with suppress(TokenError):  # who passes on another network's claims is not followed; nothing else comes of it
            if self._admission.read_grant(latest.record.origin, record).lead:
                self._latest, self._witnessed, self._is_due = latest, claim.epoch, True

    def _take(self, result: MergeResult, sender: PeerId, now: float) -> None:
        """Act on what a merge has changed, and pass it on."""
        for entry in result.changed:
            origin = PeerId(entry.origin)
            if origin == self._me:
                continue  # an older life of ours made us take a higher number
            self.liveness.on_word(origin, now)
            if entry.kind == HEARS_KIND:
                self.liveness.on_hears(origin, entry.payload)
            if entry.kind in (CLAIM_KIND, MEMBER_KIND, OBJECTION_KIND):
                self._read(origin)
            self._is_shifted = self._is_shifted or entry.kind == MEMBER_KIND
            self._is_due = self._is_due or (entry.kind == CLAIM_KIND and not self._is_refreshed(origin))
            # Nobody else reads what only this machine says; and what follows from that is looked at anyway.
            self._is_news = self._is_news or entry.kind not in OWN_KINDS or entry.kind == MEMBER_KIND
        own = [entry for entry in result.changed if entry.origin == self._me]
        if own:
            self._tell_own(own)
        passed = [e for e in result.changed if e.origin != self._me and self.table.is_shared(e.origin)]
        self._spread.pass_on(passed, sender, self._boxes, self._clients, now)
        self._expel(result.lies, sender)

    def _expel(self, lies: Collection[Lie], sender: PeerId) -> None:
        if not lies:
            return
        for lie in lies:
            _log.warning("%s said two things under one number, and is expelled", lie.one.origin)
            self._expelled.add(PeerId(lie.one.origin))
        self._spread.tell_lies((peer for peer in self._boxes if peer != sender), lies)
        self._is_news = True

    def _is_refreshed(self, peer: PeerId) -> bool:
        """Whether a claim is only said anew by the leader that is followed."""
        claim = self._claims.get(peer)
        return claim is not None and not claim.yielded and self.coordinator == (peer, claim.epoch)

    def _read(self, peer: PeerId) -> None:
        """Look at what a member says of leading, if it may."""
        for table in (self._claims, self._objections):
            table.pop(peer, None)
        self._leaders.discard(peer)
        record, grant = self.table.record(peer), self.table.grant(peer)
        if record is None or grant is None or is_client(record):
            return
        if grant.lead:
            self._leaders.add(peer)
            own, entry = self.table.entry(peer, MEMBER_KIND), self.table.entry(peer, CLAIM_KIND)
            claim = None if entry is None else _read_claim(entry)
            if own is not None and entry is not None and claim is not None:
                self._claims[peer] = claim
                if claim.epoch > self._witnessed:
                    self._latest, self._witnessed = HeldClaim(own, entry), claim.epoch
        objection = self.table.entry(peer, OBJECTION_KIND)
        refused = None if objection is None else _decode_objection(objection.payload)
        if refused is not None:
            self._objections[peer] = refused

    # -- looking around -----------------------------------------------------------------------------------------------

    def _find_dropped(self, now: float) -> tuple[PeerId, ...]:
        """Whom to hang up on: the silent and the expelled."""
        dropped = {*self.liveness.find_silent(now), *self._expelled}
        for peer in dropped:
            self.liveness.on_closed(peer, now, redialled=False)
            if peer in self._expelled:
                self._forget(peer, now)
        self._expelled = set()
        return tuple(sorted(dropped))

    def _look(self, now: float) -> bool:
        """See who lives and who is to be forgotten; whether that is otherwise than before."""
        has_changed = self.liveness.update(now, self._beat_s())
        suspects = frozenset(peer for peer in self.liveness.watched if self.liveness.is_suspect(peer, now))
        self._is_shifted = self._is_shifted or has_changed
        has_changed = has_changed or suspects != self._suspects
        if suspects - self._suspects:
            self._beat_at = now  # it may be that link alone: those who hear both of us know then that this end lives
        self._suspects = suspects
        if not has_changed and now < self._look_at:
            return False
        self._look_at = now + 1.0
        for peer in self.table.origins():
            if peer == self._me:
                continue
            if self.liveness.is_living(peer):
                self._has_lived.add(peer)
                self._gone_since.pop(peer, None)
                continue
            gone_for = now - self._gone_since.setdefault(peer, now)
            # Of whom nobody has ever heard itself, no trace is kept: anybody can invent such members.
            if gone_for >= (self._settings.forget_s if peer in self._has_lived else self._settings.orphan_s):
                self._forget(peer, now)
                has_changed = True
        self.table.forget_forgotten(now)
        return has_changed

    def _forget(self, peer: PeerId, now: float) -> None:
        has_lived = peer in self._has_lived
        self.table.forget(peer, now + (self._settings.forget_s if has_lived else self._settings.orphan_s))
        self.liveness.forget(peer)
        self._gone_since.pop(peer, None)
        self._has_lived.discard(peer)
        self._read(peer)
        self._is_shifted = True

    def _is_here(self, peer: PeerId) -> bool:
        record = self.table.record(peer)
        return record is not None and not record.left and self.liveness.is_living(peer)

    # -- what this node says ------------------------------------------------------------------------------------------

    def _beat_s(self) -> float:
        """How often each member says something at least: seldom in a large network, or it would be filled by that."""
        return max(self._settings.beat_s, self._settings.beat_each_s * len(self.table))

    def _say_own(self, now: float) -> float:
        """Tell whom this node hears when that changes, and now and then that it lives; returns when to do so next."""
        if self._role is Role.CLIENT or self.is_leaving:
            return float("inf")
        heard = encode_heard(self.liveness.find_heard(now))
        if heard != self._told_hears and now >= self._hears_at:
            # At once if it is the first change for a while: a death must not wait, a crowd of joining may.
            pause_s = max(self._settings.hears_s, self._settings.hears_each_s * len(self.table))
            self._told_hears, self._hears_at = heard, now + pause_s
            self._tell_own((self.table.publish(HEARS_KIND, heard),))
        elif now >= self._beat_at:
            self._tell_own((self.table.publish(BEAT_KIND, b""),))
        else:
            return self._beat_at if heard == self._told_hears else min(self._beat_at, self._hears_at)
        self._beat_at = now + self._beat_s() * self._rng.uniform(0.8, 1.0)
        return self._beat_at

    def _tell_own(self, entries: Iterable[Entry], peers: Iterable[PeerId] | None = None) -> None:
        """Others take from a client only its own record, and blame it for anything else."""
        if self._role is Role.CLIENT:
            entries = [entry for entry in entries if entry.kind == MEMBER_KIND]
        self._spread.tell((*self._boxes, *self._clients) if peers is None else peers, entries)

    def _summarise(self) -> Summary:
        return Summary(self.table.summary(), self._holding())

    def _holding(self) -> Holding:
        return Holding(self._admission.orders.number, len(self.table.lies), self._witnessed)

    def _describe(self, buckets: bytes, *, asks_back: bool) -> Compare:
        return Compare(self.table.digest(buckets), buckets, self._holding(), asks_back)

    def _compare(self, now: float) -> float:
        """Ask a neighbour now and then whether it holds the same; returns when next."""
        if now >= self._compare_at:
            self._compare_at = now + self._settings.compare_s * self._rng.uniform(0.8, 1.2)
            if self._boxes:
                self._replies.append((self._rng.choice(sorted(self._boxes)), self._summarise()))
        return self._compare_at

    # -- leading ------------------------------------------------------------------------------------------------------

    def _elect(self, now: float, paused_s: float) -> float:
        """Apply the election's rule, and say what it asks for; returns when to apply it again."""
        if not self.is_synced:
            if self._synced_by is None and not self._named:
                self._synced_by = now + self._settings.found_s
            self.is_synced = self._synced_by is not None and now >= self._synced_by
        waits_until = float("inf") if self.is_synced or self._synced_by is None else self._synced_by
        result = self._election.decide(self._view(), now, paused_s=paused_s)
        if result.say is not None and not self.is_leaving:
            what, epoch = result.say
            _log.log(logging.DEBUG if what is Say.REFRESH else logging.INFO, "%s of epoch %d", what.value, epoch)
            self._tell_own((self.table.publish(CLAIM_KIND, encode_claim(epoch, yielded=what is Say.YIELD)),))
            self._read(self._me)
            # A claim counts once it is seen, by its own author too: the rule is the same for everybody.
            result = self._election.decide(self._view(), now)
        before = self.coordinator
        self.coordinator = None if result.leader is None else (result.leader, result.epoch)
        self.epoch = result.epoch
        if self.coordinator != before:
            _log.info("coordinator is now %s", self.coordinator)
        return min(result.wake_at, waits_until)

    def _view(self) -> ElectionView:
        return ElectionView(
            candidates=self._candidates,
            claims=self._claims,
            witnessed=self._witnessed,
            synced=self.is_synced,
            refused=self._find_refused() if self._objections else (),
        )

    def _find_refused(self) -> frozenset[tuple[PeerId, int]]:
        """Leaders whose plans more than half of the other boxes refuse."""
        boxes = {peer for peer in (self._me, *self.liveness.living) if self.address_of(peer) is not None}
        counts = Counter(refused for peer, refused in self._objections.items() if peer in boxes and peer != refused[0])
        return frozenset(refused for refused, count in counts.items() if count > (len(boxes) - 1) / 2)

    # -- dialling -----------------------------------------------------------------------------------------------------

    def _find_wanted(self) -> dict[PeerId, Address]:
        """Whom this node should have a session with, and where it is dialled."""
        wanted = {} if self._boxes else dict(self._standby)
        if self._role is not Role.CLIENT or len(self._boxes) < CLIENT_SESSIONS:
            wanted |= self._neighbours
        living = self.liveness.living
        is_small = len(living) < self._settings.full_mesh
        return wanted | {peer: at for peer, at in self._named.items() if is_small or peer not in living}

    def _choose_parted(self, now: float, used: Mapping[PeerId, float]) -> tuple[PeerId, ...]:
        """Sessions to close: in a large network, those that were opened to join or to ask something, once they have
        not been used for a while and neither end is the other's neighbour."""
        living, settings = self.liveness.living, self._settings
        if now < self._part_at or len(living) < settings.full_mesh or self._role is Role.CLIENT:
            return ()
        self._part_at = now + settings.part_s / 4
        spare = [
            peer
            for peer in self._boxes - self._neighbours.keys() - self._parted
            if now - used.get(peer, now) >= settings.part_s
        ]
        everybody = {peer for peer in (*living, self._me) if self.address_of(peer) is not None}
        parted = tuple(
            peer
            for peer in sorted(spare)
            if self._me not in choose_neighbours(peer, everybody, full_mesh=settings.full_mesh)
        )
        self._parted.update(parted)
        return parted

    def _choose_neighbours(self, now: float) -> dict[PeerId, Address]:
        others = (peer for peer in self.table.origins() if peer != self._me)
        boxes = {peer: at for peer in others if (at := self.address_of(peer)) is not None}
        self._retry_at = float("inf")
        if len(boxes) < self._settings.full_mesh:
            return boxes
        living = {peer for peer in boxes if self.liveness.is_living(peer)}
        chosen = set(choose_neighbours(self._me, living or boxes.keys(), full_mesh=self._settings.full_mesh))
        # Of a large network's other half nobody is a neighbour: by trying one after the other they are found again.
        gone = sorted(boxes.keys() - living)
        if gone:
            chosen.add(self._rng.choice(gone))
            self._retry_at = now + self._settings.retry_gone_s
        return {peer: boxes[peer] for peer in (chosen | self.liveness.redialled) & boxes.keys()}


def _read_claim(entry: Entry) -> Claim | None:
    return decode_claim(entry.payload, (entry.incarnation, entry.version))


def _decode_objection(payload: bytes) -> tuple[PeerId, int] | None:
    try:
        found = msgspec.msgpack.decode(payload, type=_Objection)
    except DECODE_ERRORS:
        return None
    return PeerId(found.leader), found.epoch
