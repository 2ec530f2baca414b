"""The bundled model is what its card says."""

from __future__ import annotations

import json
import platform
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from p2pserve.node.bundled.evaluate import HELD_OUT, bits_per_byte, held_out_sources
from p2pserve.node.dev.train import card, train_tokenizer, training_sources
from p2pserve.node.models import BUNDLED, open_model

pytestmark = pytest.mark.beside

TARGET = 1.45  # `xz -9e` needs 1.73 bits per byte for the same modules
MEASURED = "heapq"  # all five take minutes on one core


def metrics() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((BUNDLED / "metrics.json").read_text())
    return recorded


def test_its_architecture_and_size() -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    weights = BUNDLED / "model.safetensors"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_hidden_layers"] >= 8
    assert config["num_key_value_heads"] == 2
    assert config["num_attention_heads"] > 2
    assert config["max_position_embeddings"] == 2048
    assert 2000 <= config["vocab_size"] <= 4096
    assert weights.stat().st_size <= 16_000_000
    with safe_open(weights, framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dictionary)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 4_000_000 <= sum(tensor.numel() for tensor in tensors) <= 8_000_000
    assert open_model("bundled").info.max_model_len == 2048


def test_the_card_states_what_was_measured() -> None:
    assert (BUNDLED / "README.md").read_text() == card(metrics())
    assert metrics()["bits_per_byte"] <= TARGET
    if platform.python_version() == metrics()["python"]:
        sizes = {name: len(text.encode()) for name, text in held_out_sources().items()}
        by_module = metrics()["bits_per_byte_by_module"]
        assert sum(sizes.values()) == metrics()["held_out_bytes"]
        together = sum(by_module[name] * size for name, size in sizes.items()) / sum(sizes.values())
        assert metrics()["bits_per_byte"] == pytest.approx(together)


def test_it_predicts_held_out_python() -> None:
    """Measured here and now, on a module as this Python ships it."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    figure = bits_per_byte(model, tokenizer, [held_out_sources()[MEASURED]])
    assert figure <= TARGET
    if platform.python_version() == metrics()["python"]:
        assert figure == pytest.approx(metrics()["bits_per_byte_by_module"][MEASURED], rel=1e-3)


def test_nothing_held_out_is_trained_on() -> None:
    """Neither the modules nor their own tests; every byte string has tokens, and they give it back."""
    held_out = held_out_sources()
    assert set(held_out) == set(HELD_OUT)
    texts = [text for _, text in training_sources()]
    assert len(texts) > 500
    assert not set(held_out.values()) & set(texts)
    tokenizer = train_tokenizer(texts[:20])
    for text in ("def f(x):\n\treturn x\n", "\x00\x7f ünïcödé 漢字 🙂", held_out["heapq"]):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
