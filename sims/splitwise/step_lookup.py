"""Step times by the two numbers that a Splitwise machine knows of a batch, each looked up once."""

from __future__ import annotations

from typing import Literal, final

import numpy as np

from ...coordinator.costs.step_times import StepTimes
from ..records import Trace

Mode = Literal["released", "axis", "measured"]
"""How `perf_model.csv` is read and how large KV caches are: see `run.py`."""


def decode_axis(mode: Mode) -> Literal["released", "measured"]:
    """How decode steps are looked up. `measured` and `axis` do so alike; they differ in the KV
    cache's size."""
    return "released" if mode == "released" else "measured"


def mean_prompt(trace: Trace) -> float:
    """Tokens of the prompt that a prompt token of the trace is in, on average."""
    prompts = trace.prompt.astype(np.float64)
    return float(np.sum(prompts * prompts) / np.sum(prompts))


def mean_context(trace: Trace) -> float:
    """Tokens that a decoding request of the trace holds, over all of its steps on average."""
    steps = trace.output.astype(np.float64)
    return float(np.sum(steps * (trace.prompt + steps / 2)) / np.sum(steps))


@final
class CachedIterations:
    """Implements `machine.IterationTimes`.

    A machine does not know which prompts a batch is made of, nor how long contexts are. Measured
    tables do not ask; for a roofline, prompts are of `prompt` tokens and contexts of `context`.
    """

    def __init__(self, times: StepTimes, prompt: float = 0.0, context: float = 0.0) -> None:
        self._times = times
        self._prompt = prompt
        self._context = context
        self._known: dict[tuple[int, int], float] = {}

    def iteration_s(self, prompt_tokens: int, decodes: int) -> float:
        """Seconds of one iteration."""
        key = (prompt_tokens, decodes)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._look_up(prompt_tokens, decodes)
        return seconds

    def _look_up(self, prompt_tokens: int, decodes: int) -> float:
        pairs, context = prompt_tokens * min(prompt_tokens, self._prompt) / 2, decodes * self._context
        if not prompt_tokens:
            return self._times.decode_line(decodes).step_s(context)
        if not decodes:
            return self._times.prefill_s(prompt_tokens, pairs)
        return self._times.mixed_s(prompt_tokens, pairs, decodes, context)
