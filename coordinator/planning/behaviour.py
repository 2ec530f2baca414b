"""What a replica does on its own, at every load: how busy it is, how fast it reads and writes.

Assumptions, so that a simulation can be held against them:

- The number of requests that decode together is the one at which as many end as come (Little): b = rate * mean output
  * time between tokens, which depends on b.
- A mixed replica reads prompts in chunks that ride on decode steps: reading takes time from writing, and every chunk
  waits for the decodes it travels with.
- A replica that only reads computes short prompts together when many wait, and one after the other when few do. Long
  ones are read in chunks, which follow each other through the stages of a pipeline.
- Memory for a prompt is taken when its reading begins, here or on another replica, which is as fast as this one. Memory
  for the output is taken as it grows; where there is none left, the latest request is read again later. When memory is
  full all the time, the share of requests that meet this is the share of memory that grew.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from ..costs.step_times import StepTimes
from ..plan import Phase
from .length_classes import Classes

__all__ = ["CHUNK_TOKENS", "LOADS", "MAX_BATCH", "Behaviour", "Row", "behaviour"]

Array = NDArray[np.float64]

LOADS: Final[Array] = np.array([0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0])
"""The utilisations that a replica's behaviour is tabulated at."""

CHUNK_TOKENS: Final = 2048
"""Prompt tokens that one step computes at most: longer prompts are read in chunks, short ones together."""

MAX_BATCH: Final = 256
"""Requests that one replica decodes together at most."""

_BATCHES: Final = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])


@dataclass(frozen=True, slots=True, eq=False)
class Behaviour:
    """One replica on its own, at every load.

    `read` and `write`: the rates (requests/s) that would fill it if it did nothing else, infinite for what it does not
    do; the load at X prompts and Y outputs per second is X / read + Y / write. `lone_s`, `lone_sd_s`: reading a prompt
    of each class; `chunks`: the steps that takes on a mixed replica, each behind a decode step. `spread`: squared
    coefficient of variation of the times to read. `table`: the columns of `Row` at each of LOADS.
    """

    read: float
    write: float
    lone_s: Array
    lone_sd_s: Array
    chunks: Array
    spread: float
    max_batch: float
    table: Array

    @property
    def rate(self) -> float:
        """Requests per second at full load when it does all of its work for the same requests."""
        return 1.0 / (1.0 / self.read + 1.0 / self.write)

    @property
    def reads(self) -> bool:
        """Whether prompts are for it."""
        return self.read < inf

    @property
    def writes(self) -> bool:
        """Whether outputs are for it."""
        return self.write < inf

    def batch_at(self, load: float) -> float:
        """Requests in progress: those that decode, or of a replica that only reads, the one being read."""
        column = "batch" if self.writes else "rho"
        return float(np.interp(load, LOADS, self.table[:, Row._fields.index(column)]))

    def alone_s(self, classes: Classes) -> float:
        """An average request that has the replica to itself."""
        tpot_s = float(self.table[0, Row._fields.index("tpot_s")])
        return float(classes.share @ self.lone_s) + tpot_s * classes.mean_output


class Row(NamedTuple):
    """What a replica does at one load, as columns of `Behaviour.table`.

    `rho`: share of the time that it is reading. `occupied_s`: by one prompt on average. `step_s`: a decode step's time.
    `tpot_s`: from token to token. `batch`: requests that decode. Variances of tpot_s: with their number, `batch_var`;
    with their contexts, `context_var`; with the prompts that come between, times the tokens of the request that sees
    them, `prompt_var`.
    """

    rho: Array
    occupied_s: Array
    step_s: Array
    tpot_s: Array
    batch: Array
    batch_var: Array
    context_var: Array
    prompt_var: Array


class _Steps(NamedTuple):
    """Decode steps at some batch sizes, the first of them 0 (an idle replica). `again_s`: what a request costs on
    average for being read again."""

    batch: Array
    step_s: Array
    context_s: Array
    again_s: Array


def behaviour(
    phase: Phase, times: StepTimes, classes: Classes, *, kv_tokens: int, arrival_cv: float = 1.0
) -> Behaviour:
    """Of a replica with room for so many tokens of KV, which must be enough for the requests there are."""
    if phase is Phase.PREFILL:
        return _reader(times, classes, _reads(times, classes))
    peaked = (1.0 + arrival_cv**2) / 2.0
    steps = _decode_steps(times, classes, _most(times, classes, kv_tokens), peaked)
    if phase is Phase.DECODE:
        nothing = np.zeros_like(classes.share)
        return _writer(steps, classes, _Reads(nothing, nothing, nothing), peaked)
    reads, gain = _reads(times, classes), _ride(times, classes, steps)
    return _writer(steps, classes, _Reads(*(column * gain for column in reads)), peaked)


def _most(times: StepTimes, classes: Classes, kv_tokens: int) -> int:
    """Requests that may decode together beside those that are being read."""
    read_s = times.prefill_s(round(classes.mean_prompt), classes.mean_pairs)
    most = kv_tokens / classes.held
    for _ in range(2):  # fewer requests take shorter steps, so that more are being read meanwhile: it settles at once
        batch = int(min(MAX_BATCH, max(1.0, most)))
        life_s = classes.mean_output * times.decode_line(batch).step_s(batch * classes.held)
        most = kv_tokens / (classes.held + classes.mean_prompt * read_s / life_s)
    return int(min(MAX_BATCH, max(1.0, most)))


