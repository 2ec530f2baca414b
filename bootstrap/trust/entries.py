"""What travels in gossip: signed, versioned entries, and the member record that every other entry
leans on."""

from collections.abc import Callable, Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..errors import DECODE_ERRORS
from .identity import Identity
from .keys import SIGNATURE_BYTES, verify
from .tokens import Credential, Role

MEMBER_KIND: Final = "member"
MAX_PAYLOAD: Final = 64 * 1024
MAX_RECORD: Final = 6 * 1024  # of it, for a member record: a certificate, and room for what later releases say
MAX_KINDS: Final = 16
MAX_KIND_CHARS: Final = 64
MAX_COUNTER: Final = 2**53
_DOMAIN: Final = b"p2pserve-entry-1\n"


Origin = Annotated[str, Meta(min_length=1, max_length=64)]  # a peer id
Kind = Annotated[str, Meta(min_length=1, max_length=MAX_KIND_CHARS)]
EntryCounter = Annotated[int, Meta(ge=1, le=MAX_COUNTER)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One thing one member says. Worth nothing until its signature has been checked."""

    origin: Origin
    kind: Kind
    incarnation: EntryCounter
    version: EntryCounter
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD)]
    signature: Signature


class Lie(msgspec.Struct, frozen=True, array_like=True):
    """Two entries of one origin that contradict each other: whoever signed both is not honest, and anybody can
    check it."""

    one: Entry
    other: Entry


class MemberRecord(msgspec.Struct, frozen=True, array_like=True):
    """The payload of an entry of kind ``member``. ``closed``: a member has dialled this address and not met the node
    there, so it is the node that dials, or a relay connects the two."""

    role: Role
    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=0, lt=65536)]
    credential: Credential | None
    left: bool = False
    closed: bool = False


def sign_entry(identity: Identity, kind: str, incarnation: int, version: int, payload: bytes) -> Entry:
    """A new entry by this node."""
    signature = identity.sign(_signed_bytes(identity.peer_id, kind, incarnation, version, payload))
    return Entry(identity.peer_id, kind, incarnation, version, payload, signature)


def _signed_bytes(origin: str, kind: str, incarnation: int, version: int, payload: bytes) -> bytes:
    return _DOMAIN + msgspec.msgpack.encode((origin, kind, incarnation, version, payload))


def is_sound(entry: Entry, verify: Callable[[str, bytes, bytes], bool] = verify) -> bool:
    """Whether an entry carries its origin's signature. Its bounds were checked when it was decoded.
    ``verify``: as :func:`.keys.verify`; another one for a fuzzer, whose signatures have to be cheap."""
    signed = _signed_bytes(entry.origin, entry.kind, entry.incarnation, entry.version, entry.payload)
    return verify(entry.origin, signed, entry.signature)


def contradict(one: Entry, other: Entry) -> bool:
    """Whether two entries of an honest origin could not differ so: the same number, and not the same said."""
    numbers = [(each.origin, each.kind, each.incarnation, each.version) for each in (one, other)]
    return numbers[0] == numbers[1] and one.payload != other.payload


def read_record(payload: bytes) -> MemberRecord | None:
    """The member record in a payload, if it is one."""
    if len(payload) > MAX_RECORD:
        return None  # thousands of them are kept between runs
    try:
        return msgspec.msgpack.decode(payload, type=MemberRecord)
    except DECODE_ERRORS:
        return None


def sort_records_first(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Member records before what leans on them."""
    return tuple(sorted(entries, key=lambda entry: entry.kind != MEMBER_KIND))
