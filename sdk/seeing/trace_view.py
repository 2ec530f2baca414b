"""One request across boxes as text: a line for each stretch of it, with a bar where it lies in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from ...node.observing.values import Fact, RequestTrace, TraceSpan
from .request_trace import begin_of, clock_text, end_of, title_of

BAR: Final = 22
LEAST_WIDTH: Final = 60
_WHAT: Final = 19  # columns of `decode (attempt 2)`, with a space
_BOX: Final = 17
_NAMES: Final = {"kv": "KV transfer"}


def trace_lines(
    trace: RequestTrace, name_of: Callable[[str], str], *, with_layers: bool = False, width: int = 80
) -> Iterator[str]:
    """The request for people, in lines of `width` columns where ids allow it."""
    yield from _head(trace, name_of)
    begin, end = begin_of(trace), end_of(trace)
    bar = max(10, BAR + max(LEAST_WIDTH, width) - 80)
    yield ""
    yield f"{'what':<{_WHAT}}{'box':<{_BOX}}{'from':>9}{'for':>9}  |{seconds_text(end - begin):^{bar}}|"
    for span in trace.spans:
        if span.name == "kv.layers" and not with_layers:
            continue
        yield _line(span, begin, end, bar, name_of)
        if span.name == "kv" and not with_layers:
            yield from _layers_summary(trace, span)
    yield from _tail(trace, name_of)


def _head(trace: RequestTrace, name_of: Callable[[str], str]) -> Iterator[str]:
    facts = trace.facts
    state = trace.outcome or "running"
    yield f"request {trace.id}: {state}" + (f", {trace.error}" if trace.error else "")
    if trace.gateway:
        client = f", for client {name_of(trace.client)}" if trace.client else ""
        yield f"  at gateway {name_of(trace.gateway)}{client}"
    tokens = f"  {facts.get('prompt_tokens', '?')} tokens in, {facts.get('completion_tokens', '?')} out"
    times = [("first after", "ttft_s"), ("each next", "tpot_s"), ("in all", "e2e_s")]
    found = [f"{text} {seconds_text(value)}" for text, key in times if isinstance(value := facts.get(key), float)]
    yield "; ".join([tokens, *found])
    if trace.outcome:
        cost = trace.cost
        yield f"  cost ${cost.usd:.6f}: boxes ${cost.box_usd:.6f}, traffic ${cost.traffic_usd:.6f}"
    yield from (f"  recovered: {why}" for why in trace.recovered)


def _line(span: TraceSpan, begin: float, end: float, bar: int, name_of: Callable[[str], str]) -> str:
    title = _NAMES.get(span.name, title_of(span))
    title = f"  {title}" if span.name == "kv.layers" else title
    since = seconds_text(span.begin - begin)
    took = seconds_text(span.end - span.begin) if span.end is not None else "runs"
    drawn = draw_bar(span.begin - begin, (span.end if span.end is not None else end) - begin, end - begin, bar)
    note = _note(span, name_of)
    return f"{title:<{_WHAT}}{name_of(span.node):<{_BOX}}{since:>9}{took:>9}  |{drawn}|" + (
        f"\n  {note}" if note else ""
    )


def _note(span: TraceSpan, name_of: Callable[[str], str]) -> str:
    facts = span.facts
    match span.name:
        case "kv":
            raw, wire = _megabytes(facts.get("raw_bytes")), _megabytes(facts.get("wire_bytes"))
            hidden = facts.get("hidden_fraction")
            parts = [f"{raw} sent as {wire} to {name_of(str(facts.get('target', '')))}", str(facts.get("mode", ""))]
            parts.append(f"{hidden:.0%} hidden behind prefill" if isinstance(hidden, float) else "")
            parts.append(f"failed: {facts['failed']}" if facts.get("failed") else "")
            return ", ".join(part for part in parts if part)
        case "replay":
            return f"{facts.get('type', '')}: {facts.get('why', '')}"
        case "prefill" | "decode" | "wait" if facts.get("failed"):
            return f"failed: {facts['failed']}"
        case _:
            return ""


def _layers_summary(trace: RequestTrace, transfer: TraceSpan) -> Iterator[str]:
    layers = [span for span in trace.spans if span.name == "kv.layers" and span.attempt == transfer.attempt]
    ends = [span.end - transfer.begin for span in layers if span.end is not None]
    if ends:
        last = max((span.facts["last"] for span in layers if isinstance(span.facts.get("last"), int)), default="?")
        first, final = seconds_text(min(ends)), seconds_text(max(ends))
        yield f"  layers up to {last}: the first was there after {first}, the last after {final}"


def _tail(trace: RequestTrace, name_of: Callable[[str], str]) -> Iterator[str]:
    others = [clock for clock in trace.boxes if clock.node != trace.gateway]
    if others:
        yield ""
        yield "clocks, as seen from the gateway's:"
        yield from (f"  {name_of(each.node):<{_BOX}}{clock_text(each.offset_s, each.error_s)}" for each in others)
    yield from (f"missing: {name_of(node)}: {why.replace(node, name_of(node))}" for node, why in trace.missing.items())


def draw_bar(begin: float, end: float, whole: float, width: int) -> str:
    """Where a stretch lies within the whole."""
    if whole <= 0.0:
        return "#".ljust(width)
    first = min(width - 1, int(begin / whole * width))
    last = max(first + 1, min(width, round(end / whole * width)))
    return (" " * first + "#" * (last - first)).ljust(width)


def seconds_text(seconds: float) -> str:
    """A duration for people, in at most eight columns."""
    if abs(seconds) < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if abs(seconds) < 600.0 else f"{seconds / 60:.0f} min"


def _megabytes(value: Fact | None) -> str:
    return f"{value / 1e6:.2f} MB" if isinstance(value, int) else "?"
