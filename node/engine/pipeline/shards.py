"""The paged KV cache of a stage as one worker would have it, whatever number of workers share its layers.

vLLM's scheduler keeps one table of blocks for all stages, and its own pipelines are cut into equal numbers of workers.
Stages on unequal boxes are not: so each of its workers speaks for the whole stage, with all KV heads and the memory of
all that hold different ones, and takes its own share of what it is then told to allocate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs


def join_head_shards(spec: KVCacheSpec, shards: int) -> KVCacheSpec:
    """A layer's cache with the heads of all `shards`, from that of one of them."""
    return _resized(spec, lambda size: size * shards)


def take_head_shard(config: KVCacheConfig, shards: int) -> KVCacheConfig:
    """One shard's part of a cache of `shards`: the same blocks, of fewer heads."""

    def part(size: int) -> int:
        return size // shards

    return replace(
        config,
        kv_cache_tensors=[
            replace(
                tensor,
                size=part(tensor.size),
                layer_stride=part(tensor.layer_stride),
                block_stride=part(tensor.block_stride),
                offset=part(tensor.offset),
            )
            for tensor in config.kv_cache_tensors
        ],
        kv_cache_groups=[
            replace(group, kv_cache_spec=_resized(group.kv_cache_spec, part)) for group in config.kv_cache_groups
        ],
    )


def _resized(spec: KVCacheSpec, size: Callable[[int], int]) -> KVCacheSpec:
    """The same cache with another number of heads. What has no heads is the same on all workers."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = {name: _resized(layer, size) for name, layer in spec.kv_cache_specs.items()}
        return replace(spec, kv_cache_specs=layers)
    if not isinstance(spec, AttentionSpec):
        return spec
    changes: dict[str, Any] = {
        name: size(value)
        for name in ("num_kv_heads", "num_head_slots", "page_size_padded")
        if (value := getattr(spec, name)) is not None
    }
    return replace(spec, **changes)
