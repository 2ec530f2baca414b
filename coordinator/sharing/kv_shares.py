"""One budget of KV memory for all services of an engine process, in bytes, with quotas that cannot starve anyone. Pure.

Any service may take what is free. Each has a share of the whole by its weight, of which it can always get as much as it
needs: when nothing is free, KV of services goes that hold more than theirs. So memory follows need while there is some,
and shares count only when it is short. A service may also free its own. A request that has starved may take from
anyone, so that one larger than its service's share runs, too.

Services whose blocks have the same size in bytes can share one pool of blocks; for others a budget of bytes is what
merged blocks come to, but for what is left over in each (SeaLLM, section 4.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import final

from .values import SharingError


@final
class KvShares:
    """See the module. Counts in bytes; services take and free whole blocks."""

    def __init__(self, budget: int, block_bytes: Mapping[str, int], weights: Mapping[str, float] | None = None) -> None:
        weights = weights or dict.fromkeys(block_bytes, 1.0)
        if weights.keys() != block_bytes.keys():
            raise SharingError(f"weights are of {sorted(weights)}, blocks of {sorted(block_bytes)}")
        if not all(isfinite(weight) and weight > 0.0 for weight in weights.values()):
            raise SharingError(f"weights must be above 0; they are {dict(weights)}")
        total = sum(weights.values())
        self.budget = budget
        self.free = budget
        self.used = dict.fromkeys(block_bytes, 0)
        self.shares = {service: budget * weight / total for service, weight in weights.items()}
        self._block_bytes = dict(block_bytes)
        for service, size in block_bytes.items():
            if not 1 <= size <= self.shares[service]:
                raise SharingError(
                    f"a block of {service} is {size} bytes; its share of {budget} is {self.shares[service]:.0f}"
                )

    def __repr__(self) -> str:
        return f"<KvShares {self.free} of {self.budget} bytes free>"

    def most_blocks(self, service: str) -> int:
        """As many as there are in the whole budget."""
        return self.budget // self._block_bytes[service]

    def fits(self, service: str, blocks: int) -> bool:
        """Whether so many are free."""
        return blocks * self._block_bytes[service] <= self.free

    def take(self, service: str, blocks: int) -> None:
        """Raises SharingError for more than is free."""
        size = blocks * self._block_bytes[service]
        if size > self.free:
            raise SharingError(f"{size} bytes of KV are not free for {service}: {self.free} are")
        self.free -= size
        self.used[service] += size

    def release(self, service: str, blocks: int) -> None:
        """Raises SharingError for more than it holds."""
        size = blocks * self._block_bytes[service]
        if size > self.used[service]:
            raise SharingError(f"{service} holds {self.used[service]} bytes of KV, not {size}")
        self.free += size
        self.used[service] -= size

    def may_lose(self, service: str, asker: str, *, is_starved: bool = False) -> bool:
        """Whether KV of one service may go so that a request of another has room."""
        return is_starved or service == asker or self.used[service] > self.shares[service]

    def check(self) -> None:
        """Every byte is free or a service's. Raises SharingError."""
        if self.free < 0 or self.free + sum(self.used.values()) != self.budget:
            raise SharingError(f"{self.free} bytes are free, {self.used} used, of {self.budget}")
