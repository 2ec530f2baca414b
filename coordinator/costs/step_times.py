"""How long one iteration of an engine takes: the interface that planner, simulator and emulated
engine share.

An iteration (step) computes some prompts' tokens, or one token each for some decoding requests, or
both. What it costs depends on four numbers:

- `tokens`: prompt tokens computed, all requests together;
- `pairs`: query-key pairs of those tokens, all requests together: a chunk of c tokens behind s
  earlier ones has c * s + c * (c + 1) / 2;
- `requests`: requests that decode;
- `context`: tokens that those hold in their KV caches, all together.

At a fixed number of decoding requests, a decode step is linear in the context: every source here
(roofline, fits and tables alike) has that form, and it lets the simulator take thousands of steps
at once in closed form.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class DecodeLine(NamedTuple):
    """Seconds of a decode step at a fixed number of requests: `fixed_s + context_s * context`."""

    fixed_s: float
    context_s: float

    def step_s(self, context: float) -> float:
        """One step over so many tokens of context."""
        return self.fixed_s + self.context_s * context

    def run_s(self, requests: int, context: float, steps: int) -> float:
        """`steps` steps in a row: each adds a token to the context of every request."""
        grown = requests * (steps * (steps - 1) // 2)
        return steps * self.fixed_s + self.context_s * (steps * context + grown)


class StepTimes(Protocol):
    """Of one replica: its stages and the hops between them. Pure, cheap, never negative."""

    @property
    def source(self) -> str:
        """Where the figures come from, for reports: `roofline, dense`, `perf_model.csv, measured`."""
        ...

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """Seconds from the start of a prefill-only step to its first token."""
        ...

    def prefill_interval_s(self, tokens: int, pairs: float) -> float:
        """Seconds until the next prefill may start; less than `prefill_s` in a pipeline."""
        ...

    def decode_line(self, requests: int) -> DecodeLine:
        """Token to token of a decode-only step, requests spread over a pipeline's batches."""
        ...

    def mixed_s(self, tokens: int, pairs: float, requests: int, context: float) -> float:
        """Seconds of a step that does both."""
        ...


def chunk_pairs(start: int, tokens: int) -> float:
    """Query-key pairs of a chunk of `tokens` behind `start` earlier ones of the same prompt."""
    return tokens * start + tokens * (tokens + 1) / 2
