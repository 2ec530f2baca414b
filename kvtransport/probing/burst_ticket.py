"""Permission for one bandwidth burst, and the bytes that its two ends say to each other. Pure.

    from the dialling side, on each of n connections    "p2pBW/1\\n" id(16) u8 index  0(7)  mac(32)
    from the sending side                               bytes without meaning, as many as go through
    from the receiving side, on connection 0            "p2pBR/1\\n" u32 length  result (MessagePack)  mac(32)

The box that will receive agrees to a burst over the authenticated control plane, which is where the
ticket travels. Each mac is HMAC-SHA256 under the ticket's key, so a stranger can neither make a box
receive floods nor tell anybody what was measured. An id serves for one burst, an index for one
connection.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from hashlib import sha256
from math import isfinite

import msgspec

from ..errors import KVProtocolError, TicketError
from .estimates import BurstSample
from .figures import MAX_STREAMS

BURST_MAGIC = b"p2pBW/1\n"
_RESULT_MAGIC = b"p2pBR/1\n"
_ID_BYTES, _KEY_BYTES, _MAC_BYTES = 16, 32, 32
_HELLO = struct.Struct("<8s16sB7x")
_RESULT = struct.Struct("<8sI")
BURST_HELLO_BYTES = _HELLO.size + _MAC_BYTES
RESULT_HEAD_BYTES = _RESULT.size
MAX_RESULT_BYTES = 4096
_MAX_SECONDS = 10.0
_MAX_BYTES = 4_000_000_000


class BurstTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At most `max_bytes` over `streams` connections within `seconds` of the first byte, begun
    within `lease_s`.

    `rtt_s` is what the round trip is thought to be: the receiver judges by it when the rate has
    settled."""

    burst: bytes
    key: bytes
    streams: int
    seconds: float
    max_bytes: int
    rtt_s: float
    lease_s: float = 10.0

    def __post_init__(self) -> None:
        if len(self.burst) != _ID_BYTES:
            raise TicketError(f"burst id has {len(self.burst)} bytes; it must have {_ID_BYTES}")
        if len(self.key) != _KEY_BYTES:
            raise TicketError(f"burst key has {len(self.key)} bytes; it must have {_KEY_BYTES}")
        if not 1 <= self.streams <= MAX_STREAMS:
            raise TicketError(f"burst of {self.streams} streams; it must have 1 to {MAX_STREAMS}")
        if not 0 < self.max_bytes <= _MAX_BYTES:
            raise TicketError(f"burst of {self.max_bytes} bytes; it must have 1 to {_MAX_BYTES}")
        for name, value in (("seconds", self.seconds), ("lease_s", self.lease_s)):
            if not (isfinite(value) and 0.0 < value <= _MAX_SECONDS):
                raise TicketError(f"burst {name} is {value}; it must be in (0, {_MAX_SECONDS:g}]")
        if not (isfinite(self.rtt_s) and 0.0 <= self.rtt_s <= _MAX_SECONDS):
            raise TicketError(f"burst rtt_s is {self.rtt_s}; it must be in [0, {_MAX_SECONDS:g}]")

    def __repr__(self) -> str:
        return (
            f"BurstTicket({self.burst.hex()}, streams={self.streams}, seconds={self.seconds:g}, "
            f"max_bytes={self.max_bytes}, key=<hidden>)"
        )

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("burst", self.burst.hex()), ("streams", self.streams), ("seconds", self.seconds)]


class BurstHello(msgspec.Struct, frozen=True):
    """What a connection says of itself: not yet proved, see `check`."""

    burst: bytes
    index: int
    mac: bytes

    def check(self, ticket: BurstTicket) -> None:
        """ProtocolError if it was not made with this ticket."""
        expected = hmac.digest(ticket.key, _HELLO.pack(BURST_MAGIC, self.burst, self.index), sha256)
        if self.burst != ticket.burst or not hmac.compare_digest(expected, self.mac):
            raise KVProtocolError("burst hello does not prove that its sender holds the ticket")
        if self.index >= ticket.streams:
            raise KVProtocolError(f"burst connection {self.index} of {ticket.streams}")


def issue_burst(
    *, streams: int, seconds: float, max_bytes: int, rtt_s: float, random: Callable[[int], bytes]
) -> BurstTicket:
    """A fresh ticket. `random(n)`: n unpredictable bytes (`secrets.token_bytes`, but in tests)."""
    return BurstTicket(random(_ID_BYTES), random(_KEY_BYTES), streams, seconds, max_bytes, rtt_s)


def pack_hello(ticket: BurstTicket, index: int) -> bytes:
    """The first bytes of connection `index`."""
    plain = _HELLO.pack(BURST_MAGIC, ticket.burst, index)
    return plain + hmac.digest(ticket.key, plain, sha256)


def parse_hello(data: bytes) -> BurstHello:
    """The hello in the first `BURST_HELLO_BYTES`, not yet checked against its ticket."""
    if len(data) != BURST_HELLO_BYTES or not data.startswith(BURST_MAGIC):
        raise KVProtocolError(f"not a burst connection: it begins with {data[: len(BURST_MAGIC)]!r}")
    _, burst, index = _HELLO.unpack_from(data)
    if any(data[_HELLO.size - 7 : _HELLO.size]):
        raise KVProtocolError("burst hello has something where there must be zeros")
    return BurstHello(burst, index, data[_HELLO.size :])


def pack_result(ticket: BurstTicket, sample: BurstSample) -> bytes:
    """What the receiver tells the sender."""
    body = msgspec.msgpack.encode(sample)
    head = _RESULT.pack(_RESULT_MAGIC, len(body))
    return head + body + hmac.digest(ticket.key, head + ticket.burst + body, sha256)


def result_bytes(head: bytes) -> int:
    """Bytes behind the head of a result, bounded, so that the caller may reserve them."""
    if len(head) != RESULT_HEAD_BYTES or not head.startswith(_RESULT_MAGIC):
        raise KVProtocolError(f"not a burst's result: it begins with {head[: len(_RESULT_MAGIC)]!r}")
    length = int(_RESULT.unpack(head)[1])
    if not 0 < length <= MAX_RESULT_BYTES:
        raise KVProtocolError(f"burst result of {length} bytes; it may have 1 to {MAX_RESULT_BYTES}")
    return length + _MAC_BYTES


def parse_result(ticket: BurstTicket, head: bytes, rest: bytes) -> BurstSample:
    """The sample in a result, if the holder of the ticket made it."""
    body, mac = rest[:-_MAC_BYTES], rest[-_MAC_BYTES:]
    if not hmac.compare_digest(hmac.digest(ticket.key, head + ticket.burst + body, sha256), mac):
        raise KVProtocolError("burst result does not prove that the receiver made it")
    try:
        return msgspec.msgpack.decode(body, type=BurstSample)
    except (msgspec.DecodeError, ValueError) as error:
        raise KVProtocolError(f"burst result is malformed: {error}") from None
