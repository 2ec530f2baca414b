"""What to ask, and what the right answer is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from p2pserve.node.bundled.evaluate import held_out_sources
from p2pserve.node.text import TextModel

LENGTHS = (1, 7, 64, 129, 300, 400)  # below, at and beyond vLLM's block of 128, and several chunks of 128


def prompts(text: TextModel, lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    """Held-out Python, cut to about these numbers of tokens."""
    ids = text.encode(held_out_sources()["heapq"])
    decoder = text._tokenizer
    return [decoder.decode(list(ids[40 : 40 + n])) for n in lengths]


def greedy(model: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """What `transformers` answers in float32, step by step."""
    from transformers import AutoModelForCausalLM

    llm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids, cache = torch.tensor([prompt]), None
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < count:
            out = llm(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            token = int(out.logits[0, -1].argmax())
            answer.append(token)
            if token == llm.config.eos_token_id:
                break
            ids = torch.tensor([[token]])
    return answer
