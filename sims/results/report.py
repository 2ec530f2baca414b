"""A result as tables for people, as JSON for programs, and request by request as CSV or Parquet."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

from ...coordinator.plan import Phase
from .outcomes import Distribution, ServiceOutcome, ServiceSummary, SimResult, summarise

Column = NDArray[np.float64] | NDArray[np.int64] | list[str]


class ReportError(RuntimeError):
    """Something a report cannot be written as; one line."""


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica did. Shares are of the simulated time; `kv_peak` is of its KV memory."""

    id: str
    service: str
    phase: Phase
    boxes: tuple[str, ...]
    times: str
    busy: float
    prefill: float
    decode: float
    mixed: float
    steps: int
    prompt_tokens: int
    written_tokens: int
    preemptions: int
    kv_peak: float


class SimReport(msgspec.Struct, frozen=True, kw_only=True):
    """A result in figures; `kv_gb` and `traffic_usd` count KV between boxes."""

    services: tuple[ServiceSummary, ...]
    replicas: tuple[ReplicaRow, ...]
    events: int
    simulated_s: float
    kv_gb: float
    traffic_usd: float


def report_of(result: SimResult) -> SimReport:
    """The figures of a result."""
    seconds = max(result.end_s, 1e-12)
    rows = tuple(
        ReplicaRow(
            id=replica.id,
            service=replica.service,
            phase=replica.phase,
            boxes=replica.boxes,
            times=replica.times,
            busy=replica.counts.busy_s / seconds,
            prefill=replica.counts.prefill_s / seconds,
            decode=replica.counts.decode_s / seconds,
            mixed=replica.counts.mixed_s / seconds,
            steps=replica.counts.steps,
            prompt_tokens=replica.counts.prompt_tokens,
            written_tokens=replica.counts.output_tokens,
            preemptions=replica.counts.preemptions,
            kv_peak=replica.counts.peak_blocks / replica.blocks,
        )
        for replica in result.replicas
    )
    between = sum(size for (source, target), size in result.sent_bytes.items() if source != target)
    return SimReport(
        services=tuple(summarise(outcome, result) for outcome in result.services),
        replicas=rows,
        events=result.events,
        simulated_s=result.end_s,
        kv_gb=between * 1e-9,
        traffic_usd=result.traffic_usd,
    )


def tables(report: SimReport) -> Group:
    """For a terminal: the services, what went into them, and the replicas."""
    return Group(*(_service(summary) for summary in report.services), _replicas(report))


def _service(summary: ServiceSummary) -> Table:
    table = Table(title=f"{summary.service}: {summary.model}", title_justify="left")
    for name in ("", "mean", "p50", "p90", "p99", "deadline"):
        table.add_column(name, justify="left" if not name else "right")
    rows: tuple[tuple[str, Distribution, float | None], ...] = (
        ("TTFT", summary.ttft_s, summary.slo["ttft_s"]),
        ("TPOT", summary.tpot_s, summary.slo["tpot_s"]),
        ("E2E", summary.e2e_s, summary.slo["e2e_s"]),
        ("KV visible", summary.kv_visible_s, None),
    )
    for name, figures, deadline in rows:
        values = (figures.mean, figures.p50, figures.p90, figures.p99)
        table.add_row(name, *map(_seconds, values), "" if deadline is None else _seconds(deadline))
    lost = f", {summary.refused} refused" if summary.refused else ""
    lost += f", {summary.not_admitted} not admitted" if summary.not_admitted else ""
    lost += f", {summary.replayed} replayed" if summary.replayed else ""
    table.caption = (
        f"{summary.completed} of {summary.requests} requests{lost}; {summary.offered_s:.2f} requests/s offered, "
        f"{summary.completed_s:.2f} served, {summary.goodput_s:.2f} in time ({summary.attainment:.1%}); "
        f"{summary.output_tokens_s:.0f} output and {summary.prompt_tokens_s:.0f} prompt tokens/s\n"
        f"lengths: {summary.lengths}; arrivals: {summary.arrivals}; step times: {', '.join(summary.times)}"
    )
    table.caption_justify = "left"
    return table


def _replicas(report: SimReport) -> Table:
    table = Table(
        title="Replicas: shares of the simulated time; tokens in and out; requests preempted; most KV at a time",
        title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name, cells in (("replica", [row.id for row in report.replicas]), ("phase", [*Phase])):
        table.add_column(name, no_wrap=True, min_width=max(map(len, [name, *cells])))  # no name is cut
    table.add_column("boxes")
    for name in ("busy", "prefill", "decode", "mixed", "in", "out", "pre", "KV"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for row in report.replicas:
        table.add_row(
            row.id,
            row.phase.value,
            " ".join(dict.fromkeys(row.boxes)),
            *(f"{share:.0%}" for share in (row.busy, row.prefill, row.decode, row.mixed)),
            *map(str, (row.prompt_tokens, row.written_tokens, row.preemptions)),
            f"{row.kv_peak:.0%}",
        )
    table.caption = (
        f"{report.simulated_s:.1f} s simulated in {report.events} events; {report.kv_gb:.1f} GB of KV between boxes, "
        f"${report.traffic_usd:.2f}"
    )
    table.caption_justify = "left"
    return table


def _seconds(value: float) -> str:
    if value != value:
        return "-"
    return f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.1f} ms"


def request_columns(outcome: ServiceOutcome, result: SimResult) -> Mapping[str, Column]:
    """Columns in order of arrival: seconds, tokens, replicas; NaN or "" for none."""
    outcomes, trace = outcome.outcomes, outcome.outcomes.trace
    names = [replica.id for replica in result.replicas]
    return {
        "id": trace.ids,
        "arrival": trace.arrival_s,
        "prompt": trace.prompt,
        "output": trace.output,
        "ttft": outcomes.ttft_s,
        "tpot": outcomes.tpot_s,
        "e2e": outcomes.e2e_s,
        "kv_visible": outcome.kv_s,
        "in_time": outcome.met().astype(np.int64),
        "prefill": [names[number] if number >= 0 else "" for number in outcome.prefill],
        "decode": [names[number] if number >= 0 else "" for number in outcome.decode],
        "replays": outcome.replays,
    }


def write_requests(outcome: ServiceOutcome, result: SimResult, path: Path) -> None:
    """Request by request: Parquet for a name that ends so, else CSV. Raises ReportError."""
    columns = request_columns(outcome, result)
    try:
        if path.suffix.lower() == ".parquet":
            _write_parquet(columns, path)
        else:
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(zip(*(_plain(column) for column in columns.values()), strict=True))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from error


def _plain(column: Column) -> list[object]:
    return list(column) if isinstance(column, list) else column.tolist()


def _write_parquet(columns: Mapping[str, Column], path: Path) -> None:
    try:
        import pyarrow  # of the extra `plots`: most users of the simulator want tables only
        import pyarrow.parquet
    except ImportError as error:
        raise ReportError("Parquet needs pyarrow: pip install 'p2pserve[plots]', or write CSV") from error
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), path)