class _Reads(NamedTuple):
    """Reading a prompt of each class: until its first token, and until the next may start."""

    latency_s: Array
    latency_sd_s: Array
    occupied_s: Array

    def mean_s(self, classes: Classes) -> float:
        return float(classes.share @ self.occupied_s)

    def square_s(self, classes: Classes) -> float:
        """Mean square of the time occupied."""
        sd = self.latency_sd_s * self.occupied_s / np.maximum(self.latency_s, 1e-12)
        return float(classes.share @ (self.occupied_s**2 + sd**2))


def _reads(times: StepTimes, classes: Classes) -> _Reads:
    latency, occupied = [], []
    for prompt, pairs in zip(classes.prompt.tolist(), classes.pairs.tolist(), strict=True):
        chunks = ceil(prompt / CHUNK_TOKENS)
        size = round(prompt / chunks), pairs / chunks
        occupied.append(chunks * times.prefill_interval_s(*size))
        latency.append(times.prefill_s(*size) + occupied[-1] * (chunks - 1) / chunks)
    return _Reads(np.array(latency), np.array(latency) * classes.prompt_sd / classes.prompt, np.array(occupied))


def _reader(times: StepTimes, classes: Classes, reads: _Reads) -> Behaviour:
    """A replica that only reads. Short prompts are read together when many wait."""
    together = max(1.0, CHUNK_TOKENS / classes.mean_prompt)
    batch_s = times.prefill_interval_s(round(together * classes.mean_prompt), together * classes.mean_pairs)
    mean = reads.mean_s(classes)
    occupied = min(mean, batch_s / together)
    table = np.zeros((len(LOADS), len(Row._fields)))
    table[:, 0], table[:, 1] = LOADS, occupied
    return Behaviour(
        read=1.0 / occupied, write=inf, lone_s=reads.latency_s, lone_sd_s=reads.latency_sd_s,
        chunks=np.zeros_like(reads.latency_s), spread=reads.square_s(classes) / mean**2 - 1.0, max_batch=inf,
        table=table,
    )  # fmt: skip


def _decode_steps(times: StepTimes, classes: Classes, most: int, peaked: float) -> _Steps:
    batches = np.append(_BATCHES[most > _BATCHES], most)
    lines = [times.decode_line(int(batch)) for batch in batches]
    step = np.array([line.step_s(batch * classes.held) for line, batch in zip(lines, batches.tolist(), strict=True)])
    context = np.array([line.context_s for line in lines])
    batches = np.concatenate(([0.0], batches))
    again = np.zeros(len(batches))
    if most < MAX_BATCH:
        size = classes.mean_prompt + classes.mean_output / 2
        grown = classes.mean_output / (classes.mean_prompt + classes.mean_output)
        full = 2.0 * ndtr((batches - most) / np.sqrt((peaked + classes.uneven) * batches + 0.25))
        again = full * grown * times.prefill_s(round(size), classes.mean_pairs * (size / classes.mean_prompt) ** 2)
    return _Steps(batches, np.concatenate((step[:1], step)), np.concatenate((context[:1], context)), again)


def _ride(times: StepTimes, classes: Classes, steps: _Steps) -> float:
    """What a chunk adds to a step that decodes, over what it costs alone: weights are read once for both."""
    tokens = min(CHUNK_TOKENS, max(1, round(classes.mean_prompt)))
    pairs = classes.mean_pairs * tokens / classes.mean_prompt
    alone = times.prefill_s(tokens, pairs)
    if times.prefill_interval_s(tokens, pairs) < alone:
        return 1.0  # a pipeline: its stages are at different things at a time
    batch = int(steps.batch[len(steps.batch) // 2])
    context = batch * classes.held
    added = times.mixed_s(tokens, pairs, batch, context) - times.decode_line(batch).step_s(context)
    return min(1.0, max(0.1, added / alone))


def _writer(steps: _Steps, classes: Classes, reads: _Reads, peaked: float) -> Behaviour:
    """A replica that writes, and reads if `reads` has times."""
    batch, step = steps.batch, steps.step_s
    output, occupied = classes.mean_output, reads.mean_s(classes)
    chunks = classes.mean_prompt / CHUNK_TOKENS if occupied else 0.0
    # At b requests in flight, a request takes 1/b of `output` steps, but no fewer than its prompt has chunks; Little's
    # law then gives the time between tokens.
    shared = np.maximum(output / np.maximum(batch, 1.0), chunks)
    rate = np.minimum(batch, 1.0) / (occupied + steps.again_s + step * shared)
    full = int(np.argmax(rate))
    batch, step, context, again = (column[: full + 1] for column in steps)
    rate, shared = rate[: full + 1], shared[: full + 1]
    tpot = np.concatenate((step[:1], batch[1:] / (rate[1:] * output)))
    slope = np.gradient(tpot, batch)
    square = reads.square_s(classes)
    columns = Row(
        rho=rate * (occupied + step * chunks),
        occupied_s=occupied + step * chunks,
        step_s=step * bool(occupied),
        tpot_s=tpot,
        batch=batch,
        batch_var=batch * peaked * slope**2,
        context_var=batch * context**2 * classes.held_var,
        prompt_var=rate * tpot * square,
    )
    table = np.stack([np.interp(LOADS * rate[-1], rate, column) for column in columns], axis=1)
    mean = max(occupied + float(step.mean()) * chunks, 1e-12)
    return Behaviour(
        read=1.0 / occupied if occupied else inf, write=1.0 / float(step[-1] * shared[-1] + again[-1]),
        lone_s=reads.latency_s, lone_sd_s=reads.latency_sd_s,
        chunks=np.maximum(classes.prompt / CHUNK_TOKENS, 1.0) * bool(occupied),
        spread=max(0.0, square - occupied**2) / mean**2, max_batch=float(batch[-1]), table=table,
    )  # fmt: skip
