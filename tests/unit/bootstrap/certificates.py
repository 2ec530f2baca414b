"""Members of one network, their certificates and what they say."""

import msgspec

from p2pserve.bootstrap import Address, Identity, JoinToken, NetworkKey, PeerId, Role
from p2pserve.bootstrap.members.admission import Admission
from p2pserve.bootstrap.trust.entries import MEMBER_KIND, Entry, MemberRecord, sign_entry

KEY = NetworkKey(b"n" * 32)
# In the order of their peer ids: the lower dials first.
PEOPLE = sorted((Identity(bytes([seed]) * 32) for seed in range(1, 12)), key=lambda each: each.peer_id)
TOKENS = {
    (role, lead): JoinToken.parse(KEY.issue((), role, 2e9, lead=lead))
    for role in Role
    for lead in ((False,) if role is Role.CLIENT else (False, True))
}


def admission() -> Admission:
    return Admission(KEY.public)


def place(who: Identity) -> Address:
    return Address("192.0.2.1", 4000 + PEOPLE.index(who))


def payload(
    who: Identity,
    role: Role = Role.WORKER,
    *,
    lead: bool = True,
    left: bool = False,
    closed: bool = False,
    token: JoinToken | None = None,
    peer: PeerId | None = None,
) -> bytes:
    """A member record, with a certificate that holds."""
    at = place(who)
    shown = token or TOKENS[role, lead and role is not Role.CLIENT]
    return msgspec.msgpack.encode(
        MemberRecord(role, at.host, at.port, shown.credential(peer or who.peer_id), left, closed),
    )


def record(
    who: Identity,
    role: Role = Role.WORKER,
    *,
    life: int = 1,
    version: int = 1,
    lead: bool = True,
    left: bool = False,
    closed: bool = False,
    token: JoinToken | None = None,
) -> Entry:
    said = payload(who, role, lead=lead, left=left, closed=closed, token=token)
    return sign_entry(who, MEMBER_KIND, life, version, said)


def word(who: Identity, kind: str, text: bytes, *, life: int = 1, version: int = 2) -> Entry:
    return sign_entry(who, kind, life, version, text)
