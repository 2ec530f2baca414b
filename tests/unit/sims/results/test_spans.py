"""Spans of a run: where they begin and end, and whose they are."""

from math import nan

import numpy as np
import pytest

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.workload import Service, Slo, Workload
from p2pserve.sims.records import Outcomes, Trace
from p2pserve.sims.results.outcomes import ServiceOutcome
from p2pserve.sims.results.spans import Span, TimedEvent, divide_time, summarise_spans


def outcome_of(*requests: tuple[float, float, float], replays: tuple[int, ...] = ()) -> ServiceOutcome:
    """Requests by arrival, TTFT and E2E; 11 tokens each."""
    arrival, ttft, e2e = (np.array(column) for column in zip(*requests, strict=True))
    count = len(requests)
    ones = np.ones(count, np.int64)
    trace = Trace(
        ids=np.arange(count), arrival_s=arrival, prompt=ones, output=11 * ones, lengths="by hand", arrivals="by hand"
    )
    workload = Workload(name="w", prompts=ones, outputs=11 * ones, rate=1.0)
    return ServiceOutcome(
        service=Service(name="s", model=model_shape("llama-7b"), workload=workload, slo=Slo(ttft_s=1.0, e2e_s=10.0)),
        outcomes=Outcomes(trace=trace, ttft_s=ttft, e2e_s=e2e),
        kv_s=np.zeros(count), prefill=ones, decode=ones,
        replays=np.array(replays or (0,) * count, dtype=np.int64), refused=0,
    )  # fmt: skip


def test_a_change_divides_time_into_three() -> None:
    found = divide_time([TimedEvent(60.0, "x")], [75.0], 100.0)
    assert found == (
        Span("before", 0.0, 60.0, True), Span("during", 60.0, 75.0, False), Span("after", 75.0, 100.0, True),
    )  # fmt: skip
    assert divide_time([], [], 100.0) == (Span("all", 0.0, 100.0, True),)


@pytest.mark.parametrize(
    ("moments", "settled", "spans"),
    [
        ([0.0], [5.0], [("during", 0.0, 5.0), ("after", 5.0, 100.0)]),
        ([60.0], [60.0], [("before", 0.0, 60.0), ("after", 60.0, 100.0)]),
        ([60.0], [500.0], [("before", 0.0, 60.0), ("during", 60.0, 100.0)]),
        (
            [60.0, 20.0],
            [70.0, 80.0],
            [("before", 0.0, 20.0), ("during 1", 20.0, 60.0), ("during 2", 60.0, 70.0), ("after 2", 70.0, 100.0)],
        ),
        ([20.0, 20.0], [30.0, 40.0], [("before", 0.0, 20.0), ("during 2", 20.0, 40.0), ("after 2", 40.0, 100.0)]),
    ],
    ids=["at the beginning", "answered at once", "never settled", "out of order, overlapping", "together"],
)
def test_spans_follow_each_other_and_none_is_empty(
    moments: list[float], settled: list[float], spans: list[tuple[str, float, float]]
) -> None:
    found = divide_time([TimedEvent(at, "x") for at in moments], settled, 100.0)
    assert [(span.name, span.start_s, span.end_s) for span in found] == spans


def test_a_request_that_has_not_ended_when_something_changes_is_one_of_those_that_met_it() -> None:
    outcome = outcome_of(
        (1.0, 0.5, 5.0),  # before
        (58.0, 0.5, 8.0),  # was under way
        (59.0, 0.5, nan),  # never ended
        (61.0, 2.0, 12.0),  # late
        (80.0, 0.5, 5.0),
        (99.0, 0.5, 5.0),  # ends after the last arrival
        replays=(0, 1, 3, 0, 0, 0),
    )
    before, during, after = summarise_spans(outcome, divide_time([TimedEvent(60.0, "x")], [75.0], 100.0))
    assert [each.requests for each in (before, during, after)] == [1, 3, 2]
    assert [each.replayed for each in (before, during, after)] == [0, 2, 0]
    assert [each.unanswered for each in (before, during, after)] == [0, 1, 0]
    assert [each.attainment for each in (before, during, after)] == [1.0, pytest.approx(1 / 3), 1.0]
    assert [each.goodput_s for each in (before, during, after)] == [
        pytest.approx(1 / 60), pytest.approx(1 / 15), pytest.approx(1 / 25),
    ]  # fmt: skip
    assert during.ttft_s.p50 == pytest.approx(1.25), "of the two that were answered"
    assert before.tpot_s.p50 == pytest.approx(0.45)


def test_a_span_without_requests_has_no_figures() -> None:
    (first, second) = summarise_spans(
        outcome_of((1.0, 0.5, 5.0)), [Span("a", 0.0, 50.0, True), Span("b", 50.0, 60.0, True)]
    )
    assert first.requests == 1
    assert (second.requests, second.goodput_s) == (0, 0.0)
    assert np.isnan(second.attainment)
    assert np.isnan(second.ttft_s.p50)
