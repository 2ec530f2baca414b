"""When a demand is news, and how those of several gateways are one workload: with requests at even times."""

import numpy as np
import pytest

from p2pserve.coordinator import Demand, DemandMeter
from p2pserve.coordinator.demand import MAX_LENGTHS, is_idle
from p2pserve.coordinator.demand_meter import UNKNOWN_RATE, azure_lengths, expected_workload


def ask(meter: DemandMeter, count: int, *, start: float = 0.0, gap: float = 1.0, lengths: tuple[int, int]) -> float:
    """So many requests `gap` apart, each over before the next. Returns when the last one came."""
    for number in range(count):
        meter.record_start(start + number * gap, lengths[0])
        meter.record_end(*lengths)
    return start + (count - 1) * gap


def demand(rate: float, *lengths: tuple[int, int], cv: float = 1.0) -> Demand:
    return Demand(requests_s=rate, arrival_cv=cv, lengths=lengths)


def test_nothing_is_said_before_32_requests_have_ended() -> None:
    meter = DemandMeter()
    ask(meter, 31, lengths=(100, 10))
    assert meter.demand(31.0) is None
    meter.record_start(31.0, 100)
    assert meter.demand(31.0) is None  # it has only begun
    meter.record_end(100, 10)
    assert meter.demand(31.0) == Demand(requests_s=1.0, arrival_cv=0.0, lengths=((100, 10),) * 32)


def test_requests_that_all_came_at_once_have_no_rate_yet() -> None:
    meter = DemandMeter()
    ask(meter, 64, gap=0.0, lengths=(100, 10))
    assert meter.demand(0.0) is None


def test_more_than_64_requests_are_told_of_by_classes() -> None:
    meter = DemandMeter()
    for number in range(512):
        meter.record_start(float(number), 100 + number % 8)
        meter.record_end(100 + number % 8, 10)
    told = meter.demand(511.0)
    assert told is not None
    assert len(told.lengths) == MAX_LENGTHS
    assert sorted({prompt for prompt, _ in told.lengths}) == list(range(100, 108))


@pytest.mark.parametrize(("gap", "is_news"), [(1.0, False), (0.97, False), (0.4, True), (2.5, True)])
def test_a_rate_is_news_when_it_is_clearly_another(gap: float, is_news: bool) -> None:
    meter = DemandMeter()
    last = ask(meter, 480, lengths=(100, 10))
    first = meter.demand(last)
    last = ask(meter, 30, start=last + 1.0, lengths=(100, 10))
    assert meter.demand(last) == first
    last = ask(meter, 2, start=last + 1.0, lengths=(100, 10))  # the 512th: told of again whatever it is
    again = meter.demand(last)
    last = ask(meter, 480, start=last + gap, gap=gap, lengths=(100, 10))
    assert (meter.demand(last) != again) is is_news


@pytest.mark.parametrize(("silence", "is_over"), [(60.0, False), (60.1, True)])
def test_a_minute_of_silence_is_news_where_requests_come_every_second(silence: float, is_over: bool) -> None:
    meter = DemandMeter()
    last = ask(meter, 32, lengths=(100, 10))
    told = meter.demand(last + silence)
    assert told is not None
    assert (told.requests_s == 0.0) is is_over
    assert told.lengths == ((100, 10),) * 32


@pytest.mark.parametrize(("silence", "is_over"), [(299.0, False), (301.0, True)])
def test_where_requests_are_rare_ten_gaps_are(silence: float, is_over: bool) -> None:
    meter = DemandMeter()
    last = ask(meter, 32, gap=30.0, lengths=(100, 10))
    told = meter.demand(last + silence)
    assert told is not None
    assert (told.requests_s == 0.0) is is_over


def test_bursts_leave_longer_silences() -> None:
    """Gaps of 10 s and of 110 s, of which there is one more: a mean of 61.6 and a deviation of 49.97."""
    meter = DemandMeter()
    now = 0.0
    for number in range(32):
        now += 110.0 if number % 2 else 10.0
        ask(meter, 1, start=now, lengths=(100, 10))
    told = meter.demand(now)
    assert told is not None
    assert told.arrival_cv == pytest.approx(0.811, abs=1e-3)
    longest = 10.0 * (1.0 + told.arrival_cv**2) / told.requests_s
    before, after = meter.demand(now + longest - 1.0), meter.demand(now + longest + 1.0)
    assert before == told
    assert after is not None
    assert after.requests_s == 0.0


