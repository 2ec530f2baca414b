"""The life of a KV transfer as a table, and the record of transfers that each end of a link keeps.
Pure.

Both ends go through the same statuses on the same events; docs/kvtransport.md draws the table, and
says what makes each event happen at either end. A pair that `TRANSITIONS` lacks cannot happen: it
is refused as a protocol error.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from ..errors import KVProtocolError

_MAX_EARLY = 1024
_MAX_OVER = 1 << 14


class TransferStatus(StrEnum):
    """Where a transfer stands at one end of its link."""

    WAITING = "waiting"
    MOVING = "moving"
    COMPLETE = "complete"
    DELIVERED = "delivered"
    FAILED = "failed"


class TransferEvent(StrEnum):
    """What moves a transfer on."""

    GRANTED = "granted"
    COMPLETED = "completed"
    ACKNOWLEDGED = "acknowledged"
    ABORTED = "aborted"
    REFUSED = "refused"


_OPEN = (TransferStatus.WAITING, TransferStatus.MOVING, TransferStatus.COMPLETE)

TRANSITIONS: Mapping[tuple[TransferStatus, TransferEvent], TransferStatus] = MappingProxyType(
    {
        (TransferStatus.WAITING, TransferEvent.GRANTED): TransferStatus.MOVING,
        (TransferStatus.MOVING, TransferEvent.GRANTED): TransferStatus.MOVING,
        # The receiver goes on raising its limit while the last chunks are in flight.
        (TransferStatus.COMPLETE, TransferEvent.GRANTED): TransferStatus.COMPLETE,
        (TransferStatus.MOVING, TransferEvent.COMPLETED): TransferStatus.COMPLETE,
        (TransferStatus.COMPLETE, TransferEvent.ACKNOWLEDGED): TransferStatus.DELIVERED,
        **{(status, TransferEvent.ABORTED): TransferStatus.FAILED for status in _OPEN},
        **{(status, TransferEvent.REFUSED): TransferStatus.FAILED for status in _OPEN},
    }
)


def next_status(status: TransferStatus, event: TransferEvent) -> TransferStatus:
    """The status after an event. Raises KVProtocolError for an event that cannot happen then."""
    after = TRANSITIONS.get((status, event))
    if after is None:
        raise KVProtocolError(f"a transfer that is {status} cannot be {event}")
    return after


@dataclass(frozen=True, slots=True)
class EndState:
    """`open`, then exactly one of `delivered` and `failed`, for ever."""

    name: Literal["open", "delivered", "failed"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.reason})" if self.reason else self.name


class Transfer:
    """What both ends of a link keep of a transfer. `deadline` and `opened_at` are on their clocks."""

    def __init__(self, transfer: bytes, deadline: float, now: float) -> None:
        self.id = transfer
        self.deadline = deadline
        self.opened_at = now
        self.status = TransferStatus.WAITING
        self.reason = ""
        self.by_path: dict[str, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.status in _OPEN

    @property
    def end_state(self) -> EndState:
        """The same for those who only care how it ends."""
        if self.status is TransferStatus.DELIVERED:
            return EndState("delivered")
        return EndState("failed", self.reason) if self.status is TransferStatus.FAILED else EndState("open")


@dataclass(slots=True)
class EarlyNews:
    """What the peer has said of a transfer that this end does not know yet."""

    credit: int = 0
    first: int = 0
    refused: str | None = None


# ---- what an end of a link reports ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer has reached its end state. Comes once for each transfer."""

    transfer: bytes
    state: EndState


@dataclass(frozen=True, slots=True)
class TransferComplete:
    """Every frame of a transfer has arrived: `frames` of them, covering `tokens` positions."""

    transfer: bytes
    tokens: int
    frames: int


@dataclass(frozen=True, slots=True)
class FrameReady:
    """A frame is whole. Its payload stays until the machine is told that it was consumed."""

    transfer: bytes
    frame: int
    header: bytes
    payload: memoryview


@dataclass(frozen=True, slots=True)
class TransferGranted:
    """The receiver first said that KV may come; it has the positions before `first`."""

    transfer: bytes
    first: int


@dataclass(frozen=True, slots=True)
class Released:
    """Source memory is no longer needed: confirmed, or its transfer is over."""

    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close this connection. `is_stuck`: what it carried had not arrived for long."""

    number: int
    reason: str
    is_stuck: bool = False


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The link is over: close its connections, once what is being sent has gone."""

    reason: str


LinkEvent = TransferEnded | TransferGranted | TransferComplete | FrameReady | Released | CloseConnection | LinkEnded


T = TypeVar("T", bound=Transfer)


class TransferTable(Generic[T]):
    """One end's transfers: known ones, ids of those over, and early news of others."""

    def __init__(self) -> None:
        self._known: dict[bytes, T] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._early: OrderedDict[bytes, EarlyNews] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, transfer: T) -> EarlyNews:
        """Begin a transfer. Returns what the peer has said of it already. An id serves once."""
        if transfer.id in self._known or transfer.id in self._over:
            raise KVProtocolError(f"transfer {transfer.id.hex()} has been used before")
        self._known[transfer.id] = transfer
        return self._early.pop(transfer.id, None) or EarlyNews()

    def get(self, transfer: bytes) -> T | None:
        """Also one that has ended, until it is forgotten."""
        return self._known.get(transfer)

    def get_open(self, transfer: bytes) -> T | None:
        """Only one that has not ended."""
        known = self._known.get(transfer)
        return known if known is not None and known.is_open else None

    def list_known(self) -> list[T]:
        """All, in the order in which they began."""
        return list(self._known.values())

    def list_open(self) -> list[T]:
        """Those that have not ended."""
        return [transfer for transfer in self._known.values() if transfer.is_open]

    def is_over(self, transfer: bytes) -> bool:
        """Whether one of that id has ended here."""
        return transfer in self._over

    def next_deadline(self) -> float:
        """When the first open transfer is overdue; infinite without any."""
        return min((transfer.deadline for transfer in self.list_open()), default=math.inf)

    def apply(self, transfer: T, event: TransferEvent, reason: str = "") -> None:
        """The one place where a status changes."""
        transfer.status = next_status(transfer.status, event)
        if not transfer.is_open:
            transfer.reason = reason
            self._over[transfer.id] = None
            # A peer can make this end remember ids; the oldest are the ones it can no longer ask for.
            if len(self._over) > _MAX_OVER:
                self._over.popitem(last=False)

    def forget(self, transfer: bytes) -> None:
        """Drop the record of an ended transfer."""
        known = self._known.get(transfer)
        if known is not None and not known.is_open:
            del self._known[transfer]

    def note_early(self, transfer: bytes) -> EarlyNews | None:
        """Where to write down what is said of an unknown transfer; None of one that is over."""
        if transfer in self._over:
            return None
        news = self._early.setdefault(transfer, EarlyNews())
        # Whatever a peer names costs an entry here: the oldest goes, and at worst its transfer waits.
        if len(self._early) > _MAX_EARLY:
            self._early.popitem(last=False)
        return news
