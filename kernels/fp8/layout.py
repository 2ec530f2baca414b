"""Sizes of an `fp8` payload; the folder's docstring specifies the sections."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from ..format import HEADER_BYTES, BlockLayout

GROUP_TOKENS: Final = 128
"""Token positions that share a zero and an exponent of K, per channel."""

RUN_TOKENS: Final = 32
"""A group is looked at in runs of this many positions to find a zero that outliers do not move."""


class Fp8Layout(BlockLayout):
    """Where each section of an fp8 payload begins and ends. A block's end groups may be shorter."""

    @cached_property
    def lead(self) -> int:
        """How far into its group the first token lies."""
        return self.start % GROUP_TOKENS

    @cached_property
    def key_groups(self) -> int:
        return -(-(self.lead + self.tokens) // GROUP_TOKENS)

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """Header, K zeros, K exponents, K codes, V codes, V exponents."""
        row = self.heads * self.head_dim
        keys = self.key_groups * row
        codes = self.tokens * row
        return (HEADER_BYTES, 2 * keys, keys, codes, codes, self.tokens * self.heads)
