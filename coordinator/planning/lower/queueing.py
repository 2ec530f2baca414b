"""How requests fare on replicas under a steady load: waiting, prefill, decode, and the share that
is in time.

Assumptions, so that a simulation can be held against them:

- Lengths are the workload's, in classes; within a class, times are taken to be normal.
- Prompts wait in order of arrival. A wait is 0, or exponential with a mean by Kingman and
  Allen-Cunneen, both for as many servers as share the queue (Sakasegawa). With one server and
  Poisson arrivals the mean is that of Pollaczek and Khinchine.
- Each replica waits for itself, and others help as far as the router lets them (`Pool`). It sends a
  request where the queue is shortest beside the share that the plan gives: among replicas that are
  equally busy that comes near to one queue for all. One that is half as busy has half the queue
  before it takes a request from another, so it counts for half.
- The number of requests that decode together varies as a Poisson number does, divided by the
  replicas that share it; what contexts they have is not shared out evenly. A request sees the
  average over its life, so that long ones see little of either. Rounds with prefill chunks
  come in runs: an output begins among them or not, and the shorter it is, the more of it stays
  there.
- A replica whose memory is full lets requests wait until others end.
- Transfers share links evenly (M/G/1 with processor sharing): one that finds others there, with the
  chance that the link is busy, takes longer by an exponential time of mean size / (1 - busy), so
  that the mean of all is that of theory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from ..model.length_classes import Classes
from ..model.workload import Slo
from .behaviour import LOADS, Behaviour, LoadRow

Array = NDArray[np.float64]
Index = NDArray[np.intp]

EPSILON: Final = 1e-12

LEAST_SHARE: Final = 1e-3
"""Of idle time: keeps waits finite at full load, where they are far beyond any deadline anyway."""


class Pool(NamedTuple):
    """Who helps a replica out when requests wait for it, by replica: requests wait as if for
    `servers` equal ones, and their queue gets shorter `speedup` times as fast as by itself."""

    servers: Array
    speedup: Array

    @classmethod
    def of_equals(cls, count: int) -> Pool:
        """As many that are equally fast and equally busy."""
        return cls(np.array([float(count)]), np.array([float(count)]))

    @classmethod
    def of_shares(cls, rates: Array, loads: Array) -> Pool:
        """Of replicas that take `rates` requests per second of a phase and are busy for `loads` of
        the time; one that takes none helps nobody."""
        takes = rates > 0.0
        speed = np.divide(rates, loads, out=np.zeros_like(rates), where=takes & (loads > 0.0))
        helps = np.minimum(1.0, loads[None, :] / np.maximum(loads, EPSILON)[:, None]) * speed
        together, squares = helps.sum(axis=1), (helps * speed).sum(axis=1)
        alone = ~takes | (together <= 0.0)
        # as many equal servers as unlike ones are worth: a fast one beside a slow one is hardly more than one
        servers = np.where(alone, 1.0, together**2 / np.where(alone, 1.0, squares))
        return cls(servers, np.where(alone, 1.0, together / np.where(alone, 1.0, speed)))

    def at(self, index: Index) -> Pool:
        """Of these replicas; where all are alike, of each."""
        if len(self.servers) == 1:
            return self
        return Pool(self.servers[index], self.speedup[index])


def waiting_times(rho: Array, service_s: Array, variability: Array | float, pool: Pool) -> tuple[Array, Array]:
    """The chance to wait at all, and the mean of a wait that happens.

    `rho`: utilisation. `service_s`: mean service time of one server. `variability`: the mean of the
    squared coefficients of variation of arrivals and service. M/M/1 has (rho, service_s / (1 -
    rho)).
    """
    idle = np.maximum(1.0 - rho, LEAST_SHARE)
    busy = np.minimum(rho, 1.0) ** (np.sqrt(2.0 * (pool.servers + 1.0)) - 1.0)
    return busy, service_s * variability / (pool.speedup * idle)


def chance_in_time(slack_s: Array, sd_s: Array, busy: Array, wait_s: Array) -> Array:
    """The chance that a wait and a normal time of mean 0 and deviation `sd_s` together take at most
    `slack_s`.

    The wait is 0, or with the chance `busy` exponential of mean `wait_s`.
    """
    sd = np.maximum(sd_s, 1e-9)
    z = slack_s / sd
    if not busy.any():
        return np.asarray(ndtr(z))
    a = sd / np.maximum(wait_s, sd / 30.0)
    # the part of the exponential's tail: exp(a^2 / 2 - a z) ndtr(z - a), in logarithms since either factor may be huge
    return np.asarray(ndtr(z) - busy * np.exp(np.minimum(a * (a / 2 - z) + log_ndtr(z - a), 0.0)))


class PrefillTimes(NamedTuple):
    """Prompts at some loads: rows are loads or pairs, columns of the first two are classes."""

    service_s: Array
    service_sd_s: Array
    busy: Array
    wait_s: Array

    def at(self, rows: Index) -> PrefillTimes:
        """These rows."""
        return PrefillTimes(*(column[rows] for column in self))


class KVDelays(NamedTuple):
    """KV on its way, rows being pairs. `least_s`: wait by class if nobody else sends; `busy`: the
    chance that others do; `shared_s`: mean and deviation of the extra."""

    least_s: Array
    busy: Array
    shared_s: Array

    @property
    def mean_s(self) -> Array:
        """By class."""
        return self.least_s + self.busy[:, None] * self.shared_s if self.busy.any() else self.least_s

    @property
    def variance(self) -> Array:
        """By class."""
        busy = self.busy[:, None]
        return np.asarray(busy * (2.0 - busy) * self.shared_s**2)


class DecodeTimes(NamedTuple):
    """Outputs at some loads. `stalled_share` begin among prefill chunks and take `slow_s` per
    token, others `fast_s`, deviation `sd_s` (row, class). `tpot_s`: mean; `admit_s`: mean wait for
    the batch."""

    tpot_s: Array
    fast_s: Array
    slow_s: Array
    sd_s: Array
    stalled_share: Array
    admit_s: Array

    def at(self, rows: Index) -> DecodeTimes:
        """These rows."""
        return DecodeTimes(*(column[rows] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaTables:
    """The behaviours of several replicas, stacked, so that all are looked up at once."""

    classes: Classes
    arrival_cv: float
    prefill_rate: Array
    decode_rate: Array
    mixed_rate: Array
    prefill_s: Array
    prefill_sd_s: Array
    prefill_rounds: Array
    prefill_cv2: Array
    max_batch: Array
    table: Array

    @classmethod
    def of(cls, behaviours: Sequence[Behaviour], classes: Classes, arrival_cv: float) -> ReplicaTables:
        """In the order given; a service without replicas has arrays without rows."""

        def rows(field: str, *columns: int) -> Array:
            return np.array([getattr(item, field) for item in behaviours], dtype=np.float64).reshape(-1, *columns)

        kinds, table = len(classes.share), (len(LOADS), len(LoadRow._fields))
        return cls(
            classes,
            arrival_cv,
            rows("prefill_rate"),
            rows("decode_rate"),
            rows("mixed_rate"),
            rows("prefill_s", kinds),
            rows("prefill_sd_s", kinds),
            rows("prefill_rounds", kinds),
            rows("prefill_cv2"),
            rows("max_batch"),
            rows("table", *table),
        )

    def tabulate(self) -> tuple[Index, Array, LoadRow]:
        """Every replica at each of LOADS: which, at what load, and what it does there."""
        replicas = len(self.table)
        index, load = np.repeat(np.arange(replicas), len(LOADS)), np.tile(LOADS, replicas)
        return index, load, LoadRow(*self.table.reshape(len(load), -1).T)

    def at(self, index: Index, load: Array) -> LoadRow:
        """Replicas `index[k]` at `load[k]`, between the loads that are tabulated."""
        above = np.minimum(np.maximum(np.searchsorted(LOADS, load), 1), len(LOADS) - 1)
        low, high = LOADS[above - 1], LOADS[above]
        part = ((np.minimum(np.maximum(load, 0.0), 1.0) - low) / (high - low))[:, None]
        values = (1.0 - part) * self.table[index, above - 1] + part * self.table[index, above]
        return LoadRow(*values.T)

    def prefill_times(self, index: Index, row: LoadRow, pool: Pool) -> PrefillTimes:
        """Of prompts on replicas `index[k]` that do `row`. `pool`: by replica."""
        variability = (self.arrival_cv**2 + self.prefill_cv2[index]) / 2.0
        busy, wait = waiting_times(row.rho, row.occupied_s, variability, pool.at(index))
        service = self.prefill_s[index] + self.prefill_rounds[index] * row.step_s[:, None] + row.join_s[:, None]
        return PrefillTimes(service, self.prefill_sd_s[index], busy, wait)

    def decode_times(self, index: Index, load: Array, row: LoadRow, pool: Pool) -> DecodeTimes:
        """Of outputs on replicas `index[k]` at `load[k]`, where they do `row`. `pool`: by
        replica."""
        pool = pool.at(index)
        tokens = np.maximum(self.classes.output, 1.0)[None, :]
        varied = (row.batch_var / pool.servers + row.context_var)[:, None]
        variance = varied * _average_out(tokens / self.classes.life)
        runs = tokens / row.run_rounds[:, None]
        # how much of how it began is left over its life, and what varies besides
        kept = -np.expm1(-runs) / runs
        stalled_share, stall = row.stalled_share[:, None], row.stall_s[:, None]
        variance += stall**2 * stalled_share * (1.0 - stalled_share) * np.maximum(_average_out(runs) - kept**2, 0.0)
        base = row.tpot_s[:, None] - stall * stalled_share
        fast, slow = (
            base + stall * stalled_share * (1.0 - kept),
            base + stall * (stalled_share + (1.0 - stalled_share) * kept),
        )
        peaked = (1.0 + self.arrival_cv**2) / 2.0
        number_sd = np.sqrt((peaked / pool.servers + self.classes.uneven) * row.batch + 0.25)
        full = ndtr((row.batch - self.max_batch[index]) / number_sd)
        # as many servers as places in all batches: a wait lasts 1 / (what they finish - what comes)
        idle = np.maximum(1.0 - load, LEAST_SHARE) * pool.speedup * self.decode_rate[index]
        return DecodeTimes(row.tpot_s, fast, slow, np.sqrt(variance), row.prefilling, full / idle)


def _average_out(lives: Array) -> Array:
    """What is left of a variance in the average over so many times as long as its cause lasts."""
    return np.asarray(2.0 * (lives - 1.0 + np.exp(-lives)) / lives**2)


@dataclass(frozen=True, slots=True, eq=False)
class RequestTimes:
    """When requests have what, by row and class. `admit_s`: a wait for room in the batch. `sending`
    comes before the first token, which a decode replica decodes in `step_s` where it does (`early`);
    or else after it, and so does the wait. But even then later prompts have to wait as long, when
    those that nobody takes fill the memory of the prefill replica. In `control_s` gateway and
    replicas hear each other before, and after: all that a client waits besides.
    """

    classes: Classes
    prefilling: PrefillTimes
    decoding: DecodeTimes
    sending: KVDelays
    admit_s: Array
    early: Array
    step_s: Array
    control_s: Array | float = 0.0

    def first_token_within(self, seconds: float) -> Array:
        """The chance that the first token is there."""
        prefilling, early = self.prefilling, self.early[:, None]
        besides = (self.step_s + self.control_s)[:, None]
        slack = seconds - prefilling.service_s - self.admit_s - early * self.sending.mean_s - besides
        sd = prefilling.service_sd_s
        if self.sending.busy.any():
            sd = np.sqrt(sd**2 + early * self.sending.variance)
        return chance_in_time(slack, sd, prefilling.busy[:, None], prefilling.wait_s[:, None])

    def pace_within(self, seconds: float) -> Array:
        """The chance that the mean time from token to token is no longer; sure for answers of one
        token."""
        gaps, decoding, sending = np.maximum(self.classes.output - 1.0, 1.0), self.decoding, self.sending
        late = 1.0 - self.early[:, None]
        slack, sd = seconds - late * (self.admit_s + sending.least_s) / gaps, np.maximum(decoding.sd_s, 1e-9)
        busy, shared = late * sending.busy[:, None], late * sending.shared_s / gaps

        def chance_of(tpot_s: Array) -> Array:
            if busy.any():
                return chance_in_time(slack - tpot_s, sd, busy, shared)
            return np.asarray(ndtr((slack - tpot_s) / sd))

        share = chance_of(decoding.fast_s)
        if decoding.stalled_share.any():
            share += decoding.stalled_share[:, None] * (chance_of(decoding.slow_s) - share)
        return np.where(self.classes.output > 1.5, share, 1.0)

    def end_within(self, seconds: float) -> Array:
        """The chance that the last token is there."""
        prefilling, decoding = self.prefilling, self.decoding
        gaps, stalled_share = np.maximum(self.classes.output - 1.0, 0.0), decoding.stalled_share[:, None]
        tpot, tpot_var = decoding.fast_s, decoding.sd_s**2
        if stalled_share.any():
            apart = decoding.slow_s - tpot
            tpot, tpot_var = tpot + stalled_share * apart, tpot_var + stalled_share * (1.0 - stalled_share) * apart**2
        variance = prefilling.service_sd_s**2 + gaps**2 * tpot_var + (tpot * self.classes.output_sd) ** 2
        sd = np.sqrt(variance + self.sending.variance if self.sending.busy.any() else variance)
        besides = (self.step_s + self.control_s)[:, None]
        slack = seconds - prefilling.service_s - self.admit_s - self.sending.mean_s - besides - gaps * tpot
        return chance_in_time(slack, sd, prefilling.busy[:, None], prefilling.wait_s[:, None])

    def share_in_time(self, slo: Slo) -> Array:
        """The share of requests that meet every deadline, for each row.

        The first token and the pace fail independently of each other; the end-to-end deadline fails
        together with whichever of the two is the worse.
        """
        share = None
        if isfinite(slo.ttft_s):
            share = self.first_token_within(slo.ttft_s)
        if isfinite(slo.tpot_s):
            paced = self.pace_within(slo.tpot_s)
            share = paced if share is None else share * paced
        if isfinite(slo.e2e_s):
            ended = self.end_within(slo.e2e_s)
            share = ended if share is None else np.minimum(share, ended)
        if share is None:
            return np.ones(len(self.step_s))
        # row by row: a product with a vector rounds by how many rows there are
        return np.asarray((share * self.classes.share).sum(axis=1))


class OtherPhase(NamedTuple):
    """What the phase takes that a replica does not do itself: prefill by class, and from token to
    token."""

    service_s: Array | float = 0.0
    tpot_s: float = 0.0


def in_time_by_load(
    behaviours: Sequence[Behaviour], classes: Classes, slo: Slo, arrival_cv: float,
    *, phase_counts: tuple[int, int] = (1, 1), other_phase: OtherPhase | None = None, admitted_later: bool = False,
) -> Array:  # fmt: skip
    """[replica, load] the share of requests in time at LOADS, of replicas of one phase.
    `phase_counts`: replicas sharing prompts, outputs. `other_phase`: what the end adds, default
    none. `admitted_later`: the batch wait follows the first token."""
    tables = ReplicaTables.of(behaviours, classes, arrival_cv)
    index, load, row = tables.tabulate()
    prefilling = (
        tables.prefill_times(index, row, Pool.of_equals(phase_counts[0])) if behaviours[0].does_prefill else None
    )
    decoding = (
        tables.decode_times(index, load, row, Pool.of_equals(phase_counts[1])) if behaviours[0].does_decode else None
    )
    none, nones = np.zeros(len(load)), np.zeros((len(load), len(classes.share)))
    admit, sending = (
        nones if decoding is None else nones + decoding.admit_s[:, None],
        KVDelays(nones, none, nones),
    )
    early = none if admitted_later else none + 1.0

    def request_times(beside: OtherPhase) -> RequestTimes:
        tpot = nones + beside.tpot_s
        prefill_times = prefilling or PrefillTimes(nones + beside.service_s, nones, none, none)
        decode_times = decoding or DecodeTimes(none + beside.tpot_s, tpot, tpot, nones, none, none)
        return RequestTimes(classes, prefill_times, decode_times, sending, admit, early, none)

    # The end-to-end deadline is met by both phases together: where the other one counts, it is asked for below.
    own = slo if other_phase is None else replace(slo, e2e_s=inf)
    if decoding is None:
        own = replace(own, tpot_s=inf)
    share = request_times(OtherPhase()).share_in_time(own)
    if other_phase is not None:
        share = np.minimum(share, request_times(other_phase).share_in_time(Slo(e2e_s=slo.e2e_s)))
    return share.reshape(len(behaviours), -1)
