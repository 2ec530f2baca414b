"""Tickets: a link's permission and key, and a transfer's name. The KV receiver issues them, over
the authenticated control stream only."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ...kernels.codecs import codec_named
from ...kernels.errors import CodecError
from ..errors import TicketError

TRANSFER_ID_BYTES = 16
LINK_ID_BYTES = 16
KEY_BYTES = 32
_DEADLINE_MAX_S = 3600.0
_LEASE_MAX_S = 86_400.0


class LinkTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Permission and key for a link: any number of connections between one sending and one
    receiving process.

    Both processes hold the same ticket. Keys of connections are derived from `secret` with fresh
    nonces of both ends (`channel`), so one ticket serves for every connection and redial. The link
    ends when it has carried no transfer for `lease_s` seconds."""

    link: bytes
    secret: bytes
    lease_s: float

    def __post_init__(self) -> None:
        if len(self.link) != LINK_ID_BYTES:
            raise TicketError(f"link id has {len(self.link)} bytes; it must have {LINK_ID_BYTES}")
        if len(self.secret) != KEY_BYTES:
            raise TicketError(f"secret has {len(self.secret)} bytes; it must have {KEY_BYTES}")
        if not (math.isfinite(self.lease_s) and 0 < self.lease_s <= _LEASE_MAX_S):
            raise TicketError(f"lease of {self.lease_s} s is not in (0, {_LEASE_MAX_S:g}]")

    def __repr__(self) -> str:
        return f"LinkTicket({self.link.hex()}, lease_s={self.lease_s:g}, secret=<hidden>)"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("link", self.link.hex()), ("lease_s", self.lease_s)]


class TransferTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer on a link: id, codec of its frames, seconds it may take at each end."""

    transfer: bytes
    link: bytes
    codec: str
    deadline_s: float

    def __post_init__(self) -> None:
        if len(self.transfer) != TRANSFER_ID_BYTES or not any(self.transfer):
            raise TicketError(f"transfer id {self.transfer.hex()!r}: it must have {TRANSFER_ID_BYTES} bytes, not all 0")
        if len(self.link) != LINK_ID_BYTES:
            raise TicketError(f"link id has {len(self.link)} bytes; it must have {LINK_ID_BYTES}")
        try:
            codec_named(self.codec)
        except CodecError as error:
            raise TicketError(str(error)) from None
        if not (math.isfinite(self.deadline_s) and 0 < self.deadline_s <= _DEADLINE_MAX_S):
            raise TicketError(f"deadline of {self.deadline_s} s is not in (0, {_DEADLINE_MAX_S:g}]")


def issue_link(lease_s: float, random: Callable[[int], bytes]) -> LinkTicket:
    """A fresh link ticket. `random(n)`: n unpredictable bytes (`secrets.token_bytes`)."""
    return LinkTicket(link=random(LINK_ID_BYTES), secret=random(KEY_BYTES), lease_s=lease_s)


def issue_transfer(link: bytes, codec: str, deadline_s: float, random: Callable[[int], bytes]) -> TransferTicket:
    """A fresh ticket for a transfer on a link."""
    return TransferTicket(transfer=random(TRANSFER_ID_BYTES), link=link, codec=codec, deadline_s=deadline_s)
