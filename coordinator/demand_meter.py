"""What clients ask of a service, counted: gateways count their own; plans are for all together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import log, sqrt
from typing import Final, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .costs.tables import packaged_rows
from .demand import CLASSES_PER_SIDE, MAX_LENGTHS, Demand
from .planning.model.workload import Workload
from .workload_profiler import REFERENCE, Shift, WorkloadProfiler, WorkloadStatistics

Lengths = NDArray[np.int64]

UNKNOWN_RATE: Final = 1.0
"""Requests per second that are planned for until somebody has asked for something."""

MIN_REQUESTS: Final = 32
"""Requests that have to end before a gateway says anything: until then the packaged lengths are the
better guess."""

CHECK_EVERY: Final = 16
"""Requests that end between two looks at whether there is news."""

NEWS_FACTOR: Final = 1.5
"""A rate or a mean length that is off by less than this factor is no news..."""

NEWS_ERRORS: Final = 3.0
"""...nor is one that is off by less than so many of its standard errors."""

SAMPLE_SIZE: Final = 4096
"""Requests that stand for those of several gateways."""

QUIET_S: Final = 60.0
"""Silence is no news for less than this..."""

QUIET_GAPS: Final = 10.0
"""...nor for less than (1 + cv^2) times so many mean gaps between requests: 20 gaps of Poisson
arrivals, of which one in 500 million is longer; and the long gaps between bursts are themselves 1 +
cv^2 mean gaps on average. But silence that is as long as all that was seen is news: of a lone burst
nobody knows when the next one comes."""


@final
class DemandMeter:
    """Of one gateway and one service. Tell it of every request as it begins and as it ends.

    `demand` changes only when there is news: the first requests have ended, as many as a reference
    takes have, the traffic has shifted (`WorkloadProfiler`), a mean is clearly not what it was, or
    requests no longer come. So it can be gossiped whenever it changes. After a silence nothing is
    taken as known: what comes then is told of like the first requests, and the rate stays 0 until
    then, so that now and again a request does not bring back a load that has gone.
    """

    def __init__(self) -> None:
        self._profiler = WorkloadProfiler()
        self._ended = 0  # since the profiler began, or began anew
        self._told: WorkloadStatistics | None = None
        self._demand: Demand | None = None
        self._shifted = False
        self._latest = 0.0  # when the last request came

    def __repr__(self) -> str:
        return f"<DemandMeter: {self._profiler!r}, said {self._demand}>"

    def demand(self, now: float) -> Demand | None:
        """The latest news at `now` (seconds); None before there are any."""
        if self._demand is None or not self._is_quiet(now):
            return self._demand
        return msgspec.structs.replace(self._demand, requests_s=0.0)

    def record_start(self, now: float, prompt_tokens: int) -> None:
        """A request has come. `now` (seconds) must not go back."""
        if self._is_quiet(now):
            # The silence is no gap between requests, and those that come now may be of another kind.
            self._demand, self._told = self.demand(now), None
            self._profiler, self._ended, self._shifted = WorkloadProfiler(), 0, False
        self._latest = now
        self._note_shift(self._profiler.record_arrival(prompt_tokens, now=now))

    def record_end(self, prompt_tokens: int, output_tokens: int, running: Iterable[tuple[int, int]] = ()) -> None:
        """A request has been answered, with so many tokens. `running`: prompts of those that are being answered, and
        their tokens so far."""
        self._ended += 1
        self._note_shift(self._profiler.record_finish(max(1, prompt_tokens), max(1, output_tokens)))
        if self._shifted or self._ended % CHECK_EVERY == 0 or self._ended == REFERENCE:
            self._check_for_news([(max(1, prompt), count) for prompt, count in running])

    def _note_shift(self, shift: Shift | None) -> None:
        if shift is not None:
            self._shifted, self._ended = True, 0

    def _is_quiet(self, now: float) -> bool:
        """Whether requests no longer come, as far as it is known how often they did."""
        told = self._told
        if told is None:
            return False
        long_s = QUIET_GAPS * (1.0 + told.arrival_cv**2) / told.rate
        return now - self._latest > max(QUIET_S, min(long_s, self._profiler.span_s))

    def _check_for_news(self, running: list[tuple[int, int]]) -> None:
        now = self._profiler.statistics(running)
        if now.requests < MIN_REQUESTS or not now.rate > 0.0:
            return
        if self._told is None or self._shifted or self._ended == REFERENCE or self._has_moved(self._told, now, running):
            self._told, self._shifted = now, False
            self._demand = demand_of(self._profiler.workload("requests of one gateway", running))

    def _has_moved(self, told: WorkloadStatistics, now: WorkloadStatistics, running: list[tuple[int, int]]) -> bool:
        lengths = self._profiler.workload("requests of one gateway", running)
        return (
            _differ(told.rate, now.rate, now.arrival_cv / sqrt(now.requests))
            or _differ(told.prompt, now.prompt, _standard_error(lengths.prompts))
            or _differ(told.output, now.output, _standard_error(lengths.outputs))
        )


def expected_workload(demands: Iterable[Demand], longest: int) -> Workload:
    """What all gateways together ask for. Where nobody asks for anything now, the lengths that were
    seen last, and where none has seen anything, those of Azure's conversations, at UNKNOWN_RATE.

    A request of more than `longest` tokens in all is shortened to that, prompt and output alike.
    The order of `demands` does not matter.
    """
    seen = sorted(demands, key=msgspec.structs.astuple)
    if not seen:
        prompts, outputs = azure_lengths("conversation")
        prompts, outputs = _shorten(prompts, outputs, longest)
        return Workload(name="Azure's conversations", prompts=prompts, outputs=outputs, rate=UNKNOWN_RATE)
    asking, when = [demand for demand in seen if demand.requests_s > 0.0], "lately"
    if not asking:
        asking, when = [msgspec.structs.replace(demand, requests_s=UNKNOWN_RATE / len(seen)) for demand in seen], "last"
    rate = sum(demand.requests_s for demand in asking)
    pairs = np.concatenate([_repeat(demand, SAMPLE_SIZE * demand.requests_s / rate) for demand in asking])
    prompts, outputs = _shorten(pairs[:, 0], pairs[:, 1], longest)
    # independent streams: in the long run, variances of their counts add up
    square = sum(demand.requests_s * demand.arrival_cv**2 for demand in asking) / rate
    return Workload(
        name=f"what {f'{len(asking)} gateways' if len(asking) > 1 else 'a gateway'} saw {when}",
        prompts=prompts, outputs=outputs, rate=rate, arrival_cv=sqrt(square),
    )  # fmt: skip


def _repeat(demand: Demand, requests: float) -> Lengths:
    """Each of its lengths as often as makes so many in all, and once at least; a row for each request. Where lengths
    stand for more requests than are told of, those between them are filled in."""
    pairs = np.array(demand.lengths, dtype=np.int64)
    times = max(1, round(requests / len(pairs)))
    found = np.repeat(pairs, times, axis=0)
    if len(pairs) == MAX_LENGTHS:
        steps = (np.arange(times) + 0.5) / times - 0.5
        # The longest prompt of these has neither their longest answer nor their shortest.
        others = np.roll(steps[::-1], times // 2)
        for side, each in enumerate((steps, others)):
            found[:, side] += np.rint(np.outer(_widths(pairs[:, side]), each)).astype(np.int64).ravel()
    return np.maximum(found, 1)


def _widths(lengths: Lengths) -> NDArray[np.float64]:
    """From the shortest to the longest of the requests that each of these stands for: to the nearer of its neighbours,
    so that nothing is filled in where there is a gap."""
    order = np.argsort(lengths, kind="stable")
    gaps = np.diff(lengths[order]).astype(np.float64)
    widths = np.empty(len(lengths))
    widths[order] = np.minimum(np.append(gaps, gaps[-1]), np.insert(gaps, 0, gaps[0]))
    return widths


def _shorten(prompts: Lengths, outputs: Lengths, longest: int) -> tuple[Lengths, Lengths]:
    most = max(2, longest)
    total = prompts + outputs
    kept = np.clip(prompts * most // np.maximum(total, 1), 1, most - 1)
    long = total > most
    return np.where(long, kept, prompts), np.where(long, most - kept, outputs)


def demand_of(workload: Workload) -> Demand:
    """What a gateway tells of this traffic."""
    return Demand(requests_s=workload.rate, arrival_cv=workload.arrival_cv, lengths=_summary(workload))


def _summary(workload: Workload) -> tuple[tuple[int, int], ...]:
    """The latest as they were, if there are few; else pairs with the means and the quantiles of all.

    Which answers go with which prompts is told by classes: CLASSES_PER_SIDE by prompt, each of so many by answer. Means
    of these would say nothing of how long the longest eighth is: of Azure's coding requests 11 % would have more than
    95 tokens, where 5 % do, and deadlines are missed by such. So each side is divided as finely as there are pairs:
    every class has its members at other places."""
    count, side = len(workload.prompts), CLASSES_PER_SIDE
    size = max(1, count // MAX_LENGTHS) * MAX_LENGTHS
    prompts, outputs = workload.prompts[-size:], workload.outputs[-size:]
    if size == MAX_LENGTHS:
        return tuple(sorted(zip(prompts.tolist(), outputs.tolist(), strict=True)))
    classes = outputs[np.lexsort((outputs, prompts))].reshape(side, -1)  # a row for each class of prompts
    places = np.arange(side) + (_spread(np.arange(side))[:, None] + 0.5) / side  # of its answers, in eighths
    rows = np.sort(classes, axis=1)
    answers = np.take_along_axis(rows, (places * rows.shape[1] / side).astype(np.int64), axis=1)
    ranks = np.argsort(np.argsort(answers, axis=None, kind="stable")).reshape(side, side)
    at = side * np.arange(side)[:, None] + _spread(np.arange(side) + np.arange(side)[:, None])  # among the prompts
    means = (
        np.rint(np.sort(each).reshape(MAX_LENGTHS, -1).mean(axis=1)).astype(np.int64) for each in (prompts, outputs)
    )
    by_prompt, by_output = means
    return tuple(sorted(zip(by_prompt[at].ravel().tolist(), by_output[ranks].ravel().tolist(), strict=True)))


def _spread(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Classes in an order in which neighbours are far from each other."""
    return 3 * places % CLASSES_PER_SIDE


def _standard_error(lengths: Lengths) -> float:
    """Of the mean, relative to it."""
    return float(lengths.std() / lengths.mean() / sqrt(len(lengths)))


def _differ(before: float, after: float, error: float) -> bool:
    """Whether two means are clearly not the same."""
    return abs(log(after / before)) > max(log(NEWS_FACTOR), NEWS_ERRORS * error)


@cache
def azure_lengths(kind: str) -> tuple[Lengths, Lengths]:
    """Prompts and outputs of 512 requests of Azure's traces, `coding` or `conversation`."""
    rows = [row for row in packaged_rows("azure_lengths.csv") if row["workload"] == kind]
    prompts, outputs = (np.array([int(row[name]) for row in rows], dtype=np.int64) for name in ("prompt", "output"))
    return prompts, outputs
