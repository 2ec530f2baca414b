"""A simulated engine's prefix cache: prompts in pieces of several KV blocks, in the memory that sequences have too."""

from __future__ import annotations

from typing import final

from ...coordinator.prefixes.block_cache import BlockCache
from .sequence import Sequence
from .values import SimEngineSettings


@final
class PromptCache:
    """See the module. Counts in KV blocks of the engine. Without `prefix_blocks` in the settings nothing is kept."""

    def __init__(self, settings: SimEngineSettings) -> None:
        self.pieces = BlockCache()
        self._piece_blocks = settings.prefix_blocks
        self.piece_tokens = settings.prefix_blocks * settings.block_tokens

    @property
    def used_blocks(self) -> int:
        """That belong to the cache and to sequences that use them."""
        return self.pieces.used * self._piece_blocks

    def count_cached(self, sequence: Sequence) -> int:
        """Tokens of its prompt that are cached now, of those that it is to compute or be sent."""
        return self.pieces.find(self._usable(sequence)).blocks * self.piece_tokens

    def count_shared(self, sequence: Sequence) -> int:
        """Blocks of its prompt that are in use by others, so that it need not have its own."""
        found = self.pieces.find(self._usable(sequence))
        return (found.blocks - found.unused) * self._piece_blocks

    def use(self, sequence: Sequence) -> int:
        """It begins behind what is cached of its prompt; returns how many of those blocks were unused before."""
        names = self._usable(sequence)
        found = self.pieces.find(names)
        sequence.shared = list(names[: found.blocks])
        self.pieces.use(sequence.shared)
        sequence.computed = sequence.cached = found.blocks * self.piece_tokens
        return found.unused * self._piece_blocks

    def insert(self, sequence: Sequence) -> None:
        """So much of its prompt is here as is computed, or came from another engine: what was not cached is from now
        on."""
        here = min(sequence.computed, sequence.known - 1) // self.piece_tokens if self.piece_tokens else 0
        added = self.pieces.insert(sequence.prefix[:here], len(sequence.shared))
        sequence.shared += added
        sequence.blocks -= len(added) * self._piece_blocks

    def leave(self, sequence: Sequence) -> int:
        """It has ended; returns how many blocks are unused by that."""
        unused = self.pieces.leave(sequence.shared) * self._piece_blocks
        sequence.shared = []
        return unused

    def shrink(self, free: int) -> None:
        """Unused blocks must not be more than the free ones, which they count among."""
        if self.pieces.unused:
            self.pieces.shrink(free // self._piece_blocks)

    def blocks_of_shared(self, sequence: Sequence) -> int:
        """Of its prompt, that belong to the cache."""
        return len(sequence.shared) * self._piece_blocks

    def _usable(self, sequence: Sequence) -> tuple[int, ...]:
        """The pieces of its prompt that it need not compute, or be sent, where they are cached: the last token it
        always does."""
        if not self.piece_tokens:
            return ()
        return sequence.prefix[: ((sequence.external or sequence.known) - 1) // self.piece_tokens]
