"""One request across boxes for ui.perfetto.dev and chrome://tracing, in Chrome's trace event format.

A process for each box, and threads in it for what the box did. Slices of one thread do not overlap, since the format
only lets them nest: what happens at the same time gets threads of its own. Arrows lead from a KV transfer to the decode
replica that waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ...node.observing.values import RequestTrace, TraceSpan
from ..errors import UsageError

_GROUPS: Final = {
    "queue": "gateway", "open": "gateway: opening", "replay": "gateway", "answer": "gateway: answer",
    "prefill": "prefill", "kv": "KV transfer", "kv.layers": "KV, layer by layer", "wait": "decode", "decode": "decode",
}  # fmt: skip
_ORDER: Final = tuple(dict.fromkeys(_GROUPS.values()))
_MICROSECONDS: Final = 1e6
_LANES: Final = 1000  # of one group: more threads than there are layers
Trace = dict[str, Any]


def trace_document(trace: RequestTrace, name_of: Callable[[str], str] = str) -> Trace:
    """The whole of it, as JSON has it. Times count from the request's arrival; `name_of` shortens ids of boxes."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"request": trace.id, "outcome": trace.outcome or "running", "clocks": _clocks(trace, name_of)},
        "traceEvents": list(_events(trace, name_of)),
    }


def write_trace(trace: RequestTrace, path: Path, name_of: Callable[[str], str] = str) -> None:
    """Raises UsageError for a file that cannot be written."""
    try:
        path.write_text(json.dumps(trace_document(trace, name_of), separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"trace: {path} cannot be written: {error.strerror}; name another file") from error


def end_of(trace: RequestTrace) -> float:
    """The last moment that is known of it, in unix seconds: what still runs is drawn until then."""
    return max((span.begin if span.end is None else span.end for span in trace.spans), default=0.0)


def begin_of(trace: RequestTrace) -> float:
    """The first moment that is known of it, in unix seconds."""
    return min((span.begin for span in trace.spans), default=0.0)


def share_out(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each span, so that those of one lane do not overlap; as few as can be. They come in order."""
    free_at: list[float] = []
    lanes: list[int] = []
    for begin, end in spans:
        lane = next((lane for lane, free in enumerate(free_at) if free <= begin), len(free_at))
        free_at[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def _events(trace: RequestTrace, name_of: Callable[[str], str]) -> Iterator[Trace]:
    first, last = begin_of(trace), end_of(trace)
    nodes = [trace.gateway, *sorted({span.node for span in trace.spans} - {trace.gateway})]
    placed: list[tuple[TraceSpan, int, int]] = []
    for pid, node in enumerate(nodes, 1):
        label = f"{name_of(node)} (gateway)" if node == trace.gateway else name_of(node)
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": label}}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
        for group in _ORDER:
            spans = [span for span in trace.spans if span.node == node and _GROUPS.get(span.name) == group]
            yield from _threads(spans, pid, group, last, placed)
    for span, pid, tid in placed:
        yield _slice(span, pid, tid, first, last)
    yield from _arrows(placed, first, last)


def _threads(
    spans: Sequence[TraceSpan], pid: int, group: str, last: float, placed: list[tuple[TraceSpan, int, int]]
) -> Iterator[Trace]:
    lanes = share_out([(span.begin, last if span.end is None else span.end) for span in spans])
    base = 1 + _ORDER.index(group) * _LANES
    for lane in range(max(lanes, default=-1) + 1):
        label = group if not lane else f"{group} {lane + 1}"
        yield {"ph": "M", "pid": pid, "tid": base + lane, "name": "thread_name", "args": {"name": label}}
        yield {
            "ph": "M",
            "pid": pid,
            "tid": base + lane,
            "name": "thread_sort_index",
            "args": {"sort_index": base + lane},
        }
    placed += [(span, pid, base + lane) for span, lane in zip(spans, lanes, strict=True)]


def _slice(span: TraceSpan, pid: int, tid: int, first: float, last: float) -> Trace:
    end = last if span.end is None else span.end
    found = {"pid": pid, "tid": tid, "cat": span.name, "name": title_of(span), "ts": _since(span.begin, first)}
    args = {"attempt": span.attempt, **span.facts} | ({"state": "running"} if span.end is None else {})
    if span.name == "replay":
        return {**found, "ph": "i", "s": "p", "args": args}
    return {**found, "ph": "X", "dur": max(0.0, round((end - span.begin) * _MICROSECONDS, 3)), "args": args}


def title_of(span: TraceSpan) -> str:
    """What a span is called where it is shown."""
    if span.name == "kv.layers":
        first, last = span.facts.get("first"), span.facts.get("last")
        one = isinstance(first, int) and isinstance(last, int) and last == first + 1
        return f"layer {first}" if one else f"layers {first} to {last}"
    return f"{span.name} (attempt {span.attempt})" if span.attempt > 1 else span.name


def _arrows(placed: Iterable[tuple[TraceSpan, int, int]], first: float, last: float) -> Iterator[Trace]:
    """From each KV transfer to the replica that waits for it."""
    placed = list(placed)
    for number, (span, pid, tid) in enumerate(placed, 1):
        if span.name != "kv":
            continue
        waits = (
            each for each in placed
            if each[0].name == "wait" and each[0].node == span.facts.get("target") and each[0].attempt == span.attempt
        )  # fmt: skip
        target = next(waits, None)
        if target is None:
            continue
        wait, to_pid, to_tid = target
        at = min(max(wait.begin, span.end or last), wait.end or last)
        shared = {"cat": "kv", "name": "KV", "id": number}
        yield {**shared, "ph": "s", "pid": pid, "tid": tid, "ts": _since(span.begin, first)}
        yield {**shared, "ph": "f", "bp": "e", "pid": to_pid, "tid": to_tid, "ts": _since(at, first)}


def _since(at: float, first: float) -> float:
    return max(0.0, round((at - first) * _MICROSECONDS, 3))


def _clocks(trace: RequestTrace, name_of: Callable[[str], str]) -> dict[str, str]:
    return {name_of(clock.node): clock_text(clock.offset_s, clock.error_s) for clock in trace.boxes}


def clock_text(offset_s: float, error_s: float | None) -> str:
    """How far a box's clock is from the gateway's, for people."""
    if error_s is None:
        return "not known"
    return f"{offset_s * 1e3:+.1f} ms, give or take {error_s * 1e3:.1f}"
