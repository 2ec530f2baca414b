"""KV blocks of an emulated engine: its own, or a part of one budget of bytes that engines of a process share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from ....coordinator.sharing.kv_shares import KvShares


class KvBlocks(Protocol):
    """Blocks of one engine. Those of its prefix cache that nobody uses count as free."""

    @property
    def most(self) -> int:
        """As many as it can have."""

    @property
    def free(self) -> int:
        """As many as it can take."""

    @property
    def used(self) -> int:
        """As many as it has taken."""

    def take(self, blocks: int) -> None:
        """So many that are free."""

    def give(self, blocks: int) -> None:
        """They are free again."""

    def leaves_floors(self, blocks: int) -> bool:
        """Whether it may take so many that it cannot give back for a while."""

    def usage(self) -> float:
        """What part of the memory it has in use."""

    def quota(self) -> float:
        """What part it may have when memory is short."""


@final
class OwnBlocks:
    """All for one engine."""

    def __init__(self, most: int) -> None:
        self.most = self.free = most

    def __repr__(self) -> str:
        return f"{self.free}/{self.most} blocks free"

    @property
    def used(self) -> int:
        """See `KvBlocks`."""
        return self.most - self.free

    def take(self, blocks: int) -> None:
        """See `KvBlocks`."""
        self.free -= blocks

    def give(self, blocks: int) -> None:
        """See `KvBlocks`."""
        self.free += blocks

    def leaves_floors(self, blocks: int) -> bool:
        """There is nobody else."""
        return True

    def usage(self) -> float:
        """See `KvBlocks`."""
        return self.used / self.most

    def quota(self) -> float:
        """See `KvBlocks`."""
        return 1.0


@final
class SharedBlocks:
    """Of a budget of bytes. The unused blocks of each engine's prefix cache are as many as are free for it, so that
    together they may be more than there is room for: a little more is cached than with real engines."""

    def __init__(self, shares: KvShares, service: str, block_bytes: int) -> None:
        self._shares = shares
        self._service = service
        self.block_bytes = block_bytes

    def __repr__(self) -> str:
        return f"{self.used} blocks of {self._shares}"

    @property
    def most(self) -> int:
        """See `KvBlocks`."""
        return self._shares.budget // self.block_bytes

    @property
    def free(self) -> int:
        """See `KvBlocks`."""
        return self._shares.free // self.block_bytes

    @property
    def used(self) -> int:
        """See `KvBlocks`."""
        return self._shares.used[self._service] // self.block_bytes

    def take(self, blocks: int) -> None:
        """See `KvBlocks`."""
        self._shares.take(self._service, blocks * self.block_bytes)

    def give(self, blocks: int) -> None:
        """See `KvBlocks`."""
        self._shares.release(self._service, blocks * self.block_bytes)

    def leaves_floors(self, blocks: int) -> bool:
        """See `KvBlocks`."""
        return self._shares.leaves_floors(self._service, blocks * self.block_bytes)

    def usage(self) -> float:
        """See `KvBlocks`."""
        return self._shares.used[self._service] / self._shares.budget

    def quota(self) -> float:
        """See `KvBlocks`."""
        return self._shares.quota(self._service) / self._shares.budget


ShareMemory = Callable[[int, int, int], SharedBlocks]
"""Of an engine whose memory is for so many tokens, of so many bytes, in blocks of so many tokens."""
