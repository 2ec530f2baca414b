"""What a simulation says of what changed: the answers, and each service in each span of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from ...coordinator.names import count_of
from ...sims.replanning import ReplanPolicy, ReplanRecord
from ...sims.results.outcomes import Distribution, SimResult
from ...sims.results.report import report_of
from ...sims.results.spans import Span, SpanSummary, TimedEvent, divide_time, summarise_spans
from ...sims.scenario import BoxLost, SimSettings
from ..actions.status_view import print_prose
from .changes import SimScenario

FLIPS_SHOWN: Final = 6
"""Lines of reasons for each answer."""

WHOLE_TABLE: Final = 110
"""Columns of a table of spans with three percentiles; a narrower terminal is shown the last alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One run: what came out, and what the coordinator answered."""

    policy: ReplanPolicy
    result: SimResult
    records: tuple[ReplanRecord, ...]
    cpu_s: float


def spans_of(scenario: SimScenario, runs: Sequence[PolicyRun], settings: SimSettings, end_s: float) -> tuple[Span, ...]:
    """The same for all runs: a change is settled when the last of them has its first answer to it in
    force, with all that loads, and not before gateways know of it."""
    settled = []
    for event in scenario.events:
        ready = [record.ready_s for run in runs for record in _first_answers(event, run.records)]
        settled.append(max([event.at + settings.detect_s, *ready]))
    return divide_time(scenario.events, settled, end_s)


def _first_answers(event: TimedEvent, records: Sequence[ReplanRecord]) -> list[ReplanRecord]:
    """What was answered when the coordinator first heard of it."""
    after = [record for record in records if record.asked_s >= event.at and event.is_in(record.why)]
    return [record for record in after if record.asked_s == after[0].asked_s and not record.kept]


def changes_json(scenario: SimScenario, settings: SimSettings) -> dict[str, Any]:
    """What was to happen, for programs."""
    return {
        "events": [{"at_s": event.at, "what": event.what} for event in scenario.events],
        "detect_s": settings.detect_s,
        "dead_s": settings.planned_after_s,
        "told_s": settings.told_s,
        "quiet_s": settings.quiet_s,
    }


def run_json(run: PolicyRun, spans: Sequence[Span]) -> dict[str, Any]:
    """One run, for programs."""
    return {
        "replan": run.policy.value,
        "cpu_s": run.cpu_s,
        "spans": msgspec.to_builtins(_summaries(run, spans)),
        "replans": msgspec.to_builtins(run.records),
        **msgspec.to_builtins(report_of(run.result)),
    }


def print_changes(
    scenario: SimScenario, runs: Sequence[PolicyRun], spans: Sequence[Span], settings: SimSettings, console: Console
) -> None:
    """For people: what happens, what each policy answers, and a table of all spans."""
    print_prose(_describe_changes(scenario, runs, settings), console)
    console.print(_spans_table(runs, spans, console.width))


def _describe_changes(scenario: SimScenario, runs: Sequence[PolicyRun], settings: SimSettings) -> Iterator[str]:
    for event in scenario.events:
        yield f"at {event.at:g} s {event.what}"
    if any(isinstance(change, BoxLost) for change in scenario.changes):
        yield (
            f"a lost box: its requests go on elsewhere after {settings.detect_s:g} s, plans are made without it after "
            f"{settings.planned_after_s:g} s"
        )
    yield f"links and traffic are planned with every {settings.quiet_s:g} s at most"
    for run in runs:
        answers = [record for event in scenario.events for record in _first_answers(event, run.records)]
        shares = 0
        for record in run.records:
            if not (record.flips or record.loading or record.kept or record in answers):
                shares += 1
                continue
            yield from _describe(run.policy, record)
        if shares:
            yield f"{run.policy.value}: new shares alone for news of traffic, {count_of(shares, 'time')}"


def _describe(policy: ReplanPolicy, record: ReplanRecord) -> Iterator[str]:
    head = f"{policy.value}: at {record.asked_s:.1f} s ({'; '.join(record.why)})"
    took = f"planning took {record.planning_s:.2f} s on this machine"
    if record.kept:
        yield f"{head} no {record.kind} plan: {record.kept}"
        yield f"    {took}"
        return
    count = len(record.loading)
    loads = f"{count_of(count, 'replica')} load{'s' if count == 1 else ''} for up to {record.reload_s:.0f} s (modelled)"
    yield (
        f"{head} a {record.kind} plan, {record.replicas}, in force at {record.in_force_s:.1f} s; "
        f"{loads if count else 'nothing is loaded'}"
    )
    yield f"    {record.before:.0%} expected in time without it, {record.after:.0%} with it; {took}"
    yield from (f"    {line}" for line in record.flips[:FLIPS_SHOWN])


def _spans_table(runs: Sequence[PolicyRun], spans: Sequence[Span], width: int) -> Table:
    """The service's name stands there only where there are several."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    several = len(runs[0].result.services) > 1
    for name in ("replan", *(["service"] if several else []), "span", "seconds"):
        table.add_column(name, no_wrap=True)
    is_narrow = width < WHOLE_TABLE
    shown = "p99" if is_narrow else "p50/p90/p99"
    for name in ("requests", "replayed", "in time", "goodput/s", f"TTFT {shown}", f"TPOT {shown}"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        for summary in _summaries(run, spans):
            table.add_row(
                run.policy.value, *([summary.service] if several else []), summary.span,
                f"{summary.start_s:.0f} - {summary.end_s:.0f}", str(summary.requests), str(summary.replayed),
                f"{summary.attainment:.1%}", f"{summary.goodput_s:.2f}", _times(summary.ttft_s, is_narrow),
                _times(summary.tpot_s, is_narrow),
            )  # fmt: skip
    return table


def _summaries(run: PolicyRun, spans: Sequence[Span]) -> list[SpanSummary]:
    return [summary for outcome in run.result.services for summary in summarise_spans(outcome, spans)]


def _times(figures: Distribution, is_narrow: bool) -> str:
    values = (figures.p99,) if is_narrow else (figures.p50, figures.p90, figures.p99)
    if not figures.p99 >= 10.0:
        return "/".join(f"{value * 1e3:.0f}" for value in values) + " ms"
    return "/".join(f"{value:.3g}" for value in values) + " s"
