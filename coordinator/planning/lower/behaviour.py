"""What a replica does on its own, at every load: how busy it is, how fast it prefills and decodes.

Assumptions, so that a simulation can be held against them:

- The number of requests that decode together is the one at which as many end as come (Little): b =
  rate * mean output * time between tokens, which depends on b.
- A mixed replica prefills prompts in chunks beside what it decodes, of a size that the deadline
  from token to token allows (`costs/rounds.py`). A round with a prefill chunk takes longer than one
  without, in a pipeline nearly as much for one chunk as for one in every batch. Prompts that come
  during a round are prefilled together in the next. An output of few tokens sees either rounds with
  chunks or others; a long one sees the average.
- A prefill replica computes short prompts together when many wait, and one after the other when few
  do. Long ones are cut in chunks, which follow each other through the stages of a pipeline. It
  never waits for memory: what it keeps until it has been sent is taken to fit, since links are
  planned to keep up.
- Memory for a prompt is taken when its prefill begins, here or on another replica, which is as fast
  as this one. Memory for the output is taken as it grows; where there is none left, the latest
  request is prefilled again later. When memory is full all the time, the share of requests that
  meet this is the share of memory that grew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from ...costs.rounds import TOKEN_BUDGETS, PrefillChunk, choose_token_budget, equal_rounds_s, round_s
from ...costs.step_times import StepTimes, chunk_pairs
from ...plan import Phase
from ..model.length_classes import Classes

Array = NDArray[np.float64]

LOADS: Final[Array] = np.array([0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975, 1.0])
"""The utilisations that a replica's behaviour is tabulated at."""

MAX_CHUNK_TOKENS: Final = TOKEN_BUDGETS[0]
"""Prompt tokens that a step computes at most where nothing is decoded: longer prompts are cut in
chunks, short ones together."""

MAX_BATCH: Final = 256
"""Requests that one replica decodes together at most."""

_BATCHES: Final = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])


@dataclass(frozen=True, slots=True, eq=False)
class Behaviour:
    """One replica on its own, at every load.

    `prefill_rate` and `decode_rate`: the rates (requests/s) that would fill it if it did nothing
    else, infinite for what it does not do. `mixed_rate`: that of requests that it prefills and
    decodes itself; they take less than their halves would, since weights are read once for a chunk
    and what is decoded beside it. The load at X prompts of others, Y outputs of others and Z own
    requests per second is X / prefill_rate + Y / decode_rate + Z / mixed_rate. `prefill_s`,
    `prefill_sd_s`: prefill of a prompt of each class; `prefill_rounds`: the rounds that takes on a
    mixed replica. `prefill_cv2`: squared coefficient of variation of prefill times. `table`: the
    columns of `LoadRow` at each of LOADS.
    """

    prefill_rate: float
    decode_rate: float
    mixed_rate: float
    prefill_s: Array
    prefill_sd_s: Array
    prefill_rounds: Array
    prefill_cv2: float
    max_batch: float
    table: Array

    @property
    def rate(self) -> float:
        """Requests per second at full load when it does all of its work for the same requests."""
        return min(self.prefill_rate, self.decode_rate, self.mixed_rate)

    @property
    def does_prefill(self) -> bool:
        """Whether prompts are for it."""
        return self.prefill_rate < inf

    @property
    def does_decode(self) -> bool:
        """Whether outputs are for it."""
        return self.decode_rate < inf

    def batch_at(self, load: float) -> float:
        """Requests in progress: decoding ones, or the one prefilled on a prefill replica."""
        column = "batch" if self.does_decode else "rho"
        return float(np.interp(load, LOADS, self.table[:, LoadRow._fields.index(column)]))

    def alone_s(self, classes: Classes) -> float:
        """An average request that has the replica to itself."""
        tpot_s = float(self.table[0, LoadRow._fields.index("tpot_s")])
        return float(classes.share @ self.prefill_s) + tpot_s * classes.mean_output


