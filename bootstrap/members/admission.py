"""Who may be in the network, decided from what a peer shows.

The transport proves the peer's id; its signed member record holds a certificate of the network for
that id. So any member may be asked by address alone."""

from ..errors import ProtocolError, TokenError
from ..streams.control import PROTOCOL_VERSION, Hello, Welcome
from ..trust.entries import MEMBER_KIND, MemberRecord, is_sound, read_record
from ..trust.keys import PeerId
from ..trust.tokens import Grant, admit_credential


class Admission:
    """What one network, named by its public key, asks of its members."""

    def __init__(self, network: bytes) -> None:
        self.network = network

    def check_record(self, peer: str, record: MemberRecord, now: float | None = None) -> Grant:
        """What ``peer`` is granted. Raises TokenError unless it may have this role. Without ``now`` expired tokens
        pass: expiry bounds joining, and the records of those who joined in time are gossiped for
        as long as they stay."""
        if record.credential is None:
            raise TokenError("no join token was shown; ask the network's owner for one")
        grant = admit_credential(record.credential, peer, self.network, now)
        if grant.role is not record.role:
            raise TokenError(
                f"the join token is for the role {grant.role.value!r}, not {record.role.value!r}; "
                f"use one for {record.role.value!r}"
            )
        return grant

    def check_greeting(
        self, greeting: Hello | Welcome, peer: PeerId, known: MemberRecord | None, now: float
    ) -> MemberRecord:
        """The record of a peer that may come in; ``known`` is the one we hold. Raises TokenError or
        ProtocolError."""
        if greeting.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer speaks protocol version {greeting.version} and this node version {PROTOCOL_VERSION}; "
                "use the same p2pserve release everywhere"
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
