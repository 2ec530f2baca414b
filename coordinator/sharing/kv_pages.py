"""One pool of KV memory for models whose blocks have any size: pages of one size, each with blocks of one model at a
time. Pure.

    pages = KvPages(shares, count, page_bytes)
    pages.open_service("chat", per_page)        # blocks of chat that lie in a page
    page = pages.take_free("chat")              # its blocks are chat's from now on
    pages.begin_use(page); pages.end_use(page)  # a block of it holds KV; holds none any more
    pages.release(page)                         # nothing of it is of any use

Block `b` of a model with `k` blocks in a page lies in page `b // k`, so that models whose blocks have the same size
share block numbers, and of others `k` blocks of one lie where those of another do: SeaLLM's merged blocks (section
4.4). Page 0 is nobody's: each model has its null block there.

A page without a block in use still belongs to its model while KV of its prefix cache is there: it is *idle*, and is
taken by another model when no page is free (`pick_idle`). `shares` counts pages with blocks in use.

The last free page goes first. When a model comes whose blocks fit no page well, n pages become one (`merge`). Blocks in
use stay where they are; a page in which those of several models are then is nobody's until none of them is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, final

from .kv_shares import FLOOR, KvShares
from .values import SharingError

WASTE: Final = 0.1
"""What may be left over of a page beside the blocks in it. Less: larger pages, which are free later."""

ALIGNMENT: Final = 256
"""Of the bytes of a block, for vector instructions and copies."""


@dataclass(frozen=True, slots=True)
class PageSplit:
    """How a model's blocks lie in pages: `merged` of the present pages become one, with so many blocks in it."""

    merged: int
    per_page: int


