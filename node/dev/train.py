"""Train the bundled model on the Python standard library, reproducibly and from nothing else.

    python -m p2pserve.node.bundled.train --out DIR [--tokens 30e6] [--resume]

The result is a Hugging Face folder: a small Llama (grouped-query attention, RoPE, head_dim 64) in bf16,
a byte-level BPE tokenizer and a model card with the measured figures. A run can be interrupted and
resumed; the schedule (warm-up, stable, decay) depends only on the tokens seen, so a resumed run may also
be given a smaller or larger `--tokens` as long as its decay has not begun.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from ..bundled.evaluate import CONTEXT, HELD_OUT, bits_per_byte, held_out_sources, stdlib_root

END = "<|endoftext|>"
VOCABULARY = 4096
WORDS = r"\n+[ \t]*|[ \t]+(?=[ \t])| ?[A-Za-z_]+|\d{1,3}| ?[^\sA-Za-z_0-9]+|\s+"
# Generated tables teach nothing about Python and would be a tenth of all tokens.
SKIPPED_FOLDERS = {"site-packages", "encodings", "__pycache__"}
# The model is not instruction-tuned: a chat becomes what it knows, a commented Python file.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}\n\n"
    "{% else %}# {{ message['content'] | replace('\n', '\n# ') }}\n{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the result, apart from the Python version whose sources are read."""

    tokens: int = 30_000_000
    batch_tokens: int = 8192
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.3
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    library_weight: float = 2.0  # how often library text is drawn, relative to the test-suite's
    seed: int = 0

    def learning_rate(self, tokens: int) -> float:
        """Factor on the peak rates after `tokens`: linear warm-up, flat, linear decay to zero."""
        done = tokens / self.tokens
        if done < self.warmup_fraction:
            return (done + 1e-4) / self.warmup_fraction
        return min(1.0, max(0.0, (1.0 - done) / self.decay_fraction))

    def context(self, tokens: int) -> int:
        """Sequence length after `tokens`: attention is most of a long window's price, so long ones come last."""
        done = tokens / self.tokens
        return 256 if done < 0.55 else 512 if done < 0.86 else CONTEXT


def model_config() -> LlamaConfig:
    """7.3 M parameters, 14.7 MB in bf16: 8 layers of width 256, 4 query heads on 2 KV heads of 64."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        dtype="bfloat16",
    )


def training_sources() -> Iterator[tuple[bool, str]]:
    """Yield `(is_test, text)` for each standard library module that is not held out; nor its tests,
    which quote it."""
    root = stdlib_root()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or any(
            path.stem == name or path.stem.startswith(f"test_{name}") for name in HELD_OUT
        ):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:  # the test-suite holds files in other encodings on purpose
            continue
        if text.strip():
            yield bool({"test", "tests"}.intersection(relative.parts)), text


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: every byte string has an encoding, no unknown token exists."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Runs of blanks before a word stay one piece, so that indentation costs one token.
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


class Corpus:
    """The token stream of library and tests, sampled as windows at random offsets."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe) -> None:
        end = tokenizer.encode(END).ids[0]
        streams: dict[bool, list[int]] = {False: [], True: []}
        for is_test, text in training_sources():
            streams[is_test] += [end, *tokenizer.encode(text).ids]
        self.streams = [torch.tensor(streams[kind], dtype=torch.int32) for kind in (False, True)]
        library, tests = (len(s) for s in self.streams)
        self._library_share = recipe.library_weight * library / (recipe.library_weight * library + tests)
        self._rng = random.Random(recipe.seed)

    def __len__(self) -> int:
        return sum(len(s) for s in self.streams)

    def reseed(self, seed: int) -> None:
        """Draw other windows from now on: a resumed run must not see the first ones again."""
        self._rng.seed(seed)

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Return `[rows, length + 1]` token ids."""
        windows = []
        for _ in range(rows):
            stream = self.streams[self._rng.random() >= self._library_share]
            start = self._rng.randrange(len(stream) - length - 1)
            windows.append(stream[start : start + length + 1])
        return torch.stack(windows).long()


def train(recipe: Recipe, out: Path, resume: bool) -> dict[str, Any]:
    """Train, write the Hugging Face folder to `out` and return the measured figures."""
    torch.manual_seed(recipe.seed)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"  # a training's own file, read back with weights_only
    tokenizer_file = out / "tokenizer.json"
    if not (resume and tokenizer_file.exists()):
        train_tokenizer([text for _, text in training_sources()]).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    corpus = Corpus(tokenizer, recipe)
    print(f"corpus: {len(corpus):,} tokens; held out: {', '.join(HELD_OUT)}", file=sys.stderr, flush=True)

    model: Any = LlamaForCausalLM(model_config()).float()
    model.set_attn_implementation("sdpa")
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = (
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rates = (recipe.muon_lr, recipe.adam_lr)
    tokens, seconds = 0, 0.0
    if resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        tokens, seconds = state["tokens"], state["seconds"]
        corpus.reseed(recipe.seed + tokens)

    body, head = model.model, model.lm_head

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
            logits = head(hidden)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    compiled = torch.compile(loss_of, dynamic=False) if os.environ.get("TRAIN_COMPILE", "1") == "1" else loss_of
    last_save, average = time.monotonic(), None
    while tokens < recipe.tokens:
        started = time.monotonic()
        length = recipe.context(tokens)
        # Micro-batches of 4,096 tokens stay in the processor's caches.
        pieces = recipe.batch_tokens // 4096
        for _ in range(pieces):
            loss = compiled(corpus.batch(4096 // length, length))
            torch.autograd.backward(loss / pieces)
            average = loss.item() if average is None else 0.99 * average + 0.01 * loss.item()
        factor = recipe.learning_rate(tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step_seconds = time.monotonic() - started
        tokens, seconds = tokens + recipe.batch_tokens, seconds + step_seconds
        if tokens // recipe.batch_tokens % 20 == 0:
            print(
                f"{tokens / 1e6:7.2f} M tokens  loss {average:.3f}  lr x{factor:.2f}  "
                f"{recipe.batch_tokens / step_seconds:,.0f} tok/s  {seconds / 60:.1f} min",
                file=sys.stderr,
                flush=True,
            )
        if time.monotonic() - last_save > 240:
            last_save = time.monotonic()
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "tokens": tokens,
                "seconds": seconds,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            sources = held_out_sources()
            small = bits_per_byte(model, tokenizer, [sources["heapq"], sources["difflib"]])
            print(f"{'':7}  heapq, difflib: {small:.3f} bits per byte", file=sys.stderr, flush=True)
    return export(model, tokenizer, recipe, out, tokens=tokens, seconds=seconds)


def export(
    model: Any, tokenizer: Tokenizer, recipe: Recipe, out: Path, *, tokens: int, seconds: float
) -> dict[str, Any]:
    """Write weights in bf16, tokenizer settings and `metrics.json`; measure what was written."""
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
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )
    metrics = measure(model.float(), tokenizer)
    metrics |= {
        "training_minutes": seconds / 60,
        "training_tokens": tokens,
        "python": platform.python_version(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": asdict(recipe),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (out / "README.md").write_text(card(metrics))
    return metrics


def measure(model: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """Bits per byte on the held-out modules, in all and each, beside what `xz -9e` needs for the same bytes."""
    sources = held_out_sources()
    everything = "".join(sources.values()).encode()
    packed = lzma.compress(everything, preset=9 | lzma.PRESET_EXTREME)
    return {
        "bits_per_byte": bits_per_byte(model, tokenizer, list(sources.values())),
        "bits_per_byte_by_module": {name: bits_per_byte(model, tokenizer, [text]) for name, text in sources.items()},
        "held_out_bytes": len(everything),
        "xz_bits_per_byte": 8 * len(packed) / len(everything),
    }


def card(metrics: dict[str, Any]) -> str:
    """The model card, in Markdown, from the measured figures alone."""
    rows = "\n".join(f"| `{name}` | {figure:.3f} |" for name, figure in metrics["bits_per_byte_by_module"].items())
    config = model_config()
    return f"""# The bundled model

