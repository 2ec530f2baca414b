"""An engine's prefix cache as its scheduler keeps it: which blocks of prompts are there, who uses them, and which is
overwritten first. Simulated and emulated engines have it; vLLM has its own.

As in vLLM, blocks that nobody uses stay until their room is needed, the longest unused first, and of one prompt the
last first: so what is left of a prompt is a prefix. Rooms of unused blocks count as free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final


class CachedPrefix(NamedTuple):
    """So many blocks from a prompt's beginning are cached, `unused` of them in use by nobody."""

    blocks: int
    unused: int


@final
class BlockCache:
    """See the module. Blocks go by names that stand for their whole prefixes (`naming`). What has changed is collected
    until `take_changes`, of each `stride`-th block of its prompt."""

    def __init__(self, stride: int = 1) -> None:
        self._stride = stride
        self._users: Counter[int] = Counter()  # of each cached block
        self._unused: dict[int, None] = {}  # in the order in which they are overwritten
        self._told: set[int] = set()  # of the cached blocks, those that are told
        self._held: dict[int, None] = {}
        self._lost: dict[int, None] = {}

    def __repr__(self) -> str:
        return f"<BlockCache {len(self._users)} blocks, {self.unused} unused>"

    def __len__(self) -> int:
        return len(self._users)

    @property
    def unused(self) -> int:
        """Blocks whose room is free when it is needed."""
        return len(self._unused)

    @property
    def used(self) -> int:
        """Blocks that are in use."""
        return len(self._users) - len(self._unused)

    def find(self, names: Iterable[int]) -> CachedPrefix:
        """How much of this prompt is cached."""
        blocks = unused = 0
        for name in names:
            if name not in self._users:
                break
            blocks += 1
            unused += name in self._unused
        return CachedPrefix(blocks, unused)

    def use(self, names: Iterable[int]) -> None:
        """These cached blocks have one more user."""
        for name in names:
            self._users[name] += 1
            self._unused.pop(name, None)

    def insert(self, names: Sequence[int], first: int) -> list[int]:
        """A prompt's blocks from number `first` on are computed, by a user of theirs: those that were not cached are
        from now on, and are returned; of the others the user has copies of its own."""
        added = []
        for number, name in enumerate(names[first:], first + 1):
            if name in self._users:
                continue
            self._users[name] = 1
            added.append(name)
            if number % self._stride == 0:
                self._told.add(name)
                if name in self._lost:
                    del self._lost[name]
                else:
                    self._held[name] = None
        return added

    def count_unused_without(self, users: Iterable[Sequence[int]]) -> int:
        """How many would be unused by that, if users of these had all ended."""
        ended = Counter(name for names in users for name in names)
        return sum(self._users[name] == number for name, number in ended.items())

    def leave(self, names: Sequence[int]) -> int:
        """A user of these has ended; returns how many are unused by that."""
        before = len(self._unused)
        for name in reversed(names):
            self._users[name] -= 1
            if not self._users[name]:
                self._unused[name] = None
        return len(self._unused) - before

    def shrink(self, room: int) -> None:
        """There is room for so many unused blocks only: overwrite the others."""
        while len(self._unused) > room:
            name = next(iter(self._unused))
            del self._unused[name], self._users[name]
            if name in self._told:
                self._told.discard(name)
                if name in self._held:
                    del self._held[name]
                else:
                    self._lost[name] = None

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Names that are held and that are lost, since last taken."""
        held, lost = list(self._held), list(self._lost)
        self._held, self._lost = {}, {}
        return held, lost
