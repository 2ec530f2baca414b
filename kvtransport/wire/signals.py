"""What the two ends of a link say to each other on its connections: one fixed head per record, and
a payload where there is one.

Little-endian, no padding. Every head has 54 bytes::

    u8 kind | u8 grid | u16 0 | u32 payload bytes | 16 bytes transfer | 30 bytes of the kind's own

    from the sender of KV
      1 Chunk     u32 frame | u32 offset | u32 total | 18 bytes frame header      payload: bytes of the frame
      2 End       u32 tokens | u32 frames
      3 Abort                                                                     payload: reason, UTF-8
    from the receiver
      4 Credit    u64 limit | u32 first
      5 Result    u8 delivered                                                    payload: reason, UTF-8
    from both
      6 Progress  u64 records | u64 bytes
      7 Ping      u64 token
      8 Pong      u64 token
      9 Greeting                                                                  payload: label, UTF-8
     10 Goodbye                                                                   payload: reason, UTF-8

A frame is cut on a grid of `2 ** grid` bytes: a chunk begins at a multiple of it and ends at the
next one or with the frame, so a chunk that comes twice is known by its offset. The frame header is
that of `messages`::

    u16 layer | u16 head_first | u16 head_last | u32 start | u32 tokens | u8 codec | u8 dtype | u16 head_dim

Chunk, End, Abort, Credit and Result are *reliable*: each end counts those it has dealt with on each
connection and says so with Progress; what a connection had not confirmed when it died is said again
on another.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import KVProtocolError
from .frames import MAX_PAYLOAD_BYTES, MAX_REASON_BYTES, KVFrame
from .tickets import TRANSFER_ID_BYTES

MIN_GRID, MAX_GRID = 12, 20
MAX_CHUNK_BYTES = 1 << MAX_GRID
MAX_LABEL_BYTES = 64
NO_TRANSFER = bytes(TRANSFER_ID_BYTES)

_PREFIX = struct.Struct("<BBHI16s")
_CHUNK = struct.Struct("<BBHI16sIII18s")
_NUMBERS = struct.Struct("<BBHI16sII22x")
_LONG = struct.Struct("<BBHI16sQ22x")
_CREDIT_HEAD = struct.Struct("<BBHI16sQI18x")
_LONGS = struct.Struct("<BBHI16sQQ14x")
_FLAG = struct.Struct("<BBHI16sB29x")
_BARE = struct.Struct("<BBHI16s30x")
_FRAME = struct.Struct("<HHHIIBBH")
HEAD_BYTES = _CHUNK.size


class Chunk(NamedTuple):
    """`length` bytes at `offset` of the `total` bytes of frame number `frame` of a transfer."""

    transfer: bytes
    frame: int
    offset: int
    total: int
    grid: int
    header: bytes
    length: int


class End(NamedTuple):
    """The transfer has `frames` frames from 0, covering `tokens`; some may be in flight."""

    transfer: bytes
    tokens: int
    frames: int


class Abort(NamedTuple):
    """The sender gives the transfer up."""

    transfer: bytes
    reason: str


class Credit(NamedTuple):
    """The sender may have sent chunks for up to `limit` bytes of charge since the transfer began
    (see `receiving`). The receiver has the positions before `first` already."""

    transfer: bytes
    limit: int
    first: int


class Result(NamedTuple):
    """How the transfer ended at the receiver."""

    transfer: bytes
    delivered: bool
    reason: str


class Ack(NamedTuple):
    """`records` reliable records of this connection dealt with, `bytes` read from it in all."""

    records: int
    bytes: int


class Ping(NamedTuple):
    """Answer with a Pong of the same token."""

    token: int


class Pong(NamedTuple):
    """Answers a Ping."""

    token: int


class LinkGreeting(NamedTuple):
    """Each side's first record: proves the link's secret. The dialler names the path."""

    label: str


class Goodbye(NamedTuple):
    """The link is over, for all its connections."""

    reason: str


Signal = Chunk | End | Abort | Credit | Result | Ack | Ping | Pong | LinkGreeting | Goodbye

CHUNK_KIND, _END, _ABORT, _CREDIT, _RESULT, _PROGRESS, _PING, _PONG, _GREETING, _GOODBYE = range(1, 11)


def frame_header(frame: KVFrame) -> bytes:
    """The 18 bytes that say what a frame holds."""
    return _FRAME.pack(
        frame.layer,
        frame.head_first,
        frame.head_last,
        frame.start,
        frame.tokens,
        frame.codec,
        frame.dtype,
        frame.head_dim,
    )


def frame_of(header: bytes, payload: memoryview) -> KVFrame:
    """The frame with that header. Raises ProtocolError for what no frame may say."""
    layer, head_first, head_last, start, tokens, codec, dtype, head_dim = _FRAME.unpack(header)
    return KVFrame(layer, head_first, head_last, start, tokens, codec, dtype, head_dim, payload)


def pack(signal: Signal) -> tuple[bytes, bytes]:
    """The head, and the payload of all but chunks: a chunk's payload lies in its frame."""
    if isinstance(signal, Chunk):  # nearly every one
        transfer, frame, offset, total, grid, header, length = signal
        return _CHUNK.pack(CHUNK_KIND, grid, 0, length, transfer, frame, offset, total, header), b""
    match signal:
        case End(transfer, tokens, frames):
            return _NUMBERS.pack(_END, 0, 0, 0, transfer, tokens, frames), b""
        case Abort(transfer, reason):
            text = _text(reason, MAX_REASON_BYTES)
            return _BARE.pack(_ABORT, 0, 0, len(text), transfer), text
        case Credit(transfer, limit, first):
            return _CREDIT_HEAD.pack(_CREDIT, 0, 0, 0, transfer, limit, first), b""
        case Result(transfer, delivered, reason):
            text = _text(reason, MAX_REASON_BYTES)
            return _FLAG.pack(_RESULT, 0, 0, len(text), transfer, delivered), text
        case Ack(records, count):
            return _LONGS.pack(_PROGRESS, 0, 0, 0, NO_TRANSFER, records, count), b""
        case Ping(token):
            return _LONG.pack(_PING, 0, 0, 0, NO_TRANSFER, token), b""
        case Pong(token):
            return _LONG.pack(_PONG, 0, 0, 0, NO_TRANSFER, token), b""
        case LinkGreeting(label):
            text = _text(label, MAX_LABEL_BYTES)
            return _BARE.pack(_GREETING, 0, 0, len(text), NO_TRANSFER), text
        case Goodbye(reason):
            text = _text(reason, MAX_REASON_BYTES)
            return _BARE.pack(_GOODBYE, 0, 0, len(text), NO_TRANSFER), text


