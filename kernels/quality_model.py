"""The bundled model with its KV cache sent through a codec: perplexity and greedy continuations.

Weights and arithmetic are fp32, so that the only rounding is the cache's own. Keys (after RoPE) and values are
rounded to bf16 for every codec, `raw` included, then encoded and decoded as a prompt of that length would be.
"""

from __future__ import annotations

import importlib.resources
import math
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .quality_rouge import Rouge, rouge
from .quality_tensors import through

__all__ = ["CONTINUATION_TOKENS", "HELD_OUT", "PROMPT_TOKENS", "BundledModel", "mean_rouge"]

HELD_OUT = ("argparse", "dataclasses", "tarfile", "heapq", "difflib")
"""Standard-library modules that the model was not trained on (its README)."""

WINDOW_TOKENS = 2048
PROMPT_TOKENS, CONTINUATION_TOKENS = 512, 64

_ATTENTION = "p2pserve_codec"


class BundledModel:
    """The model that ships in `node/bundled`, with a codec between its prefill and its attention."""

    def __init__(self) -> None:
        """Load the model; raises ModuleNotFoundError where transformers is not installed."""
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.utils import logging

        self._codec = "raw"

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
            if query.shape[2] > 1:  # a prompt; tokens decoded later stay where they were computed
                key, value = self._send(key, value)
            return sdpa_attention_forward(module, query, key, value, mask, **settings)

        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, attend)
        logging.disable_progress_bar()
        folder = _folder()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=_ATTENTION
        ).eval()

    def perplexity(self, codec: str, modules: Sequence[str], advance: Callable[[], None] = lambda: None) -> float:
        """exp of the mean loss per token of the held-out modules' texts.

        Windows of 2048 tokens overlap by half, as in the model's own evaluation: a token past the first window
        is predicted from at least 1024 tokens before it.
        """
        self._codec = codec
        loss, count = 0.0, 0
        for name in modules:
            ids = torch.tensor([0, *self._tokenizer.encode(_source(name)).ids])
            for start, first, window in _windows(ids):
                with torch.inference_mode():
                    logits = self._model(input_ids=window[None, :-1], use_cache=False).logits[0]
                scored = first - start - 1
                loss += float(torch.nn.functional.cross_entropy(logits[scored:], window[scored + 1 :], reduction="sum"))
                count += len(window) - 1 - scored
                advance()
        return math.exp(loss / count)

    def continuations(self, codec: str, prompts: torch.Tensor) -> list[str]:
        """Greedy continuations of `[prompts, tokens]` from a cache that came through the codec."""
        self._codec = "raw"
        found = []
        with torch.inference_mode():
            # The prefill side picks the first token from its own, unsent cache; `decode` sees the sent one.
            state = self._model(input_ids=prompts, use_cache=True, logits_to_keep=1)
            cache, token = state.past_key_values, state.logits[:, -1].argmax(-1, keepdim=True)
            self._codec = codec
            for layer in cache.layers:
                layer.keys, layer.values = self._send(layer.keys, layer.values)
            for _ in range(CONTINUATION_TOKENS):
                found.append(token)
                state = self._model(input_ids=token, past_key_values=cache, use_cache=True)
                token = state.logits[:, -1].argmax(-1, keepdim=True)
        return list(self._tokenizer.decode_batch(torch.cat(found, 1).tolist()))

    def prompts(self, modules: Sequence[str], each: int) -> torch.Tensor:
        """`[modules * each, 512]` token ids, spread evenly over each module's text."""
        rows = []
        for name in modules:
            ids = self._tokenizer.encode(_source(name)).ids
            last = len(ids) - PROMPT_TOKENS - CONTINUATION_TOKENS
            rows += [ids[last * i // each :][:PROMPT_TOKENS] for i in range(each)]
        return torch.tensor(rows)

    def windows(self, modules: Sequence[str]) -> int:
        """How many windows `perplexity` scores."""
        return sum(
            1 for name in modules for _ in _windows(torch.tensor([0, *self._tokenizer.encode(_source(name)).ids]))
        )

    def _send(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[prompts, heads, tokens, head_dim]` fp32 as it arrives, every prompt on its own."""
        pairs = []
        for k, v in zip(key, value, strict=True):
            sixteen = (x.transpose(0, 1).contiguous().to(torch.bfloat16) for x in (k, v))
            pairs.append([x.to(torch.float32).transpose(0, 1) for x in through(self._codec, *sixteen)])
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def mean_rouge(references: Sequence[str], texts: Sequence[str]) -> Rouge:
    """The mean of each score over pairs of texts."""
    scores = [rouge(reference, text) for reference, text in zip(references, texts, strict=True)]
    return Rouge(
        *(sum(column) / len(scores) for column in zip(*((s.rouge1, s.rouge2, s.rouge_l) for s in scores), strict=True))
    )


def _windows(ids: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Start of a window, index of the first token to score in it, and its ids with the one after it."""
    scored, start = 1, 0  # the first token is given
    while scored < len(ids):
        window = ids[start : start + WINDOW_TOKENS + 1]
        yield start, scored, window
        scored = start + len(window)
        start += WINDOW_TOKENS // 2


def _folder() -> Path:
    package = (__package__ or "p2pserve.kernels").partition(".")[0]
    return Path(str(importlib.resources.files(package))) / "node" / "bundled"


def _source(module: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py").read_text(encoding="utf-8")
