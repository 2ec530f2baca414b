"""What a benchmark has shown: percentiles, rates, what was in time, failures, bytes and cost. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import nan
from typing import Self

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ...coordinator.planning.model.workload import Slo
from ...sims.records import Outcomes, Trace
from ...sims.results.outcomes import Distribution, distribution_of, meets
from ..requests import Generation
from .load import BenchLoad


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the load (`row`) that has ended: what its client saw, in seconds from its arrival, or the kind of
    `failure` and its `reason`."""

    row: int
    ttft_s: float = nan
    e2e_s: float = nan
    tokens: int = 0
    replays: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    usd: float = 0.0
    failure: str = ""
    reason: str = ""

    @classmethod
    def of(cls, row: int, answer: Generation, ttft_s: float, e2e_s: float) -> Self:
        """Of an answer, with its gateway's figures where it has told any."""
        figures = answer.figures
        found = cls(row=row, ttft_s=ttft_s, e2e_s=e2e_s, tokens=len(answer.tokens))
        if figures is None:
            return found
        transfer = figures.transfer
        return msgspec.structs.replace(
            found,
            replays=max(0, figures.attempts - 1),
            raw_bytes=transfer.raw_bytes if transfer is not None else 0,
            wire_bytes=transfer.wire_bytes if transfer is not None else 0,
            usd=figures.usd,
        )


class FailureCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often requests failed in one way, and what the first of them was told."""

    kind: str
    count: int
    first: str


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark in figures. Distributions are of answered requests, None where there is none; rates are per second of
    `span_s`. `attainment` is of all that ended, `goodput_s` how many of them a second were in time, None without `slo`.
    `usd_per_million_tokens`: of answers, None where no box told a price. `unfinished` were sent and had not ended."""

    service: str
    lengths: str
    arrivals: str
    seed: int
    emulated: tuple[str, ...]
    interrupted: bool
    requests: int
    answered: int
    failed: int
    unfinished: int
    span_s: float
    requests_s: float
    output_tokens_s: float
    prompt_tokens_s: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    slo: dict[str, float] | None
    attainment: float | None
    goodput_s: float | None
    failures: tuple[FailureCount, ...]
    replayed: int
    replays: int
    kv_raw_bytes: int
    kv_wire_bytes: int
    usd: float
    usd_per_million_tokens: float | None


def summarise_run(
    load: BenchLoad, ended: Sequence[Ended], *, sent: int, span_s: float, interrupted: bool
) -> BenchReport:
    """The figures of what has ended so far."""
    answered = [each for each in ended if not each.failure]
    tokens, usd = sum(each.tokens for each in answered), sum(each.usd for each in answered)
    prompts = sum(int(load.trace.prompt[each.row]) for each in answered)
    outcomes = _outcomes(load.trace, ended) if ended else None
    met = int(meets(outcomes, load.slo).sum()) if outcomes is not None and load.slo is not None else 0
    closed = load.concurrency is not None
    return BenchReport(
        service=load.service,
        lengths=load.trace.lengths,
        arrivals=f"{load.concurrency} at a time" if closed else load.trace.arrivals,
        seed=load.seed,
        emulated=load.emulated,
        interrupted=interrupted,
        requests=len(load.trace),
        answered=len(answered),
        failed=len(ended) - len(answered),
        unfinished=sent - len(ended),
        span_s=span_s,
        requests_s=_per_second(len(answered), span_s),
        output_tokens_s=_per_second(tokens, span_s),
        prompt_tokens_s=_per_second(prompts, span_s),
        ttft_s=_spread([each.ttft_s for each in answered]),
        # An answer of one token has no time between tokens.
        tpot_s=_spread([(each.e2e_s - each.ttft_s) / (each.tokens - 1) for each in answered if each.tokens > 1]),
        e2e_s=_spread([each.e2e_s for each in answered]),
        slo=_deadlines(load.slo),
        attainment=met / len(ended) if load.slo is not None and ended else None,
        goodput_s=_per_second(met, span_s) if load.slo is not None else None,
        failures=count_failures(ended),
        replayed=sum(each.replays > 0 for each in answered),
        replays=sum(each.replays for each in answered),
        kv_raw_bytes=sum(each.raw_bytes for each in answered),
        kv_wire_bytes=sum(each.wire_bytes for each in answered),
        usd=usd,
        usd_per_million_tokens=usd / tokens * 1e6 if usd and tokens else None,
    )


