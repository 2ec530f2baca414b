"""KV caches on the move: tickets, the encrypted wire, the two ends of a transfer, and what has arrived so
far.

Nothing here imports torch, so the agent process, which never does, can issue tickets and read hellos.
Payloads are opaque bytes; `kernels.codec` makes and reads them.
"""

from __future__ import annotations

from .assembly import Assembly
from .errors import (
    ConnectionClosed,
    ProtocolError,
    TicketError,
    TransferAborted,
    TransferError,
    TransferTimeout,
)
from .messages import Abort, Ack, End, KVFrame
from .report import TransferTimes
from .stream import ReceiveStream, SendStream, StreamState, read_hello
from .tickets import Ticket, issue
from .wire import DATA_MAGIC, HELLO_BYTES, MAX_PAYLOAD_BYTES, Direction, Opener, Sealer, record_bytes

__all__ = [
    "DATA_MAGIC",
    "HELLO_BYTES",
    "MAX_PAYLOAD_BYTES",
    "Abort",
    "Ack",
    "Assembly",
    "ConnectionClosed",
    "Direction",
    "End",
    "KVFrame",
    "Opener",
    "ProtocolError",
    "ReceiveStream",
    "Sealer",
    "SendStream",
    "StreamState",
    "Ticket",
    "TicketError",
    "TransferAborted",
    "TransferError",
    "TransferTimeout",
    "TransferTimes",
    "issue",
    "read_hello",
    "record_bytes",
]
