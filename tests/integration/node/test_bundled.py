"""The bundled models are what their cards say."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from p2pserve.node.bundled.evaluate import HELD_OUT, bits_per_byte, held_out_sources, held_out_texts
from p2pserve.node.dev.export import TOP_K, card
from p2pserve.node.dev.recipes import CODE, PROSE, RECIPES, Corpora, Recipe, read_stdlib
from p2pserve.node.dev.train import train_tokenizer
from p2pserve.node.models import BUNDLED_MODELS, open_model

pytestmark = pytest.mark.beside


class Expected(NamedTuple):
    """Of a model: what it is to reach, and which of its held-out texts is measured here (all take minutes)."""

    bits_per_byte: float
    most_bytes: int
    measured: str


# `xz -9e` needs 1.73 bits per byte for the modules and 2.75 for the chapters.
EXPECTED = {"bundled": Expected(1.45, 16_000_000, "heapq"), "bundled-prose": Expected(1.45, 8_000_000, "emma")}

of_each_model = pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)


def folder_of(recipe: Recipe) -> Path:
    return BUNDLED_MODELS[recipe.name]


def metrics(recipe: Recipe) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((folder_of(recipe) / "metrics.json").read_text())
    return recorded


def is_reproducible(recipe: Recipe) -> bool:
    """Whether its held-out texts are the same here: the modules are those of the running Python."""
    return recipe.ships_held_out or platform.python_version() == metrics(recipe)["python"]


def load(recipe: Recipe) -> tuple[Any, Tokenizer]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder_of(recipe), dtype=torch.float32)
    return model, Tokenizer.from_file(str(folder_of(recipe) / "tokenizer.json"))


@of_each_model
def test_its_architecture_and_size(recipe: Recipe) -> None:
    config = json.loads((folder_of(recipe) / "config.json").read_text())
    weights, geometry = folder_of(recipe) / "model.safetensors", recipe.geometry
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == geometry.head_dim
    assert config["num_hidden_layers"] == geometry.layers
    assert config["hidden_size"] == geometry.width
    assert config["num_key_value_heads"] == geometry.kv_heads
    assert config["num_attention_heads"] == geometry.heads > geometry.kv_heads
    assert config["max_position_embeddings"] == 2048
    assert config["vocab_size"] == geometry.vocabulary
    assert weights.stat().st_size <= EXPECTED[recipe.name].most_bytes
    with safe_open(weights, framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dictionary)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in tensors) == metrics(recipe)["parameters"]
    assert open_model(recipe.name).info.max_model_len == 2048


@of_each_model
def test_it_was_trained_as_its_recipe_says(recipe: Recipe) -> None:
    schedule, recorded = asdict(recipe.schedule), metrics(recipe)["recipe"]
    shared = schedule.keys() & recorded.keys()
    assert shared >= {"tokens", "batch_tokens", "decay_fraction", "muon_lr", "adam_lr", "seed"}
    assert {name: schedule[name] for name in shared} == {name: recorded[name] for name in shared}
    assert metrics(recipe)["training_tokens"] == pytest.approx(schedule["tokens"], rel=0.01)


def test_the_two_are_of_other_geometry() -> None:
    """Blocks of their KV caches have other shapes, so that sharing a process is no special case."""
    code, prose = (open_model(name).info for name in ("bundled", "bundled-prose"))
    assert code.service != prose.service
    for name in ("layers", "hidden", "head_dim", "kv_heads", "vocabulary"):
        assert getattr(code.shape, name) != getattr(prose.shape, name), name


@of_each_model
def test_the_card_states_what_was_measured(recipe: Recipe) -> None:
    recorded = metrics(recipe)
    assert (folder_of(recipe) / "README.md").read_text() == card(recipe, recorded)
    assert recorded["bits_per_byte"] <= EXPECTED[recipe.name].bits_per_byte < recorded["xz_bits_per_byte"]
    if is_reproducible(recipe):
        sizes = {name: len(text.encode()) for name, text in held_out_texts(folder_of(recipe)).items()}
        by_text = recorded["bits_per_byte_by_module"]
        assert sum(sizes.values()) == recorded["held_out_bytes"]
        together = sum(by_text[name] * size for name, size in sizes.items()) / sum(sizes.values())
        assert recorded["bits_per_byte"] == pytest.approx(together)


@of_each_model
def test_it_predicts_what_it_was_not_trained_on(recipe: Recipe) -> None:
    """Measured here and now."""
    model, tokenizer = load(recipe)
    expected = EXPECTED[recipe.name]
    figure = bits_per_byte(model, tokenizer, [held_out_texts(folder_of(recipe))[expected.measured]])
    assert figure <= expected.bits_per_byte * 1.05  # of one text, of which some are harder
    if is_reproducible(recipe):
        assert figure == pytest.approx(metrics(recipe)["bits_per_byte_by_module"][expected.measured], rel=1e-3)


@torch.no_grad()
def test_the_samples_of_the_card_are_the_models_own() -> None:
    """Each token is one of the likeliest after those before it; other machines round a little differently."""
    model, tokenizer = load(PROSE)
    samples = metrics(PROSE)["samples"]
    assert [each["prompt"] for each in samples] == list(PROSE.prompts)
    for each in samples:
        assert tokenizer.decode(each["tokens"]) == each["text"]
        given = [0, *tokenizer.encode(each["prompt"]).ids]
        logits = model(input_ids=torch.tensor([given + each["tokens"]])).logits[0, len(given) - 1 : -1]
        ranks = [int((row > row[token]).sum()) for row, token in zip(logits, each["tokens"], strict=True)]
        assert max(ranks) < TOP_K + 3
        assert min(ranks) == 0


def test_nothing_held_out_is_trained_on() -> None:
    """Neither the modules nor their own tests; every byte string has tokens, and they give it back."""
    held_out = held_out_sources()
    assert set(held_out) == set(HELD_OUT)
    corpora = read_stdlib()
    texts = [text for _, group in corpora.groups for text in group]
    assert len(texts) > 500
    assert corpora.held_out == held_out
    assert not set(held_out.values()) & set(texts)
    tokenizer = train_tokenizer(CODE, Corpora(((1.0, texts[:20]),), {}))
    for text in ("def f(x):\n\treturn x\n", "\x00\x7f ünïcödé 漢字 🙂", held_out["heapq"]):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
