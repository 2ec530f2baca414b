"""Requests that are drawn, replayed or read, with a source of randomness that gives what it is told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pserve.sims.records import Trace, TraceError
from p2pserve.sims.workloads import Lengths, Recorded, draw, read_requests, replay, workload_of

LENGTHS = Lengths(np.array([10, 20, 30]), np.array([1, 2, 3]), "three")
RECORDED = Recorded(LENGTHS, np.array([0.0, 1.0, 4.0]))


class Told:
    """Gaps of a third of what they are in the mean, and lengths in turn."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def exponential(self, scale: Any = 1.0, size: Any = None) -> Any:
        self.asked.append(("exponential", scale, size))
        return np.full(size, scale / 3)

    def gamma(self, shape: Any, scale: Any = 1.0, size: Any = None) -> Any:
        self.asked.append(("gamma", shape, scale))
        return np.full(size, shape * scale)

    def integers(self, low: Any, high: Any = None, size: Any = None, **more: Any) -> Any:
        self.asked.append(("integers", low))
        return np.arange(size) % low


def test_a_trace_has_a_rate_and_a_burstiness() -> None:
    assert RECORDED.rate == 0.5, "two gaps in four seconds"
    assert RECORDED.gap_cv == pytest.approx(1.0 / 2.0)


def test_a_replay_is_cut_before_its_end_and_stretched_by_the_rate() -> None:
    assert replay(RECORDED, seconds=4.0).arrival_s.tolist() == [0.0, 1.0], "what arrives at the very end is too late"
    assert replay(RECORDED, seconds=4.01).arrival_s.tolist() == [0.0, 1.0, 4.0]
    fast = replay(RECORDED, rate=2.0, seconds=0.5)
    assert fast.arrival_s.tolist() == [0.0, 0.25]
    assert (fast.prompt.tolist(), fast.output.tolist()) == ([10, 20], [1, 2])
    assert fast.lengths == "three, as recorded"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf")])
def test_a_replay_of_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(TraceError, match="seconds is"):
        replay(RECORDED, seconds=seconds)


@pytest.mark.parametrize(
    ("cv", "asked", "gap"),
    [(1.0, ("exponential", 0.25, 5), 0.25 / 3), (2.0, ("gamma", 0.25, 1.0), 0.25), (0.5, ("gamma", 4.0, 0.0625), 0.25)],
)
def test_gaps_are_drawn_with_the_mean_of_the_rate_and_the_cv_asked_for(
    cv: float, asked: tuple[Any, ...], gap: float
) -> None:
    rng: Any = Told()
    trace = draw(LENGTHS, rate=4.0, rng=rng, requests=5, cv=cv)
    assert rng.asked == [asked, ("integers", 3)]
    assert trace.arrival_s.tolist() == pytest.approx([gap * (number + 1) for number in range(5)])
    assert trace.prompt.tolist() == [10, 20, 30, 10, 20]
    assert trace.output.tolist() == [1, 2, 3, 1, 2], "of the same row"


def test_a_fixed_interval_draws_nothing_but_lengths() -> None:
    rng: Any = Told()
    trace = draw(LENGTHS, rate=4.0, rng=rng, seconds=1.0, cv=0.0)
    assert rng.asked == [("integers", 3)]
    assert trace.arrival_s.tolist() == [0.25, 0.5, 0.75], "one that arrives at the very end is too late"
    assert trace.arrivals == "every 0.25 s"


def test_gaps_are_drawn_until_the_time_is_full() -> None:
    rng: Any = Told()
    trace = draw(LENGTHS, rate=10.0, rng=rng, seconds=10.0)
    assert len(trace) == pytest.approx(300, abs=1), "three times as many as expected"
    assert next(size for name, _, size in rng.asked[:-1] if name == "exponential") == 110
    assert len(rng.asked) > 3
    assert np.diff(trace.arrival_s).tolist() == pytest.approx([0.1 / 3] * (len(trace) - 1))


@pytest.mark.parametrize(("cv", "expected"), [(None, 0.5), (3.0, 3.0)])
def test_the_planner_gets_rate_lengths_and_burstiness(cv: float | None, expected: float) -> None:
    found = workload_of(replay(RECORDED), cv=cv)
    assert found.rate == 0.5
    assert found.arrival_cv == pytest.approx(expected)
    assert found.name == "three, as recorded; as recorded"
    assert found.prompts.tolist() == [10, 20, 30]


@pytest.mark.parametrize("count", [1, 3])
def test_requests_that_all_arrive_at_once_have_no_rate(count: int) -> None:
    ones = np.ones(count, np.int64)
    trace = Trace(ids=ones, arrival_s=np.zeros(count), prompt=ones, output=ones, lengths="", arrivals="")
    with pytest.raises(TraceError, match="has no rate"):
        workload_of(trace)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival,prompt,output\n0,1,1\n1,inf,1\n", "line 3: prompt is 'inf'; it must be a finite number"),
        ("arrival,prompt,output\n0,1,0.5\n", "line 2: output is 0.5; it must be a whole number"),
        ("arrival,prompt,output\n-0.001,1,1\n", "line 2: arrival is -0.001; it must not be negative"),
        ("arrival,prompt,output\n,1,1\n", "line 2: arrival is missing"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_requests(path)


def test_requests_that_arrive_together_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("arrival_s,prompt_tokens,token_size\n2,1,5\n1,2,6\n1,3,7\n0,4,8\n")
    trace = read_requests(path)
    assert trace.ids.tolist() == [3, 1, 2, 0]
    assert trace.prompt.tolist() == [4, 2, 3, 1]
    assert trace.output.tolist() == [8, 6, 7, 5]


def test_json_lines_may_be_empty_and_have_more_fields(tmp_path: Path) -> None:
    path = tmp_path / "r.NDJSON"
    path.write_text('\n{"arrival": 0, "prompt": 3, "output": 4, "user": "x"}\n   \n')
    trace = read_requests(path)
    assert (trace.prompt.tolist(), trace.output.tolist()) == ([3], [4])


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"r\.csv: .*decode"):
        read_requests(path)
