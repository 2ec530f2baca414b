"""The sweep of batch sizes and lengths by which an instance is profiled before it has traffic (Xiong
et al., section 3.1): the batches that a node tries on its engine, and the same over a model of step
times, which gives the eight constants of a replica that has not told any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from ..profile import ReplicaProfile, StepSample
from ..profile_fit import fit
from .step_times import StepTimes, chunk_pairs


class SweepBatch(NamedTuple):
    """So many requests at once, and the tokens of each one's prompt."""

    requests: int
    prompt: int


ENGINE_SWEEP: Final = (
    SweepBatch(1, 32), SweepBatch(8, 32), SweepBatch(1, 256), SweepBatch(8, 256),
    SweepBatch(4, 128), SweepBatch(16, 32), SweepBatch(1, 512), SweepBatch(16, 128),
)  # fmt: skip
"""What a node tries, in this order, in a few seconds. The first four tell all terms apart; a slow engine comes no
further. More: a better fit, and a longer sweep."""

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
LENGTHS: Final = (32, 128, 512, 1024)
MODEL_SWEEP: Final = tuple(SweepBatch(batch, length) for batch in BATCHES for length in LENGTHS)
"""What is tried where it takes no time."""

MOST_PREFILLED: Final = 8192
"""Tokens of a step that prefills; engines compute no more at once."""


def sweep_steps(times: StepTimes, batches: Iterable[SweepBatch] = MODEL_SWEEP) -> Iterator[StepSample]:
    """Steps that prefill or decode equal requests, and how long they take."""
    for batch, length in batches:
        tokens = batch * length
        if tokens <= MOST_PREFILLED:
            yield StepSample(times.prefill_s(tokens, batch * chunk_pairs(0, length)), batch, tokens, 0, 0)
        yield StepSample(times.decode_line(batch).step_s(tokens), 0, 0, batch, tokens)


def profile_times(times: StepTimes, kv_tokens: int, batches: Iterable[SweepBatch] = MODEL_SWEEP) -> ReplicaProfile:
    """The constants fitted to a sweep over these times. Takes 5 to 10 ms."""
    found = fit(list(sweep_steps(times, batches)))
    assert found.prefill is not None, "a sweep has samples enough of both phases"
    assert found.decode is not None, "likewise"
    return ReplicaProfile(prefill=found.prefill.cost, decode=found.decode.cost, kv_tokens=kv_tokens)
