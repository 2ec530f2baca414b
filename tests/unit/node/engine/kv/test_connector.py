"""Caches that can be transferred, and those that are refused by name."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from p2pserve.node.engine.kv.connector import UnsupportedModelError, refuse_unsupported


def of(kind: type[AttentionSpec] = FullAttentionSpec, **more: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return kind(**sizes | more)


def in_groups(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    "spec",
    [
        of(),
        of(sliding_window=32),  # of one group with layers that have none
        of(SlidingWindowSpec, sliding_window=32),
        of(MLAAttentionSpec, num_kv_heads=1, head_size=576),
        of(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
    ],
)
def test_caches_that_are_served(spec: AttentionSpec) -> None:
    refuse_unsupported(in_groups(spec))


STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ((of(), STATE), "keeps 2 kinds of cache"),
        ((STATE,), "cache is MambaSpec"),
        ((of(ChunkedLocalAttentionSpec, attention_chunk_size=32),), "cache is ChunkedLocalAttentionSpec"),
        ((of(SlidingWindowMLASpec, sliding_window=32),), "cache is SlidingWindowMLASpec"),
        (
            (UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": of(), "b": of(head_size=128)}),),
            "cache is UniformTypeKVCacheSpecs",
        ),
        ((of(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD),), "stored as int8_per_token_head; 16 bits or fp8"),
        ((of(kv_quant_mode=KVQuantMode.NVFP4),), "stored as nvfp4"),
        ((of(head_size_v=32),), "keys and values are of different sizes"),
        ((of(state_content_bytes=40),), "or packed"),
        ((of(MLAAttentionSpec, num_kv_heads=1, tokens_per_state=4),), "or packed"),
    ],
)
def test_caches_that_are_refused(specs: tuple[KVCacheSpec, ...], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        refuse_unsupported(in_groups(*specs))
    assert "\n" not in str(caught.value)
