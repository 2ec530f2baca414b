"""Names, wire numbers and sizes of the KV codecs: all that a process without torch needs to know about them.

The payload layouts themselves are specified, bit for bit, in `codec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .errors import PayloadError, TensorError

__all__ = [
    "EXEMPT_TOKENS",
    "FORMAT_VERSION",
    "KEY_GROUP_TOKENS",
    "KV4_HEADER_BYTES",
    "VALUE_GROUP_CHANNELS",
    "Codec",
    "Kv4Layout",
    "WireDtype",
    "codec_from_wire",
    "dtype_from_wire",
    "payload_bytes",
    "value_groups",
]

FORMAT_VERSION = 1
"""Written into every kv4 payload. A change of any bit of the layout is a new number."""

KEY_GROUP_TOKENS = 64
VALUE_GROUP_CHANNELS = 128
EXEMPT_TOKENS = 4
"""Prompt positions 0..3 collect attention whatever they say (attention sinks), so an error there reaches
every query.
"""

KV4_HEADER_BYTES = 8


class Codec(StrEnum):
    """How the values of a frame are written. The string is the name in tickets and settings; `wire` is the
    number in frames.
    """

    RAW = "raw"
    KV4 = "kv4"

    @property
    def wire(self) -> int:
        return _CODEC_NUMBERS[self]


class WireDtype(StrEnum):
    """Dtype of the tensors at both ends of a transfer."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def wire(self) -> int:
        return _DTYPE_NUMBERS[self]

    @property
    def itemsize(self) -> int:
        return 4 if self is WireDtype.FP32 else 2


# Fixed for ever: boxes of different releases talk to each other. Numbers are never reused.
_CODEC_NUMBERS = {Codec.RAW: 0, Codec.KV4: 1}
_DTYPE_NUMBERS = {WireDtype.BF16: 0, WireDtype.FP16: 1, WireDtype.FP32: 2}
_CODECS = {number: codec for codec, number in _CODEC_NUMBERS.items()}
_DTYPES = {number: dtype for dtype, number in _DTYPE_NUMBERS.items()}


def codec_from_wire(number: int) -> Codec:
    try:
        return _CODECS[number]
    except KeyError:
        raise PayloadError(f"codec number {number} is unknown; known are {sorted(_CODECS)}") from None


def dtype_from_wire(number: int) -> WireDtype:
    try:
        return _DTYPES[number]
    except KeyError:
        raise PayloadError(f"dtype number {number} is unknown; known are {sorted(_DTYPES)}") from None


def value_groups(head_dim: int) -> int:
    """Groups of V per token and head: 128 channels each, or the whole head when 128 does not divide it."""
    return head_dim // VALUE_GROUP_CHANNELS if head_dim % VALUE_GROUP_CHANNELS == 0 else 1


@dataclass(frozen=True, slots=True)
class Kv4Layout:
    """Where each section of one kv4 payload begins and ends. Pure arithmetic over the geometry of the
    block.

    Token groups of K are cut at multiples of 64 of the *prompt position*, not of the block, so that the
    values a receiver gets do not depend on how prefill happened to be chunked.
    """

    start: int
    tokens: int
    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.heads, self.head_dim) < 1:
            raise TensorError(f"empty block: {self.tokens} tokens x {self.heads} heads x {self.head_dim}")
        if self.start < 0:
            raise TensorError(f"start={self.start} is negative; it is a position in the prompt")

    @property
    def exempt(self) -> int:
        """Leading tokens of this block that travel in 16 bit."""
        return max(0, min(EXEMPT_TOKENS, self.start + self.tokens) - self.start)

    @property
    def coded(self) -> int:
        """Tokens of this block that travel in 4 bit."""
        return self.tokens - self.exempt

    @property
    def lead(self) -> int:
        """How far into its group of 64 the first coded token lies."""
        return (self.start + self.exempt) % KEY_GROUP_TOKENS

    @property
    def key_groups(self) -> int:
        return -(-(self.lead + self.coded) // KEY_GROUP_TOKENS) if self.coded else 0

    @property
    def section_bytes(self) -> tuple[int, ...]:
        """Header, exempt K, exempt V, K zeros, V zeros, K scales, V scales, K codes, V codes."""
        row = self.heads * self.head_dim
        key_groups = self.key_groups * row
        groups = self.coded * self.heads * value_groups(self.head_dim)
        codes = (self.coded * row + 1) // 2
        plain = 2 * self.exempt * row
        return (KV4_HEADER_BYTES, plain, plain, 2 * key_groups, 2 * groups, key_groups, groups, codes, codes)

    @property
    def total_bytes(self) -> int:
        return sum(self.section_bytes)


def payload_bytes(codec: Codec, dtype: WireDtype, *, start: int, tokens: int, heads: int, head_dim: int) -> int:
    """Exact length of a payload. Known before the data, so that buffers can be reserved and lies refused."""
    layout = Kv4Layout(start, tokens, heads, head_dim)
    if codec is Codec.RAW:
        return 2 * tokens * heads * head_dim * dtype.itemsize
    return layout.total_bytes
