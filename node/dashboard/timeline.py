"""One request across boxes as bars on a line of time, and courses of figures as lines. Pure geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..observing.values import RequestTrace, TraceSpan
from . import units
from .view import View

WIDTH: Final = 1000  # units of the drawing; a bar is at least one and a half
ROW: Final = 30
MAX_BARS: Final = 200
SPARK: Final = (96.0, 24.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A span: `row` counts from 0; `kind` is its name's first part, for its colour."""

    label: str
    box: str
    kind: str
    row: int
    x: float
    width: float
    seconds: str
    tip: str
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """Bars from the first span's begin to the last one's end, which is `total` later."""

    bars: tuple[Bar, ...]
    left_out: int
    total: str


def draw_timeline(view: View, trace: RequestTrace) -> RequestTimeline:
    """Spans in the order in which they began; one that has not ended reaches to the last moment known."""
    spans = sorted(trace.spans, key=lambda span: (span.begin, span.name))
    if not spans:
        return RequestTimeline(bars=(), left_out=0, total=units.NONE)
    first = spans[0].begin
    last = max(*(span.end or span.begin for span in spans), first + 1e-6)
    scale = WIDTH / (last - first)
    bars = tuple(_make_bar(view, span, row, first, last, scale) for row, span in enumerate(spans[:MAX_BARS]))
    return RequestTimeline(
        bars=bars,
        left_out=len(spans) - len(bars),
        total=units.seconds(last - first),
    )


def _make_bar(view: View, span: TraceSpan, row: int, first: float, last: float, scale: float) -> Bar:
    end = span.end if span.end is not None else last
    seconds = units.seconds(max(0.0, end - span.begin))
    facts = ", ".join(units.fact(name, value) for name, value in span.facts.items())
    lines = (f"{span.name} at {view.label(span.node)}", f"from {units.seconds(max(0.0, span.begin - first))} on", facts)
    attempt = f", attempt {span.attempt}" if span.attempt > 1 else ""
    return Bar(
        label=f"{_name(span)}{attempt}",
        box=view.label(span.node),
        kind=span.name.partition(".")[0],
        row=row,
        x=round((span.begin - first) * scale, 1),
        width=round(max(1.5, (end - span.begin) * scale), 1),
        seconds=seconds,
        tip="\n".join(filter(None, lines)),
        is_open=span.end is None,
    )


def _name(span: TraceSpan) -> str:
    """A span's name; of layers of KV, which they are."""
    first, last = span.facts.get("first"), span.facts.get("last")
    if span.name != "kv.layers" or not isinstance(first, int) or not isinstance(last, int):
        return span.name
    return f"kv layer {first}" if last == first + 1 else f"kv layers {first}–{last - 1}"


def draw_spark(values: Sequence[float | None]) -> str:
    """A line through the values that there are, oldest first, as an SVG path within SPARK; none for fewer than two."""
    known = [(number, value) for number, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    width, height = SPARK
    x_step, span = width / (len(values) - 1), (high - low) or 1.0
    y_step = (height - 4) / span
    points = (f"{number * x_step:.1f} {height - 2 - (value - low) * y_step:.1f}" for number, value in known)
    return "M" + "L".join(points)
