"""Sizes of an `fp8` payload. Pure arithmetic; `fp8` specifies what stands in the sections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .errors import TensorError

__all__ = ["FP8_GROUP_TOKENS", "FP8_HEADER_BYTES", "FP8_RUN_TOKENS", "FP8_VERSION", "Fp8Layout"]

FP8_VERSION = 1
"""Written into every fp8 payload. A change of any bit of the layout is a new number."""

FP8_GROUP_TOKENS = 128
"""Token positions that share a zero and an exponent of K, per channel."""

FP8_RUN_TOKENS = 32
"""A group is looked at in runs of this many positions to find a zero that outliers do not move."""

FP8_HEADER_BYTES = 16
"""Long enough that the codes of ordinary heads begin at multiples of 16: wide loads and stores."""


@dataclass(frozen=True)  # no slots: what is derived is kept
class Fp8Layout:
    """Where each section of one fp8 payload begins and ends.

    Groups of K are cut at multiples of 128 of the *prompt position*; those at the ends of a block may be
    shorter.
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
    def lead(self) -> int:
        """How far into its group the first token lies."""
        return self.start % FP8_GROUP_TOKENS

    @cached_property
    def key_groups(self) -> int:
        return -(-(self.lead + self.tokens) // FP8_GROUP_TOKENS)

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """Header, K zeros, K exponents, K codes, V codes, V exponents."""
        row = self.heads * self.head_dim
        keys = self.key_groups * row
        codes = self.tokens * row
        return (FP8_HEADER_BYTES, 2 * keys, keys, codes, codes, self.tokens * self.heads)

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.section_bytes)
