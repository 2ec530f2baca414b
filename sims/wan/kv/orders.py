"""Orders to the KV program in each box, and its answers: JSON lines."""

from __future__ import annotations

import msgspec

from ....kvtransport.probing.burst_ticket import BurstTicket
from ....kvtransport.probing.estimates import BurstSample
from ....kvtransport.wire.dial_path import DialPath
from ....kvtransport.wire.permits import Permit
from ....kvtransport.wire.tickets import LinkTicket, TransferTicket


class Bulk(msgspec.Struct, frozen=True):
    """One transfer: its ticket and how many frames of 1 MiB it has."""

    ticket: TransferTicket
    frames: int


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """Open the receiving end of a link, whose connections will come to the data port."""

    link: LinkTicket


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """Receive, check and acknowledge these transfers on a link that listens."""

    link: bytes
    transfers: list[Bulk]


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Open the sending end of a link and wait until all its connections are up."""

    link: LinkTicket
    paths: list[DialPath]


class Send(msgspec.Struct, frozen=True, tag="send"):
    """Start these transfers at once; answered when they have started."""

    link: bytes
    transfers: list[Bulk]


class SetPathsOrder(msgspec.Struct, frozen=True, tag="set_paths"):
    """Carry everything of a link over these paths from now on."""

    link: bytes
    paths: list[DialPath]


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Say how far the transfers of a link are."""

    link: bytes


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Close a link."""

    link: bytes


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """Relay under this permit."""

    permit: Permit


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """Say how many bytes were relayed, under all permits."""


class PingOrder(msgspec.Struct, frozen=True, tag="ping"):
    """Measure `count` round trips to another box's data port."""

    host: str
    port: int
    count: int


class ExpectBurst(msgspec.Struct, frozen=True, tag="expect_burst"):
    """Count what a burst of another box brings. Answered at once."""

    ticket: BurstTicket


class SendBurst(msgspec.Struct, frozen=True, tag="send_burst"):
    """Send a burst to a box's data port; answered with what the receiver counted."""

    ticket: BurstTicket
    host: str
    port: int


Order = (
    Listen
    | Expect
    | Connect
    | Send
    | SetPathsOrder
    | Watch
    | Forget
    | Admit
    | Relayed
    | PingOrder
    | ExpectBurst
    | SendBurst
)


class TransferState(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer at its sender: open, delivered or failed; seconds to its end or now."""

    state: str
    reason: str
    seconds: float
    bytes: int
    acknowledged: int
    resent: int
    by_path: dict[str, int]


class OrderReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an order: an error in one line, or what was asked for."""

    error: str = ""
    port: int = 0
    rtt_s: list[float] = []
    burst: BurstSample | None = None
    transfers: list[TransferState] = []
    connections: dict[str, int] = {}
    relayed: int = 0
