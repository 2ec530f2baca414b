"""Fits the constants of `profile` to samples: least squares that stays honest with few, similar or
spoilt samples.

- Errors count relative to the measured time: a step of 2 ms matters as much as one of 200 ms.
- No constant is negative. With four columns that is solved exactly, by trying every subset of them.
- A constant wants two samples at least: with as many constants as samples any noise would be
  fitted.
- Samples often cannot tell two terms apart: where each step has had one request, b * L and L are
  the same column. The less plausible one of the two is then left out (0), in the order of
  `_PREFILL_TERMS` and `_DECODE_TERMS`.
- A step that the machine held up says nothing of the engine: samples that stick out are given less
  weight (Huber).
- Samples may be weighted besides: `costs.profile_tracker` has old ones count for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from .profile import LatencyProfile, PhaseCost, PhaseFit, StepSample

Array = npt.NDArray[np.float64]
Term = Literal["token_s", "request_s", "length_s", "step_s"]

MIN_SAMPLES: Final = 4
ROUNDS: Final = 8  # of reweighting; it settles in three or four
STICKS_OUT: Final = 2.0  # in units of the spread that normal samples have
SAME_COLUMN: Final = 1e-3  # what is left of a column, relative, when the ones before it are taken out

# The most plausible first: prefill is bound by computing tokens, decode by reading the weights once a step.
_PREFILL_TERMS: Final[tuple[Term, ...]] = ("token_s", "step_s", "request_s", "length_s")
_DECODE_TERMS: Final[tuple[Term, ...]] = ("step_s", "token_s", "request_s", "length_s")

# (requests, length, seconds, weight) of a step of one phase
_Point = tuple[float, float, float, float]


def fit(samples: Sequence[StepSample], weights: Sequence[float] | None = None) -> LatencyProfile:
    """Fit both phases. Steps that did both say something of prefill once what decoding adds is
    known. `weights`: what each sample counts for, above 0; without any, all count alike."""
    weighed = zip(samples, [1.0] * len(samples) if weights is None else weights, strict=True)
    steps = [(sample, weight) for sample, weight in weighed if sample.seconds > 0.0]
    decode = _fit_phase(
        [
            (each.decode_requests, each.decode_context / each.decode_requests, each.seconds, weight)
            for each, weight in steps
            if each.decode_requests and not each.prefill_requests
        ],
        _DECODE_TERMS,
    )
    points: list[_Point] = []
    for each, weight in steps:
        if not each.prefill_requests:
            continue
        seconds = each.seconds
        if each.decode_requests:
            if decode is None:
                continue
            seconds -= decode.cost.marginal_s(each.decode_requests, each.decode_context / each.decode_requests)
        if seconds > 0.0:
            points.append((each.prefill_requests, each.prefill_tokens / each.prefill_requests, seconds, weight))
    return LatencyProfile(prefill=_fit_phase(points, _PREFILL_TERMS), decode=decode)


def _fit_phase(points: Sequence[_Point], terms: Sequence[Term]) -> PhaseFit | None:
    if len(points) < MIN_SAMPLES:
        return None
    requests, length, seconds, weights = np.array(points, dtype=np.float64).T
    columns: dict[Term, Array] = {
        "token_s": requests * length,
        "request_s": requests,
        "length_s": length,
        "step_s": np.ones_like(requests),
    }
    used = _distinct(terms, {term: column / seconds for term, column in columns.items()})[: len(points) // 2]
    matrix = np.stack([columns[term] / seconds for term in used], axis=1)
    solution = solve_robustly(matrix, weights)
    error = _weighted_median(np.abs(matrix @ solution - 1.0), weights)
    constants: dict[str, float] = {term: float(value) for term, value in zip(used, solution, strict=True)}
    cost = PhaseCost(**constants)
    return PhaseFit(cost=cost, samples=len(points), error=error)


def _weighted_median(values: Array, weights: Array) -> float:
    """Half of the weight is on values below it."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2.0)])


def _distinct(terms: Sequence[Term], columns: dict[Term, Array]) -> list[Term]:
    """The terms whose columns are no combination of those before them."""
    kept: list[Term] = []
    basis: list[Array] = []  # orthonormal
    for term in terms:
        column = columns[term]
        rest = column
        for _ in range(2):  # a second pass removes what rounding has left of the first
            for direction in basis:
                rest = rest - (rest @ direction) * direction
        size = float(np.linalg.norm(rest))
        if size > SAME_COLUMN * float(np.linalg.norm(column)):
            kept.append(term)
            basis.append(rest / size)
    return kept


def solve_robustly(matrix: Array, counts: Array | None = None) -> Array:
    """Coefficients x >= 0 with `matrix` x close to 1 for most rows. `counts`: what each row counts
    for; without any, all count alike."""
    counts = np.ones(len(matrix)) if counts is None else counts
    solution = _non_negative(matrix, counts)
    for _ in range(ROUNDS):
        off = np.abs(matrix @ solution - 1.0)
        spread = 1.4826 * _weighted_median(off, counts)  # of normal samples, whatever the others do
        if spread <= 1e-12:
            break
        weights = np.minimum(1.0, STICKS_OUT * spread / np.maximum(off, 1e-300))
        solution = _non_negative(matrix, counts * weights)
    return solution


def _non_negative(matrix: Array, weights: Array) -> Array:
    """Least squares of `matrix` x = 1 under x >= 0, exactly: the best of all subsets of columns
    whose own solution is not negative. Four columns have fifteen."""
    root = np.sqrt(weights)
    scale = np.linalg.norm(matrix, axis=0)
    rows, wanted = matrix / scale * root[:, None], root
    best: Array = np.zeros(matrix.shape[1])
    best_off = float(wanted @ wanted)
    for size in range(1, matrix.shape[1] + 1):
        for subset in combinations(range(matrix.shape[1]), size):
            part = rows[:, subset]
            values = np.linalg.lstsq(part, wanted, rcond=None)[0]
            if (values < 0.0).any():
                continue
            off = part @ values - wanted
            if (total := float(off @ off)) < best_off:
                best, best_off = np.zeros(matrix.shape[1]), total
                best[list(subset)] = values
    found: Array = best / scale
    return found