class LoadRow(NamedTuple):
    """What a replica does at one load, as columns of `Behaviour.table`.

    Of prefill: `rho`, the chance that a prompt finds others; `occupied_s`, a prompt's share of the
    time at best; `step_s`, the decode step that each chunk travels with; `join_s`, until a prompt, or
    a request with its KV, that has come is taken up. Of decode: `tpot_s`, from token to token on average; `batch`,
    requests that decode; of its variance, `batch_var` with their number and `context_var` with
    their contexts. Rounds with a prefill chunk take `stall_s` longer than others: they are
    `stalled_share` of all rounds, and come in runs of about `run_rounds` rounds; `prefilling` is
    the share of the time they take.
    """

    rho: Array
    occupied_s: Array
    step_s: Array
    join_s: Array
    tpot_s: Array
    batch: Array
    batch_var: Array
    context_var: Array
    stall_s: Array
    stalled_share: Array
    run_rounds: Array
    prefilling: Array


class _Steps(NamedTuple):
    """Decode steps by batch size, first 0 (idle). `again`: prompts that a request is prefilled again
    for, on average, and `again_s`: what that takes where no others are prefilled."""

    batch: Array
    step_s: Array
    context_s: Array
    again: Array
    again_s: Array


def model_replica(
    phase: Phase, times: StepTimes, classes: Classes,
    *, kv_tokens: int, arrival_cv: float = 1.0, stages: int = 1, tpot_s: float = inf, step_tokens: int = 0,
) -> Behaviour:  # fmt: skip
    """Of a replica with room for so many tokens of KV, which must be enough for the requests there
    are.

    `tpot_s`: the deadline that a mixed replica chooses its chunks by, unless `step_tokens` are
    given for its steps.
    """
    if phase is Phase.PREFILL:
        return _prefill_behaviour(times, classes, _time_prompts(times, classes))
    peaked = (1.0 + arrival_cv**2) / 2.0
    steps = _decode_steps(times, classes, _largest_batch(times, classes, kv_tokens), peaked)
    if phase is Phase.DECODE:
        return _decode_behaviour(steps, classes, None, peaked)
    budget = step_tokens or choose_token_budget(times, stages, tpot_s)
    return _decode_behaviour(steps, classes, _model_chunked_prefill(times, classes, steps, stages, budget), peaked)


def _largest_batch(times: StepTimes, classes: Classes, kv_tokens: int) -> int:
    """Requests that may decode together beside those that are being prefilled."""
    prefill_s = times.prefill_s(round(classes.mean_prompt), classes.mean_pairs)
    most = kv_tokens / classes.held
    for _ in range(2):  # fewer requests take shorter steps: two rounds settle it
        batch = int(min(MAX_BATCH, max(1.0, most)))
        life_s = classes.mean_output * times.decode_line(batch).step_s(batch * classes.held)
        most = kv_tokens / (classes.held + classes.mean_prompt * prefill_s / life_s)
    return int(min(MAX_BATCH, max(1.0, most)))


class _PromptTimes(NamedTuple):
    """Prefill of a prompt of each class: until its first token, and until the next may start."""

    latency_s: Array
    latency_sd_s: Array
    occupied_s: Array

    def mean_s(self, classes: Classes) -> float:
        return float(classes.share @ self.occupied_s)

    def square_s(self, classes: Classes) -> float:
        """Mean square of the time occupied."""
        sd = self.latency_sd_s * self.occupied_s / np.maximum(self.latency_s, 1e-12)
        return float(classes.share @ (self.occupied_s**2 + sd**2))