def payload_bytes(head: bytes | bytearray, largest: int) -> int:
    """Bytes of payload behind a head; an error above `largest` or its kind's bound."""
    kind, grid, zero, length, _ = _PREFIX.unpack_from(head)
    if kind == CHUNK_KIND:
        allowed = MAX_CHUNK_BYTES
    elif kind in (_ABORT, _RESULT, _GOODBYE):
        allowed = MAX_REASON_BYTES
    else:
        allowed = MAX_LABEL_BYTES if kind == _GREETING else 0
    if zero or length > min(allowed, largest) or (grid and kind != CHUNK_KIND):
        raise KVProtocolError(f"head of kind {kind} with {length} bytes of payload: at most {min(allowed, largest)}")
    return int(length)


def unpack(head: bytes, text: bytes) -> Signal:
    """The signal in a head. `text` is its payload, except that a chunk's payload stays where it is."""
    kind, grid, _, length, transfer = _PREFIX.unpack_from(head)
    if kind == CHUNK_KIND:
        frame, offset, total, header = _CHUNK.unpack(head)[5:]
        chunk = Chunk(transfer, frame, offset, total, grid, header, length)
        _check_grid(chunk)
        return chunk
    if kind == _PROGRESS:
        return Ack(*_LONGS.unpack(head)[5:])
    if kind == _CREDIT:
        return Credit(transfer, *_CREDIT_HEAD.unpack(head)[5:])
    if kind == _END:
        return End(transfer, *_NUMBERS.unpack(head)[5:])
    if kind == _ABORT:
        return Abort(transfer, _read(text))
    if kind == _RESULT:
        return Result(transfer, _FLAG.unpack(head)[5] != 0, _read(text))
    if kind == _PING:
        return Ping(_LONG.unpack(head)[5])
    if kind == _PONG:
        return Pong(_LONG.unpack(head)[5])
    if kind == _GREETING:
        return LinkGreeting(_read(text))
    if kind == _GOODBYE:
        return Goodbye(_read(text))
    raise KVProtocolError(f"a head of kind {kind} is unknown")


def _check_grid(chunk: Chunk) -> None:
    if not MIN_GRID <= chunk.grid <= MAX_GRID:
        raise KVProtocolError(f"chunk grid of 2**{chunk.grid} bytes, outside 2**{MIN_GRID}..2**{MAX_GRID}")
    if not 1 <= chunk.total <= MAX_PAYLOAD_BYTES:
        raise KVProtocolError(f"frame of {chunk.total} bytes, outside 1..{MAX_PAYLOAD_BYTES}")
    step = 1 << chunk.grid
    if chunk.offset >= chunk.total or chunk.offset % step or chunk.length != min(step, chunk.total - chunk.offset):
        raise KVProtocolError(
            f"chunk of {chunk.length} bytes at {chunk.offset} of {chunk.total} is off the grid of {step}"
        )


def _text(text: str, limit: int) -> bytes:
    """Any text, cut to what fits: giving up must not fail over a long explanation."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore").encode()


def _read(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise KVProtocolError("a reason or label is not UTF-8") from None
