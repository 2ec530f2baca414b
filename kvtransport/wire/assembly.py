"""How much of a prompt's KV has arrived: pure bookkeeping over (layer, head, token) intervals.

Frames come in any order and in any cut along the three axes. For each layer and head there is one
sorted list of disjoint token intervals, neighbours merged, so a transfer in order keeps one
interval per head and `add` costs a few comparisons.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left

from ..errors import KVProtocolError
from .frames import KVFrame


class Assembly:
    """Expects every layer of `layers`, heads `[0, heads)` and positions `[first, first + tokens)`,
    each exactly once."""

    def __init__(self, layers: range, heads: int, tokens: int, *, first: int = 0) -> None:
        if not layers or layers.step < 1 or heads < 1 or tokens < 1 or first < 0:
            raise ValueError(f"nothing to assemble: {layers=}, {heads=}, {tokens=}, {first=}")
        self._layers = layers
        self._heads = heads
        self._first = first
        self._end = first + tokens
        self._missing = len(layers) * heads * tokens
        # (layer, head) -> begins and ends of the intervals present
        self._present: dict[tuple[int, int], tuple[list[int], list[int]]] = {
            (layer, head): ([], []) for layer in layers for head in range(heads)
        }

    def add(self, frame: KVFrame) -> None:
        """Record a frame. If it lies outside or meets something already there, nothing is recorded."""
        if frame.layer not in self._layers or frame.head_last > self._heads:
            raise KVProtocolError(f"{frame} lies outside layers {self._layers} and {self._heads} heads")
        if frame.start < self._first or frame.end > self._end:
            raise KVProtocolError(f"{frame} lies outside positions {self._first}..{self._end - 1}")
        heads = range(frame.head_first, frame.head_last)
        for head in heads:
            self._refuse_overlap(frame, head)
        for head in heads:
            _insert(*self._present[frame.layer, head], frame.start, frame.end)
        self._missing -= frame.heads * frame.tokens

    def complete_tokens(self) -> int:
        """Length of the longest run from the first position on that every layer and head has: what
        survives a broken transfer."""
        return min(self._prefix(*intervals) for intervals in self._present.values())

    @property
    def is_done(self) -> bool:
        return self._missing == 0

    @property
    def fraction(self) -> float:
        """How much of everything is there, in [0, 1]."""
        return 1.0 - self._missing / (len(self._present) * (self._end - self._first))

    def check_integrity(self) -> None:
        """The intervals are sorted, disjoint, not adjacent, and account for what is missing."""
        present = 0
        for begins, ends in self._present.values():
            edges = [edge for pair in zip(begins, ends, strict=True) for edge in pair]
            if any(a >= b for a, b in itertools.pairwise(edges)):
                raise AssertionError(f"intervals out of order: {edges}")
            present += sum(ends) - sum(begins)
        expected = len(self._present) * (self._end - self._first)
        if present + self._missing != expected:
            raise AssertionError(f"{present} present + {self._missing} missing is not {expected}")

    def __repr__(self) -> str:
        total = len(self._present) * (self._end - self._first)
        return f"<Assembly {total - self._missing}/{total}, complete prefix {self.complete_tokens()} tokens>"

    def _prefix(self, begins: list[int], ends: list[int]) -> int:
        return ends[0] - self._first if begins and begins[0] == self._first else 0

    def _refuse_overlap(self, frame: KVFrame, head: int) -> None:
        begins, ends = self._present[frame.layer, head]
        at = bisect_left(begins, frame.end)  # intervals before `at` begin before the frame ends
        if at and ends[at - 1] > frame.start:
            known = f"{begins[at - 1]}..{ends[at - 1] - 1}"
            raise KVProtocolError(f"{frame} repeats positions {known} of head {head}")


def _insert(begins: list[int], ends: list[int], start: int, end: int) -> None:
    """Add a disjoint interval, merging it with the neighbours it touches."""
    at = bisect_left(begins, start)
    joins_left = at > 0 and ends[at - 1] == start
    joins_right = at < len(begins) and begins[at] == end
    if joins_left and joins_right:
        ends[at - 1] = ends.pop(at)
        begins.pop(at)
    elif joins_left:
        ends[at - 1] = end
    elif joins_right:
        begins[at] = start
    else:
        begins.insert(at, start)
        ends.insert(at, end)
