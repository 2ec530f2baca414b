"""What goes into a simulated engine and what comes out of it: settings, news, and counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from .sequence import Sequence

__all__ = ["EngineCounts", "EngineSettings", "EngineSignal", "SignalKind", "SimEngineError", "StepRecord"]


class SimEngineError(ValueError):
    """Settings or sequences that an engine cannot run; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The knobs of vLLM that matter here, with its names' meaning; memory is counted in blocks of tokens."""

    max_batched_tokens: int = 2048
    max_sequences: int = 256
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if min(self.max_batched_tokens, self.max_sequences, self.block_tokens) < 1:
            raise SimEngineError("max_batched_tokens, max_sequences and block_tokens must be at least 1")
        if self.max_batched_tokens <= self.max_sequences:
            raise SimEngineError(
                f"max_batched_tokens is {self.max_batched_tokens}: with {self.max_sequences} sequences decoding, no "
                "token of a step would be left for prompts"
            )


class SignalKind(IntEnum):
    """What an engine has to tell."""

    READING = 0
    """A step has begun that reads `tokens` of a prompt that is handed over; it ends at `at`."""
    READ = 1
    """All of a prompt that is handed over is read; its KV stays until `release`."""
    FIRST = 2
    """The very first token of a sequence is there at `at`, which is now or the end of the step that begins."""
    DONE = 3
    """The last token is there."""
    ROOM = 4
    """Blocks are reserved for KV that is to come from elsewhere."""


class EngineSignal(NamedTuple):
    """One piece of news."""

    kind: SignalKind
    sequence: Sequence
    at: float
    tokens: int = 0


class StepRecord(NamedTuple):
    """What an engine did in one go: `steps` iterations of `kind`, over so many prompt tokens and decoding requests."""

    start_s: float
    end_s: float
    kind: str
    prompt_tokens: int
    requests: int
    steps: int


@dataclass(slots=True)
class EngineCounts:
    """What an engine has done so far. Busy seconds by kind of step; `steps` counts iterations one by one."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    mixed_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    written_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0

    @property
    def busy_s(self) -> float:
        """Seconds in which it computed."""
        return self.prefill_s + self.decode_s + self.mixed_s
