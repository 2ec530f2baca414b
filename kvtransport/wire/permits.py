"""Permission to have bytes forwarded: what a relay and its client agree on over the control plane,
and the relay's books. Pure.

    client -> relay    "p2pKR/1\\n" permit(16) nonce(16) mac(16)      then whatever is to be forwarded
    relay  -> client   u8 code  u8 length  reason                     code 0: the rest of the connection is forwarded

`mac` is HMAC-SHA256 of what precedes it under the permit's secret, cut to 16 bytes; a nonce serves
once, so a hello that was overheard opens nothing. The relay never sees the keys of what it
forwards.
"""

from __future__ import annotations

import hmac
import math
import struct
from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec

from ..errors import RelayRefused, TicketError

PERMIT_ID_BYTES = 16
RELAY_MAGIC = b"p2pKR/1\n"
_SECRET_BYTES, _NONCE_BYTES, _MAC_BYTES = 32, 16, 16
_HELLO = struct.Struct("<8s16s16s16s")
RELAY_HELLO_BYTES = _HELLO.size
_MAX_CONNECTIONS = 64  # of one owner: the streams of a link at most, and a quarter of what a relay holds
_MAX_NONCES = 4096
MAX_PERMITS = 4096
_BURST_S = 0.05


class Permit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forward to `(next_host, next_port)`, at most `byte_budget` bytes in both directions together
    and `bytes_per_s` on average, until `expires_at` (seconds, on the relay's steady
    clock: nobody else can compare it with anything)."""

    permit: bytes
    secret: bytes
    next_host: str
    next_port: int
    byte_budget: Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e12)]
    expires_at: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]

    def __post_init__(self) -> None:
        if len(self.permit) != PERMIT_ID_BYTES or len(self.secret) != _SECRET_BYTES:
            raise TicketError(f"a permit has {PERMIT_ID_BYTES} bytes of id and {_SECRET_BYTES} of secret")
        if not 0 < len(self.next_host) <= 255 or not self.next_host.isprintable():
            raise TicketError(f"next_host {self.next_host[:64]!r} is not a host name or address")
        if not 0 < self.next_port < 65536:
            raise TicketError(f"next_port {self.next_port} is not a TCP port (1..65535)")
        if self.byte_budget <= 0 or not (self.bytes_per_s > 0 and math.isfinite(self.expires_at)):
            raise TicketError(f"a permit for {self.byte_budget} bytes at {self.bytes_per_s} B/s permits nothing")

    def __repr__(self) -> str:
        budget = f"{self.byte_budget} bytes at {self.bytes_per_s:g} B/s"
        return f"Permit({self.permit.hex()}, to {self.next_host}:{self.next_port}, {budget}, secret=<hidden>)"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("permit", self.permit.hex()), ("next_host", self.next_host), ("next_port", self.next_port)]


class Refusal(IntEnum):
    """Why a relay does not forward. Numbers are on the wire."""

    ACCEPTED = 0
    UNKNOWN = 1
    FORGED = 2
    EXPIRED = 3
    SPENT = 4
    BUSY = 5
    UNREACHABLE = 6


def pack_relay_hello(permit: Permit, nonce: bytes) -> bytes:
    """What a client says first. `nonce`: 16 fresh unpredictable bytes."""
    body = RELAY_MAGIC + permit.permit + nonce
    return body + _mac(permit.secret, body)


def pack_relay_answer(refusal: Refusal, reason: str = "") -> bytes:
    """What the relay answers."""
    text = reason.encode()[:255]
    return bytes((refusal, len(text))) + text


@dataclass(frozen=True, slots=True)
class RelayUse:
    """What has been forwarded under one permit."""

    permit: bytes
    connections: int
    bytes_forwarded: int
    byte_budget: int
    refused: int


@dataclass(slots=True)
class _Account:
    permit: Permit
    owner: str
    nonces: set[bytes]
    connections: int
    forwarded: int
    tokens: float
    filled_at: float
    refused: int
    spent_at: int = 0  # the budget that did not suffice


class RelayLedger:
    """Which permits hold, and what is left of each. `now` is seconds of the relay's
    steady clock."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()
        self.strangers = 0

    def __repr__(self) -> str:
        return (
            f"<RelayLedger permits={len(self._accounts)} forwarded={sum(a.forwarded for a in self._accounts.values())}>"
        )

    def admit(self, permit: Permit, now: float, owner: str = "") -> None:
        """Let a permit be used. A known one keeps its books; its budget and expiry may grow. Permits of one owner share
        the connections that it may have."""
        self._sweep(now)
        known = self._accounts.get(permit.permit)
        if known is not None:
            if known.permit.secret != permit.secret:
                raise TicketError(f"permit {permit.permit.hex()} is known with another secret")
            known.permit = permit
            return
        if len(self._accounts) >= MAX_PERMITS:
            raise TicketError(f"{MAX_PERMITS} permits are in use: none can be added")
        burst = permit.bytes_per_s * _BURST_S
        self._accounts[permit.permit] = _Account(permit, owner, set(), 0, 0, burst, now, 0)

    def revoke(self, permit: bytes) -> None:
        """Forward nothing more under a permit."""
        self._accounts.pop(permit, None)

    def knows(self, permit: bytes) -> bool:
        """Whether a permit is neither revoked nor long over."""
        return permit in self._accounts

    def enter(self, hello: bytes, now: float) -> Permit:
        """A client's hello. Raises RelayRefused with the reason; else `leave` must follow."""
        if len(hello) != RELAY_HELLO_BYTES or not hello.startswith(RELAY_MAGIC):
            self.strangers += 1
            raise RelayRefused(Refusal.FORGED, "this is no relay hello")
        _, permit, nonce, mac = _HELLO.unpack(hello)
        account = self._accounts.get(permit)
        if account is None:
            self.strangers += 1
            raise RelayRefused(Refusal.UNKNOWN, "this relay knows no such permit")
        if not hmac.compare_digest(mac, _mac(account.permit.secret, hello[:-_MAC_BYTES])) or nonce in account.nonces:
            account.refused += 1
            raise RelayRefused(Refusal.FORGED, "the hello is forged or has been used before")
        account.nonces.add(nonce)
        refusal = self._refusal(account, now)
        if refusal is not None:
            account.refused += 1
            raise refusal
        account.connections += 1
        return account.permit

    def leave(self, permit: bytes) -> None:
        """A connection of a permit has ended."""
        account = self._accounts.get(permit)
        if account is not None:
            account.connections -= 1

    def spend(self, permit: bytes, size: int, now: float) -> float:
        """Count `size` bytes about to be forwarded. Returns how many seconds to wait first; raises
        RelayRefused when the permit is over."""
        account = self._accounts.get(permit)
        if account is None:
            raise RelayRefused(Refusal.UNKNOWN, "the permit has been revoked")
        if now >= account.permit.expires_at:
            raise RelayRefused(Refusal.EXPIRED, "the permit has expired")
        if account.forwarded + size > account.permit.byte_budget:
            account.spent_at = account.permit.byte_budget
            raise RelayRefused(Refusal.SPENT, f"the budget of {account.permit.byte_budget} bytes is spent")
        account.forwarded += size
        rate = account.permit.bytes_per_s
        account.tokens = min(account.tokens + max(0.0, now - account.filled_at) * rate, rate * _BURST_S)
        account.filled_at = now
        account.tokens -= size
        return max(0.0, -account.tokens / rate)

    def statistics(self) -> tuple[RelayUse, ...]:
        """One line for each permit."""
        return tuple(
            RelayUse(
                permit=account.permit.permit,
                connections=account.connections,
                bytes_forwarded=account.forwarded,
                byte_budget=account.permit.byte_budget,
                refused=account.refused,
            )
            for account in self._accounts.values()
        )

    def _refusal(self, account: _Account, now: float) -> RelayRefused | None:
        if now >= account.permit.expires_at:
            return RelayRefused(Refusal.EXPIRED, "the permit has expired")
        if account.spent_at >= account.permit.byte_budget:
            return RelayRefused(Refusal.SPENT, f"the budget of {account.permit.byte_budget} bytes is spent")
        connections = sum(each.connections for each in self._accounts.values() if each.owner == account.owner)
        if connections >= _MAX_CONNECTIONS or len(account.nonces) > _MAX_NONCES:
            return RelayRefused(Refusal.BUSY, "too many connections of whoever has this permit")
        return None

    def _sweep(self, now: float) -> None:
        over = [key for key, a in self._accounts.items() if now >= a.permit.expires_at and not a.connections]
        for key in over:
            del self._accounts[key]


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, body, "sha256")[:_MAC_BYTES]
