"""What one node does about its peers, as a pure machine: whom to hang up on, ping and dial, what to
tell whom, and whether to lead.

Events come in, each with the time; :meth:`Peering.tick` answers with :class:`Actions`. No clock,
task or socket::

    opened, closed, dialled, heard, received  -->  Table     what all members say
                                                   Liveness  who is alive
                                                   Roster    who is a member, and in which state
                                                   Leadership, Neighbours, Spread  -->  Actions

:mod:`..network` runs it over connections, :mod:`..dev.simulation` a thousand of it over a simulated
network, and tests/sim/bootstrap/scripts over lines of text.
"""

import logging
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..addresses import Address
from ..settings import NetworkSettings
from ..trust.entries import MAX_RECORD, MEMBER_KIND, Entry, Lie, read_record
from ..trust.identity import Identity
from ..trust.keys import PeerId
from ..trust.orders import SignedOrders
from ..trust.tokens import Role
from .admission import Admission, is_client
from .allowance import Allowance
from .election import CLAIM_KIND, MAX_CLAIM, Say, encode_claim
from .gossip import Spread
from .leading import OBJECTION_KIND, Leadership, encode_objection
from .liveness import HEARS_KIND, Liveness, encode_heard
from .mesh import Dial
from .neighbours import Contacts, Neighbours
from .roster import Roster
from .states import Compare, EntryRules, GossipMessage, Holding, MergeResult, NetworkState, Part, Summary, Tell
from .table import BEAT_KIND, Table

_log = logging.getLogger(__name__)

