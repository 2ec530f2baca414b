"""When refused requests may be tried again: one for each place that becomes free, and none before."""

import pytest

from p2pserve.coordinator.requests.retry_times import RetrySettings, RetryTimes

SETTINGS = RetrySettings(gap_s=0.5, memory_s=10.0, least_s=0.2, most_s=30.0)


def test_before_a_place_has_become_free_they_are_spread_by_the_gap() -> None:
    times = RetryTimes(SETTINGS)
    assert [times.next(100.0) for _ in range(4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_then_by_how_often_places_do() -> None:
    times = RetryTimes(SETTINGS)
    for _ in range(5):
        times.freed(100.0)  # in a memory of 10 s: one every 2 s
    assert [times.next(100.0) for _ in range(3)] == pytest.approx([2.0, 4.0, 6.0])


def test_what_was_told_is_over_when_its_time_has_come() -> None:
    times = RetryTimes(SETTINGS)
    for _ in range(10):
        times.next(100.0)
    assert times.next(104.0) == pytest.approx(1.5)
    assert times.next(200.0) == pytest.approx(0.5)


def test_nothing_is_told_that_is_sooner_or_later_than_the_settings_allow() -> None:
    quick = RetryTimes(SETTINGS)
    for _ in range(1000):
        quick.freed(0.0)
    assert quick.next(0.0) == 0.2
    slow = RetryTimes(SETTINGS)
    told = [slow.next(0.0) for _ in range(100)]
    assert max(told) == 30.0
    assert told[60:] == [30.0] * 40
    assert slow.next(1.0) == pytest.approx(29.5)  # the latest that was told, and a gap


def test_places_of_long_ago_say_nothing() -> None:
    times = RetryTimes(SETTINGS)
    for _ in range(5):
        times.freed(0.0)
    assert times.next(100.0) == 0.5
