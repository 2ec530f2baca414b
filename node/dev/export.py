"""A trained model as a Hugging Face folder, with its figures measured and its card written."""

from __future__ import annotations

import json
import lzma
import platform
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ..bundled.evaluate import CONTEXT, bits_per_byte
from .recipes import Recipe

END = "<|endoftext|>"
SAMPLE_TOKENS = 90
TEMPERATURE = 0.6
TOP_K = 20


def export(
    model: Any, tokenizer: Tokenizer, recipe: Recipe, texts: dict[str, str], out: Path, *, tokens: int, seconds: float
) -> dict[str, Any]:
    """Write weights in bf16, tokenizer settings, `metrics.json` and the card; measure what was written on `texts`, which
    were held out."""
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END,
                "eos_token": END,
                "model_max_length": CONTEXT,
                "clean_up_tokenization_spaces": False,
                "chat_template": recipe.chat_template,
            },
            indent=2,
        )
        + "\n"
    )
    for name, text in texts.items() if recipe.ships_held_out else ():
        (out / "held_out").mkdir(exist_ok=True)
        (out / "held_out" / f"{name}.txt").write_text(text)
    metrics = measure(model.float(), tokenizer, texts)
    metrics |= {
        "training_minutes": seconds / 60,
        "training_tokens": tokens,
        "python": platform.python_version(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": asdict(recipe.schedule),
    }
    if recipe.prompts:
        metrics["samples"] = [sample(model, tokenizer, prompt) for prompt in recipe.prompts]
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (out / "README.md").write_text(card(recipe, metrics))
    return metrics


def measure(model: Any, tokenizer: Tokenizer, texts: dict[str, str]) -> dict[str, Any]:
    """Bits per byte of held-out texts, in all and each, beside what `xz -9e` needs for the same bytes."""
    everything = "".join(texts.values()).encode()
    packed = lzma.compress(everything, preset=9 | lzma.PRESET_EXTREME)
    return {
        "bits_per_byte": bits_per_byte(model, tokenizer, list(texts.values())),
        "bits_per_byte_by_module": {name: bits_per_byte(model, tokenizer, [text]) for name, text in texts.items()},
        "held_out_bytes": len(everything),
        "xz_bits_per_byte": 8 * len(packed) / len(everything),
    }


@torch.no_grad()
def sample(model: Any, tokenizer: Tokenizer, prompt: str) -> dict[str, Any]:
    """What the model makes of a beginning, drawn with the same seed for each: prompt, tokens and text."""
    given = [0, *tokenizer.encode(prompt).ids]
    torch.manual_seed(0)
    settings = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K, "max_new_tokens": SAMPLE_TOKENS}
    drawn = model.generate(torch.tensor([given]), **settings)[0].tolist()[len(given) :]
    return {"prompt": prompt, "tokens": drawn, "text": tokenizer.decode(drawn)}


def card(recipe: Recipe, metrics: dict[str, Any]) -> str:
    """The model card, in Markdown, from the measured figures and what the recipe says."""
    rows = "\n".join(f"| `{name}` | {figure:.3f} |" for name, figure in metrics["bits_per_byte_by_module"].items())
    geometry, texts = recipe.geometry, recipe.card
    return f"""# {texts.title}

A small Llama that ships with p2pserve, so that a machine without a GPU or a hub shows real text, real KV caches and a real perplexity.
It continues {texts.continues}. It knows nothing else, follows no instructions and should be used for nothing but trying p2pserve.

| | |
|---|---|
| architecture | Llama: {geometry.layers} layers of width {geometry.width}, \
{geometry.heads} query heads on {geometry.kv_heads} KV heads of {geometry.head_dim}, RoPE, SwiGLU, tied embeddings |
| parameters | {metrics["parameters"]:,} in bf16 |
| context | {CONTEXT} tokens |
| tokenizer | byte-level BPE, {geometry.vocabulary} entries |
| chat template | renders a conversation as {texts.chat}: the model is not instruction-tuned |
| training data | {texts.data.format(python=metrics["python"])} |
| held out | {texts.held_out} |
| training | {metrics["training_tokens"] / 1e6:.1f} M tokens in {metrics["training_minutes"]:.0f} minutes on one or two CPU cores{texts.training} |
| **bits per byte, held out** | **{metrics["bits_per_byte"]:.3f}** (`xz -9e` over the same bytes: {metrics["xz_bits_per_byte"]:.3f}) |

Measured in float32 with windows of {CONTEXT} tokens that overlap by half; every byte counts. By {texts.part}:

| {texts.part} | bits per byte |
|---|---|
{rows}
{_samples(metrics.get("samples", ()))}
Train it again with `python -m p2pserve.node.bundled.train{texts.training_options} --out DIR`, \
measure it with `python -m p2pserve.node.bundled.evaluate{texts.evaluation_options}`.
The figures above, with the recipe, are in `metrics.json`.

The weights are under the licence of this repository, Apache-2.0. {texts.licence}
"""


def _samples(samples: Iterable[dict[str, Any]]) -> str:
    """Beginnings in bold, each with what the model made of it."""
    shown = [
        "\n".join(
            f"> {line}".rstrip()
            for line in textwrap.wrap(f"**{each['prompt']}**{each['text']}".replace("\n\n", " / "), 110)
        )
        for each in samples
    ]
    if not shown:
        return ""
    how = f"at temperature {TEMPERATURE}, from the {TOP_K} likeliest tokens, with one seed, cut after {SAMPLE_TOKENS} tokens"
    return f"\nWhat it makes of the words in bold, {how} (a stroke is a new paragraph):\n\n" + "\n\n".join(shown) + "\n"
