"""OpenTelemetry: boxes that say nothing to each other make one trace of a request."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from p2pserve.node.observing.spans import MAX_OPEN, SpanExport, open_spans
from p2pserve.node.observing.values import EventKind, NodeEvent

from .logs import DECODE, GATEWAY, PREFILL, event, request_events


def export(events: list[NodeEvent]) -> dict[str, list[ReadableSpan]]:
    """What each box sends, by the names of spans."""
    exporter = InMemorySpanExporter()
    boxes = {node: SpanExport(node, SimpleSpanProcessor(exporter)) for node in (GATEWAY, PREFILL, DECODE)}
    for each in events:
        boxes[each.node].on_event(each)
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_all_boxes_are_in_one_trace_below_one_root() -> None:
    spans = export(request_events())
    assert spans.keys() == {"request", "queue", "open", "answer", "prefill", "kv", "kv.layers", "wait", "decode"}
    (root,) = spans["request"]
    assert root.parent is None
    every = [span for group in spans.values() for span in group]
    contexts = [span.context for span in every if span.context is not None]
    assert root.context is not None
    assert {context.trace_id for context in contexts} == {root.context.trace_id}
    assert len({context.span_id for context in contexts}) == len(every)
    parents = [span.parent for span in every if span is not root]
    assert {parent.span_id for parent in parents if parent is not None} == {root.context.span_id}
    assert {span.resource.attributes["service.instance.id"] for span in every} == {GATEWAY, PREFILL, DECODE}


def test_spans_have_their_times_and_facts() -> None:
    (decode,) = export(request_events())["decode"]
    assert decode.start_time == int(1000.55 * 1e9)
    assert decode.end_time == int(1000.88 * 1e9)
    assert decode.attributes is not None
    assert decode.attributes["p2pserve.busy_s"] == 0.5


def test_a_failure_is_an_error() -> None:
    events = [
        event(1, 1.0, DECODE, EventKind.DECODE_BEGUN, attempt=1),
        event(2, 2.0, DECODE, EventKind.DECODE_ENDED, attempt=1, failed="out of memory"),
    ]
    (wait,) = export(events)["wait"]
    assert not wait.status.is_ok
    assert wait.status.description == "out of memory"


def test_each_attempt_is_exported_once() -> None:
    again = [
        event(4, 1001.0, DECODE, EventKind.DECODE_BEGUN, attempt=2),
        event(5, 1001.1, DECODE, EventKind.DECODE_FIRST_TOKEN, attempt=2),
        event(6, 1001.2, DECODE, EventKind.DECODE_ENDED, attempt=2),
    ]
    spans = export([*request_events(), *again])
    assert sorted(str((span.attributes or {})["p2pserve.attempt"]) for span in spans["decode"]) == ["1", "2"]


def test_requests_that_never_end_are_forgotten() -> None:
    spans = SpanExport("here", SimpleSpanProcessor(InMemorySpanExporter()))
    for number in range(MAX_OPEN + 50):
        spans.on_event(event(1, 1.0, "here", EventKind.DECODE_BEGUN, request=f"r{number}"))
    assert repr(spans) == f"<SpanExport {MAX_OPEN} requests>"


def test_nothing_is_sent_unless_it_is_asked_for() -> None:
    assert open_spans("here", {}, pytest.fail) is None
    assert open_spans("here", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, pytest.fail) is None


def test_an_exporter_is_set_up_by_opentelemetrys_own_variable() -> None:
    spans = open_spans("here", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, pytest.fail)
    assert spans is not None
    spans.close()