def count_failures(ended: Sequence[Ended]) -> tuple[FailureCount, ...]:
    """Failures by kind, the most frequent first."""
    counts = Counter(each.failure for each in ended if each.failure)
    first = {each.failure: each.reason for each in reversed(ended)}
    return tuple(FailureCount(kind=kind, count=number, first=first[kind]) for kind, number in counts.most_common())


def print_report(report: BenchReport, console: Console) -> None:
    """For people."""
    console.print(f"{report.service}: {report.lengths}; {report.arrivals}; seed {report.seed}")
    for summary in report.emulated:
        console.print(f"engines are emulated ({summary}): their times are a model's, not a GPU's")
    parts = [f"{report.answered} of {report.requests} requests answered in {report.span_s:.1f} s"]
    parts += [f"{report.failed} failed"] * bool(report.failed) + ["interrupted"] * report.interrupted
    parts += [f"{report.unfinished} unfinished"] * bool(report.unfinished)
    console.print(", ".join(parts))
    table = Table("", "mean", "p50", "p90", "p99", box=None, pad_edge=False, header_style="bold")
    rows = {"TTFT": report.ttft_s, "TPOT": report.tpot_s, "E2E": report.e2e_s}
    for name, spread in rows.items():
        if spread is not None:
            table.add_row(name, *map(_time, (spread.mean, spread.p50, spread.p90, spread.p99)))
    if table.row_count:
        console.print(table)
    console.print(
        f"{report.requests_s:.2f} requests/s, {report.output_tokens_s:.1f} new tokens/s, "
        f"{report.prompt_tokens_s:.1f} prompt tokens/s"
    )
    if report.attainment is not None and report.slo is not None:
        asked = ", ".join(f"{name} {_time(value)}" for name, value in report.slo.items())
        console.print(f"in time ({asked}): {report.attainment:.1%}, goodput {report.goodput_s:.2f} requests/s")
    for failure in report.failures:
        console.print(f"failed, {failure.kind}: {failure.count}, the first: {failure.first}")
    if report.replays:
        console.print(f"{report.replayed} requests were begun again elsewhere, {report.replays} times in all")
    if report.kv_wire_bytes:
        console.print(f"KV {report.kv_raw_bytes / 1e6:.2f} MB sent as {report.kv_wire_bytes / 1e6:.2f} MB")
    if report.usd_per_million_tokens is not None:
        console.print(f"${report.usd:.6f}, ${report.usd_per_million_tokens:.2f} per million new tokens")


def _outcomes(trace: Trace, ended: Sequence[Ended]) -> Outcomes:
    """Those that ended, as requests of as many tokens as came."""
    rows = np.array(sorted(range(len(ended)), key=lambda index: trace.arrival_s[ended[index].row]))
    order = [ended[index] for index in rows]
    picked = np.array([each.row for each in order])
    return Outcomes(
        trace=Trace(
            ids=trace.ids[picked],
            arrival_s=trace.arrival_s[picked],
            prompt=trace.prompt[picked],
            output=np.array([max(1, each.tokens) for each in order]),
            lengths=trace.lengths,
            arrivals=trace.arrivals,
        ),
        ttft_s=np.array([each.ttft_s for each in order]),
        e2e_s=np.array([each.e2e_s for each in order]),
    )


def _spread(values: Sequence[float]) -> Distribution | None:
    return distribution_of(np.array(values)) if values else None


def _deadlines(slo: Slo | None) -> dict[str, float] | None:
    if slo is None:
        return None
    asked: Mapping[str, float] = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    return {name: value for name, value in asked.items() if np.isfinite(value)}


def _per_second(count: float, span_s: float) -> float:
    return count / span_s if span_s > 0 else 0.0


def _time(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s"
