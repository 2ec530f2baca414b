"""What travels in gossip: signed, versioned entries, and the member record that every other entry
leans on."""

from collections.abc import Iterable
from typing import Final

import msgspec

from ..errors import DECODE_ERRORS
from .identity import Identity
from .keys import verify
from .tokens import Credential, Role

MEMBER_KIND: Final = "member"
MAX_PAYLOAD: Final = 64 * 1024
MAX_KINDS: Final = 16
MAX_KIND_CHARS: Final = 64
MAX_COUNTER: Final = 2**53
_DOMAIN: Final = b"p2pserve-entry-1\n"


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One thing one member says. Worth nothing until its signature has been checked."""

    origin: str
    kind: str
    incarnation: int
    version: int
    payload: bytes
    signature: bytes


class MemberRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The payload of an entry of kind ``member``."""

    role: Role
    host: str
    port: int
    credential: Credential | None
    left: bool = False


def sign_entry(identity: Identity, kind: str, incarnation: int, version: int, payload: bytes) -> Entry:
    """A new entry by this node."""
    signature = identity.sign(_signed_bytes(identity.peer_id, kind, incarnation, version, payload))
    return Entry(identity.peer_id, kind, incarnation, version, payload, signature)


def _signed_bytes(origin: str, kind: str, incarnation: int, version: int, payload: bytes) -> bytes:
    return _DOMAIN + msgspec.msgpack.encode((origin, kind, incarnation, version, payload))


def is_sound(entry: Entry) -> bool:
    """Whether an entry keeps the bounds and carries its origin's signature."""
    return (
        0 < len(entry.kind) <= MAX_KIND_CHARS
        and len(entry.payload) <= MAX_PAYLOAD
        and 0 < entry.incarnation <= MAX_COUNTER
        and 0 < entry.version <= MAX_COUNTER
        and verify(
            entry.origin,
            _signed_bytes(entry.origin, entry.kind, entry.incarnation, entry.version, entry.payload),
            entry.signature,
        )
    )


def read_record(payload: bytes) -> MemberRecord | None:
    """The member record in a payload, if it is one."""
    try:
        record = msgspec.msgpack.decode(payload, type=MemberRecord)
    except DECODE_ERRORS:
        return None
    return record if len(record.host) <= 255 and 0 <= record.port < 65536 else None


def sort_records_first(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Member records before what leans on them."""
    return tuple(sorted(entries, key=lambda entry: entry.kind != MEMBER_KIND))
