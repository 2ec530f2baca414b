"""One pool of KV memory for the vLLM engines of a process, whatever the size of their blocks.

vLLM places block `b` of layer `l` at `offset + l * layer_stride + b * block_stride` of one buffer. Here all engines
have the same buffer, and each such strides that a block's layers lie side by side and a whole number of its blocks
fills a page (`coordinator.sharing.kv_pages`). Attention kernels read the strides of their tensor, vLLM's for CPUs too,
so they need not know. Each engine has its own `BlockPool`, with its own prefix cache, whose blocks are those of the
pages that it has.

Bytes of another model could be read as NaN, and kernels multiply what lies behind a request's last token by zero: so a
page is zero when it changes hands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, final

import torch
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.engine import core as engine_core
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs, create_kv_cache_views
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils

from ....coordinator.sharing.kv_pages import ALIGNMENT, KvPages, PageSplit, split_pages
from ....coordinator.sharing.kv_shares import FLOOR
from ....coordinator.sharing.values import SharingError
from ..process import StartError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ..sharing.turns import ProcessTurns

PAGES: Final = 64
"""At least so many are wished for: of fewer, more is held by blocks that are not in use."""


@final
class KvPool:
    """See the module. `give_blocks` while an engine is built. The KV memory that the first one is given is that of all;
    later ones are told the same."""

    def __init__(self, turns: ProcessTurns) -> None:
        self._turns = turns
        self._pages: KvPages | None = None
        self._buffer: torch.Tensor | None = None
        self._last_owners: dict[int, str] = {}
        self._per_page: dict[str, int] = {}
        self._longest: dict[str, int] = {}  # blocks of the longest request
        self._pools: dict[str, PagedBlockPool] = {}

    def __repr__(self) -> str:
        return f"<KvPool {self._pages}>"

    @property
    def pages(self) -> KvPages:
        """Of the pool, once the first engine is built."""
        assert self._pages is not None
        return self._pages

    @contextmanager
    def give_blocks(self, service: str) -> Iterator[None]:
        """An engine that is built in the body has its KV here."""
        core, runner, runner_2, coordinator = map(
            _as_any, (engine_core, gpu_model_runner, attn_utils, kv_cache_coordinator)
        )
        configure, allocate, make_pool = core.get_kv_cache_configs, runner.allocate_kv_cache, coordinator.BlockPool
        core.get_kv_cache_configs = partial(self._configure, service, configure)
        runner.allocate_kv_cache = runner_2.allocate_kv_cache = self._allocate
        coordinator.BlockPool = partial(self._open_pool, service)
        try:
            yield
        finally:
            core.get_kv_cache_configs, coordinator.BlockPool = configure, make_pool
            runner.allocate_kv_cache = runner_2.allocate_kv_cache = allocate

    def close_service(self, service: str) -> None:
        """Its engine has left, or has failed to load: its blocks are free."""
        pool = self._pools.pop(service, None)
        if pool is not None:
            pool.leave_foreign_pages()
        self._longest.pop(service, None)
        for page in [page for page, owner in self._last_owners.items() if owner == service]:
            self._last_owners[page] = ""  # who comes back by that name may be another model
        if self._per_page.pop(service, None) is not None:
            self.pages.close_service(service)

    @property
    def changes(self) -> int:
        """See `TurnQueue.changes`."""
        return self._turns.changes

    # ---- for the block pools of engines ---------------------------------------------------------------------

    def take_page(self, service: str, *, beyond_quota: bool) -> int | None:
        """A page for this engine, zero where another has written: one that is free, or else an idle one of another
        engine; with `beyond_quota` False only if that has more than its quota and this one less. None: there is none.
        """
        pages = self.pages
        if not pages.free:
            idle = pages.pick_idle(service, over_quota=not beyond_quota)
            if idle is None:
                return None
            owner = pages.owners[idle]
            assert owner is not None
            self._pools[owner].forget(idle)
            pages.release(idle)
        page = pages.take_free(service)
        if page is not None and self._last_owners.get(page) != service:
            assert self._buffer is not None
            self._buffer[page * pages.page_bytes : (page + 1) * pages.page_bytes].zero_()
            self._last_owners[page] = service
        return page

    # ---- in place of what vLLM does -------------------------------------------------------------------------

    def _configure(
        self, service: str, configure: Callable[..., list[KVCacheConfig]], *given: Any
    ) -> list[KVCacheConfig]:
        """`get_kv_cache_configs`, with blocks in pages."""
        (config,) = configure(*given)
        vllm_config, _, (budget,) = given
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self._longest[service] = sum(-(-vllm_config.model_config.max_model_len // size) for size in sizes)
        ends = [self._place_layers(config, number) for number in range(len(config.kv_cache_groups))]
        block_bytes = -(-max(ends) // ALIGNMENT) * ALIGNMENT
        try:
            per_page = self._join(service, block_bytes, budget)
        except SharingError as error:
            raise StartError(f"kv-cache-mib: {error}") from error
        pages = self.pages
        for tensor in config.kv_cache_tensors:
            tensor.block_stride = pages.page_bytes // per_page
            tensor.size = pages.count * pages.page_bytes
        config.num_blocks = pages.count * per_page
        self._turns.token_bytes[service] = sum(pages.page_bytes // per_page // size for size in sizes)
        return [config]

    def _place_layers(self, config: KVCacheConfig, number: int) -> int:
        """Put the pages of a group's layers side by side; the bytes that they take of a block."""
        group, end = config.kv_cache_groups[number], 0
        for tensor in config.kv_cache_tensors:
            if tensor.layers[0] not in group.layer_names:
                continue
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[tensor.layers[0]]
            if not isinstance(spec, AttentionSpec) or not spec.has_layer_views:
                raise StartError(
                    f"layers of the kind {type(spec).__name__} have no KV that models of one box can share"
                )
            tensor.offset, tensor.layer_stride = end, spec.page_size_bytes
            end += len(tensor.layers) * spec.page_size_bytes
        return end

    def _join(self, service: str, block_bytes: int, budget: int) -> int:
        """Blocks of this model in a page, which is larger from now on if they fit none. Raises SharingError."""
        if self._pages is None:
            count = max(2, budget // block_bytes)
            shares = self._turns.open_memory((count - 1) * block_bytes)
            self._pages, split = KvPages(shares, count, block_bytes), PageSplit(1, 1)
        else:
            split = self._split(block_bytes)
            if split.merged > 1 and (obstacle := self.pages.find_obstacle(split.merged)):
                split = self._split_present(block_bytes, obstacle)
        per_page = {each: number * split.merged for each, number in self._per_page.items()} | {service: split.per_page}
        pages = self.pages.count // split.merged - 1
        for each, number in per_page.items():
            if pages * number < self._longest[each]:
                raise SharingError(f"the longest requests of {each} have no room in {budget} bytes; give more")
        if split.merged > 1:
            self._merge(split.merged)
        self.pages.open_service(service)
        self._per_page[service] = split.per_page
        return split.per_page

    def _split(self, block_bytes: int) -> PageSplit:
        pages = self.pages
        whole = pages.count * pages.page_bytes
        try:
            return split_pages(pages.page_bytes, block_bytes, whole // PAGES)
        except SharingError:
            return split_pages(pages.page_bytes, block_bytes, int(FLOOR * whole / (len(self._per_page) + 1)))

    def _split_present(self, block_bytes: int, obstacle: str) -> PageSplit:
        try:
            return split_pages(self.pages.page_bytes, block_bytes, self.pages.page_bytes)
        except SharingError as error:
            raise SharingError(f"{error}; {obstacle}") from error

    def _merge(self, number: int) -> None:
        """So many pages become one; what is only cached is forgotten."""
        pages = self.pages
        for pool in self._pools.values():
            pool.forget_idle()
        for page in (-each for each in pages.free):  # may lie in a page of another model from now on
            if self._buffer is not None and page in self._last_owners:
                self._buffer[page * pages.page_bytes : (page + 1) * pages.page_bytes].zero_()
        pages.merge(number)
        self._last_owners.clear()
        for service, pool in self._pools.items():
            self._per_page[service] *= number
            pool.on_merge(number)

    def _allocate(
        self, config: KVCacheConfig, device: torch.device, layout: Any, kernel_block_sizes: list[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """`allocate_kv_cache`: views of the one buffer, which the first engine makes."""
        if self._buffer is None:
            self._buffer = torch.zeros(self.pages.count * self.pages.page_bytes, dtype=torch.int8, device=device)
        caches: dict[str, torch.Tensor] = {}
        for tensor in config.kv_cache_tensors:
            number, group = next(
                (number, each)
                for number, each in enumerate(config.kv_cache_groups)
                if tensor.layers[0] in each.layer_names
            )
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[tensor.layers[0]]
            size = None if kernel_block_sizes is None else kernel_block_sizes[number]
            views = create_kv_cache_views(self._buffer, spec, config.num_blocks, layout, tensor, kernel_block_size=size)
            caches.update(zip(tensor.layers, views, strict=True))
        return caches

    def _open_pool(self, service: str, **given: Any) -> PagedBlockPool:
        pool = self._pools[service] = PagedBlockPool(self, service, self._per_page[service], **given)
        return pool


@final
class PagedBlockPool(BlockPool):
    """vLLM's, of the blocks in pages that one engine has. A block that it does not have is in no queue."""

    def __init__(self, pool: KvPool, service: str, per_page: int, **given: Any) -> None:
        super().__init__(**given)
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = None
        self.free_block_queue = FreeKVCacheBlockQueue([])
        self._pool = pool
        self._service = service
        self._per_page = per_page
        self._quota, self._quota_at = 0.0, -1

    @property
    def usable_blocks(self) -> int:
        """As many as it has when the others have none."""
        return (self._pool.pages.count - 1) * self._per_page

    @property
    def block_bytes(self) -> int:
        """Of a block, with what is left over beside it."""
        return self._pool.pages.page_bytes // self._per_page

    def quota(self) -> float:
        """What part of the pool it may have when memory is short, by the requests that there are."""
        shares, changes = self._pool.pages.shares, self._pool.changes
        if changes != self._quota_at:  # asked for with each step, of which few change it
            self._quota_at = changes
            # A budget of 0: all pages have blocks of several models.
            self._quota = shares.quota(self._service) / max(1, shares.budget)
        return self._quota

    def get_usage(self) -> float:
        """What part of the pool this engine has in use."""
        shares = self._pool.pages.shares
        return shares.used[self._service] / max(1, shares.budget)

    def leaves_floors(self, blocks: int) -> bool:
        """Whether it may take so many that it cannot give back for a while."""
        return self._pool.pages.shares.leaves_floors(self._service, blocks * self.block_bytes)

    def count_freed_bytes(self, block_ids: Iterable[int], *, for_others: bool) -> int:
        """What this engine can take when these blocks have a user less for each time that they are named; or the
        others, which take whole pages."""
        ended = Counter(block_ids)
        freed = [block for block, users in ended.items() if block and self.blocks[block].ref_cnt == users]
        pages, per_page = self._pool.pages, self._per_page
        if for_others:
            return pages.count_freed(self._service, Counter(block // per_page for block in freed)) * pages.page_bytes
        return sum(pages.owners[block // per_page] == self._service for block in freed) * self.block_bytes

    def get_num_free_blocks(self) -> int:
        """Those that it can have without taking any that is in use."""
        available = self._pool.pages.count_available(self._service) * self._per_page
        return int(self.free_block_queue.num_free_blocks) + available

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Of pages that it has, without KV in them; of further pages; and where there are none, cached ones."""
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"{num_blocks} blocks are not free for {self._service}")
        fresh = sum(1 for _ in zip(range(num_blocks), takewhile(_is_empty, self._queued()), strict=False))
        while fresh < num_blocks:
            beyond_quota = self.free_block_queue.num_free_blocks < num_blocks
            page = self._pool.take_page(self._service, beyond_quota=beyond_quota)
            if page is None:
                break
            self.free_block_queue.prepend_n(self._blocks_of(page))
            fresh += self._per_page
        taken: list[KVCacheBlock] = super().get_new_blocks(num_blocks)
        self._begin_use(taken)
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """See vLLM's."""
        unused = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        super().touch(blocks)
        self._begin_use(unused)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """See vLLM's."""
        blocks = [*ordered_blocks]
        super().free_blocks(blocks)
        pages = self._pool.pages
        for block in blocks:
            if block.ref_cnt or block.is_null:
                continue
            page = block.block_id // self._per_page
            if pages.owners[page] != self._service:
                self._drop((block,))
                pages.end_use(page)
            elif pages.end_use(page) and all(map(_is_empty, self._blocks_of(page))):
                self.forget(page)
                pages.release(page)

    def forget(self, page: int) -> None:
        """The page is another engine's from now on: nothing of it is cached or free here."""
        self._drop(self._blocks_of(page))

    def forget_idle(self) -> None:
        """Nothing of what is only cached is any more."""
        pages = self._pool.pages
        while (page := pages.longest_idle(self._service)) is not None:
            self.forget(page)
            pages.release(page)

    def on_merge(self, number: int) -> None:
        """So many pages are one now, of which some are several engines'."""
        self._per_page *= number
        for page, owner in enumerate(self._pool.pages.owners):
            blocks = self._blocks_of(page)
            if owner == self._service:
                self.free_block_queue.prepend_n([each for each in blocks if not each.ref_cnt and not _is_queued(each)])
            else:
                self._drop(each for each in blocks if not each.ref_cnt and _is_queued(each))

    def leave_foreign_pages(self) -> None:
        """The engine has left: its blocks in pages of several are not in use any more."""
        pages = self._pool.pages
        for page, owner in enumerate(pages.owners):
            if owner != self._service:
                for block in self._blocks_of(page):
                    if block.ref_cnt and not block.is_null:
                        pages.end_use(page)

    def _begin_use(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._pool.pages.begin_use(block.block_id // self._per_page)

    def _drop(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            self._maybe_evict_cached_block(block)
            self.free_block_queue.remove(block)

    def _blocks_of(self, page: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.blocks[page * self._per_page : (page + 1) * self._per_page]
        return blocks

    def _queued(self) -> Iterator[KVCacheBlock]:
        """The free ones that it has, in the order in which they are taken."""
        queue = self.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block
            block = block.next_free_block


def _is_empty(block: KVCacheBlock) -> bool:
    return block.block_hash is None


def _is_queued(block: KVCacheBlock) -> bool:
    return block.next_free_block is not None


def _as_any(module: Any) -> Any:
    return module
