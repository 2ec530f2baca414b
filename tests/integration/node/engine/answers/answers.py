"""What to ask, and what the right answer is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from p2pserve.node.bundled.evaluate import held_out_sources
from p2pserve.node.models.text import TextModel

LENGTHS = (1, 7, 64, 129, 300, 400)  # below, at and beyond vLLM's block of 128, and several chunks of 128


def prompts(text: TextModel, lengths: tuple[int, ...] = LENGTHS, *, skip: int = 0) -> list[str]:
    """Held-out Python, cut to about these numbers of tokens; with another `skip`, others that begin otherwise."""
    ids = text.encode(held_out_sources()["heapq"])
    return [text.decoder().push(ids[40 + skip : 40 + skip + n]) for n in lengths]


@cache
def _loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # several, of which one gets no core, wait for each other far longer than one needs
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def regrets(model: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """By how many logits each token of an answer is behind the one that `transformers` would write there in float32,
    after the prompt and the tokens before it. All 0: it is `greedy`'s answer."""
    with torch.no_grad():
        logits = _loaded(model)(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return [float(each) for each in logits.max(dim=1).values - chosen]


def greedy(model: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """What `transformers` answers in float32, step by step."""
    llm = _loaded(model)
    ids, past = torch.tensor([prompt]), None
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < count:
            out = llm(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            token = int(out.logits[0, -1].argmax())
            answer.append(token)
            if token == llm.config.eos_token_id:
                break
            ids = torch.tensor([[token]])
    return answer
