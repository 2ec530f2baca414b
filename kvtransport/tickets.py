"""Tickets: permission and key for one KV transfer.

The side that listens issues one; it reaches the other side over the authenticated control stream and
nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ..kernels.format import Codec
from .errors import TicketError

__all__ = ["KEY_BYTES", "TRANSFER_ID_BYTES", "Ticket", "issue"]

TRANSFER_ID_BYTES = 16
KEY_BYTES = 32
_HOST_MAX = 255
_DEADLINE_MAX_S = 3600.0


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dial `(host, port)`, name `transfer`, encrypt under `key`, be done within `deadline_s` of connecting.

    **One ticket, one connection.** The nonces of a connection count from zero, so a second connection under
    the same key would give away both plaintexts. A retry takes a new ticket, and whoever accepts
    connections forgets a transfer id at its first use.
    """

    transfer: bytes
    key: bytes
    host: str
    port: int
    codec: str
    deadline_s: float

    def __post_init__(self) -> None:
        if len(self.transfer) != TRANSFER_ID_BYTES:
            raise TicketError(f"transfer id has {len(self.transfer)} bytes; it must have {TRANSFER_ID_BYTES}")
        if len(self.key) != KEY_BYTES:
            raise TicketError(f"key has {len(self.key)} bytes; it must have {KEY_BYTES}")
        if not 0 < len(self.host) <= _HOST_MAX or not self.host.isprintable():
            raise TicketError(f"host {self.host[:64]!r} is not a host name or address")
        if not 0 < self.port < 65536:
            raise TicketError(f"port {self.port} is not a TCP port (1..65535)")
        if self.codec not in tuple(Codec):
            raise TicketError(f"codec {self.codec[:64]!r} is unknown; known are {', '.join(Codec)}")
        if not (math.isfinite(self.deadline_s) and 0 < self.deadline_s <= _DEADLINE_MAX_S):
            raise TicketError(f"deadline of {self.deadline_s} s is not in (0, {_DEADLINE_MAX_S:g}]")

    def __repr__(self) -> str:
        # The key stays out of logs, tracebacks and test reports.
        return (
            f"Ticket({self.transfer.hex()}, {self.host}:{self.port}, codec={self.codec}, "
            f"deadline_s={self.deadline_s:g}, key=<hidden>)"
        )

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("transfer", self.transfer.hex()), ("host", self.host), ("port", self.port)]


def issue(host: str, port: int, codec: str, deadline_s: float, random: Callable[[int], bytes]) -> Ticket:
    """A fresh ticket. `random(n)` gives n unpredictable bytes: `secrets.token_bytes`, except in tests."""
    return Ticket(
        transfer=random(TRANSFER_ID_BYTES),
        key=random(KEY_BYTES),
        host=host,
        port=port,
        codec=codec,
        deadline_s=deadline_s,
    )