def _time_prompts(times: StepTimes, classes: Classes) -> _PromptTimes:
    """In full chunks, and what is left in the last: it cannot be out before the one ahead of it."""
    latency, occupied = [], []
    for prompt, pairs in zip(classes.prompt.tolist(), classes.pairs.tolist(), strict=True):
        full = ceil(prompt / MAX_CHUNK_TOKENS) - 1
        rest = max(1, round(prompt - full * MAX_CHUNK_TOKENS))
        last = rest, min(pairs, chunk_pairs(full * MAX_CHUNK_TOKENS, rest))
        ahead_s = out_s = 0.0
        if full:
            chunk = MAX_CHUNK_TOKENS, (pairs - last[1]) / full
            interval_s = times.prefill_interval_s(*chunk)
            ahead_s = full * interval_s
            out_s = ahead_s - interval_s + times.prefill_s(*chunk)
        occupied.append(ahead_s + times.prefill_interval_s(*last))
        latency.append(max(out_s, ahead_s + times.prefill_s(*last)))
    return _PromptTimes(np.array(latency), np.array(latency) * classes.prompt_sd / classes.prompt, np.array(occupied))


def _prefill_behaviour(times: StepTimes, classes: Classes, prompts: _PromptTimes) -> Behaviour:
    """A prefill replica. Short prompts are computed together when many wait."""
    together = max(1.0, MAX_CHUNK_TOKENS / classes.mean_prompt)
    batch_s = times.prefill_interval_s(round(together * classes.mean_prompt), together * classes.mean_pairs)
    mean = prompts.mean_s(classes)
    occupied = min(mean, batch_s / together)
    table = np.zeros((len(LOADS), len(LoadRow._fields)))
    table[:, 0], table[:, 1] = LOADS, occupied
    table[:, LoadRow._fields.index("run_rounds")] = 1.0
    return Behaviour(
        prefill_rate=1.0 / occupied,
        decode_rate=inf,
        mixed_rate=inf,
        prefill_s=prompts.latency_s,
        prefill_sd_s=prompts.latency_sd_s,
        prefill_rounds=np.zeros_like(prompts.latency_s),
        prefill_cv2=prompts.square_s(classes) / mean**2 - 1.0,
        max_batch=inf,
        table=table,
    )


def _decode_steps(times: StepTimes, classes: Classes, most: int, peaked: float) -> _Steps:
    batches = np.append(_BATCHES[most > _BATCHES], most)
    lines = [times.decode_line(int(batch)) for batch in batches]
    step = np.array([line.step_s(batch * classes.held) for line, batch in zip(lines, batches.tolist(), strict=True)])
    context = np.array([line.context_s for line in lines])
    batches = np.concatenate(([0.0], batches))
    again, again_s = np.zeros(len(batches)), 0.0
    if most < MAX_BATCH:
        size = classes.mean_prompt + classes.mean_output / 2
        longer = size / classes.mean_prompt
        grown = classes.mean_output / (classes.mean_prompt + classes.mean_output)
        full = 2.0 * ndtr((batches - most) / np.sqrt((peaked + classes.uneven) * batches + 0.25))
        again = full * grown * longer
        again_s = times.prefill_s(round(size), classes.mean_pairs * longer**2) / longer
    return _Steps(
        batches, np.concatenate((step[:1], step)), np.concatenate((context[:1], context)), again, again * again_s
    )


class _ChunkedPrefill(NamedTuple):
    """Prefill beside decode. `tokens` of prompts in a round, up to all that fit, make it `added_s`
    longer; prompts of each class that are prefilled alone take `rounds`, and add `alone_s` in all.
    With nothing to decode, a prompt occupies the replica for `occupied_s` on average."""

    tokens: Array
    added_s: Array
    rounds: Array
    alone_s: Array
    occupied_s: float

    @property
    def most(self) -> float:
        """Tokens that fit a round."""
        return float(self.tokens[-1])


