"""Services that share boxes, live and simulated: what is computed of it without a network."""

from dataclasses import replace

import numpy as np
import pytest

from p2pserve.sdk.errors import DemoFailed
from p2pserve.sdk.live.shared.comparison import AskedModel, SharedRun, check_boxes, number_boxes, serve, summarize
from p2pserve.sims.placement.routing import AsRouted, FewestRequests
from p2pserve.sims.records import Trace

RUN = replace(
    SharedRun(),
    services=(AskedModel("llama-7b", 0.5, 96, 40), AskedModel("opt-6.7b", 0.5, 96, 40)),
    pairs=((0, 1), (0, 1)),
    lead=0.0,
)


def together(*arrivals: float, prompt: int = 20) -> dict[int, Trace]:
    """Requests of both services at these moments."""
    count = len(arrivals)
    prompts, outputs = np.full(count, prompt), np.full(count, 20)
    trace = Trace(
        ids=np.arange(count), arrival_s=np.array(arrivals), prompt=prompts, output=outputs, lengths="l", arrivals="a"
    )
    return {0: trace, 1: trace}


def test_requests_are_as_many_as_each_service_is_asked_for_and_the_same_every_time() -> None:
    run = SharedRun()
    traces = run.traces()
    assert [len(trace) for trace in traces.values()] == [360, 216, 144]
    assert all(
        (trace.arrival_s == again.arrival_s).all()
        for trace, again in zip(traces.values(), run.traces().values(), strict=True)
    )
    assert {number for pair in run.pairs for number in pair} == {0, 1, 2}


def test_a_request_is_simulated_where_it_went_live() -> None:
    traces = together(0.0)
    problem = RUN.problem(traces)
    apart = summarize(RUN, problem, serve(RUN, problem, traces, AsRouted({(0, 0): 0, (1, 0): 1})), 0.0)
    beside = summarize(RUN, problem, serve(RUN, problem, traces, AsRouted({(0, 0): 1, (1, 0): 1})), 0.0)
    assert apart[0] == pytest.approx(1.0)
    assert beside[0] > 1.3, "two that step one at a time"
    late = summarize(RUN, problem, serve(RUN, problem, traces, FewestRequests()), 0.5)
    assert late[1] == pytest.approx(apart[1] + 0.5), "messages come before the first token"
    assert late[2] == pytest.approx(apart[2])


def test_steps_are_those_of_the_plans() -> None:
    """A prompt that fits none takes several, and reads the weights in each."""
    traces = together(0.0, prompt=800)
    problem = RUN.problem(traces)
    once, twice = (
        summarize(RUN, problem, serve(RUN, problem, traces, AsRouted({(0, 0): 0, (1, 0): 1}), tokens), 0.0)
        for tokens in (1024, 512)
    )
    assert twice[1] > 1.05 * once[1]
    assert twice[2] == pytest.approx(once[2])


def test_boxes_are_told_by_what_their_engine_process_has() -> None:
    both = [("llama-7b-emulated", "a"), ("opt-6.7b-emulated", "b")]
    assert number_boxes(RUN, [both, [(name, peer * 2) for name, peer in both]]) == {"a": 0, "b": 0, "aa": 1, "bb": 1}
    with pytest.raises(DemoFailed, match="which no box was started with"):
        number_boxes(RUN, [both[:1]])


def test_a_request_that_another_services_box_answers_is_told() -> None:
    run = replace(RUN, pairs=((0, 1), (0, 0)))
    check_boxes(run, {(0, 3): 1, (1, 2): 0})
    with pytest.raises(DemoFailed, match=r"request 3 to opt-6.7b was answered on a box without it"):
        check_boxes(run, {(1, 2): 1})
