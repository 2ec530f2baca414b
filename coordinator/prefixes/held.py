"""What a replica tells of the prefixes that it holds: names, bounded in number, as differences to what was told before.

A replica with more blocks than `MAX_NAMES` names every `stride`-th block of each prompt, so that what it tells covers
all that it holds: names stand for whole prefixes, so the deepest one that is known says all. What is held is rounded
down by that to a whole stride.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Annotated, Final, NamedTuple, final

import msgspec

from ..bounds import Count
from .naming import NAME_BYTES

MAX_NAMES: Final = 4096
"""That are told of one replica: 32 KiB."""
BLOCK_TOKENS: Final = (4, 1 << 16)
"""The least and the most: who hears of small blocks has many names of a prompt to compute."""

Names = Annotated[bytes, msgspec.Meta(max_length=MAX_NAMES * NAME_BYTES)]
BlockTokens = Annotated[int, msgspec.Meta(ge=BLOCK_TOKENS[0], le=BLOCK_TOKENS[1])]
Stride = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class PrefixError(ValueError):
    """News of prefixes that cannot be; the text names the field."""


class PrefixVersion(msgspec.Struct, frozen=True):
    """How far somebody has heard of a replica: `life` tells one start of its engine from another."""

    life: Count = 0
    number: Count = 0


class PrefixNews(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica holds as of `version`: `held` and not `lost` any more since the version `since`, or, where that is
    None, in all.

    A block has `block_tokens` tokens; every `stride`-th of a prompt is named.
    """

    version: PrefixVersion
    since: PrefixVersion | None = None
    block_tokens: BlockTokens
    stride: Stride = 1
    held: Names = b""
    lost: Names = b""

    def __post_init__(self) -> None:
        if len(self.held) % NAME_BYTES or len(self.lost) % NAME_BYTES:
            raise PrefixError(f"prefixes.held and prefixes.lost must be whole names of {NAME_BYTES} bytes")
        if self.since is None and self.lost:
            raise PrefixError("prefixes.lost without prefixes.since: there was nothing before")


def pack_names(names: Iterable[int]) -> bytes:
    """Names in the form in which they are told."""
    packed = array("Q", names)
    if sys.byteorder == "little":  # as the network has it
        packed.byteswap()
    return packed.tobytes()


def unpack_names(told: bytes) -> list[int]:
    """The names that were told."""
    found = array("Q", told)
    if sys.byteorder == "little":
        found.byteswap()
    return found.tolist()


def choose_stride(blocks: int) -> int:
    """Which blocks of a prompt a replica with so many names, so that all that it holds is told."""
    return max(1, -(-blocks // MAX_NAMES))


class _Change(NamedTuple):
    number: int
    name: int


@final
class HeldPrefixes:
    """What one engine holds, in the present `life` of it, and what has changed lately."""

    def __init__(self, *, life: int, block_tokens: int, stride: int = 1) -> None:
        self.block_tokens = block_tokens
        self.stride = stride
        self._life = life
        self._number = 0
        self._held: dict[int, None] = {}  # in the order in which they came
        self._changes: deque[_Change] = deque(maxlen=2 * MAX_NAMES)
        self._dropped = 0  # changes up to this version are not remembered

    def __repr__(self) -> str:
        return f"<HeldPrefixes {len(self)} names, version {self._life}.{self._number}>"

    def __len__(self) -> int:
        return len(self._held)

    def change(self, held: Iterable[int], lost: Iterable[int]) -> None:
        """The engine holds these and has lost those; of one in both, it holds it. Beyond `MAX_NAMES` the oldest are not
        told any more."""
        self._number += 1
        for name in lost:
            if name in self._held:
                del self._held[name]
                self._note(name)
        for name in held:
            if name not in self._held:
                self._held[name] = None
                self._note(name)
        while len(self._held) > MAX_NAMES:
            oldest = next(iter(self._held))
            del self._held[oldest]
            self._note(oldest)

    def news_since(self, heard: PrefixVersion | None) -> PrefixNews | None:
        """What somebody has not heard who has heard up to there: the difference, or all where that is not known any
        more; None: nothing."""
        version = PrefixVersion(self._life, self._number)
        if heard == version:
            return None
        if heard is None or heard.life != self._life or not self._dropped <= heard.number <= self._number:
            return self._news(version, None, self._held, ())
        since = heard.number
        latest = takewhile(lambda change: change.number > since, reversed(self._changes))
        touched = dict.fromkeys(change.name for change in latest)
        if len(touched) > MAX_NAMES:
            return self._news(version, None, self._held, ())
        held = [name for name in touched if name in self._held]
        return self._news(version, heard, held, [name for name in touched if name not in self._held])

    def _news(
        self, version: PrefixVersion, since: PrefixVersion | None, held: Iterable[int], lost: Iterable[int]
    ) -> PrefixNews:
        return PrefixNews(
            version=version,
            since=since,
            block_tokens=self.block_tokens,
            stride=self.stride,
            held=pack_names(held),
            lost=pack_names(lost),
        )

    def _note(self, name: int) -> None:
        if len(self._changes) == self._changes.maxlen:
            self._dropped = self._changes[0].number
        self._changes.append(_Change(self._number, name))


@final
class ChainNames:
    """Which of an engine's blocks are told, while it stores and evicts them: each `stride`-th of its prompt.

    What has changed is collected until `take`.
    """

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._depths: dict[int, int] = {}  # of each block that is held; the first has 1
        self._held: dict[int, None] = {}
        self._lost: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._depths)

    def store(self, blocks: Iterable[int], parent: int | None) -> None:
        """Blocks in order of their prompt, behind `parent`; None: from its beginning. Without a parent that is known
        nobody could find them, so they are left out."""
        before = 0 if parent is None else self._depths.get(parent)
        if before is None:
            return
        for depth, block in enumerate(blocks, before + 1):
            is_new = block not in self._depths
            self._depths[block] = depth
            if not is_new or depth % self._stride:
                continue
            if block in self._lost:
                del self._lost[block]
            else:
                self._held[block] = None

    def evict(self, blocks: Iterable[int]) -> None:
        """These blocks are overwritten."""
        for block in blocks:
            depth = self._depths.pop(block, None)
            if depth is None or depth % self._stride:
                continue
            if block in self._held:
                del self._held[block]
            else:
                self._lost[block] = None

    def clear(self) -> None:
        """All blocks are."""
        self.evict(list(self._depths))

    def longest_held(self, blocks: Iterable[int]) -> int:
        """How many blocks from a prompt's beginning are held."""
        count = 0
        for block in blocks:
            if block not in self._depths:
                break
            count += 1
        return count

    def take(self) -> tuple[list[int], list[int]]:
        """Names that are held and that are lost, since last taken."""
        held, lost = list(self._held), list(self._lost)
        self._held, self._lost = {}, {}
        return held, lost
