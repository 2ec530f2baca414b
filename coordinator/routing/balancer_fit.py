"""The two predictors of `balancer`, fitted to an engine's own steps.

    line = fit_chunk_line(book.samples(), expected_chunk_line(times, 512), step_tokens=512)

Until an engine has run steps of a kind, what is known is what the roofline expects of it: the prior.
It counts as PRIOR_STEPS steps, in proportion to what was measured, so that steps of short prompts
alone, which say nothing of long ones, raise or lower the whole line. Least squares of relative
errors with coefficients that are not negative, and less weight for what sticks out (`profile_fit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from ..costs.gpus import GpuSpec, Specs
from ..costs.model_shape import ModelShape
from ..costs.replica import StageHardware, replica_times
from ..costs.roofline import TYPICAL_CONTEXT
from ..costs.step_times import StepTimes, chunk_pairs
from ..profile import StepSample
from ..profile_fit import MIN_SAMPLES, Array, solve_robustly
from .balancer import ChunkLine, PrefillLine

PREFILL_LENGTHS: Final = (64, 128, 256, 512, 1024, 1536, 2048)
"""Tokens of the prompts that a prior is taken at: prompts are mostly no longer."""

CHUNK_CONTEXTS: Final = tuple((prefill, decode) for prefill in (0, 1024, 2048, 4096) for decode in (0, 16_384, 65_536))
"""Contexts of the chunk and of the decoding requests that a prior is taken at."""

PRIOR_PREFILLS: Final = (128, 512, 1024, 2048)
PRIOR_CHUNKS: Final = ((0, 0), (2048, 0), (0, 32_768), (2048, 32_768))
PRIOR_STEPS: Final = len(PRIOR_CHUNKS)

FULL_STEP: Final = 0.9
"""Of its tokens, what a step has to compute to count as filled up."""


LEAST_RATE: Final = 1e-3
"""TFLOP/s and GB/s: no device is slower."""


class FitQuality(NamedTuple):
    """How well a line says what was measured: the coefficient of determination, and the mean of
    |predicted - measured| / measured."""

    r_squared: float
    mean_error: float


def measured_times(model: ModelShape, tflops: float, memory_gbps: float) -> StepTimes:
    """Of an engine that has measured these rates of its device, all of its GPUs together. A replica of several boxes
    is taken for one box: what its links cost is found in its steps."""
    card = GpuSpec(
        name="", memory_gib=1.0, memory_gbps=max(memory_gbps, LEAST_RATE), tflops=max(tflops, LEAST_RATE),
        nvlink_gbps=0.0, pcie_gen=0, usd_per_hour=0.0, specs=Specs.ENGINE,
    )  # fmt: skip
    return replica_times(model, [StageHardware(card, 1, model.layers, 1.0)])


def expected_prefill_line(times: StepTimes) -> PrefillLine:
    """Fitted to what these times say of prompts that are alone."""
    rows = [(tokens, 1.0) for tokens in PREFILL_LENGTHS]
    seconds = [times.prefill_s(tokens, chunk_pairs(0, tokens)) for tokens in PREFILL_LENGTHS]
    token_s, base_s = _solve(rows, seconds)
    return PrefillLine(token_s=token_s, base_s=base_s)


def expected_chunk_line(times: StepTimes, step_tokens: int) -> ChunkLine:
    """Fitted to what these times say of full steps, with decoding requests of TYPICAL_CONTEXT."""
    rows, seconds = [], []
    for prefill, decode in CHUNK_CONTEXTS:
        requests = decode // TYPICAL_CONTEXT
        tokens = max(1, step_tokens - requests)
        rows.append((float(prefill), float(decode), 1.0))
        seconds.append(times.mixed_s(tokens, chunk_pairs(prefill, tokens), requests, decode))
    return _chunk_line(_solve(rows, seconds))


def fit_prefill_line(samples: Iterable[StepSample], prior: PrefillLine) -> PrefillLine:
    """From the steps that only prefilled."""
    steps = [each for each in samples if each.prefill_requests and not each.decode_requests and each.seconds > 0.0]
    if len(steps) < MIN_SAMPLES:
        return prior
    measured = [each.seconds for each in steps]
    level = _level(measured, [prior.seconds(each.prefill_tokens) for each in steps])
    rows = [(float(each.prefill_tokens), 1.0) for each in steps]
    rows += [(float(tokens), 1.0) for tokens in PRIOR_PREFILLS]
    expected = [level * prior.seconds(tokens) for tokens in PRIOR_PREFILLS]
    token_s, base_s = _solve(rows, [*measured, *expected])
    return PrefillLine(token_s=token_s, base_s=base_s)


def fit_chunk_line(samples: Iterable[StepSample], prior: ChunkLine, step_tokens: int) -> ChunkLine:
    """From the steps with a chunk of one prompt that were filled up."""
    steps = [each for each in samples if _is_full(each, step_tokens)]
    if len(steps) < MIN_SAMPLES:
        return prior
    measured = [each.seconds for each in steps]
    level = _level(measured, [prior.seconds(each.prefill_context, each.decode_context) for each in steps])
    rows = [(float(each.prefill_context), float(each.decode_context), 1.0) for each in steps]
    rows += [(float(prefill), float(decode), 1.0) for prefill, decode in PRIOR_CHUNKS]
    expected = [level * prior.seconds(prefill, decode) for prefill, decode in PRIOR_CHUNKS]
    return _chunk_line(_solve(rows, [*measured, *expected]))


def quality(predicted: Sequence[float], measured: Sequence[float]) -> FitQuality:
    """Of a line, from its predictions and the times themselves."""
    guess, real = np.array(predicted), np.array(measured)
    off = guess - real
    around = real - real.mean()
    return FitQuality(1.0 - float(off @ off / (around @ around)), float(np.mean(np.abs(off) / real)))


def _is_full(step: StepSample, step_tokens: int) -> bool:
    computed = step.prefill_tokens + step.decode_requests
    return step.prefill_requests == 1 and computed >= FULL_STEP * step_tokens and step.seconds > 0.0


def _level(measured: Sequence[float], expected: Sequence[float]) -> float:
    """How many times as long as expected the steps have taken: their median."""
    return float(np.median(np.array(measured) / np.maximum(np.array(expected), 1e-300)))


def _solve(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    matrix: Array = np.array(rows) / np.array(seconds)[:, None]
    kept = [column for column in range(matrix.shape[1]) if np.any(matrix[:, column])]
    found = np.zeros(matrix.shape[1])
    found[kept] = solve_robustly(matrix[:, kept])
    return [float(value) for value in found]


def _chunk_line(coefficients: Sequence[float]) -> ChunkLine:
    prefill, decode, base = coefficients
    return ChunkLine(prefill_context_s=prefill, decode_context_s=decode, base_s=base)
