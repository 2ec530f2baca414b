"""Every error that a KV transfer can raise. What sockets and ciphers raise is mapped to these."""

from __future__ import annotations


class TransferError(Exception):
    """Base of all failures of a KV transfer. Whoever waits for the KV recomputes it; the client
    never sees this."""


class KVProtocolError(TransferError):
    """Bytes or calls that the wire format does not allow: forged, replayed, reordered, malformed,
    or out of turn."""


class TransferAborted(TransferError):
    """One side gave up and said why: `reason` is in its own words."""

    def __init__(self, reason: str, *, by_peer: bool = False) -> None:
        super().__init__(f"the other side gave up: {reason}" if by_peer else reason)
        self.reason = reason
        self.by_peer = by_peer


class TransferTimeout(TransferError):
    """The other side made no progress for the timeout, or the ticket's deadline has passed."""


class ConnectionClosed(TransferError):
    """The connection ended, from either side or under both, before the transfer did."""


class TicketError(TransferError, ValueError):
    """A ticket that cannot be meant: wrong key size, impossible address, unknown codec, no time."""


class FiguresError(ValueError):
    """An impossible figure about a link, a box or a layout of shards; the text names the field."""


class RelayRefused(TransferError):
    """A relay does not forward, or no longer: `code` is a `permits.Refusal`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"the relay refuses: {reason}")
        self.code = code
        self.reason = reason
