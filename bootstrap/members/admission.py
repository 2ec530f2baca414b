"""Who may be in the network, decided from what a peer shows and what the owner has ordered since.

The transport proves the peer's id; its signed member record holds a certificate of the network for
that id. So any member may be asked by address alone. A certificate is for so many boxes: the first
that show it are those. One certificate for one box is bound to it for good. Of one for several, a
box that has been forgotten yields its place to another that comes when all are taken: or whoever
holds such a token could use it up for everybody, with identities that are never seen again.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from ..errors import ProtocolError, TokenError, TokenSpent
from ..streams.control import Hello, Welcome, check_version
from ..trust.entries import MEMBER_KIND, MemberRecord, is_sound, read_record
from ..trust.keys import PeerId
from ..trust.orders import Orders, SignedOrders, read_orders
from ..trust.tokens import Grant, Role, admit_credential, read_grant

MAX_VISITORS: Final = 4  # of one certificate at once
"""Boxes that look around with a worker's token, at once. More lets more boxes of one token try `doctor` together; each
costs what a client costs."""


class Places(NamedTuple):
    """Of a certificate: for how many boxes it is, how many places no other box may have any more, and whether a certain
    peer has one of them."""

    uses: int
    taken: int
    is_holder: bool


class _PlaceUse(Enum):
    """How a peer has its place of a certificate. Of the last two others may take it, where all are taken."""

    TAKEN = "taken"
    VACANT = "vacant"  # the box was here, and is forgotten by now; a certificate for one box stays bound to it
    TOLD_OF = "told of"  # nobody has seen the box yet, only its record: it yields to one that is at the door itself


class Admission:
    """What one network, named by its public key, asks of its members."""

    def __init__(self, network: bytes) -> None:
        self.network = network
        self.orders = Orders()
        self.signed_orders: SignedOrders | None = None
        self._places: dict[str, dict[str, _PlaceUse]] = {}  # certificate -> the peers that were admitted with it
        self._visitors: dict[str, Grant] = {}  # peers that have come as clients with a worker's certificate, now
        self._expelled: set[str] = set()

    # -- orders -------------------------------------------------------------------------------------------------------

    def take_orders(self, signed: SignedOrders) -> bool:
        """Follow the owner's orders if they are its own and newer; returns whether they are."""
        orders = read_orders(signed, self.network)
        if orders is None or orders.number <= self.orders.number:
            return False
        self.orders, self.signed_orders = orders, signed
        return True

    def was_admitted(self, peer: str, grant: Grant) -> bool:
        """Whether this peer has been here with this certificate."""
        return peer in self._places.get(grant.certificate, ())

    def is_revoked(self, grant: Grant) -> bool:
        """Whether the owner has withdrawn this certificate."""
        return grant.certificate in self.orders.revoked

    # -- who used which certificate -----------------------------------------------------------------------------------

    @property
    def holders(self) -> Mapping[str, frozenset[str]]:
        """The peers that were admitted so far, by certificate: to be kept on disk."""
        return {certificate: frozenset(places) for certificate, places in self._places.items()}

    def restore_holders(self, holders: Mapping[str, Iterable[str]]) -> None:
        """Take up what an earlier run has kept."""
        self._places = {certificate: dict.fromkeys(peers, _PlaceUse.TAKEN) for certificate, peers in holders.items()}

    def has_place(self, peer: str, record: MemberRecord) -> bool:
        """Whether a record is not one too many of its certificate. It costs no signature, and none is checked."""
        grant = read_grant(record.credential.certificate) if record.credential is not None else None
        if grant is None or is_visit(record, grant):
            return True
        places = self._places.get(grant.certificate, {})
        is_free = peer in places or len(places) < grant.uses
        return is_free or _find_yielding(places, grant, is_here=False) is not None

    def note_seen(self, peer: str) -> None:
        """This peer is or was alive: its places are taken."""
        self._mark(peer, _PlaceUse.TAKEN)

    def vacate(self, peer: str) -> None:
        """A box is forgotten: it comes back as long as no other one has needed its place."""
        self._mark(peer, _PlaceUse.VACANT)

    def count_places(self, asker: str, peer: str) -> Places | None:
        """How many places are taken of the certificate that `asker` has shown, and whether `peer` has one; None for an
        asker that was not admitted."""
        grant = self._visitors.get(asker)
        if grant is None:
            return None
        places = self._places.get(grant.certificate, {})
        is_yielding = {place: _yields(place, grant, is_here=True) for place in _PlaceUse}
        taken = sum(not is_yielding[place] for place in places.values())
        return Places(grant.uses, taken, peer in places)

    def release(self, peer: str) -> None:
        """A client has gone: others may use its place."""
        self._visitors.pop(peer, None)
        for places in self._places.values():
            places.pop(peer, None)

    def release_unseen(self, peer: str) -> None:
        """A member that nobody has ever heard is forgotten, and has used no place."""
        for places in self._places.values():
            if places.get(peer) is _PlaceUse.TOLD_OF:
                del places[peer]

    def _mark(self, peer: str, place: _PlaceUse) -> None:
        for places in self._places.values():
            if peer in places:
                places[peer] = place

    def expel(self, peer: str) -> None:
        """Never let this peer in again: it has proved that it lies."""
        self._expelled.add(peer)

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_record(self, peer: str, record: MemberRecord, now: float | None = None) -> Grant:
        """What ``peer``, which has signed this record, is granted from now on. Raises TokenError unless it may have
        this role. ``now`` (unix seconds) where it shows the record itself. By hearsay expired tokens pass: expiry
        bounds joining, and the records of those who joined in time are gossiped for as long as they stay. Who was
        here before, comes back with the same certificate, however long it was away."""
        grant = self.read_grant(peer, record)
        self.check_revoked(grant)
        if is_visit(record, grant):
            self._check_visit(peer, grant, now)
            return grant
        places = self._places.setdefault(grant.certificate, {})
        if now is not None and places.get(peer, _PlaceUse.TOLD_OF) is _PlaceUse.TOLD_OF:
            self.check_end(peer, grant, now)
        if peer not in places and len(places) >= grant.uses:
            yielding = _find_yielding(places, grant, is_here=now is not None)
            if yielding is None:
                boxes = "one box" if grant.uses == 1 else f"{grant.uses} boxes"
                raise TokenSpent(
                    f"the join token {grant.certificate} is for {boxes} and has been used by as many; ask the "
                    "network's owner for another one (p2pserve token create --uses N)"
                )
            del places[yielding]
        if now is None:
            places.setdefault(peer, _PlaceUse.TOLD_OF)
        else:
            places[peer] = _PlaceUse.TAKEN
        return grant

    def _check_visit(self, peer: str, grant: Grant, now: float | None) -> None:
        """A box looks around before it joins: it takes no place, and few may do so at once. Raises TokenError."""
        if now is None:  # its record, once it was let in
            return
        self.check_end(peer, grant, now)
        visitors = sum(each.certificate == grant.certificate for each in self._visitors.values())
        if peer not in self._visitors and visitors >= MAX_VISITORS:
            raise TokenError(
                f"{visitors} boxes look around with the join token {grant.certificate}; try again in a minute"
            )
        self._visitors[peer] = grant

    def read_grant(self, peer: str, record: MemberRecord) -> Grant:
        """What the certificate in a peer's record grants it, or has granted. Raises TokenError."""
        if record.credential is None:
            raise TokenError("no join token was shown; ask the network's owner for one")
        grant = admit_credential(record.credential, peer, self.network, None)
        grant.check_role(record.role, f"use one for {record.role.value!r}")
        return grant

    def check_revoked(self, grant: Grant) -> None:
        """Raise TokenSpent for a certificate that the owner has withdrawn."""
        if self.is_revoked(grant):
            raise TokenSpent(
                f"the join token {grant.certificate} was revoked by the network's owner; ask for another one"
            )

    def check_end(self, peer: str, grant: Grant, now: float) -> None:
        """Raise TokenError where this peer's certificate has ended, and was not renewed for it."""
        renewal = self.orders.renewed.get(grant.certificate)
        renewed = renewal.grant() if renewal is not None else None
        if renewal is None or renewed is None:
            grant.check_expiry(now)
        elif renewal.is_for(peer):
            if now >= renewed.expires_at:
                grant.check_expiry(now)
        elif grant.expires_at == renewed.expires_at:
            # Anybody may see a renewed certificate, and who has the token could show it: it is for its members only.
            raise TokenError("the join token has ended, and was renewed for other boxes; ask the owner for a new one")
        else:
            grant.check_expiry(now)

    def check_greeting(self, greeting: Hello | Welcome, peer: PeerId, now: float) -> MemberRecord:
        """The record of a peer that may come in. Raises TokenError or ProtocolError."""
        check_version(greeting.version, greeting.release)
        if peer in self._expelled:
            raise TokenError(
                "the peer has said two different things under one number, which proves that it lies; if it is yours, "
                "delete identity.key in its home folder and start it with another token"
            )
        if greeting.network != self.network:
            raise TokenError(
                f"the peer belongs to another network ({greeting.network.hex()[:8]}, "
                f"this one is {self.network.hex()[:8]}); use a token issued by this network"
            )
        entry = greeting.member
        record = read_record(entry.payload)
        if entry.kind != MEMBER_KIND or entry.origin != peer or record is None or not is_sound(entry):
            raise ProtocolError("the peer's member record is malformed or not its own; use the same p2pserve release")
        self.check_record(peer, record, now)
        return record


def _find_yielding(places: Mapping[str, _PlaceUse], grant: Grant, *, is_here: bool) -> str | None:
    """Whose place one more may have, where all are taken; None: nobody's."""
    return next((peer for peer, place in places.items() if _yields(place, grant, is_here=is_here)), None)


def _yields(place: _PlaceUse, grant: Grant, *, is_here: bool) -> bool:
    """Whether one that comes (`is_here`), or is told of, may have this place."""
    if place is _PlaceUse.VACANT:
        return grant.uses > 1 or grant.role is Role.CLIENT  # a certificate for one box stays bound to it
    return place is _PlaceUse.TOLD_OF and is_here


def is_visit(record: MemberRecord, grant: Grant) -> bool:
    """Whether a box that may join looks around first."""
    return record.role is Role.CLIENT and grant.role is Role.WORKER


def is_client(record: MemberRecord | None) -> bool:
    """Whether this is the record of a client, of which nobody but its members knows."""
    return record is not None and record.role is Role.CLIENT
