"""Sizes of a `kivi4` payload. Pure arithmetic; `kivi4` specifies what stands in the sections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .errors import TensorError

__all__ = ["KIVI4_GROUP", "KIVI4_HEADER_BYTES", "KIVI4_VERSION", "Kivi4Layout", "kivi4_value_groups"]

KIVI4_VERSION = 1
"""Written into every kivi4 payload. A change of any bit of the layout is a new number."""

KIVI4_GROUP = 32
"""Token positions per group of K, channels per group of V: the paper's and its examples' choice."""

KIVI4_HEADER_BYTES = 16
"""Long enough that the sections of whole groups of ordinary heads begin at multiples of 16: wide loads and stores."""


def kivi4_value_groups(head_dim: int) -> int:
    """Groups of V per token and head: as many equal ones of at least 32 channels as fit.

    32 channels each for head_dim 64, 96, 128 and 256; two of 40 for 80; a head below 64 is one group.
    """
    return next(count for count in range(max(1, head_dim // KIVI4_GROUP), 0, -1) if head_dim % count == 0)


@dataclass(frozen=True)  # no slots: what is derived is kept
class Kivi4Layout:
    """Where each section of one kivi4 payload begins and ends.

    Groups of K are cut at multiples of 32 of the *prompt position*. Tokens whose group is not wholly in the
    block are its residual: `lead` of them before the first whole group and `tail` after the last.
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
        """Residual tokens at the beginning of the block."""
        return min(self.tokens, -self.start % KIVI4_GROUP)

    @cached_property
    def key_groups(self) -> int:
        """Whole groups of 32 positions."""
        return (self.tokens - self.lead) // KIVI4_GROUP

    @cached_property
    def coded(self) -> int:
        """Tokens in whole groups."""
        return self.key_groups * KIVI4_GROUP

    @cached_property
    def residual(self) -> int:
        """Tokens that travel in 16 bit."""
        return self.tokens - self.coded

    @cached_property
    def value_groups(self) -> int:
        return kivi4_value_groups(self.head_dim)

    @cached_property
    def value_code_bytes(self) -> int:
        """Bytes of the codes of one group of V."""
        return (self.head_dim // self.value_groups + 1) // 2

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """Header, residual K, residual V, K zeros, K scales, V zeros, V scales, K codes, V codes."""
        row = self.heads * self.head_dim
        plain = 2 * self.residual * row
        keys = 2 * self.key_groups * row
        groups = self.coded * self.heads * self.value_groups
        key_codes = self.coded // 2 * row
        value_codes = groups * self.value_code_bytes
        return (KIVI4_HEADER_BYTES, plain, plain, keys, keys, 2 * groups, 2 * groups, key_codes, value_codes)

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.section_bytes)