def _model_chunked_prefill(
    times: StepTimes, classes: Classes, steps: _Steps, stages: int, chunk: int
) -> _ChunkedPrefill:
    """Looked at beside a middling batch: what is added depends little on it."""
    batch = int(steps.batch[len(steps.batch) // 2])
    context, pairs = batch * classes.held, classes.mean_pairs / classes.mean_prompt
    step_s = times.decode_line(batch).step_s(context)
    size = max(chunk // 4, chunk - batch // stages)
    small = size // 8, size // 3
    tokens = np.array([0.0, *small, *range(size, size * stages + 1, size)])
    rounds_s = [round_s(times, stages, [PrefillChunk(part, part * pairs)], batch, context) for part in small]
    rounds_s += equal_rounds_s(times, stages, PrefillChunk(size, size * pairs), batch, context)
    added_s = np.maximum.accumulate([0.0, *(seconds - step_s for seconds in rounds_s)])
    alone = np.ceil(classes.prompt / tokens[-1])
    # a class has its own pairs to the token: longer prompts take longer by their attention, as when they are alone
    skew = classes.pairs / classes.prompt / pairs - 1.0
    attention = _attention_share(times, classes)
    alone_s = alone * np.interp(classes.prompt / alone, tokens, added_s) * (1.0 + attention * skew)
    occupied_s = classes.mean_prompt / chunk * times.prefill_interval_s(chunk, chunk * pairs)
    return _ChunkedPrefill(tokens, added_s, alone, alone_s, occupied_s)


def _attention_share(times: StepTimes, classes: Classes) -> float:
    """Of the time of an average prefill. An engine's own constants know attention by the number of prompts alone, and
    may have it that many short ones take longer than one: then it is nothing."""
    prompt = max(1, round(classes.mean_prompt))
    whole = times.prefill_interval_s(prompt, classes.mean_pairs)
    return max(0.0, 1.0 - times.prefill_interval_s(prompt, 0.0) / whole) if whole > 0.0 else 0.0


class _Rounds(NamedTuple):
    """By batch: requests ended per second, rounds with prefill chunks per second, and how much longer
    those take."""

    rate: Array
    prefilling_rate: Array
    added_s: Array


def _model_rounds(steps: _Steps, classes: Classes, chunked: _ChunkedPrefill | None) -> _Rounds:
    """At b requests in flight, a request takes 1/b of `output` steps, at least its prompt's rounds;
    prompts take the rest. Those that come during a round are prefilled together in the next."""
    batch, step = steps.batch, steps.step_s
    share = classes.mean_output / np.maximum(batch, 1.0)
    if chunked is None:
        none = np.zeros_like(batch)
        return _Rounds(np.minimum(batch, 1.0) / (steps.again_s + step * share), none, none)
    prompt, most = classes.mean_prompt, chunked.most
    alone_s, rounds = float(classes.share @ chunked.alone_s), float(classes.share @ chunked.rounds)
    # who is prefilled again is one prompt more among those that are prefilled together
    prompts = 1.0 + steps.again
    fixed_s = step * np.maximum(share, prompts * prompt / most)
    tokens, added = np.full(len(batch), prompt / rounds), np.full(len(batch), alone_s / rounds)
    # short prompts and long ones alone take less than as many of mean length; full rounds are all alike
    alike = alone_s / max(1e-12, rounds * float(np.interp(prompt / rounds, chunked.tokens, chunked.added_s)))
    spare = max(1e-12, most - prompt / rounds)
    # how many prompts meet in a round depends on how long it takes, and that on how many meet: iterated to where they
    # agree, never below the tokens that b requests in flight bring with them
    for _ in range(4):
        rate = 1.0 / (fixed_s + prompts * prompt / tokens * added)
        come = np.maximum(prompts * rate * (step + added), 1e-9)
        tokens = np.minimum(most, np.maximum(prompt / rounds * come / -np.expm1(-come), prompts * prompt / share))
        # the fuller the rounds, the more alike they are: what lone prompts differ by fades out
        uneven = 1.0 + (alike - 1.0) * (most - tokens) / spare
        added = np.interp(tokens, chunked.tokens, chunked.added_s) * uneven
    rate = np.minimum(batch, 1.0) / (fixed_s + prompts * prompt / tokens * added)
    return _Rounds(rate, prompts * rate * prompt / tokens, added)


def _decode_behaviour(steps: _Steps, classes: Classes, chunked: _ChunkedPrefill | None, peaked: float) -> Behaviour:
    """A decode replica, or with `chunked` prefill a mixed one."""
    rounds = _model_rounds(steps, classes, chunked)
    # beyond the batch with the highest rate, more requests in flight finish fewer: that batch is full load
    full = int(np.argmax(rounds.rate))
    steps = _Steps(*(column[: full + 1] for column in steps))
    rounds = _Rounds(*(column[: full + 1] for column in rounds))
    batch, output = steps.batch, classes.mean_output
    tpot = np.concatenate((steps.step_s[:1], batch[1:] / (rounds.rate[1:] * output)))
    none, kinds = np.zeros_like(batch), np.zeros_like(classes.share)
    columns = LoadRow(
        rho=none, occupied_s=none, step_s=none, join_s=0.5 * tpot * -np.expm1(-batch), tpot_s=tpot, batch=batch,
        batch_var=batch * peaked * np.gradient(tpot, batch) ** 2,
        context_var=batch * steps.context_s**2 * classes.held_var,
        stall_s=none, stalled_share=none, run_rounds=none + 1.0, prefilling=none,
    )  # fmt: skip
    decode = Behaviour(
        prefill_rate=inf,
        decode_rate=1.0 / float(steps.step_s[-1] * output / batch[-1] + steps.again_s[-1]),
        mixed_rate=inf,
        prefill_s=kinds,
        prefill_sd_s=kinds,
        prefill_rounds=kinds,
        prefill_cv2=0.0,
        max_batch=float(batch[-1]),
        table=_tabulate(rounds.rate, columns),
    )
    if chunked is None:
        return decode
    square = classes.prompt**2 + classes.prompt_sd**2
    return replace(
        decode, prefill_rate=1.0 / chunked.occupied_s, mixed_rate=float(rounds.rate[-1]), prefill_s=chunked.alone_s,
        prefill_sd_s=chunked.alone_s * classes.prompt_sd / classes.prompt, prefill_rounds=chunked.rounds,
        prefill_cv2=float(classes.share @ square) / classes.mean_prompt**2 - 1.0,
        table=_tabulate(rounds.rate, _add_prefill_columns(columns, steps, rounds, classes, chunked)),
    )  # fmt: skip


def _add_prefill_columns(
    row: LoadRow, steps: _Steps, rounds: _Rounds, classes: Classes, chunked: _ChunkedPrefill
) -> LoadRow:
    """The same with the columns of a mixed replica."""
    step, slow = steps.step_s, steps.step_s + rounds.added_s
    prefilling = np.minimum(1.0, rounds.prefilling_rate * slow)
    often = float(classes.share @ chunked.rounds**2) / float(classes.share @ chunked.rounds)
    return row._replace(
        rho=rounds.rate / rounds.rate[-1],
        occupied_s=classes.mean_prompt / chunked.most * (step + chunked.added_s[-1]),
        step_s=step,
        join_s=0.5 * (prefilling * slow + (1.0 - prefilling) * step),
        stall_s=rounds.added_s,
        stalled_share=np.minimum(1.0, rounds.prefilling_rate * row.tpot_s),
        run_rounds=often * slow / ((1.0 - prefilling) * slow + prefilling * step),
        prefilling=prefilling,
    )


def _tabulate(rate: Array, columns: LoadRow) -> Array:
    """Each column between the two rates that every load lies between; rates rise from 0."""
    wanted = LOADS * rate[-1]
    above = np.minimum(np.maximum(np.searchsorted(rate, wanted), 1), len(rate) - 1)
    part = (wanted - rate[above - 1]) / (rate[above] - rate[above - 1])
    values = np.array(columns)
    return np.asarray((values[:, above - 1] * (1.0 - part) + values[:, above] * part).T)
