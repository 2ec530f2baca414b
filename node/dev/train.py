"""Train a bundled model, reproducibly: `bundled` on Python's standard library, `bundled-prose` on novels.

    python -m p2pserve.node.bundled.train [bundled-prose --corpus DATA] --out DIR [--tokens 30e6] [--resume]

The result is a Hugging Face folder: a small Llama (grouped-query attention, RoPE) in bf16, a byte-level
BPE tokenizer and a model card with the measured figures. A run can be interrupted and resumed; the schedule
(warm-up, stable, decay) depends only on the tokens seen, so a resumed run may also be given a smaller or
larger `--tokens` as long as its decay has not begun.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from bisect import bisect
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from ..bundled.evaluate import bits_per_byte
from .export import END, export
from .recipes import RECIPES, Corpora, Recipe

CHECKED_BYTES = 30_000  # of held-out text, measured whenever a checkpoint is written


def train_tokenizer(recipe: Recipe, corpora: Corpora) -> Tokenizer:
    """A byte-level BPE tokenizer: every byte string has an encoding, no unknown token exists."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(recipe.words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (text for _, texts in corpora.groups for text in texts),
        trainers.BpeTrainer(
            vocab_size=recipe.geometry.vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


class TokenStreams:
    """The tokens of each group of texts, sampled as windows at random offsets."""

    def __init__(self, tokenizer: Tokenizer, corpora: Corpora, seed: int) -> None:
        end = tokenizer.encode(END).ids[0]
        self.streams = [
            torch.tensor([token for text in texts for token in (end, *tokenizer.encode(text).ids)], dtype=torch.int32)
            for _, texts in corpora.groups
        ]
        weights = [weight * len(stream) for (weight, _), stream in zip(corpora.groups, self.streams, strict=True)]
        self._shares = [sum_ / sum(weights) for sum_ in accumulate(weights)][:-1]
        self._rng = random.Random(seed)

    def __len__(self) -> int:
        return sum(len(s) for s in self.streams)

    def reseed(self, seed: int) -> None:
        """Draw other windows from now on: a resumed run must not see the first ones again."""
        self._rng.seed(seed)

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Return `[rows, length + 1]` token ids."""
        windows = []
        for _ in range(rows):
            stream = self.streams[bisect(self._shares, self._rng.random())]
            start = self._rng.randrange(len(stream) - length - 1)
            windows.append(stream[start : start + length + 1])
        return torch.stack(windows).long()


def train(recipe: Recipe, corpora: Corpora, out: Path, *, resume: bool) -> dict[str, Any]:
    """Train, write the Hugging Face folder to `out` and return the measured figures."""
    schedule = recipe.schedule
    torch.manual_seed(schedule.seed)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"  # a training's own file, read back with weights_only
    tokenizer_file = out / "tokenizer.json"
    if not (resume and tokenizer_file.exists()):
        train_tokenizer(recipe, corpora).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    streams = TokenStreams(tokenizer, corpora, schedule.seed)
    print(f"corpus: {len(streams):,} tokens; held out: {', '.join(corpora.held_out)}", file=sys.stderr, flush=True)
    checked = [text for text in corpora.held_out.values() if len(text) < CHECKED_BYTES]

    model: Any = LlamaForCausalLM(recipe.geometry.config()).float()
    model.set_attn_implementation("sdpa")
    drop = _add_dropout(model, schedule.dropout)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = (
        torch.optim.Muon(matrices, lr=schedule.muon_lr, weight_decay=schedule.weight_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=schedule.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rates = (schedule.muon_lr, schedule.adam_lr)
    tokens, seconds = 0, 0.0
    if resume and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        tokens, seconds = state["tokens"], state["seconds"]
        streams.reseed(schedule.seed + tokens)

    body, head = model.model, model.lm_head

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
            logits = head(hidden)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    compiled = torch.compile(loss_of, dynamic=False) if os.environ.get("TRAIN_COMPILE", "1") == "1" else loss_of
    last_save, average = time.monotonic(), None
    while tokens < schedule.tokens:
        started = time.monotonic()
        length = schedule.context(tokens)
        # Micro-batches of 4,096 tokens stay in the processor's caches.
        pieces = schedule.batch_tokens // 4096
        for _ in range(pieces):
            loss = compiled(streams.batch(4096 // length, length))
            torch.autograd.backward(loss / pieces)
            average = loss.item() if average is None else 0.99 * average + 0.01 * loss.item()
        factor = schedule.learning_rate(tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step_seconds = time.monotonic() - started
        tokens, seconds = tokens + schedule.batch_tokens, seconds + step_seconds
        if tokens // schedule.batch_tokens % 20 == 0:
            print(
                f"{tokens / 1e6:7.2f} M tokens  loss {average:.3f}  lr x{factor:.2f}  "
                f"{schedule.batch_tokens / step_seconds:,.0f} tok/s  {seconds / 60:.1f} min",
                file=sys.stderr,
                flush=True,
            )
        if time.monotonic() - last_save > 240:
            last_save = time.monotonic()
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state | {"tokens": tokens, "seconds": seconds}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            drop.eval()
            figure = bits_per_byte(model, tokenizer, checked)
            drop.train()
            print(f"{'':7}  held out, in part: {figure:.3f} bits per byte", file=sys.stderr, flush=True)
    drop.eval()
    return export(model, tokenizer, recipe, corpora.held_out, out, tokens=tokens, seconds=seconds)


def _add_dropout(model: Any, share: float) -> torch.nn.Dropout:
    """Of what each attention and MLP adds to the residual stream."""
    drop = torch.nn.Dropout(share)
    for layer in model.model.layers if share else ():
        for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
            added.register_forward_hook(lambda _module, _inputs, output: drop(output))
    return drop


def main() -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description="Train a bundled model.")
    parser.add_argument("model", nargs="?", choices=RECIPES, default="bundled", help="which one (bundled)")
    parser.add_argument("--corpus", type=Path, help="folder that its texts are read from (of Python: its own)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--tokens", type=float, help="training tokens in all (as many as the bundled one saw)")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.model]
    tokens = recipe.schedule.tokens if arguments.tokens is None else arguments.tokens
    if not math.isfinite(tokens) or tokens < 1e5:
        parser.error("--tokens must be at least 1e5")
    try:
        corpora = recipe.read(arguments.corpus)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(arguments.threads)
    recipe = replace(recipe, schedule=replace(recipe.schedule, tokens=int(tokens)))
    metrics = train(recipe, corpora, arguments.out, resume=arguments.resume)
    print(json.dumps(metrics, indent=2))
