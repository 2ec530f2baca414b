"""The sweep of batch sizes and lengths by which an instance is profiled before it has traffic (Xiong
et al., section 3.1), here over a model of its step times: the eight constants of a replica that has
not told any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ..profile import ReplicaProfile, StepSample
from ..profile_fit import fit
from .step_times import StepTimes, chunk_pairs

BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
LENGTHS: Final = (32, 128, 512, 1024)

MOST_PREFILLED: Final = 8192
"""Tokens of a step that prefills; engines compute no more at once."""


def sweep_steps(times: StepTimes) -> Iterator[StepSample]:
    """Steps that prefill or decode equal requests, and how long they take."""
    for batch in BATCHES:
        for length in LENGTHS:
            tokens = batch * length
            if tokens <= MOST_PREFILLED:
                yield StepSample(times.prefill_s(tokens, batch * chunk_pairs(0, length)), batch, tokens, 0, 0)
            yield StepSample(times.decode_line(batch).step_s(tokens), 0, 0, batch, tokens)


def profile_times(times: StepTimes, kv_tokens: int) -> ReplicaProfile:
    """The constants fitted to a sweep over these times. Takes 5 to 10 ms."""
    found = fit(list(sweep_steps(times)))
    assert found.prefill is not None, "a sweep has samples enough of both phases"
    assert found.decode is not None, "likewise"
    return ReplicaProfile(prefill=found.prefill.cost, decode=found.decode.cost, kv_tokens=kv_tokens)
