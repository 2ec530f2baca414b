"""Names, wire numbers and sizes of the KV codecs: all that a process without torch needs to know about them.

The payload layouts themselves are specified, bit for bit, in `codec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

from .errors import PayloadError, TensorError
from .fp8_layout import Fp8Layout
from .kivi4_layout import Kivi4Layout

__all__ = [
    "EXEMPT_TOKENS",
    "FORMAT_VERSION",
    "KEY_GROUP_TOKENS",
    "KEY_SPAN_TOKENS",
    "KV4_HEADER_BYTES",
    "LEAST_CODED_TOKENS",
    "VALUE_GROUP_CHANNELS",
    "Codec",
    "Fp8Layout",
    "Kivi4Layout",
    "Kv4Layout",
    "WireDtype",
    "codec_from_wire",
    "dtype_from_wire",
    "kv4_layout",
    "payload_bytes",
    "value_groups",
]

FORMAT_VERSION = 3
"""Written into every kv4 payload. A change of any bit of the layout is a new number."""

KEY_SPAN_TOKENS = 256
"""Token positions that share a base and a unit of K, per channel. Cutting a prompt at multiples of this
changes no decoded value, whatever the codec.
"""

KEY_GROUP_TOKENS = 32
"""Token positions that share a zero and a step of K, per channel."""

VALUE_GROUP_CHANNELS = 32
"""Rotated channels that share a grid of V, per token and head."""

EXEMPT_TOKENS = 4
"""Prompt positions 0..3 collect attention whatever they say (attention sinks), so an error there reaches
every query.
"""

LEAST_CODED_TOKENS = 4
"""A block with fewer left travels in 16 bit: the parameters of K would cost more than its codes save."""

KV4_HEADER_BYTES = 16


class Codec(StrEnum):
    """How the values of a frame are written. The string is the name in tickets and settings; `wire` is the
    number in frames.
    """

    RAW = "raw"
    KV4 = "kv4"
    FP8 = "fp8"
    KIVI4 = "kivi4"

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
_CODEC_NUMBERS = {Codec.RAW: 0, Codec.KV4: 1, Codec.FP8: 2, Codec.KIVI4: 3}
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
    """Groups of V per token and head: as many equal ones of at least 32 channels as fit.

    32 channels each for head_dim 64, 96, 128 and 256; two of 40 for 80; a head below 64 is one group.
    """
    most = max(1, head_dim // VALUE_GROUP_CHANNELS)
    return next(count for count in range(most, 0, -1) if head_dim % count == 0)


@dataclass(frozen=True)  # no slots: what is derived is kept
class Kv4Layout:
    """Where each section of one kv4 payload begins and ends. Pure arithmetic over the geometry of the
    block.

    Spans and groups of K are cut at multiples of 256 and 32 of the *prompt position*, not of the block, so
    that the values a receiver gets do not depend on how prefill happened to be chunked. Everything of K is
    stored as a run of rows out of the arrays that whole spans would have: `*_rows` say which run.
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

    @cached_property
    def exempt(self) -> int:
        """Leading tokens of this block that travel in 16 bit."""
        exempt = max(0, min(EXEMPT_TOKENS, self.start + self.tokens) - self.start)
        return self.tokens if self.tokens - exempt < LEAST_CODED_TOKENS else exempt

    @cached_property
    def coded(self) -> int:
        """Tokens of this block that travel in 4 bit."""
        return self.tokens - self.exempt

    @cached_property
    def lead(self) -> int:
        """How far into its span of 256 the first coded token lies."""
        return (self.start + self.exempt) % KEY_SPAN_TOKENS

    @cached_property
    def spans(self) -> int:
        """Spans of 256 positions, of which at least a part is coded in this block."""
        return -(-(self.lead + self.coded) // KEY_SPAN_TOKENS) if self.coded else 0

    @cached_property
    def group_rows(self) -> slice:
        """Groups of K in this block, counted from the beginning of the first span."""
        if not self.coded:
            return slice(0, 0)
        return slice(self.lead // KEY_GROUP_TOKENS, -(-(self.lead + self.coded) // KEY_GROUP_TOKENS))

    @cached_property
    def step_rows(self) -> slice:
        """Pairs of groups of K, whose steps share bytes."""
        return slice(self.group_rows.start // 2, -(-self.group_rows.stop // 2))

    @cached_property
    def code_rows(self) -> slice:
        """Rows of code bytes of K. Row r of a group's 16 holds its tokens r and r + 16."""
        if not self.coded:
            return slice(0, 0)
        half = KEY_GROUP_TOKENS // 2
        end = self.lead + self.coded
        first, last = self.group_rows.start, self.group_rows.stop - 1
        low = self.lead - first * KEY_GROUP_TOKENS
        high = end - last * KEY_GROUP_TOKENS
        if first == last and low < half < high:
            return slice(first * half, (first + 1) * half)
        if first == last and low >= half:
            return slice(first * half + low - half, first * half + high - half)
        skipped = low if first == last else max(0, low - half)
        return slice(first * half + skipped, last * half + min(high, half))

    @cached_property
    def value_code_bytes(self) -> int:
        """Bytes of the codes of one group of V."""
        return (self.head_dim // value_groups(self.head_dim) + 1) // 2

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """Header, exempt K, exempt V, K bases, K units, K zeros, K steps, K codes, V units, V grids, V codes."""
        row = self.heads * self.head_dim
        plain = 2 * self.exempt * row
        spans = self.spans * row
        vectors, groups = self.coded * self.heads, value_groups(self.head_dim)
        keys = (_length(rows) * row for rows in (self.group_rows, self.step_rows, self.code_rows))
        values = (vectors, vectors * groups, vectors * groups * self.value_code_bytes)
        return (KV4_HEADER_BYTES, plain, plain, 2 * spans, spans, *keys, *values)

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.section_bytes)


@lru_cache(maxsize=256)
def kv4_layout(start: int, tokens: int, heads: int, head_dim: int) -> Kv4Layout:
    """The layout of blocks of this geometry, kept because all layers of a prompt have the same."""
    return Kv4Layout(start, tokens, heads, head_dim)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def payload_bytes(codec: Codec, dtype: WireDtype, *, start: int, tokens: int, heads: int, head_dim: int) -> int:
    """Exact length of a payload. Known before the data, so that buffers can be reserved and lies refused."""
    layout = _LAYOUTS[codec](start, tokens, heads, head_dim)
    if codec is Codec.RAW:
        return 2 * tokens * heads * head_dim * dtype.itemsize
    return layout.total_bytes


# `raw` has no sections; any layout refuses an empty block and a negative start for it.
_LAYOUTS: dict[Codec, Callable[[int, int, int, int], Kv4Layout | Fp8Layout | Kivi4Layout]] = {
    Codec.RAW: kv4_layout,
    Codec.KV4: kv4_layout,
    Codec.FP8: Fp8Layout,
    Codec.KIVI4: Kivi4Layout,
}
