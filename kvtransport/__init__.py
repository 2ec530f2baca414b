"""KV caches on the move: links and tickets, the two ends of a transfer, relays, and what is known of the ways between.

Nothing here imports torch, so the agent process, which never does, can issue tickets and choose paths.
Payloads are opaque bytes; `kernels.codec` makes and reads them.
"""

from __future__ import annotations

from .assembly import Assembly
from .channel import LINK_HELLO_BYTES, LINK_MAGIC, LinkHello, parse_link_hello
from .dialling import Path
from .endpoint import Endpoint
from .errors import (
    ConnectionClosed,
    ProtocolError,
    RelayRefused,
    TicketError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from .frames import MAX_PAYLOAD_BYTES, KVFrame
from .lanes import EndState, LinkSettings, PathStatistics
from .links import LinkStatistics
from .permits import RELAY_HELLO_BYTES, RELAY_MAGIC, Permit, Refusal, RelayUse
from .receive_link import Incoming, ReceiveLink
from .relay import Relay
from .report import TransferTimes
from .send_link import Outgoing, SendLink
from .sockets import read_link_hello
from .tickets import LinkTicket, TransferTicket, issue_link, issue_transfer

__all__ = [
    "LINK_HELLO_BYTES",
    "LINK_MAGIC",
    "MAX_PAYLOAD_BYTES",
    "RELAY_HELLO_BYTES",
    "RELAY_MAGIC",
    "Assembly",
    "ConnectionClosed",
    "EndState",
    "Endpoint",
    "Incoming",
    "KVFrame",
    "LinkHello",
    "LinkSettings",
    "LinkStatistics",
    "LinkTicket",
    "Outgoing",
    "Path",
    "PathStatistics",
    "Permit",
    "ProtocolError",
    "ReceiveLink",
    "Refusal",
    "Relay",
    "RelayRefused",
    "RelayUse",
    "SendLink",
    "TicketError",
    "TransferAborted",
    "TransferError",
    "TransferTicket",
    "TransferTimeout",
    "TransferTimes",
    "issue_link",
    "issue_transfer",
    "parse_link_hello",
    "read_link_hello",
]
