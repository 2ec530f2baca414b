"""So much per second, and a burst."""

import pytest

from p2pserve.bootstrap.members.allowance import Allowance


def test_a_burst_can_be_had_at_once_and_no_more() -> None:
    allowance = Allowance(rate=2.0, burst=3.0, at=10.0)
    assert [allowance.take(10.0) for _ in range(5)] == [True, True, True, False, False]


def test_it_fills_at_its_rate() -> None:
    allowance = Allowance(rate=2.0, burst=3.0, left=0.0, at=10.0)
    assert not allowance.take(10.4)
    assert allowance.take(10.5)
    assert not allowance.take(10.9)
    assert allowance.take(11.0)


def test_it_holds_no_more_than_the_burst() -> None:
    allowance = Allowance(rate=2.0, burst=3.0, left=0.0)
    assert [allowance.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_an_earlier_time_neither_fills_nor_empties_it() -> None:
    allowance = Allowance(rate=1.0, burst=2.0, at=10.0)
    assert allowance.take(5.0)
    assert allowance.take(5.0)
    assert not allowance.take(5.0)


def test_an_empty_one_begins_empty() -> None:
    assert not Allowance(rate=1.0, burst=5.0, left=0.0).take(0.0)


@pytest.mark.parametrize(("left", "after_s"), [(0.0, 0.5), (0.5, 0.25), (1.0, 0.0), (2.5, 0.0)])
def test_when_there_is_one_again(left: float, after_s: float) -> None:
    assert Allowance(rate=2.0, burst=3.0, left=left, at=10.0).next_at() == 10.0 + after_s
