"""Prompts on their way through an engine: which tokens of which a step computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...coordinator.costs.rounds import PrefillChunk
from ...coordinator.costs.step_times import chunk_pairs
from .sequence import Sequence
from .values import EngineSignal, SignalKind


class PromptChunk(NamedTuple):
    """`tokens` tokens of a prompt, behind `start` that were computed before."""

    sequence: Sequence
    start: int
    tokens: int


class PrefillStep(NamedTuple):
    """A prefill-only step on its way through the stages; it leaves the last one at `end`."""

    end: float
    chunks: list[PromptChunk]


def add_up(chunks: Iterable[PromptChunk]) -> PrefillChunk:
    """The prefill work of one batch in a step."""
    tokens, pairs = 0, 0.0
    for _, start, size in chunks:
        tokens += size
        pairs += chunk_pairs(start, size)
    return PrefillChunk(tokens, pairs)


def announce_prefill(chunks: Iterable[PromptChunk], end: float) -> Iterator[EngineSignal]:
    """What a step that ends at `end` computes of prompts whose KV is sent."""
    return (
        # what was cached is there at once, and is sent with what this step computes
        EngineSignal(SignalKind.PREFILL_STEP, sequence, end, tokens + (start if start == sequence.cached else 0))
        for sequence, start, tokens in chunks
        if sequence.sends_kv
    )
