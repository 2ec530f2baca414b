"""What the members say of leading, gathered for the election: who may, who claims, who objects. Pure."""

from collections import Counter
from contextlib import suppress

import msgspec

from ..errors import DECODE_ERRORS, TokenError
from ..settings import NetworkSettings
from ..trust.entries import MEMBER_KIND, Entry, read_record
from ..trust.keys import PeerId
from .admission import Admission, is_client
from .election import CLAIM_KIND, Claim, Election, ElectionResult, ElectionView, decode_claim
from .roster import Roster
from .states import HeldClaim
from .table import Table

OBJECTION_KIND = "objection"


class _Objection(msgspec.Struct, frozen=True, array_like=True):
    leader: str
    epoch: int


def encode_objection(leader: PeerId, epoch: int) -> bytes:
    """The payload of an entry with which a box says that it refuses what this leader plans."""
    return msgspec.msgpack.encode(_Objection(leader, epoch))


class Leadership:
    """Claims and objections of all members, and what follows from them."""

    def __init__(self, table: Table, roster: Roster, admission: Admission, settings: NetworkSettings) -> None:
        self.latest: HeldClaim | None = None  # proof of the highest epoch, whatever has become of who claimed it
        self.epoch = 0  # that one
        self._table = table
        self._roster = roster
        self._admission = admission
        self._election = Election(table.peer_id, settings)
        self._leaders: set[PeerId] = set()  # who may lead
        self._claims: dict[PeerId, Claim] = {}  # of those
        self._objections: dict[PeerId, tuple[PeerId, int]] = {}  # box -> the leader and epoch whose plans it refuses
        self._candidates: frozenset[PeerId] = frozenset()  # those of the leaders that are here

    def read(self, peer: PeerId) -> None:
        """A member says something of leading, has another record, or is gone."""
        for table in (self._claims, self._objections):
            table.pop(peer, None)
        self._leaders.discard(peer)
        record, grant = self._table.record(peer), self._table.grant(peer)
        if record is None or grant is None or is_client(record):
            return
        if grant.lead:
            self._leaders.add(peer)
            self._read_claim(peer)
        objection = self._table.entry(peer, OBJECTION_KIND)
        refused = None if objection is None else _decode_objection(objection.payload)
        if refused is not None:
            self._objections[peer] = refused

    def _read_claim(self, peer: PeerId) -> None:
        own, entry = self._table.entry(peer, MEMBER_KIND), self._table.entry(peer, CLAIM_KIND)
        claim = None if entry is None else _decode(entry)
        if own is not None and entry is not None and claim is not None:
            self._claims[peer] = claim
            if claim.epoch > self.epoch:
                self.latest, self.epoch = HeldClaim(own, entry), claim.epoch

    def take_latest(self, latest: HeldClaim) -> bool:
        """Believe in a higher epoch, if who claimed it was allowed to; whether that is so."""
        record, claim = read_record(latest.record.payload), _decode(latest.claim)
        is_fitting = (latest.record.kind, latest.claim.kind) == (MEMBER_KIND, CLAIM_KIND)
        if record is None or claim is None or not is_fitting or latest.record.origin != latest.claim.origin:
            return False
        if claim.epoch <= self.epoch or not all(map(self._table.is_sound, (latest.record, latest.claim))):
            return False
        with suppress(TokenError):  # who passes on another network's claims is not followed; nothing else comes of it
            if self._admission.read_grant(latest.record.origin, record).lead:
                self.latest, self.epoch = latest, claim.epoch
                return True
        return False

    def is_refreshed(self, peer: PeerId, leader: tuple[PeerId, int] | None) -> bool:
        """Whether a claim is only said anew by the leader that is followed."""
        claim = self._claims.get(peer)
        return claim is not None and not claim.yielded and leader == (peer, claim.epoch)

    def find_candidates(self) -> None:
        """See which of those that may lead are here: after members have come or gone."""
        self._candidates = frozenset(peer for peer in self._leaders if self._roster.is_here(peer))

    def decide(self, now: float, *, synced: bool, paused_s: float = 0.0) -> ElectionResult:
        """Apply the election's rule."""
        view = ElectionView(
            candidates=self._candidates,
            claims=self._claims,
            witnessed=self.epoch,
            synced=synced,
            refused=self._find_refused() if self._objections else (),
        )
        return self._election.decide(view, now, paused_s=paused_s)

    def _find_refused(self) -> frozenset[tuple[PeerId, int]]:
        """Leaders whose plans more than half of the other boxes refuse, and never one alone: of two boxes, the one that
        does not lead could pass over the other at will."""
        boxes = self._roster.find_boxes()
        refusing = (refused for peer, refused in self._objections.items() if peer in boxes and peer != refused[0])
        return frozenset(
            refused for refused, count in Counter(refusing).items() if count > max(1, (len(boxes) - 1) / 2)
        )


def _decode(entry: Entry) -> Claim | None:
    return decode_claim(entry.payload, (entry.incarnation, entry.version))


def _decode_objection(payload: bytes) -> tuple[PeerId, int] | None:
    try:
        found = msgspec.msgpack.decode(payload, type=_Objection)
    except DECODE_ERRORS:
        return None
    return PeerId(found.leader), found.epoch
