"""Steps with decodes and prefill chunks at once, and how large the chunks should be.

A pipeline of n stages works on n batches, and each of them may compute a prefill chunk beside what
it decodes. From one token of a request to its next is one round: once through all stages in company
of the largest chunk, or all batches through the slowest stage, whichever takes longer. A batch that
is slow holds up all behind it, so that one chunk costs as much of a round as one for every batch
does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from .roofline import TYPICAL_CONTEXT
from .step_times import StepTimes, chunk_pairs

TOKEN_BUDGETS: Final = (2048, 1536, 1024, 768, 512, 384)
"""Token budgets of a batch (vLLM's max_num_batched_tokens). Smaller ones mostly read weights, and
leave 256 decoding requests no room for prompts."""

DEADLINE_SHARE: Final = 0.7
"""Of the deadline from token to token, what a round may take whose chunks are full."""

COMPANY: Final = 4
"""Requests that decode in each batch, of TYPICAL_CONTEXT, when a budget is chosen."""


class PrefillChunk(NamedTuple):
    """Prompt tokens that one batch computes in a step, and their query-key pairs."""

    tokens: int
    pairs: float


def round_s(times: StepTimes, stages: int, chunks: Sequence[PrefillChunk], requests: int, context: float) -> float:
    """Seconds of a round in which `requests` decode and as many batches as there are `chunks` have
    one each.

    There are no more chunks than stages, and at least one.
    """
    if stages == 1:
        return times.mixed_s(*chunks[0], requests, context)
    kinds = Counter(chunks)
    longest = max(times.mixed_s(*chunk, requests, context) for chunk in kinds)
    prefill_s = sum(many * _prefill_stage_s(times, stages, chunk, requests) for chunk, many in kinds.items())
    return max(longest, prefill_s + _decode_stage_s(times, stages, len(chunks), requests, context))


def equal_rounds_s(times: StepTimes, stages: int, chunk: PrefillChunk, requests: int, context: float) -> list[float]:
    """Of rounds in which 1, 2, ... `stages` batches have such a chunk: see `round_s`."""
    longest = times.mixed_s(*chunk, requests, context)
    if stages == 1:
        return [longest]
    prefill_s = _prefill_stage_s(times, stages, chunk, requests)
    return [
        max(longest, many * prefill_s + _decode_stage_s(times, stages, many, requests, context))
        for many in range(1, stages + 1)
    ]


def _prefill_stage_s(times: StepTimes, stages: int, chunk: PrefillChunk, requests: int) -> float:
    """The slowest stage on a batch with a chunk; weights are read once for both."""
    return times.prefill_interval_s(chunk.tokens + round(requests / stages), chunk.pairs)


def _decode_stage_s(times: StepTimes, stages: int, chunks: int, requests: int, context: float) -> float:
    """The slowest stage on all batches without a chunk, and on the context of all."""
    batches, line = min(stages, requests), times.decode_line(requests)
    return max(0, batches - chunks) / batches * line.fixed_s + line.context_s * context


def choose_token_budget(times: StepTimes, stages: int, tpot_s: float) -> int:
    """The largest of TOKEN_BUDGETS that keeps a round in time in which every batch is filled up
    with prompt tokens; the least of them where none does."""
    requests = COMPANY * stages
    for tokens in TOKEN_BUDGETS:
        chunk = PrefillChunk(tokens - COMPANY, chunk_pairs(TYPICAL_CONTEXT, tokens - COMPANY))
        *_, full_s = equal_rounds_s(times, stages, chunk, requests, requests * TYPICAL_CONTEXT)
        if full_s <= DEADLINE_SHARE * tpot_s:
            return tokens
    return TOKEN_BUDGETS[-1]
