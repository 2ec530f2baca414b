"""Synthetic keys and values of known difficulty, and what a codec does to them. The kinds stand for
what real models show; figures compare codecs only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..codec import decode, encode

BLOCK_TOKENS = 512
TOKENS, HEADS, HEAD_DIM, QUERIES = 2048, 4, 128, 64

PROMPT_TOKENS, PROMPT_HEADS = 1500, 8
"""The prompt of `bits_per_element`: of no round length, on a model with 8 KV heads of 128."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Errors:
    """A codec's error on one pair of tensors.

    `logit_db`: variance over keys of the error of q . k over that of q . k, in dB, mean over heads
    and queries. `key`, `value`: error length over tensor length."""

    logit_db: float
    key: float
    value: float


def _normal(rng: torch.Generator) -> Pair:
    """Independent N(0, 1)."""
    return _noise(rng), _noise(rng)


def _heavy_tailed(rng: torch.Generator) -> Pair:
    """Student's t with 3 degrees of freedom."""
    return _student(rng), _student(rng)


def _outlier_channel(rng: torch.Generator) -> Pair:
    """N(0, 1), and in 5 % of the channels of each head 8 times that about a mean of N(0, 16)."""
    pair = []
    for _ in range(2):
        x = _noise(rng)
        outlier = torch.rand(HEADS, HEAD_DIM, generator=rng) < 0.05
        far = 16 * torch.randn(HEADS, HEAD_DIM, generator=rng)
        pair.append(torch.where(outlier, 8 * x + far, x))
    return pair[0], pair[1]


def _qwen2_like(rng: torch.Generator) -> Pair:
    """N(0, 1) and a constant bias of norm 600 per layer, 9/10 of it in the slow half of the
    channels; then RoPE. As Qwen2's first layer (605; its last 921); V's is ordinary."""
    bias = torch.randn(HEADS, HEAD_DIM, generator=rng) ** 3
    slow = torch.arange(HEAD_DIM) % (HEAD_DIM // 2) >= HEAD_DIM // 4
    bias[:, ~slow] *= math.sqrt(0.1 / 0.9) * float(bias[:, slow].norm() / bias[:, ~slow].norm())
    bias *= 600 / bias.norm()
    value_bias = 0.5 * torch.randn(HEADS, HEAD_DIM, generator=rng)
    return _rope(_noise(rng) + bias), _noise(rng) + value_bias


KINDS: dict[str, Callable[[torch.Generator], Pair]] = {
    "normal": _normal,
    "heavy-tailed": _heavy_tailed,
    "outlier-channel": _outlier_channel,
    "qwen2-like": _qwen2_like,
}


def tensors(kind: str, tokens: int = TOKENS) -> Pair:
    """The first `tokens` of K and V `[2048, 4, 128]` in bf16; the same numbers in every run."""
    k, v = KINDS[kind](torch.Generator().manual_seed(list(KINDS).index(kind)))
    return k[:tokens].to(torch.bfloat16), v[:tokens].to(torch.bfloat16)


def through(codec: str, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """What arrives of a whole prompt `[tokens, heads, head_dim]` sent in blocks of 512 tokens."""
    arrived = [
        decode(
            codec,
            encode(codec, k[part], v[part], start=part.start, layer=0),
            tokens=part.stop - part.start,
            heads=k.shape[1],
            head_dim=k.shape[2],
            dtype=k.dtype,
            start=part.start,
            layer=0,
        )
        for part in _blocks(k.shape[0])
    ]
    return torch.cat([pair[0] for pair in arrived]), torch.cat([pair[1] for pair in arrived])


def block_errors(codec: str, k: torch.Tensor, v: torch.Tensor) -> Errors:
    """The errors of a codec on one prompt."""
    got_k, got_v = through(codec, k, v)
    true, error = k.float(), got_k.float() - k.float()
    queries = torch.randn(QUERIES, *k.shape[1:], generator=torch.Generator().manual_seed(99))
    noise, signal = (float(torch.einsum("qhd,thd->hqt", queries, x).var(-1).mean()) for x in (error, true))
    # `raw` makes no error at all, and JSON knows no minus infinity.
    logit_db = 10 * math.log10(noise / signal) if noise else -math.inf
    return Errors(logit_db, float(error.norm() / true.norm()), _relative(got_v, v))


def bits_per_element(codec: str) -> float:
    """Bits per value in all, for a 1500-token prompt in blocks of 512 tokens, 8 heads of 128."""
    shape = (PROMPT_TOKENS, PROMPT_HEADS, HEAD_DIM)
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(*shape, generator=rng).to(torch.bfloat16) for _ in range(2))
    parts = _blocks(PROMPT_TOKENS)
    total = sum(len(encode(codec, k[part], v[part], start=part.start, layer=0)) for part in parts)
    return total * 8 / (k.numel() + v.numel())


def _blocks(tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK_TOKENS, tokens)) for start in range(0, tokens, BLOCK_TOKENS))


def _relative(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.float() - true.float()).norm() / true.float().norm())


def _student(rng: torch.Generator) -> torch.Tensor:
    squares = torch.stack([_noise(rng) ** 2 for _ in range(3)])
    return _noise(rng) / squares.mean(0).sqrt()


def _noise(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(TOKENS, HEADS, HEAD_DIM, generator=rng)


def _rope(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions as Llama and Qwen apply them: channel c turns with channel c + head_dim / 2."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0])[:, None, None] * 1e6 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
