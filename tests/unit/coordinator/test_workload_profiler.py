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
        for shift in (profiler.arrived(prompt, now=start + arrival), profiler.finished(prompt, output))
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
