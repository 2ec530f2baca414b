"""Requests as OpenTelemetry traces across boxes, where an exporter is set up (`pip install p2pserve[otel]`).

Each box exports the spans of its own part when that ends. They are one trace without anything being passed along: the
trace's id is made of the request's, which is the same on all boxes, and the ids of spans of what they are. Where to is
said by OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, final

from .traces import assemble_trace
from .values import MAX_FACTS, EventKind, NodeEvent, TraceSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.trace import SpanContext

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
MAX_OPEN: Final = 4096  # requests that are followed at once
ROOT: Final = "request"
_ENDS: Final = frozenset({EventKind.REQUEST_ENDED, EventKind.PREFILL_ENDED, EventKind.DECODE_ENDED})
_NANOSECONDS: Final = 1e9


def open_spans(node: str, environment: Mapping[str, str], say: Callable[[str], None]) -> SpanExport | None:
    """The export that the environment asks for; None where it asks for none, or the libraries are missing."""
    if not any(environment.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        say(f"{ENDPOINTS[0]} is set, and no traces are sent: pip install 'p2pserve[otel]'")
        return None
    return SpanExport(node, BatchSpanProcessor(OTLPSpanExporter()))


@final
class SpanExport:
    """A follower of a node's log that makes spans of what has ended, and gives them to `processor`."""

    def __init__(self, node: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource

        self._processor = processor
        self._resource = Resource.create({"service.name": "p2pserve", "service.instance.id": node})
        self._open: OrderedDict[str, list[NodeEvent]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SpanExport {len(self._open)} requests>"

    def on_event(self, event: NodeEvent) -> None:
        """The log has been told of this."""
        if not event.request:
            return
        events = self._open.setdefault(event.request, [])
        events.append(event)
        if event.kind in _ENDS:
            self._export(event, events)
        if event.kind == EventKind.REQUEST_ENDED or len(self._open) > MAX_OPEN:
            self._open.pop(event.request if event.kind == EventKind.REQUEST_ENDED else next(iter(self._open)), None)

    def close(self) -> None:
        """Send what is waiting. Blocks for some seconds at most."""
        self._processor.shutdown()

    def _export(self, ended: NodeEvent, events: list[NodeEvent]) -> None:
        """The spans of the part that has ended: the gateway's, or those of one try at a replica."""
        group = ended.kind.partition(".")[0]
        attempt = ended.facts.get("attempt")
        own = [each for each in events if _group(each) == group and each.facts.get("attempt", attempt) == attempt]
        if group == "request":
            own = [each for each in events if _group(each) == group]
            self._export_root(ended, own)
        trace = assemble_trace(own)
        for span in trace.spans if trace is not None else ():
            self._processor.on_end(self._readable(ended.request, span, parent=ROOT))

    def _export_root(self, ended: NodeEvent, own: list[NodeEvent]) -> None:
        begin = own[0].time if own else ended.time
        facts = {**(own[0].facts if own else {}), **ended.facts}
        facts = dict(list(facts.items())[:MAX_FACTS])
        root = TraceSpan(name=ROOT, node=ended.node, begin=begin, end=max(begin, ended.time), facts=facts)
        self._processor.on_end(self._readable(ended.request, root, parent=None))

    def _readable(self, request: str, span: TraceSpan, parent: str | None) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.status import Status, StatusCode

        failed = span.facts.get("failed") or span.facts.get("error")
        end = span.end if span.end is not None else span.begin
        attributes: dict[str, Any] = {f"p2pserve.{name}": value for name, value in span.facts.items()}
        return ReadableSpan(
            name=span.name,
            context=_context(request, _key(span)),
            parent=_context(request, parent) if parent is not None else None,
            resource=self._resource,
            attributes={**attributes, "p2pserve.request": request, "p2pserve.attempt": span.attempt},
            kind=SpanKind.SERVER if span.name == ROOT else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, str(failed)) if failed else Status(StatusCode.UNSET),
            start_time=int(span.begin * _NANOSECONDS),
            end_time=int(end * _NANOSECONDS),
        )


def _group(event: NodeEvent) -> str:
    """Which part of a request an event is of: a KV transfer is its prefill replica's."""
    group = event.kind.partition(".")[0]
    return "prefill" if group == "transfer" else group


def _key(span: TraceSpan) -> str:
    if span.name == ROOT:
        return ROOT
    return f"{span.name} {span.node} {span.attempt} {span.facts.get('first', '')} {span.begin}"


def _context(request: str, key: str) -> SpanContext:
    """The same ids on every box, for the same request and the same part of it."""
    from opentelemetry.trace import SpanContext, TraceFlags

    trace = int.from_bytes(blake2b(request.encode(), digest_size=16).digest(), "big") or 1
    span = int.from_bytes(blake2b(f"{request} {key}".encode(), digest_size=8).digest(), "big") or 1
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
