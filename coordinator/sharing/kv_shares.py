"""One budget of KV memory for all services of an engine process, in bytes, with quotas that follow need and cannot
starve anyone. Pure.

    shares = KvShares(budget, need)
    shares.open_service("chat", block_bytes)
    shares.take("chat", 3 * block_bytes)
    shares.may_lose("code", "chat")        # whether KV of code goes so that a request of chat has room

Any service may take what is free; quotas count only when memory is short. Then KV of services goes that hold more than
theirs. A quota is a floor, half of an equal part, and of the rest a part by what the service's open requests need above
that floor. So a service with most of the requests gets most of the memory, and one with few keeps half of an equal part
whatever the others ask for. A service may also free its own. A request that has starved may take from anyone, so that
one larger than its service's quota runs, too.

What cannot be taken back for a while, KV that comes from another box, may not take the others' floors
(`leaves_floors`).

In the simulator and in emulated engines bytes are those of blocks. Live, they are those of pages, which blocks of one
service at a time share (`kv_pages`): merged blocks of SeaLLM, section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, final

from .values import SharingError

FLOOR: Final = 0.5
"""Of an equal part: what a service can always have. More: need counts less; less: services with few requests wait
longer for memory."""


@final
class KvShares:
    """See the module. `need`: bytes of KV that the open requests of a service will come to."""

    def __init__(self, budget: int, need: Callable[[str], float]) -> None:
        self.budget = budget
        self.free = budget
        self.used: dict[str, int] = {}
        self._need = need

    def __repr__(self) -> str:
        return f"<KvShares {self.free} of {self.budget} bytes free>"

    def open_service(self, service: str, block_bytes: int) -> None:
        """It joins the others. Raises SharingError if blocks of these bytes are too large for its floor."""
        services = {*self.used, service}
        floor = FLOOR * self.budget / len(services)
        if not 1 <= block_bytes <= floor:
            raise SharingError(
                f"a block of {service} is {block_bytes} bytes of KV; of {self.budget} for {len(services)} models it is "
                f"sure of {floor:.0f}: give them more memory"
            )
        self.used.setdefault(service, 0)

    def close_service(self, service: str) -> None:
        """It is gone, and what it held is free."""
        self.free += self.used.pop(service)

    def resize(self, budget: int, used: Mapping[str, int]) -> None:
        """There is more or less memory from now on, of which services hold so much."""
        self.budget = budget
        self.used = dict(used)
        self.free = budget - sum(used.values())

    @property
    def floor(self) -> float:
        """Bytes that each service can always have."""
        return FLOOR * self.budget / max(1, len(self.used))

    def quota(self, service: str) -> float:
        """Bytes that it can have when memory is short."""
        floor = self.floor
        above = {each: max(0.0, self._need(each) - floor) for each in self.used}
        total = sum(above.values())
        part = above[service] / total if total > 0.0 else 1.0 / len(above)
        return floor + (self.budget - floor * len(above)) * part

    def fits(self, size: int) -> bool:
        """Whether so many bytes are free."""
        return size <= self.free

    def take(self, service: str, size: int) -> None:
        """Raises SharingError for more than is free."""
        if size > self.free:
            raise SharingError(f"{size} bytes of KV are not free for {service}: {self.free} are")
        self.free -= size
        self.used[service] += size

    def release(self, service: str, size: int) -> None:
        """Raises SharingError for more than it holds."""
        if size > self.used[service]:
            raise SharingError(f"{service} holds {self.used[service]} bytes of KV, not {size}")
        self.free += size
        self.used[service] -= size

    def may_lose(self, service: str, asker: str, *, is_starved: bool = False, lost: int = 0) -> bool:
        """Whether KV of one service may go so that a request of another has room, beside `lost` bytes that it is to
        lose already."""
        return is_starved or service == asker or self.used[service] - lost > self.quota(service)

    def leaves_floors(self, service: str, size: int) -> bool:
        """Whether the others can still have their floors when it has taken so many bytes for good."""
        floor = self.floor
        owed = sum(max(0.0, floor - used) for each, used in self.used.items() if each != service)
        return self.budget - sum(self.used.values()) - size >= owed

    def check(self) -> None:
        """Every byte is free or a service's. Raises SharingError."""
        if self.free < 0 or self.free + sum(self.used.values()) != self.budget:
            raise SharingError(f"{self.free} bytes are free, {self.used} used, of {self.budget}")
