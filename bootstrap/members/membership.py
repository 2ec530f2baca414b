"""Who is in the network and what each member says, as a pure machine: no clock, no task, no
socket.

A member says things in *entries*: signed, versioned, one per (origin, kind). Anybody may carry
anybody's entries.

* ``incarnation`` counts the lives of a node, ``version`` the entries of one life. A newer life
  replaces the whole older one; within a life the higher version of a kind wins. Merging is
  therefore commutative, associative and idempotent: whatever the order of arrival, everybody ends
  with the same entries.
* The entry of kind ``member`` is the node's own record: its role, its address, the credential it
  was admitted with, and whether it has left. No other entry of an origin counts without a valid
  one.
* Whether a member is *alive* is never gossiped as an opinion. A peer vouches for those it hears
  itself, with the age of what it heard, so one broken link does not make a member dead for the
  two that cannot see each other.

States of a member, by the silence since it was last heard, directly or through a voucher::

            3 s            8 s, or at once when its connection
    alive ------> suspect ------> dead     closed and nobody answers the redial
      ^--------------+-------------'  heard again
    left: it said so itself, in a signed member record; only a newer life undoes that
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ..addresses import Address
from ..errors import TokenError
from ..settings import NetworkSettings
from ..trust.entries import (
    MAX_COUNTER,
    MAX_KIND_CHARS,
    MAX_KINDS,
    MAX_PAYLOAD,
    MEMBER_KIND,
    Entry,
    MemberRecord,
    is_sound,
    read_record,
    sign_entry,
    sort_records_first,
)
from ..trust.identity import Identity
from ..trust.keys import PeerId
from ..trust.tokens import Bootstrap, Role
from .states import CheckRecord, Digest, Member, MemberState, MergeResult, TickResult

MAX_ORIGINS: Final = 4096
_NO_NEWS: Final = float("-inf")
_GONE: Final = (MemberState.DEAD, MemberState.LEFT)


@dataclass(slots=True)
class _OpenStream:
    """The open control stream to one peer."""

    heard_at: float
    pinged_at: float = _NO_NEWS


@dataclass(slots=True)
class _Life:
    """Everything held about one origin."""

    incarnation: int
    entries: dict[str, Entry]
    record: MemberRecord | None = None
    shared: bool = True  # False: heard from itself only and told to nobody (clients)
    heard_at: float | None = None  # None: only hearsay so far, and nobody vouched
    lost_at: float = _NO_NEWS  # vouchers older than this moment do not count
    state: MemberState = MemberState.DEAD
    gone_since: float | None = None  # since when dead, left, or hearsay that nobody vouches for


class _Outcome(Enum):
    """What became of one entry."""

    TAKEN = "taken"
    FORGED = "forged"  # nobody honest sends it
    IGNORED = "ignored"  # it cannot be checked yet, or there is no room


def _not_measured(peer: PeerId) -> float | None:
    """The round trip to a peer, as a membership without links knows it."""
    return None


class Membership:
    """The member table of one node. Methods are synchronous and get the time as ``now``."""

    def __init__(
        self,
        identity: Identity,
        role: Role,
        *,
        incarnation: int,
        check: CheckRecord,
        settings: NetworkSettings | None = None,
    ) -> None:
        if not 0 < incarnation <= MAX_COUNTER:
            raise ValueError(f"incarnation {incarnation} is not between 1 and {MAX_COUNTER}")
        self.peer_id: PeerId = identity.peer_id
        self.role = role
        self._settings = settings or NetworkSettings()
        self._identity = identity
        self._check = check
        self._version = 0
        self._own = _Life(incarnation, {}, state=MemberState.ALIVE)
        self._lives: dict[str, _Life] = {self.peer_id: self._own}
        self._forgotten: dict[str, tuple[int, float]] = {}  # origin -> (incarnation, until): not to be learned again
        self._connected: dict[PeerId, _OpenStream] = {}

    # -- what this node says ------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """This life's number; it grows when an older life of ours turns up with a higher one."""
        return self._own.incarnation

    def publish(self, kind: str, payload: bytes) -> Entry:
        """Say something; returns the entry to push to others."""
        if not 0 < len(kind) <= MAX_KIND_CHARS:
            raise ValueError(f"kind {kind[:80]!r} must have 1 to {MAX_KIND_CHARS} characters")
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(f"the payload of {kind!r} has {len(payload)} bytes; at most {MAX_PAYLOAD} are gossiped")
        if kind not in self._own.entries and len(self._own.entries) >= MAX_KINDS:
            raise ValueError(f"{kind!r} would be kind number {MAX_KINDS + 1}; a member publishes at most {MAX_KINDS}")
        if kind == MEMBER_KIND:
            record = read_record(payload)
            if record is None:
                raise ValueError(f"kind {MEMBER_KIND!r} belongs to the member record; choose another name")
            self._own.record = record
            self._own.state = MemberState.LEFT if record.left else MemberState.ALIVE
        self._version += 1
        entry = sign_entry(self._identity, kind, self._own.incarnation, self._version, payload)
        self._own.entries[kind] = entry
        return entry

    def own_entries(self) -> tuple[Entry, ...]:
        """Everything this node says, its member record first."""
        return sort_records_first(self._own.entries.values())

    # -- gossip -------------------------------------------------------------------------------------------------------

    def digest(self) -> Digest:
        """What we hold, briefly, with tombstones: a dead member's claim still counts as seen."""
        return {
            origin: (life.incarnation, {kind: entry.version for kind, entry in life.entries.items()})
            for origin, life in self._lives.items()
            if life.shared and life.entries
        }

    def delta_for(self, digest: Mapping[str, tuple[int, Mapping[str, int]]], *, max_bytes: int = 2**21) -> list[Entry]:
        """The entries the owner of ``digest`` lacks, records first; the rest comes the next time."""
        lacking: list[Entry] = []
        for origin, life in self._lives.items():
            if not life.shared:
                continue
            incarnation, versions = digest.get(origin, (0, {}))
            # They hold a newer life of this origin: whatever is held here is out of date.
            if incarnation > life.incarnation:
                continue
            known = versions if incarnation == life.incarnation else {}
            lacking += (entry for kind, entry in life.entries.items() if entry.version > known.get(kind, 0))
        # What does not fit comes with the next digest, which will show that it is still lacking.
        chosen: list[Entry] = []
        size = 0
        for entry in sort_records_first(lacking):
            size += len(entry.payload) + 200
            if chosen and size > max_bytes:
                break
            chosen.append(entry)
        return chosen

    def merge(self, entries: Iterable[Entry], now: float, *, from_origin: PeerId | None = None) -> MergeResult:
        """Take entries. ``from_origin``, a client, gives only its own record, which stays here."""
        changed: list[Entry] = []
        forged = ignored = 0
        for entry in sort_records_first(entries):
            # Signatures are checked last: they cost a hundred times what the rest does, and most of
            # what gossip brings is known already.
            if from_origin is not None and entry.origin != from_origin:
                forged += 1
            elif not self._is_news(entry):
                continue
            elif not is_sound(entry):
                forged += 1
            elif entry.origin == self.peer_id:
                self._outlive(entry)
                changed += self.own_entries()
            elif self._is_forgotten(entry, now):
                ignored += 1
            else:
                outcome = self._take(entry, now, private=from_origin is not None)
                if outcome is _Outcome.TAKEN:
                    changed.append(entry)
                forged += outcome is _Outcome.FORGED
                ignored += outcome is _Outcome.IGNORED
        return MergeResult(changed=tuple(changed), forged=forged, ignored=ignored)

    def admit(self, record_entry: Entry, now: float, *, private: bool) -> None:
        """Take the record of a peer that was let in; counts even if it was forgotten as dead."""
        self._forgotten.pop(record_entry.origin, None)
        self.merge((record_entry,), now, from_origin=PeerId(record_entry.origin) if private else None)

    def vouchers(self, now: float) -> dict[str, float]:
        """The peers we hear ourselves, with the age of what we heard."""
        return {
            peer: now - link.heard_at
            for peer, link in self._connected.items()
            if now - link.heard_at < self._settings.suspect_s
            and (life := self._lives.get(peer)) is not None
            and life.shared
        }

    def on_vouched(self, vouchers: Mapping[str, float], now: float) -> None:
        """A peer hears these; so they live, even if we cannot reach them."""
        for peer, age in vouchers.items():
            life = self._lives.get(peer)
            heard_at = now - age if age > 0.0 else now  # nan, too, must not get into the table
            # What was heard before this node saw the connection break says nothing of now.
            if life is None or life is self._own or heard_at <= life.lost_at:
                continue
            if life.heard_at is None or heard_at > life.heard_at:
                life.heard_at = heard_at

    # -- liveness -----------------------------------------------------------------------------------------------------

    def on_connected(self, peer: PeerId, now: float) -> None:
        """An admitted control stream to this peer is open."""
        self._connected[peer] = _OpenStream(heard_at=now)
        self.on_heard(peer, now)

    def on_disconnected(self, peer: PeerId) -> None:
        """Its control stream closed; it may only be a broken link."""
        self._connected.pop(peer, None)

    def on_heard(self, peer: PeerId, now: float) -> None:
        """Anything at all came from this peer itself."""
        link = self._connected.get(peer)
        if link is not None:
            link.heard_at = max(link.heard_at, now)
        life = self._lives.get(peer)
        if life is not None and life is not self._own and (life.heard_at is None or now > life.heard_at):
            life.heard_at = now

    def on_lost(self, peer: PeerId, now: float) -> None:
        """Its connection closed and the redial failed: dead until heard after this moment."""
        self._connected.pop(peer, None)
        life = self._lives.get(peer)
        if life is not None and life is not self._own:
            life.lost_at = now
            # As silent as the dead from now on; `lost_at` keeps out what others heard of it before.
            if life.heard_at is not None:
                life.heard_at = min(life.heard_at, now - self._settings.dead_s)

    def tick(self, now: float) -> TickResult:
        """Move every member to the state that follows from its silence."""
        changed = False
        for origin, life in list(self._lives.items()):
            if life is self._own:
                continue
            state = self._state_of(life, now)
            changed = changed or state is not life.state
            life.state = state
            if state not in _GONE:
                life.gone_since = None
            elif life.gone_since is None:
                life.gone_since = now
            # A member that is connected is about to be heard again, or to be dropped.
            is_over = life.gone_since is not None and origin not in self._connected
            if is_over and now >= self._forget_at(life):
                self._forget(origin, life, now)
                changed = True
        self._forgotten = {origin: last for origin, last in self._forgotten.items() if last[1] > now}
        # A session lives by what comes over it alone: others may vouch for a peer that this node does
        # not hear any more, and it is then alive, but this connection to it is not.
        dead = now - self._settings.dead_s
        drop = tuple(peer for peer, link in self._connected.items() if link.heard_at <= dead)
        ping = tuple(
            peer for peer, link in self._connected.items() if self._ping_at(peer, link) <= now and peer not in drop
        )
        for peer in ping:
            self._connected[peer].pinged_at = now
        return TickResult(drop=drop, ping=ping, changed=changed)

    def wake_at(self, now: float) -> float | None:
        """When :meth:`tick` next has something to do; ``None`` while alone."""
        moments = [max(self._ping_at(peer, link), now) for peer, link in self._connected.items()]
        for life in self._lives.values():
            if life.gone_since is not None:
                moments.append(self._forget_at(life))
            elif life is not self._own and life.heard_at is not None:
                is_alive = life.state is MemberState.ALIVE
                moments.append(life.heard_at + (self._settings.suspect_s if is_alive else self._settings.dead_s))
        return min(moments, default=None)

    # -- what others may read -----------------------------------------------------------------------------------------

    def entries(self, kind: str) -> dict[PeerId, bytes]:
        """What the living members say about ``kind``, those of this node included."""
        return {
            PeerId(origin): life.entries[kind].payload
            for origin, life in self._lives.items()
            if kind in life.entries and _is_live(life)
        }

    def highest(self, kind: str) -> dict[PeerId, bytes]:
        """The same including tombstones: for what must not be forgotten because its author died."""
        return {PeerId(o): life.entries[kind].payload for o, life in self._lives.items() if kind in life.entries}

    def members(self, rtt_s: Callable[[PeerId], float | None] = _not_measured) -> tuple[Member, ...]:
        """Everybody ever heard or vouched for, by peer id; ``rtt_s`` knows the round trips."""
        found = []
        for origin, life in sorted(self._lives.items()):
            if life.record is not None and (life is self._own or life.heard_at is not None or life.record.left):
                found.append(
                    Member(
                        peer_id=PeerId(origin),
                        role=life.record.role,
                        state=life.state,
                        address=Address(life.record.host, life.record.port),
                        incarnation=life.incarnation,
                        rtt_s=rtt_s(PeerId(origin)),
                    )
                )
        return tuple(found)

    def addresses(self) -> tuple[Bootstrap, ...]:
        """Where other boxes that were ever heard can be dialled, last heard first."""
        heard = sorted(
            ((-life.heard_at, origin) for origin, life in self._lives.items() if life.heard_at is not None),
        )
        targets = self.dial_targets()
        found = ((PeerId(origin), targets.get(PeerId(origin))) for _, origin in heard)
        return tuple(Bootstrap(at.host, at.port, peer) for peer, at in found if at is not None and at.port != 0)

    def record(self, peer: str) -> MemberRecord | None:
        """The member record we hold of a peer, whatever its state."""
        life = self._lives.get(peer)
        return None if life is None else life.record

    def dial_targets(self) -> dict[PeerId, Address]:
        """Everybody a full mesh should reach: no clients, nobody who left."""
        return {
            PeerId(origin): Address(life.record.host, life.record.port)
            for origin, life in self._lives.items()
            if life is not self._own
            and life.record is not None
            and life.record.role is not Role.CLIENT
            and not life.record.left
        }

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        for origin, life in self._lives.items():
            assert len(life.entries) <= MAX_KINDS, f"{origin} has {len(life.entries)} kinds"
            for kind, entry in life.entries.items():
                assert (entry.origin, entry.kind) == (origin, kind), (
                    f"{origin}/{kind} holds {entry.origin}/{entry.kind}"
                )
                assert entry.incarnation == life.incarnation, f"{origin}/{kind} is of another life"
            assert life is self._own or not life.entries or life.record is not None, f"{origin} has no member record"

    def __repr__(self) -> str:
        states: Collection[str] = [life.state.value for life in self._lives.values()]
        counts = ", ".join(f"{state}={list(states).count(state)}" for state in sorted(set(states)))
        return f"Membership({self.peer_id}, {counts})"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _state_of(self, life: _Life, now: float) -> MemberState:
        if life.record is not None and life.record.left:
            return MemberState.LEFT
        if life.heard_at is None:
            return MemberState.DEAD
        silence = now - life.heard_at
        if silence >= self._settings.dead_s:
            return MemberState.DEAD
        return MemberState.SUSPECT if silence >= self._settings.suspect_s else MemberState.ALIVE

    def _is_news(self, entry: Entry) -> bool:
        life = self._lives.get(entry.origin)
        if life is None or entry.incarnation > life.incarnation:
            return True
        held = life.entries.get(entry.kind)
        newer = held is None or entry.version > held.version
        return entry.incarnation == life.incarnation and newer

    def _is_forgotten(self, entry: Entry, now: float) -> bool:
        incarnation, until = self._forgotten.get(entry.origin, (0, now))
        return entry.incarnation <= incarnation and now < until

    def _take(self, entry: Entry, now: float, *, private: bool) -> _Outcome:
        """File an entry that is new and carries its origin's signature, if it may be believed."""
        life = self._lives.get(entry.origin)
        new_life = life is None or entry.incarnation > life.incarnation
        if entry.kind != MEMBER_KIND:
            if life is None or new_life:
                return _Outcome.IGNORED  # its member record has not come yet
            if _is_client(life.record):
                # From the client itself it is a lie. By hearsay it may be an honest peer's, to whom
                # this origin was a box in an earlier life.
                return _Outcome.FORGED if private else _Outcome.IGNORED
            if entry.kind not in life.entries and len(life.entries) >= MAX_KINDS:
                return _Outcome.IGNORED
            life.entries[entry.kind] = entry
            return _Outcome.TAKEN
        record = read_record(entry.payload)
        if record is None or private is not _is_client(record):
            return _Outcome.FORGED
        if life is not None and not new_life and _is_client(life.record) is not private:
            # One life is either a client or a box: what is told to nobody must not slip out as a box's.
            return _Outcome.IGNORED
        try:
            self._check(entry.origin, record)
        except TokenError:
            return _Outcome.FORGED
        if life is None:
            if len(self._lives) >= MAX_ORIGINS:
                return _Outcome.IGNORED
            life = self._lives[entry.origin] = _Life(entry.incarnation, {}, shared=not private)
        elif new_life:
            life.incarnation, life.entries = entry.incarnation, {}
            life.shared, life.state = not private, MemberState.DEAD  # the new life must be seen to be believed
            life.heard_at, life.lost_at, life.gone_since = None, _NO_NEWS, None
        life.record = record
        life.entries[MEMBER_KIND] = entry
        return _Outcome.TAKEN

    def _outlive(self, ghost: Entry) -> None:
        """An older life of ours has a higher number (the clock went back): go one higher."""
        self._own.incarnation = ghost.incarnation + 1
        for kind, entry in list(self._own.entries.items()):
            self._version += 1
            self._own.entries[kind] = sign_entry(
                self._identity, kind, self._own.incarnation, self._version, entry.payload
            )

    def _ping_at(self, peer: PeerId, link: _OpenStream) -> float:
        """When to ping. Of two ends one notices silence sooner; its pings satisfy the other."""
        wait_s = self._settings.ping_s * (1.0 if self.peer_id < peer else 1.5)
        return min(max(link.heard_at, link.pinged_at) + wait_s, link.pinged_at + self._settings.rtt_s)

    def _forget_at(self, life: _Life) -> float:
        since = life.gone_since if life.gone_since is not None else _NO_NEWS
        return since + (self._settings.forget_s if life.shared else 0.0)

    def _forget(self, origin: str, life: _Life, now: float) -> None:
        del self._lives[origin]
        if life.shared and len(self._forgotten) < MAX_ORIGINS:
            self._forgotten[origin] = (life.incarnation, now + self._settings.forget_s)


def _is_client(record: MemberRecord | None) -> bool:
    return record is not None and record.role is Role.CLIENT


def _is_live(life: _Life) -> bool:
    return life.state not in _GONE
