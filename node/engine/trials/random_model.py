"""Llamas with random weights, made on the spot: a tiny one for the self-test, and one that is some work for a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from safetensors.numpy import save_file


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` says of a Llama. `weights_std`: of the values of its matrices."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int
    positions: int
    dtype: Literal["float32", "bfloat16"]
    weights_std: float


TINY: Final = LlamaShape(
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    hidden=128,
    inner=256,
    vocabulary=512,
    positions=256,
    dtype="float32",
    weights_std=0.2,
)

ONE_BILLION: Final = LlamaShape(
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    hidden=2048,
    inner=8192,
    vocabulary=32768,
    positions=8192,
    dtype="bfloat16",
    weights_std=0.02,
)
"""The shape of Llama-3.2-1B with fewer words: 1.1 billion parameters, a file of 2.2 GB, 32 KiB of KV a position."""


def make_model(folder: Path, shape: LlamaShape = TINY) -> None:
    """Write a Llama of this shape with random weights, always the same ones."""
    rng = np.random.default_rng(7)
    # numpy has no bfloat16: such a model's file is in float16, which vLLM converts when it loads.
    stored = np.float32 if shape.dtype == "float32" else np.float16
    tensors = {
        name: (rng.standard_normal(size) * shape.weights_std if len(size) == 2 else np.ones(size)).astype(stored)
        for name, size in _tensor_sizes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")


def _config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": shape.dtype,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _tensor_sizes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """All tensors of the model, by name."""
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (shape.vocabulary, shape.hidden),
    }
    for layer in range(shape.layers):
        inside = {
            "input_layernorm": (shape.hidden,),
            "post_attention_layernorm": (shape.hidden,),
            "self_attn.q_proj": (shape.heads * shape.head_dim, shape.hidden),
            "self_attn.k_proj": (shape.kv_heads * shape.head_dim, shape.hidden),
            "self_attn.v_proj": (shape.kv_heads * shape.head_dim, shape.hidden),
            "self_attn.o_proj": (shape.hidden, shape.heads * shape.head_dim),
            "mlp.gate_proj": (shape.inner, shape.hidden),
            "mlp.up_proj": (shape.inner, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.inner),
        }
        sizes |= {f"model.layers.{layer}.{name}.weight": size for name, size in inside.items()}
    return sizes