def split_pages(page_bytes: int, block_bytes: int, most_bytes: int) -> PageSplit:
    """The smallest pages of which little is left over, among those that are `page_bytes` several times and at most
    `most_bytes`. Blocks lie at equal distances, so their number divides the page. Raises SharingError where none fits.
    """
    best: tuple[float, PageSplit] | None = None
    for merged in range(1, max(1, most_bytes // page_bytes) + 1):
        units = merged * page_bytes // ALIGNMENT
        most = merged * page_bytes // block_bytes
        per_page = next((number for number in range(most, 0, -1) if units % number == 0), 0)
        if not per_page:
            continue
        waste = 1.0 - per_page * block_bytes / (merged * page_bytes)
        if best is None or waste < best[0]:
            best = (waste, PageSplit(merged, per_page))
        if waste <= WASTE:
            break
    if best is None:
        raise SharingError(f"a block of {block_bytes} bytes of KV has no room in pages of at most {most_bytes}")
    return best[1]


@dataclass(frozen=True, slots=True)
class _MergedPages:
    """As pages would be. `used`: bytes by model."""

    count: int
    page_bytes: int
    owners: list[str | None]
    in_use: list[int]
    free: list[int]
    used: dict[str, int]
    budget: int


@final
class KvPages:
    """See the module. `shares` has as many bytes as `count` pages, without the first."""

    def __init__(self, shares: KvShares, count: int, page_bytes: int) -> None:
        self.shares = shares
        self.count = count
        self.page_bytes = page_bytes
        self.free = [-page for page in range(count - 1, 0, -1)]  # a heap: the last page goes first
        self.owners: list[str | None] = [None] * count
        self._in_use = [0] * count
        self._idle: dict[str, dict[int, None]] = {}  # the longest idle first

    def __repr__(self) -> str:
        return f"<KvPages {len(self.free)} of {self.count} free, {self.shares.used} bytes in use>"

    def open_service(self, service: str) -> None:
        """A model joins the others."""
        self.shares.open_service(service, self.page_bytes)
        self._idle.setdefault(service, {})

    def close_service(self, service: str) -> None:
        """It is gone, and nothing of its KV is read any more."""
        del self._idle[service]
        self.shares.close_service(service)
        for page, owner in enumerate(self.owners):
            if owner == service:
                self._in_use[page] = 0
                self._free(page)

    def count_available(self, service: str) -> int:
        """Pages that it can take, without those that it has."""
        return len(self.free) + sum(len(pages) for owner, pages in self._idle.items() if owner != service)

    def take_free(self, service: str) -> int | None:
        """A page that is nobody's; None: there is none."""
        if not self.free:
            return None
        page = -heappop(self.free)
        self.owners[page] = service
        self._idle[service][page] = None
        return page

    def pick_idle(self, service: str, *, over_quota: bool) -> int | None:
        """A page that another model is to `release` for this one: of the model that has most beyond its quota, the
        longest idle; None: there is none. `over_quota`: only where that model has more than its quota, what is idle
        included, and this one has less."""
        best: tuple[float, str] | None = None
        for owner, pages in self._idle.items():
            if owner != service and pages:
                beyond = self._beyond(owner)
                if (beyond > 0.0 or not over_quota) and (best is None or beyond > best[0]):
                    best = (beyond, owner)
        if best is None or (over_quota and self._beyond(service) + self.page_bytes > 0.0):
            return None
        return next(iter(self._idle[best[1]]))

    def longest_idle(self, service: str) -> int | None:
        """Of its idle pages; None: it has none."""
        return next(iter(self._idle[service]), None)

    def begin_use(self, page: int) -> None:
        """One more block of it holds KV."""
        owner = self.owners[page]
        if owner is None:
            raise SharingError(f"page {page} is nobody's")
        self._in_use[page] += 1
        if self._in_use[page] == 1:
            del self._idle[owner][page]
            self.shares.take(owner, self.page_bytes)

    def end_use(self, page: int) -> bool:
        """One block less. Returns whether the page is idle now, which is its owner's to `release` or to keep."""
        self._in_use[page] -= 1
        if self._in_use[page] < 0:
            raise SharingError(f"no block of page {page} is in use")
        owner = self.owners[page]
        if self._in_use[page]:
            return False
        if owner is None:  # of several models, or behind the last one
            if 0 < page < self.count:
                self._free(page)
                self.shares.resize(self.shares.budget + self.page_bytes, self.shares.used)
            return False
        self.shares.release(owner, self.page_bytes)
        self._idle[owner][page] = None
        return True

    def release(self, page: int) -> None:
        """An idle page is nobody's from now on."""
        owner = self.owners[page]
        assert owner is not None
        del self._idle[owner][page]
        self._free(page)

    def find_obstacle(self, number: int) -> str:
        """Why so many pages cannot become one for a model that comes, as things stand, "" where they can: a block is in
        use where the first page would be, in which models have their null blocks; or so many pages would be of several
        models until requests end that one more is not sure of a page."""
        if any(self._in_use[:number]):
            return "pages cannot be larger while KV is where the first would be"
        merged = self._plan_merge(number)
        floor = FLOOR * merged.budget / (len(self._idle) + 1)
        return "" if merged.page_bytes <= floor else "pages cannot be larger while so many hold KV"

    def merge(self, number: int) -> None:
        """So many pages become one, for which there is no obstacle. All that was idle must have been released; what is
        left over behind the last page is lost."""
        assert not any(self._idle.values())
        assert not any(self._in_use[:number])
        merged = self._plan_merge(number)
        self.count, self.page_bytes = merged.count, merged.page_bytes
        self.owners, self._in_use, self.free = merged.owners, merged.in_use, merged.free
        self.shares.resize(merged.budget, merged.used)

    def _plan_merge(self, number: int) -> _MergedPages:
        users: dict[int, set[str | None]] = {}
        in_use = [0] * (self.count // number + 1)
        for page, blocks in enumerate(self._in_use):
            if blocks:
                users.setdefault(page // number, set()).add(self.owners[page])
                in_use[page // number] += blocks
        count, page_bytes = self.count // number, self.page_bytes * number
        owners: list[str | None] = [None] * len(in_use)
        used = dict.fromkeys(self._idle, 0)
        for page in range(1, count):
            match tuple(users.get(page, ())):
                case (str(owner),):
                    owners[page] = owner
                    used[owner] += page_bytes
        free = [-page for page in range(count - 1, 0, -1) if not in_use[page]]
        budget = len(free) * page_bytes + sum(used.values())
        return _MergedPages(count, page_bytes, owners, in_use, free, used, budget)

    def count_freed(self, service: str, blocks: Mapping[int, int]) -> int:
        """How many of its pages would have no block in use any more, if so many of these pages' had none."""
        return sum(self.owners[page] == service and self._in_use[page] == number for page, number in blocks.items())

    def check(self) -> None:
        """Each page is free, idle, in use or left over, and of one model at most. Raises SharingError."""
        self.shares.check()
        used = dict.fromkeys(self._idle, 0)
        for page, owner in enumerate(self.owners):
            if owner is not None and self._in_use[page]:
                used[owner] += self.page_bytes
            elif (owner is not None) != any(page in pages for pages in self._idle.values()):
                raise SharingError(f"page {page} of {owner} is not idle where it should be")
        free = {-page for page in self.free}
        if used != self.shares.used or len(free) != len(self.free):
            raise SharingError(f"{used} bytes are in use, {self.shares.used} counted; {len(free)} pages are free")
        if any(self.owners[page] is not None or self._in_use[page] for page in free):
            raise SharingError("a page that is free is somebody's")

    def _beyond(self, service: str) -> float:
        """Bytes of its pages, idle ones included, that are more than its quota."""
        has = self.shares.used[service] + len(self._idle[service]) * self.page_bytes
        return has - self.shares.quota(service)

    def _free(self, page: int) -> None:
        self.owners[page] = None
        heappush(self.free, -page)
