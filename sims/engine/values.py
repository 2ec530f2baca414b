"""What goes into a simulated engine and what comes out of it: settings, signals, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import msgspec

from .sequence import Sequence


class SimEngineError(ValueError):
    """Settings or sequences that an engine cannot run; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimEngineSettings:
    """vLLM's settings that matter here.

    `max_batched_tokens`: token budget of a step (vLLM's max_num_batched_tokens); more prefills
    faster and makes the decode steps beside it longer. `max_sequences`: requests in a step
    (max_num_seqs); more raises throughput and the time of a decode step. `block_tokens`: KV memory
    is given out in blocks of so many tokens (block_size); larger ones leave more of it unused. `prefix_blocks`: a
    prefix cache (enable_prefix_caching) keeps prompts in pieces of so many blocks, of as many tokens
    as those that the trace names; 0: none is kept. `chunked_prefill` (enable_chunked_prefill): prompts are computed in
    chunks beside what decodes; False: each whole and before all decoding, which stands still meanwhile, as vLLM's
    default was before its version 1. Live engines here are never run so: it is for papers that were."""

    max_batched_tokens: int = 2048
    max_sequences: int = 256
    block_tokens: int = 16
    prefix_blocks: int = 0
    chunked_prefill: bool = True

    def __post_init__(self) -> None:
        if min(self.max_batched_tokens, self.max_sequences, self.block_tokens) < 1:
            raise SimEngineError("max_batched_tokens, max_sequences and block_tokens must be at least 1")
        if self.prefix_blocks < 0:
            raise SimEngineError(f"prefix_blocks is {self.prefix_blocks}; it must not be negative")
        if self.max_batched_tokens <= self.max_sequences:
            raise SimEngineError(
                f"max_batched_tokens is {self.max_batched_tokens}: with {self.max_sequences} sequences decoding, no "
                "token of a step would be left for prompts"
            )


class SignalKind(IntEnum):
    """What a signal is about."""

    PREFILL_STEP = 0
    """A step has begun that prefills `tokens` of a sequence that `sends_kv`; it ends at `at`."""
    PREFILLED = 1
    """A sequence that `sends_kv` is prefilled; its KV stays until `Engine.release_kv`."""
    FIRST_TOKEN = 2
    """A request's very first token is there at `at`: now, or at the end of the step that begins."""
    DONE = 3
    """A sequence has its last token."""
    HAS_ROOM = 4
    """Blocks are reserved for KV that is transferred to here."""


class EngineSignal(msgspec.Struct, frozen=True, gc=False):
    """One thing that a caller has to know."""

    kind: SignalKind
    sequence: Sequence
    at: float
    tokens: int = 0


class StepRecord(NamedTuple):
    """`steps` iterations in a row; `kind` is prefill, decode or mixed. `stalled`: requests whose decoding stands still
    meanwhile."""

    start_s: float
    end_s: float
    kind: str
    prompt_tokens: int
    requests: int
    steps: int
    stalled: int = 0


@dataclass(slots=True)
class EngineCounts:
    """Totals of an engine. Busy seconds by kind of step; `steps` counts iterations one by one."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    mixed_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, that were in the prefix cache and not computed
    received_tokens: int = 0  # of prompts, whose KV another engine has sent
    output_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0

    @property
    def busy_s(self) -> float:
        """Seconds in which it computed."""
        return self.prefill_s + self.decode_s + self.mixed_s
