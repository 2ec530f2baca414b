"""What a codec is, and what all payloads have in common. No torch: processes that move no KV import
this.

`codecs` lists the codecs; each one's own docstring specifies its payload bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, final

from .errors import PayloadError, TensorError

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 16
"""Of every payload but `raw`'s: u8 version | u8 dtype16 (0 bf16, 1 fp16) | 14 bytes 0, which aligns
the sections behind it to 16 for ordinary heads."""

LARGEST = 2.0**120
"""Bound on |x|: up to here neither a range (2 |x|) nor anything decoded leaves fp32 or bf16."""

WINDOW_TOKENS = 256
"""Cutting a prompt at multiples of this position changes no decoded value, whatever the codec."""

GROUP_TOKENS = 32
"""Cutting where a window has no room at multiples of this costs 4-bit codecs least."""


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
_DTYPE_NUMBERS = {WireDtype.BF16: 0, WireDtype.FP16: 1, WireDtype.FP32: 2}
_DTYPES = {number: dtype for dtype, number in _DTYPE_NUMBERS.items()}


def dtype_from_wire(number: int) -> WireDtype:
    """The dtype with this number. Raises PayloadError."""
    try:
        return _DTYPES[number]
    except KeyError:
        raise PayloadError(f"dtype number {number} is unknown; known are {sorted(_DTYPES)}") from None


@dataclass(frozen=True)  # no slots: what is derived is kept
class BlockLayout:
    """Where each section of one payload begins and ends; each codec derives its own.

    Groups are cut at multiples of the *prompt position* `start + i`, so that decoded values do not
    depend on how prefill was chunked."""

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
    def quantised(self) -> slice:
        """The tokens that are quantised. The others travel in 16 bit behind the header: K, then V."""
        return slice(0, self.tokens)

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """The sizes of header and sections, in their order; `raw` has neither."""
        return ()

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.section_bytes)

    def payload_bytes(self, dtype: WireDtype) -> int:
        """The exact length of the payload of tensors of this dtype."""
        return self.total_bytes


class CodecPath(Protocol):
    """One implementation of a codec, usually a module; all of one codec write the same bytes. It
    takes the quantised tokens `[tokens, heads, head_dim]` in 16 bit and a whole payload."""

    def quantise(self, k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Any) -> bool | None:
        """Fill the codec's sections. False: a value is not finite or too large, and they are void."""

    def dequantise(self, payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any) -> bool | None:
        """Fill `k` and `v`, contiguous. False: no encoder writes such parameters; values are void."""


class ReferencePath(CodecPath, Protocol):
    """Plain torch: the specification, and the fallback. Never returns None."""

    def require_sound(self, payload: torch.Tensor, dtype: torch.dtype, layout: Any, layer: int) -> None:
        """Raise PayloadError for the first parameter or value that no encoder writes, if any."""


class NativePath(CodecPath, Protocol):
    """C++ for CPU tensors. None where there is no library (yet), or for heads it does not take."""

    def available(self) -> bool:
        """Whether the library is there, or has now been built."""


class GpuPath(Protocol):
    """Triton for GPU tensors. Only queues work; raises `flag` (int32 `[1]`) instead of returning
    False."""

    def quantise(
        self, k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Any, flag: torch.Tensor
    ) -> None: ...
    def dequantise(
        self, payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any, flag: torch.Tensor
    ) -> None: ...


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Codec:
    """How keys and values are written on the wire: all the rest of the program knows of a codec.

    `layout` is called with start, tokens, heads and head_dim. Paths import torch, so they are
    loaded when first used; a codec without a reference carries the tensors' bits."""

    name: str
    """In tickets, settings and tables."""
    wire: int
    """In frames. Never reused: boxes of different releases talk to each other."""
    bits: float
    """Of a long prompt with heads of 128, overhead included: what plans count with."""
    layout: Callable[[int, int, int, int], BlockLayout]
    version: int = 0
    """In the header of every payload. A change of any bit of the layout is a new number."""
    largest: float = LARGEST
    """Bound on the size of a value that can be coded."""
    reference: Callable[[], ReferencePath] | None = None
    native: Callable[[], NativePath] | None = None
    triton: Callable[[], GpuPath] | None = None

    def __str__(self) -> str:
        return self.name


def lazy_module(package: str, name: str) -> Callable[[], Any]:
    """The path in a codec's own folder, for `Codec`: imported at the first call, with its torch."""
    return partial(import_module, f".{name}", package)


@lru_cache(maxsize=256)
def layout_of(codec: Codec, start: int, tokens: int, heads: int, head_dim: int) -> BlockLayout:
    """The layout of blocks of this geometry, kept because all layers of a prompt have the same."""
    return codec.layout(start, tokens, heads, head_dim)


def payload_bytes(codec: Codec, dtype: WireDtype, *, start: int, tokens: int, heads: int, head_dim: int) -> int:
    """Exact payload length, known before the data, to reserve buffers and refuse lies."""
    return layout_of(codec, start, tokens, heads, head_dim).payload_bytes(dtype)


def equal_groups(channels: int, least: int) -> int:
    """Into how many equal groups of at least `least` channels a head is cut: as many as fit, or
    one. For 32: groups of 32 for head_dim 64, 96, 128 and 256; two of 40 for 80; one below 64."""
    return next(count for count in range(max(1, channels // least), 0, -1) if channels % count == 0)
