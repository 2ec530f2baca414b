"""A result for chrome://tracing or ui.perfetto.dev: replicas' steps, KV transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .outcomes import SimResult
from .report import ReportError

_MICROSECONDS: Final = 1e6
_TRANSFERS: Final = 1_000_000
"""Number of the track that shows transfers."""


def chrome_events(result: SimResult) -> Iterator[dict[str, Any]]:
    """Events in Chrome's format: a track for each replica, and the KV transfers."""
    for number, replica in enumerate(result.replicas):
        name = f"{replica.id} ({replica.phase.value}, {' '.join(replica.boxes)})"
        yield {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": 1, "tid": _TRANSFERS, "name": "thread_name", "args": {"name": "KV transfers"}}
    for number, step in result.steps:
        yield {
            "ph": "X",
            "pid": 1,
            "tid": number,
            "name": step.kind,
            "ts": step.start_s * _MICROSECONDS,
            "dur": (step.end_s - step.start_s) * _MICROSECONDS,
            "args": {"prompt_tokens": step.prompt_tokens, "requests": step.requests, "steps": step.steps},
        }
    for number, transfer in enumerate(result.transfers):
        ends = f"{result.replicas[transfer.source].id} -> {result.replicas[transfer.target].id}"
        shared = {"pid": 1, "tid": _TRANSFERS, "cat": "kv", "id": number, "name": ends}
        yield {**shared, "ph": "b", "ts": transfer.start_s * _MICROSECONDS, "args": {"tokens": transfer.tokens}}
        yield {**shared, "ph": "e", "ts": transfer.end_s * _MICROSECONDS}


def write_chrome_trace(result: SimResult, path: Path) -> None:
    """Raises ReportError for a bad file, or a result without recorded steps."""
    if not result.steps:
        raise ReportError("no steps were recorded: simulate with record=True")
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, event in enumerate(chrome_events(result)):
                file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from error
