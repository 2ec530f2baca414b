"""What all members say, as a pure machine: no clock, no task, no socket.

A member says things in *entries*: signed, versioned, one per (origin, kind). Anybody may carry
anybody's entries.

* ``incarnation`` counts the lives of a node, ``version`` the entries of one life. A newer life
  replaces the whole older one; within a life the higher version of a kind wins. Merging is
  therefore commutative, associative and idempotent: whatever the order of arrival, everybody ends
  with the same entries.
* The entry of kind ``member`` is the node's own record: its role, its address, the credential it
  was admitted with, and whether it has left. No other entry of an origin counts without a valid
  one.
* Who signs two entries that contradict each other is a liar, and the two prove it to everybody:
  nothing of such an origin is kept, and it is not let in again.

What one origin can make all others hold and check is bounded: by bytes, by kinds, and by new
entries per second.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Final

from ..errors import TokenError, TokenSpent
from ..settings import NetworkSettings
from ..trust.entries import (
    MAX_COUNTER,
    MAX_KIND_CHARS,
    MAX_KINDS,
    MAX_PAYLOAD,
    MAX_RECORD,
    MEMBER_KIND,
    Entry,
    Lie,
    MemberRecord,
    contradict,
    read_record,
    sign_entry,
    sort_records_first,
)
from ..trust.identity import Identity
from ..trust.keys import PeerId
from ..trust.tokens import Grant
from .admission import Admission, is_client
from .allowance import Allowance
from .overlay import place_on_ring
from .states import Digest, EntryRules, MergeResult

BEAT_KIND: Final = "beat"  # says nothing but that its origin lives: not compared, but asked for when it is overdue
MAX_ORIGINS: Final = 4096
MAX_LIES: Final = 256
MAX_ORIGIN_BYTES: Final = 192 * 1024
BUCKETS: Final = 64
_HASH_BYTES: Final = 8
_HASHES: Final = 1 << (8 * _HASH_BYTES)


@dataclass(slots=True)
class _Origin:
    """Everything held of one origin."""

    incarnation: int
    entries: dict[str, Entry] = field(default_factory=dict)
    record: MemberRecord | None = None
    grant: Grant | None = None
    shared: bool = True  # False: heard from itself only and told to nobody (clients)
    size: int = 0
    allowance: Allowance | None = None  # None for this node itself


class _Outcome(Enum):
    """What became of one entry."""

    TAKEN = "taken"
    FORGED = "forged"  # nobody honest sends it
    IGNORED = "ignored"  # it cannot be checked yet, or there is no room


class Table:
    """The entries of one network, as one node holds them. Methods get the time as ``now``, in seconds."""

    def __init__(
        self,
        identity: Identity,
        admission: Admission,
        *,
        incarnation: int,
        settings: NetworkSettings | None = None,
        rules: EntryRules | None = None,
    ) -> None:
        if not 0 < incarnation <= MAX_COUNTER:
            raise ValueError(f"incarnation {incarnation} is not between 1 and {MAX_COUNTER}")
        self.peer_id: PeerId = identity.peer_id
        self.lies: dict[str, Lie] = {}
        self.outlived = 0  # how often a later life of this node than this one turned up
        self._settings = settings or NetworkSettings()
        self._identity = identity
        self._admission = admission
        rules = rules or EntryRules()
        self._numbered = rules.numbered
        self.is_sound = rules.is_sound
        self._version = 0
        self._own = _Origin(incarnation)
        self._origins: dict[str, _Origin] = {self.peer_id: self._own}
        self._forgotten: dict[str, tuple[int, float]] = {}  # origin -> (incarnation, until): not to be learned again
        self._hashes = [0] * BUCKETS

    # -- what this node says ------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """This life's number; it grows when an older life of ours turns up with a higher one."""
        return self._own.incarnation

    def publish(self, kind: str, payload: bytes) -> Entry:
        """Say something; returns the entry to tell others."""
        if not 0 < len(kind) <= MAX_KIND_CHARS:
            raise ValueError(f"kind {kind[:80]!r} must have 1 to {MAX_KIND_CHARS} characters")
        if len(payload) > MAX_PAYLOAD:
            raise ValueError(f"the payload of {kind!r} has {len(payload)} bytes; at most {MAX_PAYLOAD} are gossiped")
        if kind not in self._own.entries and len(self._own.entries) >= MAX_KINDS:
            raise ValueError(f"{kind!r} would be kind number {MAX_KINDS + 1}; a member publishes at most {MAX_KINDS}")
        others = sum(len(entry.payload) for entry in self._own.entries.values() if entry.kind != kind)
        if others + len(payload) > MAX_ORIGIN_BYTES:
            raise ValueError(
                f"with {kind!r} this member would say {others + len(payload)} bytes; "
                f"at most {MAX_ORIGIN_BYTES} are gossiped for each"
            )
        if kind == MEMBER_KIND:
            record = read_record(payload)
            if record is None:
                raise ValueError(f"kind {MEMBER_KIND!r} belongs to the member record; choose another name")
            self._own.record = record
            self._own.shared = not is_client(record)
            self._own.grant = self._admission.check_record(self.peer_id, record)
            self.note_seen(self.peer_id)
        self._version += 1
        entry = sign_entry(self._identity, kind, self._own.incarnation, self._version, payload)
        self._put(self._own, entry)
        return entry

    def own_entries(self) -> tuple[Entry, ...]:
        """Everything this node says, its member record first."""
        return sort_records_first(self._own.entries.values())

    # -- comparing with others ----------------------------------------------------------------------------------------

    def summary(self) -> bytes:
        """One hash per bucket of origins: two nodes with the same summary hold the same."""
        return b"".join(each.to_bytes(_HASH_BYTES, "big") for each in self._hashes)

    def find_differing(self, summary: bytes) -> frozenset[int]:
        """The buckets in which the owner of ``summary`` holds something else."""
        if len(summary) != _HASH_BYTES * BUCKETS:
            return frozenset(range(BUCKETS))
        own = self.summary()
        parts = ((at, slice(at * _HASH_BYTES, (at + 1) * _HASH_BYTES)) for at in range(BUCKETS))
        return frozenset(at for at, part in parts if own[part] != summary[part])

    def digest(self, buckets: Collection[int]) -> Digest:
        """What is held in these buckets, briefly, the dead included: their claims still count as seen."""
        return {
            origin: (held.incarnation, {e.kind: e.version for e in held.entries.values() if e.kind != BEAT_KIND})
            for origin, held in self._origins.items()
            if held.shared and held.entries and _bucket_of(origin) in buckets
        }

    def digest_beats(self, peers: Iterable[PeerId]) -> Digest:
        """Which signs of life of these members are held."""
        held = {peer: found for peer in peers if (found := self._origins.get(peer)) is not None and found.entries}
        return {
            peer: (each.incarnation, {BEAT_KIND: beat.version} if (beat := each.entries.get(BEAT_KIND)) else {})
            for peer, each in held.items()
        }

    def delta_for(self, digest: Digest, buckets: Collection[int]) -> list[Entry]:
        """The entries of these buckets, in which it holds something else, that the owner of ``digest`` lacks, records
        first. Of origins of other buckets it is asked for newer signs of life."""
        lacking = [beat for origin, known in digest.items() if (beat := self._newer_beat(origin, known, buckets))]
        if digest == self.digest(buckets):
            # The same versions, and not the same: somebody has told two things under one, and both together prove it.
            digest = {}
        for origin, held in self._origins.items():
            if not held.shared or _bucket_of(origin) not in buckets:
                continue
            incarnation, versions = digest.get(origin, (0, {}))
            # They hold a newer life of this origin: whatever is held here is out of date.
            if incarnation > held.incarnation:
                continue
            known = versions if incarnation == held.incarnation else {}
            lacking += (
                entry
                for kind, entry in held.entries.items()
                if entry.version > known.get(kind, 0) and kind != BEAT_KIND
            )
        return list(sort_records_first(lacking))

    def _newer_beat(self, origin: str, known: tuple[int, Mapping[str, int]], buckets: Collection[int]) -> Entry | None:
        held = self._origins.get(origin)
        beat = held.entries.get(BEAT_KIND) if held is not None and held.shared else None
        if beat is None or _bucket_of(origin) in buckets:
            return None
        incarnation, versions = known
        return beat if (beat.incarnation, beat.version) > (incarnation, versions.get(BEAT_KIND, 0)) else None

    # -- what others say ----------------------------------------------------------------------------------------------

    def merge(self, entries: Iterable[Entry], now: float, *, from_client: PeerId | None = None) -> MergeResult:
        """Take entries. A client gives only its own record, which stays here."""
        changed: list[Entry] = []
        lies: list[Lie] = []
        forged = ignored = 0
        for entry in sort_records_first(entries):
            if forged >= self._settings.max_offences:
                break  # enough to hang up; checking the rest would only cost time
            # Signatures are checked last: they cost a hundred times what the rest does, and most of
            # what gossip brings is known already.
            if from_client is not None and entry.origin != from_client:
                forged += 1
            elif entry.origin in self.lies:
                ignored += 1
            elif (lie := self._find_lie(entry)) is not None:
                proved = self.take_lies((lie,))
                lies += proved.lies
                forged += proved.forged
            elif not self._is_news(entry):
                continue
            elif self._is_forgotten(entry, now) or not self._is_allowed(entry, now) or self._has_no_place(entry):
                ignored += 1
            elif not self.is_sound(entry):
                forged += 1
            elif entry.origin == self.peer_id:
                self._outlive(entry)
                changed += self.own_entries()
            else:
                outcome = self._take(entry, now, private=from_client is not None)
                if outcome is _Outcome.TAKEN:
                    changed.append(entry)
                forged += outcome is _Outcome.FORGED
                ignored += outcome is _Outcome.IGNORED
        return MergeResult(changed=tuple(changed), lies=tuple(lies), forged=forged, ignored=ignored)

    def admit(self, record_entry: Entry, now: float, *, private: bool) -> MergeResult:
        """Take the record of a peer that was let in; counts even if it was forgotten as dead."""
        self._forgotten.pop(record_entry.origin, None)
        result = self.merge((record_entry,), now, from_client=PeerId(record_entry.origin) if private else None)
        self.note_seen(record_entry.origin)
        return result

    def take_lies(self, lies: Iterable[Lie]) -> MergeResult:
        """Expel whom these prove to be liars. Of the result, `lies` are those that were news."""
        found: list[Lie] = []
        forged = 0
        for lie in lies:
            if forged >= self._settings.max_offences:
                break
            origin = lie.one.origin
            if origin in self.lies or origin == self.peer_id or len(self.lies) >= MAX_LIES or not self._proves(lie):
                continue
            if not (self.is_sound(lie.one) and self.is_sound(lie.other)):
                forged += 1
                continue
            self.lies[origin] = lie
            self._admission.expel(origin)
            self._drop(origin)
            found.append(lie)
        return MergeResult(lies=tuple(found), forged=forged)

    def recheck(self) -> tuple[PeerId, ...]:
        """Drop whom the owner's latest orders do not admit any more; returns who that is."""
        gone = tuple(
            PeerId(origin)
            for origin, held in self._origins.items()
            if held is not self._own and held.grant is not None and self._admission.is_revoked(held.grant)
        )
        for peer in gone:
            self._drop(peer)
        return gone

    def note_seen(self, origin: str) -> None:
        """This member is alive: its place of its certificate is taken."""
        self._admission.note_seen(origin)

    def forget(self, origin: str, until: float) -> None:
        """Drop a member that has been gone for long, and do not learn its life again from others before ``until``."""
        held = self._origins.get(origin)
        if held is None or held is self._own:
            return
        if held.shared and len(self._forgotten) < MAX_ORIGINS:
            self._forgotten[origin] = (held.incarnation, until)
        self._drop(origin)
        self._admission.release_unseen(origin)

    def forget_forgotten(self, now: float) -> None:
        """Let go of what is old enough, and of the places that such boxes had."""
        for origin in [origin for origin, (_, until) in self._forgotten.items() if until <= now]:
            del self._forgotten[origin]
            if origin not in self._origins:
                self._admission.vacate(origin)

    # -- what others may read -----------------------------------------------------------------------------------------

    def origins(self) -> tuple[PeerId, ...]:
        """All of whom a record is held, this node included."""
        return tuple(PeerId(origin) for origin, held in self._origins.items() if held.record is not None)

    def record(self, peer: str) -> MemberRecord | None:
        """The member record we hold of a peer."""
        held = self._origins.get(peer)
        return None if held is None else held.record

    def grant(self, peer: str) -> Grant | None:
        """What a peer's certificate lets it do."""
        held = self._origins.get(peer)
        return None if held is None else held.grant

    def is_shared(self, peer: str) -> bool:
        """Whether others may be told of this peer: not of clients."""
        held = self._origins.get(peer)
        return held is not None and held.shared

    def life(self, peer: str) -> int:
        """The incarnation that is held of a peer; 0 of nobody."""
        held = self._origins.get(peer)
        return 0 if held is None else held.incarnation

    def entry(self, peer: str, kind: str) -> Entry | None:
        """What a peer says of this kind."""
        held = self._origins.get(peer)
        return None if held is None else held.entries.get(kind)

    def entries(self, kind: str) -> dict[PeerId, Entry]:
        """What everybody says of this kind, the dead included."""
        return {PeerId(o): held.entries[kind] for o, held in self._origins.items() if kind in held.entries}

    def shared_entries(self) -> list[Entry]:
        """Everything but clients' records: what is worth keeping for the next start."""
        held = [origin for origin in self._origins.values() if origin.shared]
        return [e for origin in held for e in sort_records_first(origin.entries.values()) if e.kind != BEAT_KIND]

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself."""
        hashes = [0] * BUCKETS
        for origin, held in self._origins.items():
            assert len(held.entries) <= MAX_KINDS, f"{origin} has {len(held.entries)} kinds"
            assert held.size == sum(len(entry.payload) for entry in held.entries.values()), f"{origin} is miscounted"
            for kind, entry in held.entries.items():
                assert (entry.origin, entry.kind) == (origin, kind), (
                    f"{origin}/{kind} holds {entry.origin}/{entry.kind}"
                )
                assert entry.incarnation == held.incarnation, f"{origin}/{kind} is of another life"
                if held.shared:
                    hashes[_bucket_of(origin)] += _hash(entry)
            assert held is self._own or held.record is not None, f"{origin} has no member record"
            assert origin not in self.lies, f"{origin} lied and is still here"
        assert [each % _HASHES for each in hashes] == self._hashes, "the summary does not fit what is held"

    def __len__(self) -> int:
        return len(self._origins)

    def __repr__(self) -> str:
        return f"Table({self.peer_id}, origins={len(self._origins)}, lies={len(self.lies)})"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_news(self, entry: Entry) -> bool:
        held = self._origins.get(entry.origin)
        if held is None or entry.incarnation > held.incarnation:
            return True
        known = held.entries.get(entry.kind)
        newer = known is None or entry.version > known.version
        return entry.incarnation == held.incarnation and newer

    def _is_forgotten(self, entry: Entry, now: float) -> bool:
        incarnation, until = self._forgotten.get(entry.origin, (0, now))
        return entry.incarnation <= incarnation and now < until

    def _has_no_place(self, entry: Entry) -> bool:
        """Whether this is the record of one more member than its certificate is for."""
        if entry.kind != MEMBER_KIND or entry.origin in self._origins:
            return False
        record = read_record(entry.payload)
        return record is not None and not self._admission.has_place(entry.origin, record)

    def _is_allowed(self, entry: Entry, now: float) -> bool:
        """Whether this origin has not said too much lately: nobody can keep all others busy."""
        held = self._origins.get(entry.origin)
        # What is over the allowance is not lost: the newest of each kind comes with a later comparison.
        return held is None or held.allowance is None or held.allowance.take(now)

    def _find_lie(self, entry: Entry) -> Lie | None:
        """A proof, if this entry and what is held of its kind cannot both be honest."""
        known = self.entry(entry.origin, entry.kind)
        if known is None or known.payload == entry.payload or entry.origin == self.peer_id:
            return None
        lie = Lie(known, entry)
        return lie if self._proves(lie) else None

    def _proves(self, lie: Lie) -> bool:
        one, other = lie.one, lie.other
        if contradict(one, other):
            return True
        same_life = (one.origin, one.kind, one.incarnation) == (other.origin, other.kind, other.incarnation)
        if not same_life or one.payload == other.payload:
            return False  # who was restarted and has lost everything may count from one again
        read = self._numbered.get(one.kind)
        number = None if read is None else read(one.payload)
        return read is not None and number is not None and number == read(other.payload)

    def _take(self, entry: Entry, now: float, *, private: bool) -> _Outcome:
        """File an entry that is new and carries its origin's signature, if it may be believed."""
        held = self._origins.get(entry.origin)
        new_life = held is None or entry.incarnation > held.incarnation
        if entry.kind != MEMBER_KIND:
            if held is None or new_life:
                return _Outcome.IGNORED  # its member record has not come yet
            if is_client(held.record):
                # From the client itself it is a lie. By hearsay it may be an honest peer's, to whom
                # this origin was a box in an earlier life.
                return _Outcome.FORGED if private else _Outcome.IGNORED
            known = held.entries.get(entry.kind)
            size = held.size + len(entry.payload) - (len(known.payload) if known is not None else 0)
            if (known is None and len(held.entries) >= MAX_KINDS) or size > MAX_ORIGIN_BYTES:
                return _Outcome.IGNORED
            self._put(held, entry)
            return _Outcome.TAKEN
        record = read_record(entry.payload)
        if len(entry.payload) > MAX_RECORD:
            return _Outcome.IGNORED  # who passed it on may be of a release that kept it
        if record is None or private is not is_client(record):
            return _Outcome.FORGED
        if held is not None and not new_life and is_client(held.record) is not private:
            # One life is either a client or a box: what is told to nobody must not slip out as a box's.
            return _Outcome.IGNORED
        if held is None and len(self._origins) >= MAX_ORIGINS:
            return _Outcome.IGNORED
        try:
            grant = self._admission.check_record(entry.origin, record)
        except TokenSpent:
            return _Outcome.IGNORED  # who passed it on may not have heard
        except TokenError:
            return _Outcome.FORGED
        if held is None or new_life:
            allowance = held.allowance if held is not None else None
            self._drop(entry.origin)
            held = self._origins[entry.origin] = _Origin(entry.incarnation, shared=not private)
            held.allowance = allowance or Allowance(self._settings.entries_s, self._settings.entries_burst, at=now)
        held.record, held.grant = record, grant
        self._put(held, entry)
        return _Outcome.TAKEN

    def _outlive(self, ghost: Entry) -> None:
        """An older life of ours has a higher number (the clock went back), or another node our key: go one higher."""
        self.outlived += 1
        self._own.incarnation = ghost.incarnation + 1
        for kind, entry in list(self._own.entries.items()):
            self._version += 1
            self._put(self._own, sign_entry(self._identity, kind, self._own.incarnation, self._version, entry.payload))

    def _put(self, held: _Origin, entry: Entry) -> None:
        known = held.entries.get(entry.kind)
        if known is not None:
            self._uncount(held, known)
        held.entries[entry.kind] = entry
        held.size += len(entry.payload)
        if held.shared:
            bucket = _bucket_of(entry.origin)
            self._hashes[bucket] = (self._hashes[bucket] + _hash(entry)) % _HASHES

    def _uncount(self, held: _Origin, entry: Entry) -> None:
        held.size -= len(entry.payload)
        if held.shared:
            bucket = _bucket_of(entry.origin)
            self._hashes[bucket] = (self._hashes[bucket] - _hash(entry)) % _HASHES

    def _drop(self, origin: str) -> None:
        held = self._origins.pop(origin, None)
        if held is None:
            return
        for entry in held.entries.values():
            self._uncount(held, entry)
        if is_client(held.record):
            self._admission.release(origin)


def _bucket_of(origin: str) -> int:
    return place_on_ring(PeerId(origin)) * BUCKETS >> 64


def _hash(entry: Entry) -> int:
    """What an entry adds to the hash of its bucket: sums do not depend on the order in which entries came."""
    if entry.kind == BEAT_KIND:
        return 0
    # What is said counts, too: who tells two things under one version is found out when two compare what they hold.
    text = f"{entry.origin} {entry.kind} {entry.incarnation} {entry.version} ".encode() + entry.payload
    return int.from_bytes(blake2b(text, digest_size=_HASH_BYTES).digest(), "big")
