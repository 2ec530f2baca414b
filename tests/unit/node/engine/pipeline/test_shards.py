"""A stage's KV cache seen as one worker's: the same blocks, whatever number of workers have a share of their heads."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from p2pserve.node.engine.pipeline.shards import join_head_shards, take_head_shard

BLOCK = 16


def full(heads: int, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=64, dtype=torch.float32, **changes)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 50), st.integers(1, 6))
def test_each_shard_allocates_what_it_has_asked_for(heads: int, shards: int, blocks: int, layers: int) -> None:
    """vLLM lays the layers of one cache out one behind the other."""
    mine = full(heads)
    page = mine.page_size_bytes

    def config(spec: KVCacheSpec, page: int) -> KVCacheConfig:
        names = [f"layers.{i}" for i in range(layers)]
        tensor = KVCacheTensor(
            size=page * blocks * layers, layers=names, layer_stride=page * blocks, block_stride=page, offset=page
        )
        return KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, spec)])

    stage = join_head_shards(mine, shards)
    assert stage.page_size_bytes == page * shards
    assert take_head_shard(config(stage, page * shards), shards) == config(mine, page)


def test_padding_and_slots_are_shared_too() -> None:
    mine = full(2, page_size_padded=1 << 15, num_head_slots=3)
    stage = join_head_shards(mine, 4)
    assert isinstance(stage, FullAttentionSpec)
    assert (stage.num_kv_heads, stage.num_head_slots, stage.page_size_bytes) == (8, 12, 1 << 17)


def test_caches_of_all_kinds_of_layers_are_widened() -> None:
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=32)
    both = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": full(2), "b": full(4)})
    state = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
    wide = join_head_shards(window, 2)
    assert isinstance(wide, SlidingWindowSpec)
    assert (wide.num_kv_heads, wide.sliding_window) == (4, 32)
    assert join_head_shards(both, 2) == UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"a": full(4), "b": full(8)}
    )
    assert join_head_shards(state, 2) is state


@pytest.mark.parametrize("shards", [1, 2])
def test_one_is_no_change(shards: int) -> None:
    assert (join_head_shards(full(4), shards) == full(4)) == (shards == 1)
