"""What the two ends of a transfer say to each other, and the bytes each message has inside its record.

Little-endian, no padding. Every message starts with `u8 version | u8 kind`:

    1 KVFrame   u16 layer | u16 head_first | u16 head_last | u32 start | u32 tokens
                u8 codec | u8 dtype | u16 head_dim | payload
    2 End       u32 tokens | u32 frames
    3 Ack
    4 Abort     reason, UTF-8, at most 512 bytes

Ranges are half-open: heads `[head_first, head_last)` of the whole model, token positions `[start, start +
tokens)` of the prompt. So a frame means the same whatever tensor or pipeline parallelism either side runs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..kernels.errors import PayloadError
from ..kernels.format import codec_from_wire, dtype_from_wire
from .errors import ProtocolError

__all__ = [
    "FRAME_HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_PLAINTEXT_BYTES",
    "MAX_REASON_BYTES",
    "WIRE_VERSION",
    "Abort",
    "Ack",
    "End",
    "KVFrame",
    "Message",
    "encode_parts",
    "parse",
]

WIRE_VERSION = 1
MAX_REASON_BYTES = 512
MAX_PLAINTEXT_BYTES = 8 * 1024 * 1024 - 16
"""A record, its 16-byte tag included, is at most 8 MiB: what a peer may make us reserve before it has
proved anything.
"""

_U16, _U32 = (1 << 16) - 1, (1 << 32) - 1
_MAX_HEAD_DIM = 1024
_MAX_POSITION = 1 << 31
_PREFIX = struct.Struct("<BB")
_FRAME = struct.Struct("<BBHHHIIBBH")
_END = struct.Struct("<BBII")
_KIND_FRAME, _KIND_END, _KIND_ACK, _KIND_ABORT = 1, 2, 3, 4

FRAME_HEADER_BYTES = _FRAME.size
MAX_PAYLOAD_BYTES = MAX_PLAINTEXT_BYTES - FRAME_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class KVFrame:
    """Keys and values of one layer, some heads and some tokens. `payload` is what `kernels.codec` wrote; it
    is not copied.
    """

    layer: int
    head_first: int
    head_last: int
    start: int
    tokens: int
    codec: int
    dtype: int
    head_dim: int
    payload: bytes | bytearray | memoryview

    def __post_init__(self) -> None:
        _bounded("layer", self.layer, 0, _U16)
        _bounded("head_last", self.head_last, 1, _U16)
        _bounded("head_first", self.head_first, 0, self.head_last - 1)
        _bounded("tokens", self.tokens, 1, _MAX_POSITION)
        _bounded("start", self.start, 0, _MAX_POSITION - self.tokens)
        _bounded("head_dim", self.head_dim, 1, _MAX_HEAD_DIM)
        _bounded("payload length", memoryview(self.payload).nbytes, 1, MAX_PAYLOAD_BYTES)
        try:
            codec_from_wire(self.codec)
            dtype_from_wire(self.dtype)
        except PayloadError as error:
            raise ProtocolError(f"KV frame of layer {self.layer}: {error}") from error

    @property
    def heads(self) -> int:
        return self.head_last - self.head_first

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def __repr__(self) -> str:
        return (
            f"KVFrame(layer={self.layer}, heads=[{self.head_first}, {self.head_last}), "
            f"tokens=[{self.start}, {self.end}), codec={self.codec}, dtype={self.dtype}, "
            f"head_dim={self.head_dim}, {memoryview(self.payload).nbytes} bytes)"
        )


@dataclass(frozen=True, slots=True)
class End:
    """All frames have been sent: `frames` of them, covering `tokens` positions between the first and the
    last.
    """

    tokens: int
    frames: int

    def __post_init__(self) -> None:
        _bounded("tokens", self.tokens, 0, _U32)
        _bounded("frames", self.frames, 0, _U32)


@dataclass(frozen=True, slots=True)
class Ack:
    """The receiver has everything and answers for it from now on."""


@dataclass(frozen=True, slots=True)
class Abort:
    """This side gives up."""

    reason: str

    def __post_init__(self) -> None:
        _bounded("abort reason length", len(self.reason.encode("utf-8", "replace")), 0, MAX_REASON_BYTES)

    @classmethod
    def because(cls, reason: str) -> Abort:
        """Any text, cut to what fits: giving up must not fail over a long explanation."""
        return cls(reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore"))


Message = KVFrame | End | Ack | Abort


def encode_parts(message: Message) -> tuple[bytes, bytes | bytearray | memoryview]:
    """Header and body of a message. The body of a frame is its payload itself, so nothing large is copied."""
    match message:
        case KVFrame():
            header = _FRAME.pack(
                WIRE_VERSION,
                _KIND_FRAME,
                message.layer,
                message.head_first,
                message.head_last,
                message.start,
                message.tokens,
                message.codec,
                message.dtype,
                message.head_dim,
            )
            return header, message.payload
        case End():
            return _END.pack(WIRE_VERSION, _KIND_END, message.tokens, message.frames), b""
        case Ack():
            return _PREFIX.pack(WIRE_VERSION, _KIND_ACK), b""
        case Abort():
            return _PREFIX.pack(WIRE_VERSION, _KIND_ABORT), message.reason.encode("utf-8", "replace")


def parse(plain: bytes) -> Message:
    """The one message in `plain`. A frame's payload is a view of `plain`."""
    if len(plain) < _PREFIX.size:
        raise ProtocolError(f"a message of {len(plain)} bytes has no version and kind")
    version, kind = _PREFIX.unpack_from(plain)
    if version != WIRE_VERSION:
        raise ProtocolError(f"message of version {version}; this build speaks version {WIRE_VERSION}")
    if kind == _KIND_FRAME:
        if len(plain) <= _FRAME.size:
            raise ProtocolError(f"a KV frame of {len(plain)} bytes has no payload")
        fields: tuple[int, int, int, int, int, int, int, int] = _FRAME.unpack_from(plain)[2:]
        return KVFrame(*fields, memoryview(plain)[_FRAME.size :])
    if kind == _KIND_END and len(plain) == _END.size:
        return End(*_END.unpack(plain)[2:])
    if kind == _KIND_ACK and len(plain) == _PREFIX.size:
        return Ack()
    if kind == _KIND_ABORT:
        return _parse_abort(plain[_PREFIX.size :])
    raise ProtocolError(f"message of kind {kind} and {len(plain)} bytes is unknown")


def _parse_abort(text: bytes) -> Abort:
    try:
        return Abort(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ProtocolError("abort reason is not UTF-8") from error


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ProtocolError(f"{name} is {value}, outside {low}..{high}")
