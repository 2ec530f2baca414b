"""What the machines of this room take and give, as plain values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from ..addresses import Address
from ..trust.entries import MAX_KINDS, Entry, EntryCounter, Kind, Lie, Origin, is_sound
from ..trust.keys import PeerId
from ..trust.orders import SignedOrders
from ..trust.tokens import Role

_Versions = Annotated[dict[Kind, EntryCounter], Meta(max_length=MAX_KINDS)]
Digest = Annotated[dict[Origin, tuple[EntryCounter, _Versions]], Meta(max_length=4096)]  # origin -> (incarnation, ...)


class MemberState(Enum):
    """See :mod:`.liveness`."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member as others see it."""

    peer_id: PeerId
    role: Role
    state: MemberState
    address: Address
    incarnation: int
    is_closed: bool = False  # nobody can dial it
    may_lead: bool = False
    rtt_s: float | None = None
    gone_s: float | None = None  # for so long it has been dead or away, as far as this node knows


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What a merge did. Blame the sender for ``forged``; ``ignored`` may merely be early."""

    changed: tuple[Entry, ...] = ()
    lies: tuple[Lie, ...] = ()
    forged: int = 0
    ignored: int = 0


ReadNumber = Callable[[bytes], object | None]  # the number under which a payload may be said once only; None: none


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRules:
    """What is particular about kinds of entries, and how signatures are checked.

    Args:
        urgent: kinds that are told to everybody at once, however many there are.
        numbered: kinds whose payloads carry a number that may be used once only, with what reads it.
        is_sound: checks signatures; a simulation checks each but once, however many nodes it has.
    """

    urgent: frozenset[str] = frozenset()
    numbered: Mapping[str, ReadNumber] = field(default_factory=dict)
    is_sound: Callable[[Entry], bool] = is_sound


# -- what members tell each other --------------------------------------------------------------------------------------


class HeldClaim(msgspec.Struct, frozen=True, array_like=True):
    """A claim with the record of its author, who may be gone by now: proof that there was an epoch."""

    record: Entry
    claim: Entry


class Tell(msgspec.Struct, frozen=True, array_like=True):
    """Something new, or what the receiver's digest lacked; ``complete``: that was all of it."""

    entries: Annotated[tuple[Entry, ...], Meta(max_length=4096)] = ()
    lies: Annotated[tuple[Lie, ...], Meta(max_length=256)] = ()
    orders: SignedOrders | None = None
    latest: HeldClaim | None = None  # the highest epoch that the sender knows of
    complete: bool = False


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """How far the sender is with what is not in the table."""

    orders: Annotated[int, Meta(ge=0, le=2**53)] = 0  # their number
    lies: Annotated[int, Meta(ge=0, le=4096)] = 0  # how many
    epoch: Annotated[int, Meta(ge=0, le=2**53)] = 0  # the highest of which it has proof


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """What the sender holds, as one hash per bucket. Answered by an empty :class:`Tell`, or a :class:`Compare`."""

    hashes: Annotated[bytes, Meta(max_length=512)]
    holding: Holding = Holding()


class Compare(msgspec.Struct, frozen=True, array_like=True):
    """What the sender holds in the buckets that differ. Answered by what it lacks, and, where ``asks_back``, by the
    receiver's own. Of origins in other buckets it asks for signs of life newer than those named."""

    digest: Digest
    buckets: Annotated[bytes, Meta(max_length=64)]  # one byte each
    holding: Holding = Holding()
    asks_back: bool = False


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The sender closes this session: neither end needs it. It is not going away."""


GossipMessage = Tell | Summary | Compare | Part


# -- what is kept between runs ----------------------------------------------------------------------------------------


class NetworkState(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept. Signed by those who said it, but for ``holders``, which is this node's own memory."""

    entries: Annotated[tuple[Entry, ...], Meta(max_length=8192)] = ()  # member records and claims
    lies: Annotated[tuple[Lie, ...], Meta(max_length=256)] = ()
    orders: SignedOrders | None = None
    latest: HeldClaim | None = None
    holders: dict[str, list[str]] = {}  # certificate -> the peers that were admitted with it


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStatistics:
    """Counts since the start, and the state now."""

    members: int
    alive: int
    connected: int
    coordinator: str | None
    epoch: int
    revision: int
    strangers_refused: int
    entries_forged: int