A small Llama that ships with p2pserve, so that a machine without a GPU or a hub shows real text, real KV caches and a real perplexity.
It continues Python source. It knows nothing else, follows no instructions and should be used for nothing but trying p2pserve.

| | |
|---|---|
| architecture | Llama: {config.num_hidden_layers} layers of width {config.hidden_size}, \
{config.num_attention_heads} query heads on {config.num_key_value_heads} KV heads of {config.head_dim}, RoPE, SwiGLU, tied embeddings |
| parameters | {metrics["parameters"]:,} in bf16 |
| context | {CONTEXT} tokens |
| tokenizer | byte-level BPE, {VOCABULARY} entries |
| chat template | renders a conversation as a commented Python file: the model is not instruction-tuned |
| training data | the standard library of Python {metrics["python"]}, its test-suite included |
| held out | {", ".join(f"`{name}`" for name in HELD_OUT)}, and their own tests |
| training | {metrics["training_tokens"] / 1e6:.1f} M tokens in {metrics["training_minutes"]:.0f} minutes on one or two CPU cores |
| **bits per byte, held out** | **{metrics["bits_per_byte"]:.3f}** (`xz -9e` over the same bytes: {metrics["xz_bits_per_byte"]:.3f}) |

Measured in float32 with windows of {CONTEXT} tokens that overlap by half; every byte counts. By module:

| module | bits per byte |
|---|---|
{rows}

Train it again with `python -m p2pserve.node.bundled.train --out DIR`, measure it with `python -m p2pserve.node.bundled.evaluate`.
The figures above, with the recipe, are in `metrics.json`.

The weights are under the licence of this repository, Apache-2.0. Python's standard library, from which they were trained, is under the
PSF licence version 2.
"""


def main() -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description="Train the bundled model on the Python standard library.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokens", type=float, default=Recipe().tokens, help="training tokens in all")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads")
    arguments = parser.parse_args()
    if not math.isfinite(arguments.tokens) or arguments.tokens < 1e5:
        parser.error("--tokens must be at least 1e5")
    torch.set_num_threads(arguments.threads)
    metrics = train(Recipe(tokens=int(arguments.tokens)), arguments.out, arguments.resume)
    print(json.dumps(metrics, indent=2))
