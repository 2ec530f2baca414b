"""Sizes of a `kivi4` payload; the folder's docstring specifies the sections."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from ..format import HEADER_BYTES, BlockLayout, equal_groups

GROUP: Final = 32
"""Token positions per group of K, channels per group of V: the paper's and its examples' choice."""


class Kivi4Layout(BlockLayout):
    """Where each section of one kivi4 payload begins and ends. Tokens whose group is not wholly in
    the block are residual: `lead` before the first whole group, the rest behind the last."""

    @cached_property
    def lead(self) -> int:
        """Residual tokens at the beginning of the block."""
        return min(self.tokens, -self.start % GROUP)

    @cached_property
    def key_groups(self) -> int:
        """Whole groups of 32 positions."""
        return (self.tokens - self.lead) // GROUP

    @cached_property
    def coded(self) -> int:
        """Tokens in whole groups."""
        return self.key_groups * GROUP

    @cached_property
    def residual(self) -> int:
        """Tokens that travel in 16 bit."""
        return self.tokens - self.coded

    @cached_property
    def quantised(self) -> slice:
        return slice(self.lead, self.lead + self.coded)

    @cached_property
    def value_groups(self) -> int:
        """Groups of V per token and head."""
        return equal_groups(self.head_dim, GROUP)

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
        return (HEADER_BYTES, plain, plain, keys, keys, 2 * groups, 2 * groups, key_codes, value_codes)
