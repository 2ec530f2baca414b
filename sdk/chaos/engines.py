"""What boxes serve with in a run, and what the right answers are: known beforehand, token for token."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any, Final

from ...coordinator import Phase
from ...node.bundled.evaluate import held_out_sources
from ...node.engine.emulated.model import emulated_model, parse_cards
from ...node.engine.emulated.tokens import EmulatedAnswer
from ...node.models import BUNDLED
from ...node.models.text import TextModel
from .records import Expect
from .schedule import EMULATED, ChaosSettings, DrawPrompt

PROMPTS: Final = 24  # different ones that real engines are asked
SHORTEST: Final = 8
CLEAR: Final = 1e-3  # logits by which each token of a right answer must lead, since engines round differently
SMALL_GIB: Final = 0.082  # too little for the bundled model beside its KV: two such boxes hold it together


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The options of each box that serves, the codec of the network, and prompts with their right answers."""

    options: tuple[tuple[str, ...], ...]
    codec: str
    draw_prompt: DrawPrompt
    expect: Expect


def choose_setup(settings: ChaosSettings) -> EngineSetup:
    """Emulated engines, or vLLM with the bundled model."""
    return _emulated_setup(settings) if settings.engine == EMULATED else _vllm_setup(settings)


def _emulated_setup(settings: ChaosSettings) -> EngineSetup:
    vocabulary = emulated_model(settings.model, parse_cards(settings.cards)).emulation.vocabulary

    def draw_prompt(rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randrange(1, vocabulary) for _ in range(rng.randint(SHORTEST, settings.prompt)))

    def expect(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        answer = EmulatedAnswer(prompt, vocabulary)
        return tuple(answer.next() for _ in range(count))

    common = ("--emulate", settings.cards, "--model", settings.model)
    options = tuple((*common, "--phase", _phase(number).value) for number in range(settings.boxes))
    return EngineSetup(options, "kv4", draw_prompt, expect)


def _vllm_setup(settings: ChaosSettings) -> EngineSetup:
    """KV travels as it is: in 4 bits an answer could rightly differ. The last two boxes hold the model together."""
    answers = find_clear_answers(settings.prompt, settings.output)
    prompts = sorted(answers)

    def expect(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        return answers[prompt][:count]

    common = ("--model", "bundled", "--threads", "1", "--kv-cache-mib", "64")
    alone = [(*common, "--phase", _phase(number).value) for number in range(settings.boxes - 2)]
    together = [(*common, "--phase", Phase.PREFILL.value, "--memory-gib", f"{SMALL_GIB:g}")] * 2
    return EngineSetup((*alone, *together), "raw", lambda rng: rng.choice(prompts), expect)


def _phase(number: int) -> Phase:
    """To what boxes are pinned, so that KV travels: in turn."""
    return (Phase.DECODE, Phase.PREFILL)[number % 2]


def find_clear_answers(longest: int, count: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Held-out Python as prompts, with what `transformers` writes after each in float32; those alone where no token of
    it is nearly a tie."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # seconds, for real engines alone
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    llm: Any = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    ids = TextModel(BUNDLED).encode(held_out_sources()["heapq"])
    rng = random.Random(0)
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    while len(found) < PROMPTS:
        first = rng.randrange(len(ids) - longest)
        prompt = tuple(ids[first : first + rng.randint(SHORTEST, longest)])
        answer = _continue(llm, torch, prompt, count)
        if answer is not None:
            found[prompt] = answer
    return found


def _continue(llm: Any, torch: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """The greedy answer; None where a token leads the next one by too little."""
    answer: list[int] = []
    ids, past = torch.tensor([prompt]), None
    with torch.no_grad():
        while len(answer) < count:
            out = llm(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            best = out.logits[0, -1].topk(2)
            if float(best.values[0] - best.values[1]) < CLEAR:
                return None
            answer.append(int(best.indices[0]))
            ids = best.indices[:1].unsqueeze(0)
    return tuple(answer)