def test_silence_as_long_as_a_lone_burst_is_news_after_a_minute() -> None:
    """Eight at once, four times within 72 s: nobody knows whether there will be a fifth."""
    meter, last = DemandMeter(), 0.0
    for number in range(4):
        last = ask(meter, 8, start=24.0 * number, gap=0.01, lengths=(100, 10))
    told, later = meter.demand(last + 71.0), meter.demand(last + 73.0)
    assert told is not None
    assert later is not None
    assert 10.0 * (1.0 + told.arrival_cv**2) / told.requests_s > 180.0
    assert (told.requests_s > 0.0, later.requests_s) == (True, 0.0)


def test_answers_that_are_still_coming_count_as_long_as_longer_ones() -> None:
    meter = DemandMeter()
    last = ask(meter, 31, lengths=(100, 10))
    meter.record_start(last + 1.0, 100)
    meter.record_end(100, 90, [(300, 0), (300, 9), (300, 10), (300, 89), (300, 90), (300, 200)])
    told = meter.demand(last + 1.0)
    assert told is not None
    mean = round((31 * 10 + 90) / 32)
    expected = [(100, 10)] * 31 + [(100, 90), (300, mean), (300, mean), (300, 90), (300, 90), (300, 180), (300, 400)]
    assert sorted(told.lengths) == sorted(expected)


def test_after_a_silence_everything_is_learnt_anew() -> None:
    meter = DemandMeter()
    last = ask(meter, 32, lengths=(100, 10))
    last = ask(meter, 31, start=last + 1000.0, gap=2.0, lengths=(700, 70))
    silent = meter.demand(last)
    assert silent is not None
    assert (silent.requests_s, silent.lengths[0]) == (0.0, (100, 10))
    last = ask(meter, 1, start=last + 2.0, lengths=(700, 70))
    assert meter.demand(last) == Demand(requests_s=0.5, arrival_cv=0.0, lengths=((700, 70),) * 32)


def test_idle_is_who_was_asked_and_is_not_any_more() -> None:
    assert not is_idle([])
    assert is_idle([demand(0.0, (1, 1)), demand(0.0, (2, 2))])
    assert not is_idle([demand(0.0, (1, 1)), demand(0.1, (2, 2))])


def test_rates_add_up_and_lengths_count_by_them() -> None:
    found = expected_workload([demand(3.0, (100, 10)), demand(1.0, (500, 50)), demand(0.0, (9000, 9))], 10_000)
    assert found.rate == 4.0
    assert found.mean_prompt == pytest.approx(200.0)
    assert found.mean_output == pytest.approx(20.0)
    assert found.name == "what 2 gateways saw lately"
    one = expected_workload([demand(3.0, (100, 10))], 10_000)
    assert one.name == "what a gateway saw lately"


def test_variances_of_arrivals_count_by_rates() -> None:
    found = expected_workload([demand(3.0, (1, 1), cv=1.0), demand(1.0, (1, 1), cv=3.0)], 10)
    assert found.arrival_cv == pytest.approx(np.sqrt((3 * 1 + 1 * 9) / 4))


def test_where_nobody_asks_any_more_the_last_lengths_stay() -> None:
    found = expected_workload([demand(0.0, (100, 10)), demand(0.0, (300, 30))], 10_000)
    assert (found.rate, found.mean_prompt, found.name) == (UNKNOWN_RATE, 200.0, "what 2 gateways saw last")


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ((100, 100), 200, (100, 100)),
        ((100, 100), 199, (99, 100)),
        ((300, 100), 200, (150, 50)),
        ((1000, 1), 100, (99, 1)),
        ((1, 1000), 100, (1, 99)),
        ((1000, 1000), 1, (1, 1)),  # a prompt and an answer have a token each at least
    ],
)
def test_requests_too_long_for_any_box_are_shortened(
    lengths: tuple[int, int], longest: int, expected: tuple[int, int]
) -> None:
    found = expected_workload([demand(1.0, lengths)], longest)
    assert {(int(prompt), int(output)) for prompt, output in zip(found.prompts, found.outputs, strict=True)} == {
        expected
    }


def test_before_anybody_asked_requests_are_taken_to_be_conversations() -> None:
    prompts, outputs = azure_lengths("conversation")
    found = expected_workload([], 1 << 20)
    assert (found.prompts.tolist(), found.outputs.tolist(), found.rate) == (
        prompts.tolist(), outputs.tolist(), UNKNOWN_RATE,
    )  # fmt: skip
    assert len(prompts) == len(outputs) == 512
    assert azure_lengths("coding")[1].mean() < 0.5 * outputs.mean()
