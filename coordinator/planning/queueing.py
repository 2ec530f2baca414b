"""How requests fare on replicas under a steady load: waiting, reading, writing, and the share that is in time.

Assumptions, so that a simulation can be held against them:

- Lengths are the workload's, in classes; within a class, times are taken to be normal.
- Prompts wait in order of arrival. A wait is 0, or exponential with a mean by Kingman and Allen-Cunneen, both for as
  many servers as share the queue (Sakasegawa): the router sends a request to the shortest queue, which comes near to
  one queue for all. With one server and Poisson arrivals the mean is that of Pollaczek and Khinchine.
- The number of requests that decode together varies as a Poisson number does, divided by the replicas that share it;
  what contexts they have is not shared out evenly. A request sees the average over its life, so that long ones see
  little of either.
- A replica whose memory is full lets requests wait until others end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from .behaviour import LOADS, Behaviour, Row
from .length_classes import Classes
from .workload import Slo

__all__ = ["Fates", "Fleet", "Partner", "Reading", "Writing", "alone", "in_time", "waits"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]

LEAST_SHARE: Final = 1e-3
"""Of idle time: keeps waits finite at full load, where they are far beyond any deadline anyway."""


def waits(rho: Array, service_s: Array, variability: Array | float, servers: Array | float) -> tuple[Array, Array]:
    """The chance to wait at all, and the mean of a wait that happens.

    `rho`: utilisation. `service_s`: mean service time of one server. `variability`: the mean of the squared
    coefficients of variation of arrivals and service. M/M/1 has (rho, service_s / (1 - rho)).
    """
    idle = np.maximum(1.0 - rho, LEAST_SHARE)
    return np.minimum(rho, 1.0) ** (np.sqrt(2.0 * (servers + 1.0)) - 1.0), service_s * variability / (servers * idle)


def in_time(slack_s: Array, sd_s: Array, busy: Array, wait_s: Array) -> Array:
    """The chance that a wait and a normal time of mean 0 and deviation `sd_s` together take at most `slack_s`.

    The wait is 0, or with the chance `busy` exponential of mean `wait_s`.
    """
    sd = np.maximum(sd_s, 1e-9)
    z = slack_s / sd
    a = sd / np.maximum(wait_s, sd / 30.0)
    # the part of the exponential's tail: exp(a^2 / 2 - a z) ndtr(z - a), in logarithms since either factor may be huge
    return np.asarray(ndtr(z) - busy * np.exp(np.minimum(a * (a / 2 - z) + log_ndtr(z - a), 0.0)))


class Reading(NamedTuple):
    """Prompts at some loads: rows are loads or pairs, columns of the first two are classes."""

    service_s: Array
    service_sd_s: Array
    busy: Array
    wait_s: Array

    def at(self, rows: Index) -> Reading:
        """These rows."""
        return Reading(*(column[rows] for column in self))


class Writing(NamedTuple):
    """Outputs at some loads. `admit_s`: mean wait for room in the batch."""

    tpot_s: Array
    tpot_sd_s: Array
    admit_s: Array

    def at(self, rows: Index) -> Writing:
        """These rows."""
        return Writing(*(column[rows] for column in self))


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """The behaviours of several replicas, stacked, so that all are looked up at once."""

    classes: Classes
    arrival_cv: float
    read: Array
    write: Array
    lone_s: Array
    lone_sd_s: Array
    chunks: Array
    spread: Array
    max_batch: Array
    table: Array

    @classmethod
    def of(cls, behaviours: Sequence[Behaviour], classes: Classes, arrival_cv: float) -> Fleet:
        """In the order given; a service without replicas has arrays without rows."""

        def rows(field: str, *columns: int) -> Array:
            return np.array([getattr(item, field) for item in behaviours], dtype=np.float64).reshape(-1, *columns)

        kinds, table = len(classes.share), (len(LOADS), len(Row._fields))
        return cls(
            classes, arrival_cv, rows("read"), rows("write"), rows("lone_s", kinds), rows("lone_sd_s", kinds),
            rows("chunks", kinds), rows("spread"), rows("max_batch"), rows("table", *table),
        )  # fmt: skip

    def _row(self, index: Index, load: Array) -> Row:
        """Between the loads that are tabulated."""
        above = np.clip(np.searchsorted(LOADS, load), 1, len(LOADS) - 1)
        low, high = LOADS[above - 1], LOADS[above]
        part = ((np.clip(load, 0.0, 1.0) - low) / (high - low))[:, None]
        values = (1.0 - part) * self.table[index, above - 1] + part * self.table[index, above]
        return Row(*values.T)

    def reading(self, index: Index, load: Array, servers: float) -> Reading:
        """Of prompts on replicas `index[k]` at `load[k]`, when `servers` replicas share the queue."""
        row = self._row(index, load)
        variability = (self.arrival_cv**2 + self.spread[index]) / 2.0
        busy, wait = waits(row.rho, row.occupied_s, variability, servers)
        # a chunk joins at the end of the step that runs: half a step on average
        service = self.lone_s[index] + (self.chunks[index] + 0.5 * (self.chunks[index] > 0)) * row.step_s[:, None]
        return Reading(service, self.lone_sd_s[index], busy, wait)

    def writing(self, index: Index, load: Array, servers: float) -> Writing:
        """Of outputs on replicas `index[k]` at `load[k]`, when `servers` replicas share them."""
        row = self._row(index, load)
        tokens = np.maximum(self.classes.output, 1.0)[None, :]
        lives = tokens / self.classes.life
        averaged = 2.0 * (lives - 1.0 + np.exp(-lives)) / lives**2
        varied = (row.batch_var / servers + row.context_var)[:, None]
        variance = varied * averaged + row.prompt_var[:, None] / tokens
        peaked = (1.0 + self.arrival_cv**2) / 2.0
        number_sd = np.sqrt((peaked / servers + self.classes.uneven) * row.batch + 0.25)
        full = ndtr((row.batch - self.max_batch[index]) / number_sd)
        # as many servers as places in all batches: a wait lasts 1 / (what they finish - what comes)
        idle = np.maximum(1.0 - load, LEAST_SHARE) * servers * self.write[index]
        return Writing(row.tpot_s, np.sqrt(variance), full / idle)


@dataclass(frozen=True, slots=True, eq=False)
class Fates:
    """When requests have what, by row and class. A hand-over and a wait for room in the batch come before the first
    token, `first_delay_s`, or after it, `later_delay_s`."""

    classes: Classes
    reading: Reading
    writing: Writing
    first_delay_s: Array
    later_delay_s: Array

    def first_within(self, seconds: float) -> Array:
        """The chance that the first token is there."""
        reading = self.reading
        slack = seconds - reading.service_s - self.first_delay_s
        return in_time(slack, reading.service_sd_s, reading.busy[:, None], reading.wait_s[:, None])

    def paced_within(self, seconds: float) -> Array:
        """The chance that the mean time from token to token is no longer; sure for answers of one token."""
        gaps = np.maximum(self.classes.output - 1.0, 1.0)
        slack = seconds - self.writing.tpot_s[:, None] - self.later_delay_s / gaps
        paced = ndtr(slack / np.maximum(self.writing.tpot_sd_s, 1e-9))
        return np.where(self.classes.output > 1.5, paced, 1.0)

    def ended_within(self, seconds: float) -> Array:
        """The chance that the last token is there."""
        reading, writing = self.reading, self.writing
        gaps, tpot = np.maximum(self.classes.output - 1.0, 0.0), writing.tpot_s[:, None]
        sd = np.sqrt(reading.service_sd_s**2 + (gaps * writing.tpot_sd_s) ** 2 + (tpot * self.classes.output_sd) ** 2)
        slack = seconds - reading.service_s - self.first_delay_s - self.later_delay_s - gaps * tpot
        return in_time(slack, sd, reading.busy[:, None], reading.wait_s[:, None])

    def met(self, slo: Slo) -> Array:
        """The share of requests that meet every deadline, for each row.

        The first token and the pace fail independently of each other; the end-to-end deadline fails together with
        whichever of the two is the worse.
        """
        share = np.ones_like(self.first_delay_s)
        if isfinite(slo.ttft_s):
            share = self.first_within(slo.ttft_s)
        if isfinite(slo.tpot_s):
            share = share * self.paced_within(slo.tpot_s)
        if isfinite(slo.e2e_s):
            share = np.minimum(share, self.ended_within(slo.e2e_s))
        return np.asarray(share @ self.classes.share)


class Partner(NamedTuple):
    """What the phase takes that a replica does not do itself: by class to read, and from token to token."""

    service_s: Array | float = 0.0
    tpot_s: float = 0.0


def alone(
    behaves: Behaviour, classes: Classes, slo: Slo, arrival_cv: float,
    *, crowd: tuple[int, int] = (1, 1), partner: Partner | None = None, admitted_later: bool = False,
) -> Array:  # fmt: skip
    """The share of requests in time at each of LOADS, for what one replica does to them. `crowd`: how many replicas
    share the prompts, and the outputs. `partner`: one that takes no time unless it is given.
    `admitted_later`: a wait for room in the batch comes after the first token."""
    fleet, partner = Fleet.of([behaves], classes, arrival_cv), partner or Partner()
    rows, none = np.zeros(len(LOADS), dtype=np.intp), np.zeros(len(LOADS))
    nones = np.zeros((len(LOADS), len(classes.share)))
    reading, writing = (
        Reading(nones + partner.service_s, nones, none, none),
        Writing(none + partner.tpot_s, nones, none),
    )
    if behaves.reads:
        reading = fleet.reading(rows, LOADS, crowd[0])
    if behaves.writes:
        writing = fleet.writing(rows, LOADS, crowd[1])
    admit = nones + writing.admit_s[:, None]
    delays = (nones, admit) if admitted_later else (admit, nones)
    return Fates(classes, reading, writing, *delays).met(slo)
