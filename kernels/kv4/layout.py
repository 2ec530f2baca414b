"""Sizes of a `kv4` payload; the folder's docstring specifies the sections."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from ..format import HEADER_BYTES, WINDOW_TOKENS, BlockLayout, equal_groups

LARGEST: Final = 2.0**30
"""Bound on |x|: up to here every unit is within the range of its 8 bits."""

KEY_SPAN_TOKENS: Final = WINDOW_TOKENS
"""Token positions that share a base and a unit of K, per channel."""

KEY_GROUP_TOKENS: Final = 32
"""Token positions that share a zero and a step of K, per channel."""

VALUE_GROUP_CHANNELS: Final = 32
"""Rotated channels that share a grid of V, per token and head."""

EXEMPT_TOKENS: Final = 4
"""Prompt positions 0..3 are attention sinks: an error there reaches every query."""

LEAST_CODED_TOKENS: Final = 4
"""A block with fewer left travels in 16 bit: K's parameters would cost more than is saved."""


def value_groups(head_dim: int) -> int:
    """Groups of V per token and head."""
    return equal_groups(head_dim, VALUE_GROUP_CHANNELS)


class Kv4Layout(BlockLayout):
    """Where each section of one kv4 payload begins and ends. K is stored as runs of rows out of the
    arrays that whole spans would have: `*_rows`."""

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
    def quantised(self) -> slice:
        return slice(self.exempt, self.tokens)

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
        """Header, exempt K and V, K bases, units, zeros, steps and codes, V units, grids and codes."""
        row = self.heads * self.head_dim
        plain = 2 * self.exempt * row
        spans = self.spans * row
        vectors, groups = self.coded * self.heads, value_groups(self.head_dim)
        keys = (_length(rows) * row for rows in (self.group_rows, self.step_rows, self.code_rows))
        values = (vectors, vectors * groups, vectors * groups * self.value_code_bytes)
        return (HEADER_BYTES, plain, plain, 2 * spans, spans, *keys, *values)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)
