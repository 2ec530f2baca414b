"""A run in spans of time: before something changes, while the network answers to it, and after."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .outcomes import Distribution, ServiceOutcome, distribution_of


class TimedEvent(NamedTuple):
    """Something that changes at a moment, in words. `news`: what the coordinator's news of it begin
    with."""

    at: float
    what: str
    news: str = ""

    def is_in(self, why: Sequence[str]) -> bool:
        """Whether these news tell of it."""
        return any(line.startswith(self.news) for line in why)


class Span(NamedTuple):
    """From `start_s` to `end_s`. `calm`: nothing that has changed is waiting for an answer."""

    name: str
    start_s: float
    end_s: float
    calm: bool


class SpanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One service in one span.

    A request counts where it arrived; but one that had not ended when something changed counts
    among those that met the change. `attainment`: the share of all of them that met every deadline.
    `goodput_s`: requests in time that ended in the span, per second of it. `unanswered`: they had
    no last token when the simulation ended.
    """

    service: str
    span: str
    start_s: float
    end_s: float
    requests: int
    replayed: int
    unanswered: int
    attainment: float
    goodput_s: float
    ttft_s: Distribution
    tpot_s: Distribution


def divide_time(events: Sequence[TimedEvent], settled: Sequence[float], end_s: float) -> tuple[Span, ...]:
    """The spans up to `end_s`. By event, `settled` says when all answers to it were in force; one
    that is not by the next event ends there."""
    order = sorted(zip(events, settled, strict=True), key=lambda each: each[0].at)
    spans = [Span("before", 0.0, min(order[0][0].at, end_s), True)] if order else [Span("all", 0.0, end_s, True)]
    several = len(order) > 1
    for number, (event, until) in enumerate(order):
        following = order[number + 1][0].at if number + 1 < len(order) else end_s
        middle = min(max(until, event.at), following)
        mark = f" {number + 1}" if several else ""
        spans += [Span(f"during{mark}", event.at, middle, False), Span(f"after{mark}", middle, following, True)]
    return tuple(span for span in spans if span.end_s > span.start_s)


def summarise_spans(outcome: ServiceOutcome, spans: Sequence[Span]) -> tuple[SpanSummary, ...]:
    """One service in each span."""
    outcomes = outcome.outcomes
    arrival, output = outcomes.trace.arrival_s, outcomes.trace.output
    ends = np.where(outcomes.completed, arrival + outcomes.e2e_s, inf)
    member = _assign_requests(arrival, ends, spans)
    in_time = outcome.met()
    found = []
    for number, span in enumerate(spans):
        here = member == number
        done = here & outcomes.completed
        ended = in_time & (ends >= span.start_s) & (ends < span.end_s)
        found.append(
            SpanSummary(
                service=outcome.service.name, span=span.name, start_s=span.start_s, end_s=span.end_s,
                requests=int(here.sum()), replayed=int((outcome.replays[here] > 0).sum()),
                unanswered=int((here & ~outcomes.completed).sum()),
                attainment=float(in_time[here].mean()) if here.any() else float("nan"),
                goodput_s=float(ended.sum()) / (span.end_s - span.start_s),
                ttft_s=distribution_of(outcomes.ttft_s[done]),
                tpot_s=distribution_of(outcomes.tpot_s[done & (output > 1)]),
            )
        )  # fmt: skip
    return tuple(found)


def _assign_requests(
    arrival: NDArray[np.float64], ends: NDArray[np.float64], spans: Sequence[Span]
) -> NDArray[np.int64]:
    """The number of the span that each request counts in."""
    starts = np.array([span.start_s for span in spans])
    member = np.asarray(np.searchsorted(starts, arrival, side="right") - 1, dtype=np.int64)
    for number, span in enumerate(spans[:-1]):
        if span.calm and not spans[number + 1].calm:
            member[(member == number) & (ends > span.end_s)] = number + 1
    return member
