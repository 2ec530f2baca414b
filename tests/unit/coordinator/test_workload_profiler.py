"""What the profiler makes of requests: no alarm where nothing changes, a prompt one where something does."""

from collections.abc import Iterable
from itertools import accumulate
from math import exp, floor, log, sqrt
from statistics import stdev

import numpy as np
import pytest

from p2pserve.coordinator.workload_profiler import (
    ALARM,
    BLOCK_ALARM,
    BLOCK_DRIFT,
    DRIFT,
    REFERENCE,
    Shift,
    Watched,
    WorkloadProfiler,
)
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


def first_shift(profiler: WorkloadProfiler, prompts: Iterable[int]) -> Shift | None:
    """Of prompts of these lengths, a second apart."""
    return next(filter(None, (profiler.record_arrival(prompt, now=at) for at, prompt in enumerate(prompts))), None)


def first_rate_shift(profiler: WorkloadProfiler, gaps: Iterable[float]) -> Shift | None:
    """Of requests of one length with these gaps between them."""
    arrivals = accumulate(gaps, initial=0.0)
    return next(filter(None, (profiler.record_arrival(100, now=now) for now in arrivals)), None)


@pytest.mark.parametrize(("tokens", "since"), [(110, 15), (90, 13), (103, 220)])
def test_lengths_that_were_all_alike_count_as_varying_by_a_twentieth(tokens: int, since: int) -> None:
    """In log lengths 110 is 1.906 deviations of 0.05 away, 90 is 2.107, 103 is 0.591; 0.5 of each do not count, and
    what does has to come to more than 20."""
    found = first_shift(WorkloadProfiler(), [100] * 512 + [tokens] * 300)
    assert found is not None
    assert (found.what, found.since) == (Watched.PROMPT, since)
    assert (found.before, found.after) == pytest.approx((100.0, tokens))


