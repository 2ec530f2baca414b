"""KV transport: links and tickets, both ends of a transfer, relays, path choice and link
measurement.

Nothing here imports torch, so the agent process, which never does, can issue tickets and choose
paths. Payloads are opaque bytes; `kernels.codec` makes and reads them.
"""

from __future__ import annotations

from .errors import (
    ConnectionClosed,
    KVProtocolError,
    RelayRefused,
    TicketError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from .link.endpoint import Endpoint
from .link.links import LinkStatistics
from .link.machine import PathStatistics
from .link.receive_link import IncomingTransfer, ReceiveLink
from .link.relay import Relay
from .link.send_link import OutgoingTransfer, SendLink
from .link.settings import LinkSettings
from .link.transfers import EndState
from .routing.report import TransferTimes
from .wire.assembly import Assembly
from .wire.channel import LINK_HELLO_BYTES, LINK_MAGIC, LinkHello, parse_link_hello
from .wire.dial_path import DialPath
from .wire.frames import MAX_PAYLOAD_BYTES, KVFrame
from .wire.permits import RELAY_HELLO_BYTES, RELAY_MAGIC, Permit, Refusal, RelayUse
from .wire.sockets import read_link_hello
from .wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer

__all__ = [
    "LINK_HELLO_BYTES",
    "LINK_MAGIC",
    "MAX_PAYLOAD_BYTES",
    "RELAY_HELLO_BYTES",
    "RELAY_MAGIC",
    "Assembly",
    "ConnectionClosed",
    "DialPath",
    "EndState",
    "Endpoint",
    "IncomingTransfer",
    "KVFrame",
    "KVProtocolError",
    "LinkHello",
    "LinkSettings",
    "LinkStatistics",
    "LinkTicket",
    "OutgoingTransfer",
    "PathStatistics",
    "Permit",
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
