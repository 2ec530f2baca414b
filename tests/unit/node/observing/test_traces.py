"""One request across boxes: its parts, by clocks that disagree, with parts missing."""

from __future__ import annotations

import random

import pytest

from p2pserve.node.observing.traces import (
    assemble_trace,
    boxes_of,
    clock_from_round_trip,
    estimate_clocks,
    find_request,
    relative_clocks,
)
from p2pserve.node.observing.values import BoxClock, EventKind, NodeEvent, RequestTrace, TraceSpan

from .logs import CLIENT, DECODE, GATEWAY, PREFILL, REQUEST, event, request_events


def assembled(events: list[NodeEvent], clocks: dict[str, BoxClock] | None = None) -> RequestTrace:
    trace = assemble_trace(events, clocks or {})
    assert trace is not None
    return trace


def span(trace: RequestTrace, name: str) -> TraceSpan:
    return next(each for each in trace.spans if each.name == name)


def stretch(trace: RequestTrace, name: str) -> tuple[str, float, float]:
    found = span(trace, name)
    assert found.end is not None
    return found.node, round(found.begin - 1000.0, 6), round(found.end - 1000.0, 6)


def test_a_request_has_all_its_parts() -> None:
    trace = assembled(request_events())
    assert stretch(trace, "queue") == (GATEWAY, 0.0, 0.1)
    assert stretch(trace, "open") == (GATEWAY, 0.1, 0.14)
    assert stretch(trace, "prefill") == (PREFILL, 0.16, 0.4)
    assert stretch(trace, "kv") == (PREFILL, 0.25, 0.45)
    assert stretch(trace, "wait") == (DECODE, 0.12, 0.55)
    assert stretch(trace, "decode") == (DECODE, 0.55, 0.88)
    assert stretch(trace, "answer") == (GATEWAY, 0.5, 0.9)
    assert [each.name for each in trace.spans].count("kv.layers") == 2
    assert stretch(trace, "kv.layers") == (PREFILL, 0.25, 0.35)


def test_a_trace_says_what_became_of_it() -> None:
    trace = assembled(request_events())
    assert (trace.id, trace.gateway, trace.client, trace.outcome) == (REQUEST, GATEWAY, CLIENT, "length")
    assert (trace.cost.box_usd, trace.cost.traffic_usd) == (0.002, 0.001)
    assert trace.cost.usd == pytest.approx(0.003)
    assert trace.facts["ttft_s"] == 0.5
    assert trace.missing == {}


def test_the_order_of_events_does_not_matter() -> None:
    events = request_events()
    random.Random(1).shuffle(events)
    assert assembled(events) == assembled(request_events())


def test_one_that_runs_has_open_spans() -> None:
    trace = assembled([each for each in request_events() if each.kind not in ("decode.ended", "request.ended")])
    assert trace.outcome == ""
    assert span(trace, "decode").end is None
    assert span(trace, "answer").end is None


def test_clocks_that_are_off_are_put_right_from_the_logs_alone() -> None:
    skewed = request_events({PREFILL: 3600.0, DECODE: -20.0})
    clocks = estimate_clocks(skewed)
    assert clocks[PREFILL].offset_s == pytest.approx(3600.0, abs=0.03)
    assert clocks[DECODE].offset_s == pytest.approx(-20.0, abs=0.03)
    assert clocks[GATEWAY] == BoxClock(node=GATEWAY, error_s=0.0)
    for node in (PREFILL, DECODE):
        error = clocks[node].error_s
        assert error is not None
        assert error <= 0.02 + 1e-9
    trace = assembled(skewed, clocks)
    assert stretch(trace, "prefill")[1] == pytest.approx(0.16, abs=0.02)
    assert stretch(trace, "decode")[2] == pytest.approx(0.88, abs=0.03)


def test_nothing_is_known_of_clocks_without_the_gateway() -> None:
    assert estimate_clocks([each for each in request_events() if each.node != GATEWAY]) == {}
    unheard = [each for each in request_events() if each.kind != EventKind.REQUEST_OPENED]
    assert estimate_clocks(unheard).keys() == {GATEWAY}


def test_a_round_trip_tells_how_far_a_clock_is_and_how_surely() -> None:
    clock = clock_from_round_trip("p", shown=110.0, asked=100.0, answered=100.2)
    assert clock.offset_s == pytest.approx(9.9)
    assert clock.error_s == pytest.approx(0.1)
    gateway = BoxClock(node=GATEWAY, offset_s=2.0, error_s=0.05)
    relative = relative_clocks({"p": clock, GATEWAY: gateway}, GATEWAY)
    assert relative["p"].offset_s == pytest.approx(7.9)
    assert relative["p"].error_s == pytest.approx(0.15)
    assert (relative[GATEWAY].offset_s, relative[GATEWAY].error_s) == (0.0, 0.0)


def test_a_box_whose_log_is_not_there_is_named() -> None:
    trace = assembled([each for each in request_events() if each.node != PREFILL])
    assert trace.missing == {PREFILL: "its log has nothing of it"}
    told = assemble_trace([each for each in request_events() if each.node != PREFILL], {}, {PREFILL: "no answer"})
    assert told is not None
    assert told.missing == {PREFILL: "no answer"}
    assert boxes_of(request_events()) == (GATEWAY, PREFILL, DECODE)


def test_a_replay_is_a_moment_with_its_reason_and_attempts_are_kept_apart() -> None:
    why = "decode node ..de-box was lost"
    later = [
        event(7, 1001.0, GATEWAY, EventKind.REQUEST_RECOVERED, attempt=2, type="decode", why=why),
        event(8, 1001.0, GATEWAY, EventKind.REQUEST_ROUTED, attempt=2, decode="other"),
        event(1, 1001.1, "other", EventKind.DECODE_BEGUN, attempt=2),
        event(2, 1001.2, "other", EventKind.DECODE_FIRST_TOKEN, attempt=2),
        event(3, 1001.3, "other", EventKind.DECODE_ENDED, attempt=2),
    ]
    trace = assembled([*request_events(), *later])
    assert trace.recovered == (why,)
    replay = span(trace, "replay")
    assert (replay.attempt, replay.begin, replay.end) == (2, 1001.0, 1001.0)
    assert [(each.node, each.attempt) for each in trace.spans if each.name == "decode"] == [(DECODE, 1), ("other", 2)]


def test_a_request_is_found_by_either_id() -> None:
    assert find_request(request_events(), "mine") == REQUEST
    assert find_request(request_events(), REQUEST) == REQUEST
    assert find_request(request_events(), "other") is None
    assert assemble_trace([]) is None
