"""What the profiler makes of requests: no alarm where nothing changes, a prompt one where something does."""

import numpy as np
import pytest

from p2pserve.coordinator.workload_profiler import Shift, Watched, WorkloadProfiler
from p2pserve.sims.records import Trace
from p2pserve.sims.workloads import azure, draw


def trace(name: str, rate: float, requests: int, seed: int) -> Trace:
    return draw(azure(name).lengths, rate=rate, rng=np.random.default_rng(seed), requests=requests)


def feed(profiler: WorkloadProfiler, requests: Trace, start: float = 0.0) -> list[tuple[int, Shift]]:
    """Each alarm, with the number of the request it came at."""
    rows = zip(requests.arrival_s.tolist(), requests.prompt.tolist(), requests.output.tolist(), strict=True)
    return [
        (number, shift)
        for number, (arrival, prompt, output) in enumerate(rows)
        for shift in (profiler.record_arrival(prompt, now=start + arrival), profiler.record_finish(prompt, output))
        if shift is not None
    ]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["coding", "conversation"])
def test_traffic_that_stays_as_it_is_raises_no_alarm(name: str, seed: int) -> None:
    assert feed(WorkloadProfiler(), trace(name, 5.0, 6000, seed)) == []


@pytest.mark.parametrize(("first", "then"), [("coding", "conversation"), ("conversation", "coding")])
def test_another_workload_is_noticed_within_a_hundred_requests(first: str, then: str) -> None:
    profiler = WorkloadProfiler()
    before = trace(first, 5.0, 2000, 0)
    assert feed(profiler, before) == []
    shifts = feed(profiler, trace(then, 5.0, 500, 1), float(before.arrival_s[-1]))
    assert shifts
    number, shift = shifts[0]
    assert number < 100
    assert shift.what in (Watched.PROMPT, Watched.OUTPUT)


def test_a_doubled_rate_is_noticed() -> None:
    profiler = WorkloadProfiler()
    before = trace("conversation", 4.0, 2000, 0)
    assert feed(profiler, before) == []
    shifts = feed(profiler, trace("conversation", 8.0, 1000, 1), float(before.arrival_s[-1]))
    assert [shift.what for _, shift in shifts][:1] == [Watched.RATE]
    assert shifts[0][1].after > 1.5 * shifts[0][1].before


def test_statistics_are_those_of_the_window() -> None:
    profiler = WorkloadProfiler()
    assert tuple(profiler.statistics()) == (0, 0.0, 0.0, 0.0, 0.0)
    for number in range(4):
        profiler.record_arrival(100, now=0.5 * number)
    profiler.record_finish(100, 10)
    profiler.record_finish(300, 30)
    found = profiler.statistics()
    assert (found.requests, found.rate, found.arrival_cv) == (2, 2.0, 0.0)
    assert (found.prompt, found.output) == (200.0, 20.0)
    assert repr(profiler) == "<WorkloadProfiler: 2 requests, 2/s (CV 0), 200 in, 20 out>"


def test_the_window_keeps_the_latest_requests() -> None:
    profiler = WorkloadProfiler()
    for number in range(600):
        profiler.record_arrival(10, now=float(number))
        profiler.record_finish(10, 1 if number < 100 else 2)
    assert profiler.statistics().requests == 512
    assert profiler.statistics().output == pytest.approx((12 * 1 + 500 * 2) / 512)
    found = profiler.workload("seen")
    assert (len(found.prompts), found.rate, found.name) == (512, 1.0, "seen")


def test_time_does_not_go_back() -> None:
    profiler = WorkloadProfiler()
    profiler.record_arrival(10, now=5.0)
    profiler.record_arrival(10, now=5.0)
    with pytest.raises(ValueError, match=r"1 s before the one ahead of it"):
        profiler.record_arrival(10, now=4.0)


def test_an_alarm_tells_how_old_the_shift_is_and_forgets_what_was_before_it() -> None:
    profiler = WorkloadProfiler()
    for number in range(600):
        assert profiler.record_arrival(100 + number % 3, now=float(number)) is None
        profiler.record_finish(100, 10)
    shift = None
    for number in range(600, 700):
        shift = profiler.record_arrival(1000, now=float(number))
        if shift is not None:
            break
        profiler.record_finish(1000, 10)
    assert shift is not None
    assert shift.what is Watched.PROMPT
    assert shift.before == pytest.approx(101.0, rel=0.01)
    assert shift.after > 150.0
    assert shift.since == number - 600 + 1
    assert profiler.statistics().requests == shift.since


def test_lengths_that_hardly_vary_may_vary_a_little() -> None:
    profiler = WorkloadProfiler()
    shifts = [profiler.record_arrival(1000 if number < 512 else 1020, now=float(number)) for number in range(2000)]
    assert not any(shifts)
