"""Bits per byte of a causal language model on the held-out modules of the standard library."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

HELD_OUT = ("argparse", "dataclasses", "tarfile", "heapq", "difflib")


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_sources() -> dict[str, str]:
    """The held-out modules' texts as this interpreter ships them."""
    return {name: (stdlib_root() / f"{name}.py").read_text("utf-8") for name in HELD_OUT}


@torch.no_grad()
def bits_per_byte(model: Any, tokenizer: Tokenizer, texts: list[str], context: int = 2048) -> float:
    """Negative log2-likelihood of `texts` per UTF-8 byte, every byte counted.

    Each text starts from the end-of-text token. Windows of `context` tokens overlap by half, so a token
    past the first window is predicted from at least `context / 2` tokens before it.
    """
    bits, size = 0.0, 0
    for text in texts:
        ids = torch.tensor([0, *tokenizer.encode(text).ids])
        size += len(text.encode())
        scored = 1  # ids[:scored] need no more scoring; ids[0] is given
        start = 0
        while scored < len(ids):
            window = ids[start : start + context + 1]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
            first = scored - start - 1
            losses = torch.nn.functional.cross_entropy(logits[first:].float(), window[first + 1 :], reduction="sum")
            bits += losses.item() / math.log(2)
            scored = start + len(window)
            start += context // 2
    return bits / size
