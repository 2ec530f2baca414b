"""The bundled model with its KV cache sent through a codec, or kept in 8 bits: losses, divergences, continuations.

Weights and arithmetic are fp32, so that the only rounding is the cache's. Keys (after RoPE) and
values are rounded to bf16 for every codec, `raw` included, then encoded and decoded. Wherever a codec is named, a
format of `kept_formats` may be: then all tokens are rounded to it, those of answers too, and nothing is sent unless it
says so."""

from __future__ import annotations

import importlib.resources
import math
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .kept_formats import KEPT
from .quality_tensors import through

HELD_OUT = ("argparse", "dataclasses", "tarfile", "heapq", "difflib")
"""Standard-library modules that the model was not trained on (its README)."""

WINDOW_TOKENS = 2048
PROMPT_TOKENS, LONGEST_CONTINUATION = 512, 64

_ATTENTION = "p2pserve_codec"


Kv = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one prompt, layer by layer, each `[1, heads, tokens, head_dim]` in fp32."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """A codec's effect on each scored token, `[tokens]`; losses and divergences in nats, fp64.

    `loss`: of the token that came. `divergence`: KL(prediction after `raw` || after the codec),
    over all tokens that might have come. `right`: whether the token that came was the likeliest."""

    loss: torch.Tensor
    divergence: torch.Tensor
    right: torch.Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return math.exp(float(self.loss.mean()))

    @property
    def accuracy(self) -> float:
        """The share of tokens that a greedy answer would have got right."""
        return float(self.right.double().mean())


class Window(NamedTuple):
    """A run of a text: its start, the first token to score in it, its ids and the id after it."""

    start: int
    first_scored: int
    ids: torch.Tensor


def module_source(module: str) -> str:
    """The text of a module of the standard library."""
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py").read_text(encoding="utf-8")


class BundledModel:
    """The model that ships in `node/bundled`, with a codec between its prefill and its attention."""

    def __init__(self, source: Callable[[str], str] = module_source) -> None:
        """Load the model; `source` gives a module's text. ModuleNotFoundError without transformers."""
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.utils import logging

        self._codec, self._source = "raw", source

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
            if query.shape[2] > 1:  # a prompt; tokens decoded later stay where they were computed
                key, value = self._send(key, value)
            elif self._codec in KEPT:  # and are kept there as that engine keeps all
                key, value = (KEPT[self._codec].round(x.to(torch.bfloat16)).to(x.dtype) for x in (key, value))
            return sdpa_attention_forward(module, query, key, value, mask, **settings)

        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, attend)
        logging.disable_progress_bar()
        folder = _folder()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=_ATTENTION
        ).eval()

    def scores(
        self, codecs: Sequence[str], windows: Sequence[Window], advance: Callable[[], None] = lambda: None
    ) -> dict[str, TokenScores]:
        """The scored tokens of the windows after every codec; `advance` after every window of each.
        Window by window, so that only one window's `raw` predictions are kept."""
        losses: dict[str, list[torch.Tensor]] = {codec: [] for codec in codecs}
        divergences: dict[str, list[torch.Tensor]] = {codec: [] for codec in codecs}
        rights: dict[str, list[torch.Tensor]] = {codec: [] for codec in codecs}
        for window in windows:
            scored = window.first_scored - window.start - 1
            expected = self._predictions("raw", window.ids, scored)
            for codec in codecs:
                found = expected if codec == "raw" else self._predictions(codec, window.ids, scored)
                came = window.ids[scored + 1 :]
                losses[codec].append(-found.gather(1, came[:, None]).squeeze(1))
                rights[codec].append(found.argmax(1) == came)
                divergences[codec].append(divergence(expected, found))
                advance()
        return {
            codec: TokenScores(*(torch.cat(parts[codec]) for parts in (losses, divergences, rights)))
            for codec in codecs
        }

    def continuations(self, codec: str, prompts: torch.Tensor, count: int) -> list[str]:
        """`count` greedy tokens after each of `[prompts, tokens]`, from a cache coded and decoded."""
        self._codec = (KEPT[codec].source or codec) if codec in KEPT else "raw"
        found = []
        with torch.inference_mode():
            # The prefill side picks the first token from its own, unsent cache; `decode` sees the sent one.
            state = self._model(input_ids=prompts, use_cache=True, logits_to_keep=1)
            cache, token = state.past_key_values, state.logits[:, -1].argmax(-1, keepdim=True)
            self._codec = codec
            for layer in cache.layers:
                layer.keys, layer.values = self._send(layer.keys, layer.values)
            for _ in range(count):
                found.append(token)
                state = self._model(input_ids=token, past_key_values=cache, use_cache=True)
                token = state.logits[:, -1].argmax(-1, keepdim=True)
        return list(self._tokenizer.decode_batch(torch.cat(found, 1).tolist()))

    def prefill(self, ids: torch.Tensor) -> Kv:
        """The KV of one prompt's tokens as they were computed."""
        self._codec = "raw"
        with torch.inference_mode():
            state = self._model(input_ids=ids[None], use_cache=True, logits_to_keep=1)
        return [(layer.keys.clone(), layer.values.clone()) for layer in state.past_key_values.layers]

    def send(self, codec: str, kv: Kv) -> Kv:
        """The same as it arrives."""
        self._codec = codec
        return [self._send(key, value) for key, value in kv]

    def decode(self, kv: Kv, token: torch.Tensor) -> torch.Tensor:
        """The logits `[vocabulary]` of what follows one token behind the prompt with this KV."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (key, value) in enumerate(kv):
            cache.update(key, value, layer)
        logits: torch.Tensor = self._model(input_ids=token[None], past_key_values=cache, use_cache=True).logits[0, -1]
        return logits

    def prompts(self, modules: Sequence[str], each: int) -> torch.Tensor:
        """`[modules * each, 512]` token ids, spread evenly over each module's text."""
        rows = []
        for name in modules:
            ids = self._tokenizer.encode(self._source(name)).ids
            last = len(ids) - PROMPT_TOKENS - LONGEST_CONTINUATION
            rows += [ids[last * i // each :][:PROMPT_TOKENS] for i in range(each)]
        return torch.tensor(rows)

    def windows(self, modules: Sequence[str], most: int | None = None) -> list[Window]:
        """The windows of the held-out modules' texts, of each its first `most`; None: all."""
        texts = (torch.tensor([0, *self._tokenizer.encode(self._source(name)).ids]) for name in modules)
        return [window for ids in texts for window in islice(cut_windows(ids), most)]

    def _predictions(self, codec: str, window: torch.Tensor, scored: int) -> torch.Tensor:
        """Log-probabilities `[tokens, vocabulary]` of what follows each token from `scored` on."""
        self._codec = codec
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=window[None, :-1], use_cache=False).logits[0, scored:]
            return logits.double().log_softmax(-1)

    def _send(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[prompts, heads, tokens, head_dim]` fp32 as it arrives, every prompt on its own."""
        pairs = []
        for k, v in zip(key, value, strict=True):
            sixteen = [x.transpose(0, 1).contiguous().to(torch.bfloat16) for x in (k, v)]
            pairs.append([x.to(torch.float32).transpose(0, 1) for x in _arrived(self._codec, *sixteen)])
        return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def _arrived(codec: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt's KV `[tokens, heads, head_dim]`, sent or kept."""
    kept = KEPT.get(codec)
    if kept is None:
        return through(codec, k, v)
    if kept.codec:
        k, v = through(kept.codec, *(KEPT[kept.source].round(x) for x in (k, v)))
    return kept.round(k), kept.round(v)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL(expected || found) of each row of log-probabilities, in nats."""
    return (expected.exp() * (expected - found)).sum(-1)


def cut_windows(ids: torch.Tensor) -> Iterator[Window]:
    """Windows of 2048 tokens that overlap by half, so that a token is predicted from at least 1024
    others."""
    scored, start = 1, 0  # the first token is given
    while scored < len(ids):
        window = ids[start : start + WINDOW_TOKENS + 1]
        yield Window(start, scored, window)
        scored = start + len(window)
        start += WINDOW_TOKENS // 2


def _folder() -> Path:
    package = (__package__ or "p2pserve.kernels").partition(".")[0]
    return Path(str(importlib.resources.files(package))) / "node" / "bundled"
