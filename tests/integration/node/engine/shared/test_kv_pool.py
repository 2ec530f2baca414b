"""Blocks of several engines in one pool: no byte is ever two requests', and what goes is forgotten."""

from __future__ import annotations

import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from p2pserve.coordinator.sharing.values import SharingError
from p2pserve.node.engine.sharing.turns import KvHolder, ProcessTurns
from p2pserve.node.engine.vllm_program.kv_pool import KvPool, PagedBlockPool

BUDGET = 64 * 6144
BYTES = {"one": 6144, "half": 3072, "odd": 4608, "large": 18432}  # of their blocks


def no_engine(service: str) -> KvHolder:
    raise AssertionError(f"{service} is to lose KV")


class World:
    """A pool, and the block pools of engines that have come."""

    def __init__(self) -> None:
        self.pool = KvPool(ProcessTurns("db", lambda: 0.0, no_engine))
        self.pools: dict[str, PagedBlockPool] = {}
        self.held: list[tuple[str, KVCacheBlock]] = []

    def open(self, service: str) -> PagedBlockPool:
        """As vLLM does while it builds an engine."""
        pool: Any = self.pool
        pool._longest[service] = 2
        per_page = pool._join(service, BYTES[service], BUDGET)
        if pool._buffer is None:
            pool._buffer = torch.zeros(BUDGET, dtype=torch.int8)
        self.pools[service] = pool._open_pool(
            service,
            num_gpu_blocks=self.pool.pages.count * per_page,
            enable_caching=True,
            hash_block_size=16,
            enable_kv_cache_events=True,
        )
        return self.pools[service]

    def take(self, service: str, count: int) -> list[KVCacheBlock]:
        blocks = self.pools[service].get_new_blocks(count)
        self.held += [(service, block) for block in blocks]
        return blocks

    def free(self, service: str, blocks: list[KVCacheBlock]) -> None:
        self.held = [each for each in self.held if each[0] != service or each[1] not in blocks]
        self.pools[service].free_blocks(blocks)

    def check(self) -> None:
        """Nobody's bytes are anybody else's, nor the null block's; the books are right."""
        self.pool.pages.check()
        spans = sorted(self.span(service, block) for service, block in self.held)
        for (_, end), (begin, _) in zip([(0, self.pool.pages.page_bytes), *spans], spans, strict=False):
            assert end <= begin
        for service, pool in self.pools.items():
            free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
            assert len(free) == pool.free_block_queue.num_free_blocks
            assert free.isdisjoint(block.block_id for name, block in self.held if name == service)
            for block in pool.blocks[1:]:
                assert (block.block_id in free) <= (self.pool.pages.owners[block.block_id // pool._per_page] == service)
                assert block.block_hash is None or block.ref_cnt or block.block_id in free

    def span(self, service: str, block: KVCacheBlock) -> tuple[int, int]:
        size = self.pools[service].block_bytes
        return block.block_id * size, block.block_id * size + BYTES[service]


def cache(pool: PagedBlockPool, blocks: list[KVCacheBlock], name: str) -> None:
    """They are full, of a prompt of that name."""
    hashes = [f"{name} {number}".encode().ljust(32) for number in range(len(blocks))]
    request: Any = SimpleNamespace(
        block_hashes=hashes, mm_features=(), lora_request=None, cache_salt=None, prompt_embeds=None, session_id=None,
        all_token_ids=[0] * 16 * len(blocks), request_id=name, num_prompt_tokens=16 * len(blocks),
    )  # fmt: skip
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 16, 0)


def find(pool: PagedBlockPool, name: str, number: int) -> list[KVCacheBlock] | None:
    found: list[KVCacheBlock] | None = pool.get_cached_block(f"{name} {number}".encode().ljust(32), [0])  # type: ignore[arg-type]
    return found


def test_what_one_has_cached_goes_when_the_other_needs_its_room() -> None:
    world = World()
    one, half = world.open("one"), world.open("half")
    assert (one.usable_blocks, half.usable_blocks) == (63, 126)
    blocks = world.take("one", 63)
    cache(one, blocks, "prompt")
    assert half.get_num_free_blocks() == 0
    world.free("one", blocks[::-1])
    assert (one.get_num_free_blocks(), half.get_num_free_blocks()) == (63, 126)
    assert find(one, "prompt", 62) is not None
    one.take_events()
    world.pool._buffer.fill_(7)  # type: ignore[union-attr]
    taken = world.take("half", 3)
    world.check()
    assert [find(one, "prompt", number) is None for number in (62, 61, 60)] == [True, True, False]
    assert len(one.take_events()) == 2  # the network hears of it
    for block in taken:
        begin, _ = world.span("half", block)
        assert not world.pool._buffer[begin : begin + BYTES["half"]].any()  # type: ignore[index]
    assert find(half, "prompt", 0) is None


def test_a_models_own_cache_stays_while_there_is_other_room() -> None:
    world = World()
    one = world.open("one")
    blocks = world.take("one", 20)
    cache(one, blocks, "prompt")
    world.free("one", blocks)
    more = world.take("one", 43)
    assert find(one, "prompt", 0) is not None
    assert {block.block_id for block in more}.isdisjoint(block.block_id for block in blocks)


def test_what_requests_free_is_whole_pages_for_others_and_prefixes_only_with_their_last_user() -> None:
    """Pages have six blocks: of the first two requests one holds four and the other the rest, with a block of both."""
    world = World()
    world.open("large")
    half = world.open("half")
    first = world.take("half", 4)
    half.touch(first[:1])
    second = [*first[:1], *world.take("half", 2)]
    size, (one, both) = half.block_bytes, ([each.block_id for each in first], [*first, *second])
    assert half.count_freed_bytes(one, for_others=False) == 3 * size
    assert half.count_freed_bytes(one, for_others=True) == 0
    assert half.count_freed_bytes([each.block_id for each in both], for_others=False) == 6 * size
    assert half.count_freed_bytes([each.block_id for each in both], for_others=True) == world.pool.pages.page_bytes
    before = world.pools["half"].get_num_free_blocks()
    half.free_blocks(first)
    assert half.get_num_free_blocks() == before + 3


def test_a_model_that_is_refused_leaves_pages_as_they_are() -> None:
    """Those of both have blocks in all pages but the first two: one of three would be of both."""
    world = World()
    pools = [world.open("one"), world.open("half")]
    taken = [pools[number % 2].get_new_blocks(1 + number % 2) for number in range(63)]
    assert pools[1].get_num_free_blocks() == 0
    for number in (61, 62):
        pools[number % 2].free_blocks(taken[number])
    with pytest.raises(SharingError, match="pages cannot be larger while"):
        world.open("large")
    assert (world.pool.pages.page_bytes, set(world.pool._per_page)) == (BYTES["one"], {"one", "half"})
    world.pool.pages.check()


@pytest.mark.parametrize("seed", range(8))
def test_no_byte_is_two_requests(seed: int) -> None:
    """Models of four sizes come, one after the other and while KV of the others is in use, and go."""
    rng = random.Random(seed)
    world = World()
    requests: list[tuple[str, list[KVCacheBlock]]] = []
    for step in range(600):
        missing = [service for service in BYTES if service not in world.pools]
        if missing and (step == 0 or rng.random() < 0.02):
            with suppress(SharingError):  # the first pages are in use, and pages cannot be larger
                world.open(rng.choice(missing))
        elif len(world.pools) > 1 and rng.random() < 0.005:
            gone = rng.choice(list(world.pools))
            world.pool.close_service(gone)
            del world.pools[gone]
            world.held = [each for each in world.held if each[0] != gone]
            requests = [each for each in requests if each[0] != gone]
        service = rng.choice(list(world.pools))
        pool = world.pools[service]
        free = pool.get_num_free_blocks()
        if free and rng.random() < 0.6:
            blocks = world.take(service, rng.randrange(1, min(free, 12) + 1))
            if rng.random() < 0.6:
                cache(pool, blocks, f"{seed} {step}")
            requests.append((service, blocks))
        elif requests:
            service, blocks = requests.pop(rng.randrange(len(requests)))
            world.free(service, blocks[::-1])
        world.check()
    for service, blocks in requests:
        world.free(service, blocks)
    world.check()
    for pool in world.pools.values():
        assert pool.get_num_free_blocks() == pool.usable_blocks
        assert pool.get_usage() == 0.0