@pytest.mark.parametrize("tokens", [800, 303, 132, 50])
def test_a_shift_of_lengths_is_found_by_how_many_deviations_it_is_away(tokens: int) -> None:
    learnt = [100, 400] * (REFERENCE // 2)  # of a geometric mean of 200
    away = abs(log(tokens / 200)) / stdev(map(log, learnt))
    found = first_shift(WorkloadProfiler(), learnt + [tokens] * 300)
    assert found is not None
    assert found.since == floor(ALARM / (away - DRIFT)) + 1
    assert (found.before, found.after) == pytest.approx((200.0, tokens))


def test_a_shift_begins_after_the_last_spell_that_has_been_made_up_for() -> None:
    """Ten times 1.406 are made up for by 29 times 0.5, fifteen more are a shift: and a lower one too, by the way."""
    for tokens, since in ((110, 15), (90, 13)):
        found = first_shift(WorkloadProfiler(), [100] * 512 + [tokens] * 10 + [100] * 33 + [tokens] * 20)
        assert found is not None
        assert (found.since, found.after) == pytest.approx((since, tokens))


def test_a_prompt_of_no_tokens_counts_as_one() -> None:
    assert first_shift(WorkloadProfiler(), [0, 1] * 400) is None
    found = first_shift(WorkloadProfiler(), [0] * 512 + [2] * 3)
    assert found is not None
    assert (found.before, found.after, found.since) == pytest.approx((1.0, 2.0, 2))


@pytest.mark.parametrize(("gap", "since"), [(0.5, 2), (0.9, 16), (1.1, 18), (2.0, 2)])
def test_gaps_that_were_all_alike_are_compared_two_by_two(gap: float, since: int) -> None:
    """In log rates, 0.9 is 2.107 deviations of 0.05 away and 1.1 is 1.906: less 1 each, the sum has to pass 8."""
    found = first_rate_shift(WorkloadProfiler(), [1.0] * 512 + [gap] * 40)
    assert found is not None
    assert (found.what, found.since) == (Watched.RATE, since)
    assert (found.before, found.after) == pytest.approx((1.0, 1.0 / gap))


@pytest.mark.parametrize("gap", [0.25, 0.5, 0.755, 1.31, 4.0])
def test_gaps_that_vary_are_compared_in_blocks_of_which_the_mean_is_known(gap: float) -> None:
    """A coefficient of variation of 0.5 and a mean known to a quarter are four gaps, against 512 of the reference."""
    learnt = [0.5, 1.5] * 256
    away = abs(log(gap)) / (stdev(learnt) * sqrt(1 / 4 + 1 / 512))
    found = first_rate_shift(WorkloadProfiler(), learnt + [gap] * 1000)
    assert found is not None
    assert found.since == 4 * (floor(BLOCK_ALARM / (away - BLOCK_DRIFT)) + 1)
    assert (found.before, found.after) == pytest.approx((1.0, 1.0 / gap))


def test_the_more_gaps_vary_the_longer_is_the_reference() -> None:
    """Of a coefficient of variation of 1.56, the mean is known to 5 % after about 972 gaps, to 25 % after 39."""
    bursts = [0.1, 0.1, 0.1, 3.7] * 243
    found = first_rate_shift(WorkloadProfiler(), bursts + [0.25] * 200)
    assert found is not None
    assert found.since == 2 * 39
    assert found.before == pytest.approx(1.0, rel=0.01)
    assert found.after == pytest.approx(4.0, rel=0.05)
    # what comes before that is learnt, and no shift
    assert first_rate_shift(WorkloadProfiler(), bursts[:600] + [0.25] * 200) is None


def test_requests_that_all_come_at_once_are_a_shift_but_nothing_to_learn_a_rate_from() -> None:
    found = first_rate_shift(WorkloadProfiler(), [1.0] * 512 + [0.0] * 2)
    assert found is not None
    assert (found.since, found.after) == pytest.approx((2, exp(20 * 0.05)))
    assert first_rate_shift(WorkloadProfiler(), [0.0] * 600 + [1.0] * 100) is None


def test_after_a_shift_only_what_came_since_counts_and_all_is_learnt_anew() -> None:
    profiler = WorkloadProfiler()
    for number in range(513):
        assert profiler.record_arrival(100, now=float(number)) is None
        assert profiler.record_finish(100, 10) is None
    assert profiler.record_arrival(100, now=512.5) is None
    assert profiler.record_finish(100, 10) is None
    shift = profiler.record_arrival(100, now=513.0)
    assert shift is not None
    assert (shift.what, shift.since) == (Watched.RATE, 2)
    assert tuple(profiler.statistics()) == (2, 2.0, 0.0, 100.0, 10.0)
    for number in range(511):
        assert profiler.record_arrival(300, now=514.0 + number) is None
        assert profiler.record_finish(300, 500) is None


@pytest.mark.parametrize(("arrivals", "rate"), [(513, 512 / 521), (514, 1.0)])
def test_the_rate_is_that_of_the_latest_gaps(arrivals: int, rate: float) -> None:
    """A first one of 10 s is still among 512, and not among 513."""
    profiler = WorkloadProfiler()
    for number in range(arrivals):
        profiler.record_arrival(100, now=number + 9.0 * (number > 0))
    assert profiler.statistics().rate == pytest.approx(rate)


@pytest.mark.parametrize(("gap", "after"), [(1.0, 11), (0.2, 22)])
def test_a_rate_that_clearly_changes_while_it_is_learnt_is_noticed_at_once(gap: float, after: int) -> None:
    """Of 32 gaps, 11 of 1 s and the others of 0.4 s are more than 1.5 times as long as 0.4 s on average; with 22 of 0.2
    s they are less than two thirds as long."""
    learnt = [0.4] * 100
    assert first_rate_shift(WorkloadProfiler(), [*learnt, *[gap] * (after - 1)]) is None
    found = first_rate_shift(WorkloadProfiler(), [*learnt, *[gap] * after])
    assert found is not None
    assert (found.what, found.since) == (Watched.RATE, 16)


def test_poisson_arrivals_are_no_shift_while_they_are_learnt() -> None:
    shifts = [
        first_rate_shift(WorkloadProfiler(), np.random.default_rng(seed).exponential(1.0, 512).tolist())
        for seed in range(50)
    ]
    assert shifts == [None] * 50
