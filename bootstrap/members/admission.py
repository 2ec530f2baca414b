"""Who may be in the network, decided from what a peer shows and what the owner has ordered since.

The transport proves the peer's id; its signed member record holds a certificate of the network for
that id. So any member may be asked by address alone. A certificate is for so many boxes: the first
that show it are those.
"""

from collections.abc import Iterable, Mapping

from ..errors import ProtocolError, TokenError, TokenSpent
from ..streams.control import Hello, Welcome, check_version
from ..trust.entries import MEMBER_KIND, MemberRecord, is_sound, read_record
from ..trust.keys import PeerId
from ..trust.orders import Orders, SignedOrders, read_orders
from ..trust.tokens import Grant, Role, admit_credential, read_grant


class Admission:
    """What one network, named by its public key, asks of its members."""

    def __init__(self, network: bytes) -> None:
        self.network = network
        self.orders = Orders()
        self.signed_orders: SignedOrders | None = None
        self._holders: dict[str, set[str]] = {}  # certificate -> the peers that were admitted with it
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
        return peer in self._holders.get(grant.certificate, ())

    def is_revoked(self, grant: Grant) -> bool:
        """Whether the owner has withdrawn this certificate."""
        return grant.certificate in self.orders.revoked

    # -- who used which certificate -----------------------------------------------------------------------------------

    @property
    def holders(self) -> Mapping[str, frozenset[str]]:
        """The peers that were admitted so far, by certificate: to be kept on disk."""
        return {certificate: frozenset(peers) for certificate, peers in self._holders.items()}

    def restore_holders(self, holders: Mapping[str, Iterable[str]]) -> None:
        """Take up what an earlier run has kept."""
        self._holders = {certificate: set(peers) for certificate, peers in holders.items()}

    def has_place(self, peer: str, record: MemberRecord) -> bool:
        """Whether a record is not one too many of its certificate. It costs no signature, and none is checked."""
        grant = read_grant(record.credential.certificate) if record.credential is not None else None
        holders = self._holders.get(grant.certificate, ()) if grant is not None else ()
        return grant is None or peer in holders or len(holders) < grant.uses

    def expel(self, peer: str) -> None:
        """Never let this peer in again: it has proved that it lies."""
        self._expelled.add(peer)

    def release(self, peer: str) -> None:
        """A client has gone: others may use its place. (A box keeps it: its certificate is bound to it.)"""
        for peers in self._holders.values():
            peers.discard(peer)

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_record(self, peer: str, record: MemberRecord, now: float | None = None) -> Grant:
        """What ``peer``, which has signed this record, is granted from now on. Raises TokenError unless it may have
        this role. Without ``now`` expired tokens pass: expiry bounds joining, and the records of
        those who joined in time are gossiped for as long as they stay. Who was admitted before, comes back with the
        same certificate, however long it was away."""
        grant = self.read_grant(peer, record)
        self.check_revoked(grant)
        holders = self._holders.setdefault(grant.certificate, set())
        if now is not None and peer not in holders:
            self.check_end(peer, grant, now)
        if peer not in holders and len(holders) >= grant.uses:
            boxes = "one box" if grant.uses == 1 else f"{grant.uses} boxes"
            raise TokenSpent(
                f"the join token {grant.certificate} is for {boxes} and has been used by as many; ask the network's "
                "owner for another one (p2pserve token create --uses N)"
            )
        holders.add(peer)
        return grant

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

    def check_greeting(
        self, greeting: Hello | Welcome, peer: PeerId, known: MemberRecord | None, now: float
    ) -> MemberRecord:
        """The record of a peer that may come in; ``known`` is the one we hold. Raises TokenError or
        ProtocolError."""
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
        has_joined_before = known is not None and known.credential == record.credential and known.role is record.role
        self.check_record(peer, record, None if has_joined_before else now)
        return record


def is_client(record: MemberRecord | None) -> bool:
    """Whether this is the record of a client, of which nobody but its members knows."""
    return record is not None and record.role is Role.CLIENT