OWN_KINDS: Final = frozenset({MEMBER_KIND, CLAIM_KIND, HEARS_KIND, BEAT_KIND, OBJECTION_KIND})
_PAUSE_S: Final = 0.5  # so late, a tick shows that this node itself had no time
_DOUBLED: Final = 2
_OVERDUE_AT_ONCE: Final = 64  # members whose signs of life one neighbour is asked for
_LIES_AT_ONCE: Final = 8  # told to one that lacks some; each may have 128 KiB


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
    """The peers of one node."""

    def __init__(
        self,
        identity: Identity,
        role: Role,
        *,
        incarnation: int,
        admission: Admission,
        settings: NetworkSettings,
        rng: random.Random,
        contacts: Contacts | None = None,
        rules: EntryRules | None = None,
    ) -> None:
        contacts, rules = contacts or Contacts(), rules or EntryRules()
        self.table = Table(identity, admission, incarnation=incarnation, settings=settings, rules=rules)
        self.liveness = Liveness(identity.peer_id, settings)
        self.roster = Roster(self.table, self.liveness, settings)
        self.coordinator: tuple[PeerId, int] | None = None
        self.epoch = 0
        self.forged = 0
        self.is_leaving = False
        self._me = identity.peer_id
        self._role = role
        self._settings = settings
        self._rng = rng
        self._admission = admission
        self._leadership = Leadership(self.table, self.roster, admission, settings)
        self._neighbours = Neighbours(
            self.roster, self.liveness, contacts, settings, rng, keeps_one=role is Role.CLIENT
        )
        self._spread = Spread(rng, settings, self.liveness.hears, rules.urgent)
        self._boxes: set[PeerId] = set()  # connected
        self._clients: set[PeerId] = set()  # connected
        self._answers: dict[PeerId, Allowance] = {}  # comparisons answered to each connected peer
        self._replies: list[tuple[PeerId, GossipMessage]] = []
        self._expelled: set[PeerId] = set()  # to be hung up on
        self._parted: set[PeerId] = set()  # sessions that are being closed because neither end needs them
        self.is_synced = not self._neighbours.knows_others  # whether this node knows what there is
        self._synced_by: float | None = None  # when it has waited long enough to hear that
        self._told_hears = b""
        self._changed_at = float("inf")  # since when this node hears others than it has told
        self._hears_at = self._beat_at = self._compare_at = float("-inf")
        self._elect_at = float("-inf")  # when to apply the election's rule, if nothing happens before
        self._due_at = float("inf")  # when the next tick is expected
        self._is_shifted = True  # who is here, or where, is otherwise than when neighbours were chosen
        self._is_due = False  # something came that is to be looked at
        self._is_news = False  # which those who read members and entries should look at, too

    # -- events -----------------------------------------------------------------------------------------------------

    def publish(self, kind: str, payload: bytes) -> None:
        """Say something to everybody, with the next tick."""
        self._tell_own((self.table.publish(kind, payload),))
        self._leadership.read(self._me)
        self._is_news = True
        self._is_shifted = self._is_shifted or kind == MEMBER_KIND

    def object_to(self, leader: PeerId, epoch: int) -> None:
        """Tell everybody that this node refuses what the leader of this epoch plans."""
        self.publish(OBJECTION_KIND, encode_objection(leader, epoch))

    def order(self, orders: SignedOrders) -> None:
        """Follow the orders of the network's owner, if they are news, and pass them on."""
        if self._admission.take_orders(orders):
            self._expelled.update(self.table.recheck())
            self._spread.tell_orders((*self._boxes, *self._clients), orders)
            self._is_news = True

    def state(self) -> NetworkState:
        """What is worth keeping for the next run."""
        admission = self._admission
        sizes = {MEMBER_KIND: MAX_RECORD, CLAIM_KIND: MAX_CLAIM}
        return NetworkState(
            entries=tuple(e for e in self.table.shared_entries() if len(e.payload) <= sizes.get(e.kind, -1)),
            lies=tuple(self.table.lies.values()),
            orders=admission.signed_orders,
            latest=self._leadership.latest,
            holders={name: sorted(peers) for name, peers in admission.holders.items()},
        )

    def restore(self, state: NetworkState, now: float) -> None:
        """Take up what an earlier run has kept, before anything else happens."""
        self._admission.restore_holders(state.holders)
        if state.orders is not None:
            self._admission.take_orders(state.orders)
        self.table.take_lies(state.lies)
        if state.latest is not None:
            self._leadership.take_latest(state.latest)
        for entry in self.table.merge(state.entries, now).changed:
            peer = PeerId(entry.origin)
            self.roster.note_lived((peer,))
            self._neighbours.on_known(peer)
            self._leadership.read(peer)
            self.is_synced = False  # who was here before asks the others first
        for holder in frozenset[str]().union(*state.holders.values()) - set(self.table.origins()):
            self._admission.vacate(holder)  # a box that was forgotten, or a client whose session has ended

    def on_named(self, peer: PeerId, address: Address) -> None:
        """It turned out who answers at an address that was given by hand."""
        self._neighbours.on_named(peer, address)

    def on_opened(self, peer: PeerId, record: Entry, now: float) -> None:
        """A session with this peer is open; it came with this member record."""
        is_box = not is_client(read_record(record.payload))
        result = self.table.admit(record, now, private=not is_box)
        (self._boxes if is_box else self._clients).add(peer)
        self._answers[peer] = Allowance(self._settings.answers_s, self._settings.answers_burst, at=now)
        if is_box:
            self._neighbours.on_known(peer)
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
        self._is_shifted = True  # it is dialled anew, neighbour or not
        if comes_back:
            self._neighbours.on_closed(peer, now)
        elif not is_box:
            self._forget(peer, now)  # a client: nobody can dial it, and nobody else knows it
        self._is_news = True

    def on_dialled(self, peer: PeerId, succeeded: bool, now: float) -> None:
        """A dial that :attr:`Actions.dial` asked for has ended."""
        self._neighbours.on_dialled(peer, succeeded, now)
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

    @property
    def is_doubled(self) -> bool:
        """Whether another node signs with this one's key, too. One life after the other is no proof of it: a clock may
        have gone back. Who answers to what this life has made of the first, lives now."""
        return self.table.outlived >= _DOUBLED

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
        if self._is_shifted or now >= self._neighbours.retry_at:
            self._leadership.find_candidates()
            self._neighbours.choose(now)
            self._is_shifted = False
        before = self.coordinator
        said_at = self._say_own(now)
        if is_due or paused_s:
            self._elect_at = self._elect(now, paused_s)
        compared_at = self._compare(now)
        part = self._neighbours.choose_parted(self._boxes - self._parted, used, now)
        self._parted.update(part)
        dial = () if self.is_leaving else self._neighbours.take_dials(self._boxes, now)
        send = (*self._replies, *self._spread.take(self._boxes, now), *((peer, Part()) for peer in part))
        self._replies = []
        moments = (said_at, self._elect_at, compared_at, self._spread.wake_at(), self.liveness.wake_at())
        self._due_at = max(min(*moments, self._neighbours.wake_at(self._boxes)), now)
        return Actions(
            drop=drop,
            ping=self.liveness.take_pings(now),
            send=send,
            part=part,
            dial=dial,
            changed=has_changed or self.coordinator != before,
            wake_at=self._due_at,
        )

    def __repr__(self) -> str:
        return f"Peering({self.table!r}, connected={len(self._boxes)}, coordinator={self.coordinator})"

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _on_tell(self, peer: PeerId, message: Tell, now: float) -> int:
        from_client = peer if peer in self._clients else None
        result = self.table.merge(message.entries, now, from_client=from_client)
        self._take(result, peer, now)
        forged = result.forged
        if from_client is None:
            proved = self.table.take_lies(message.lies)
            forged += proved.forged
            self._expel(proved.lies, peer)
            self._take_news(peer, message, now)
            if message.complete and not self.is_synced:
                self.is_synced = self._is_news = True
        self.forged += forged
        return forged

    def _take_news(self, peer: PeerId, message: Tell, now: float) -> None:
        """Follow orders and epochs. They cost signatures, and who passes on what does not count need not know it: so
        they are looked at now and then. What is left out comes with a later comparison."""
        if (message.orders is None and message.latest is None) or not self._answers[peer].take(now):
            return
        if message.orders is not None:
            self.order(message.orders)
        if message.latest is not None and self._leadership.take_latest(message.latest):
            self._is_due = True

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
            lies = list(self.table.lies.values())
            self._spread.tell_lies((peer,), self._rng.sample(lies, min(len(lies), _LIES_AT_ONCE)))
        latest = self._leadership.latest
        if latest is not None and theirs.epoch < mine.epoch:
            self._spread.tell_latest(peer, latest)

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
                self._leadership.read(origin)
            self._is_shifted = self._is_shifted or entry.kind == MEMBER_KIND
            is_refreshed = self._leadership.is_refreshed(origin, self.coordinator)
            says_of_leading = entry.kind == OBJECTION_KIND or (entry.kind == CLAIM_KIND and not is_refreshed)
            self._is_due = self._is_due or says_of_leading
            # Nobody else reads what only this machine says; and what follows from that is looked at anyway.
            self._is_news = self._is_news or entry.kind not in OWN_KINDS or entry.kind == MEMBER_KIND
        own = [entry for entry in result.changed if entry.origin == self._me]
        if own:
            self._tell_own(own)
        if self._role is not Role.CLIENT:  # which would be blamed for it
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
        before = self.roster.suspects
        has_changed, is_suspicious = self.roster.look(now)
        if is_suspicious:
            self._beat_at = now  # it may be that link alone: those who hear both of us know then that this end lives
        self._is_shifted = self._is_shifted or has_changed
        forgotten = self.roster.find_forgotten(now, has_changed=has_changed)
        for peer in forgotten:
            self._forget(peer, now)
        return has_changed or bool(forgotten) or self.roster.suspects != before

    def _forget(self, peer: PeerId, now: float) -> None:
        self.roster.forget(peer, now)
        self._leadership.read(peer)
        self._is_shifted = True

    # -- what this node says ------------------------------------------------------------------------------------------

    def _say_own(self, now: float) -> float:
        """Tell whom this node hears when that changes, and now and then that it lives; returns when to do so next."""
        if self._role is Role.CLIENT or self.is_leaving:
            return float("inf")
        heard = encode_heard(self.liveness.find_heard(now))
        if heard == self._told_hears:
            self._changed_at = float("inf")
        else:
            self._changed_at = min(self._changed_at, now)
        each_s = self._settings.hears_each_s * len(self.table)
        # In a small network at once. In a large one what happens at the same moment is told together, or the first
        # of many deaths would be told now, and the others only with the next change.
        tell_at = max(self._changed_at + min(each_s, self._settings.hears_s), self._hears_at)
        if now >= tell_at:
            self._told_hears, self._hears_at = heard, now + max(self._settings.hears_s, each_s)
            self._changed_at = float("inf")
            self._tell_own((self.table.publish(HEARS_KIND, heard),))
        elif now >= self._beat_at:
            self._tell_own((self.table.publish(BEAT_KIND, b""),))
        else:
            return min(self._beat_at, tell_at)
        self._beat_at = now + self.roster.beat_s() * self._rng.uniform(0.8, 1.0)
        return self._beat_at

    def _tell_own(self, entries: Iterable[Entry], peers: Iterable[PeerId] | None = None) -> None:
        """Others take from a client only its own record, and blame it for anything else."""
        if self._role is Role.CLIENT:
            entries = [entry for entry in entries if entry.kind == MEMBER_KIND]
        self._spread.tell((*self._boxes, *self._clients) if peers is None else peers, entries)

    def _summarise(self) -> Summary:
        return Summary(self.table.summary(), self._holding())

    def _holding(self) -> Holding:
        return Holding(self._admission.orders.number, len(self.table.lies), self._leadership.epoch)

    def _describe(self, buckets: bytes, *, asks_back: bool) -> Compare:
        return Compare(self.table.digest(buckets), buckets, self._holding(), asks_back)

    def _compare(self, now: float) -> float:
        """Ask a neighbour now and then whether it holds the same, and for signs of life that may have been missed: a
        few misses in a row would be taken for a death. Returns when next."""
        if now >= self._compare_at:
            self._compare_at = now + self._settings.compare_s * self._rng.uniform(0.8, 1.2)
            if self._boxes:
                asked = self._rng.choice(sorted(self._boxes))
                self._replies.append((asked, self._summarise()))
                if overdue := self.liveness.find_overdue(now, self.roster.beat_s())[:_OVERDUE_AT_ONCE]:
                    self._replies.append((asked, Compare(self.table.digest_beats(overdue), b"", self._holding())))
        return self._compare_at

    # -- leading ------------------------------------------------------------------------------------------------------

    def _elect(self, now: float, paused_s: float) -> float:
        """Apply the election's rule, and say what it asks for; returns when to apply it again."""
        if not self.is_synced:
            if self._synced_by is None and not self._neighbours.is_invited:
                self._synced_by = now + self._settings.found_s
            self.is_synced = self._synced_by is not None and now >= self._synced_by
        waits_until = float("inf") if self.is_synced or self._synced_by is None else self._synced_by
        result = self._leadership.decide(now, synced=self.is_synced, paused_s=paused_s)
        if result.say is not None and not self.is_leaving:
            what, epoch = result.say
            _log.log(logging.DEBUG if what is Say.REFRESH else logging.INFO, "%s of epoch %d", what.value, epoch)
            self._tell_own((self.table.publish(CLAIM_KIND, encode_claim(epoch, yielded=what is Say.YIELD)),))
            self._leadership.read(self._me)
            # A claim counts once it is seen, by its own author too: the rule is the same for everybody.
            result = self._leadership.decide(now, synced=self.is_synced)
        before = self.coordinator
        self.coordinator = None if result.leader is None else (result.leader, result.epoch)
        self.epoch = result.epoch
        if self.coordinator != before:
            _log.info("coordinator is now %s", self.coordinator)
        return min(result.wake_at, waits_until)
