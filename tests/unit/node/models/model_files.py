"""Small models as folders of files, whole and in shards."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from p2pserve.node.models import ModelError, open_model
from p2pserve.node.models.checkpoint import INDEX_FILE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


def tensors(*, layers: int = 4, fill: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    """Weights in 16 bit: 20 bytes of embeddings, 8 + 2 * layer of each layer, 6 of the norm and 20 of the head."""
    made = {"model.embed_tokens.weight": np.full((5, 2), fill, np.float16)}
    for layer in range(layers):
        made[f"model.layers.{layer}.mlp.weight"] = np.full((4 + layer,), fill, np.float16)
    return made | {
        "model.norm.weight": np.full(3, fill, np.float16),
        "lm_head.weight": np.full((5, 2), fill, np.float16),
    }


def make(
    folder: Path, *, config: object = CONFIG, weights: bytes | None = None, leave_out: str = "", layers: int = 4
) -> Path:
    folder.mkdir()
    text = config if isinstance(config, str) else json.dumps(config)
    for name, content in {
        "config.json": text.encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": weights if weights is not None else save(tensors(layers=layers)),
    }.items():
        if name != leave_out:
            (folder / name).write_bytes(content)
    return folder


def make_sharded(folder: Path, shards: Mapping[str, list[str]]) -> Path:
    """A folder whose tensors lie in these files, with an index."""
    make(folder, leave_out="model.safetensors")
    every = tensors()
    for file, names in shards.items():
        (folder / file).write_bytes(save({name: every[name] for name in names}))
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return folder


SHARDS = {
    "a.safetensors": ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight"],
    "b.safetensors": ["model.layers.2.mlp.weight"],
    "c.safetensors": ["model.layers.3.mlp.weight", "model.norm.weight", "lm_head.weight"],
}


def refusal(name: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(str(name))
    text = str(caught.value)
    assert text.startswith("model ")
    assert "\n" not in text
    return text


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name != key}
