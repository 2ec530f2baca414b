"""What a box tells of its end is never more than the truth, and is not told anew all the time."""

import pytest

from p2pserve.coordinator.repair.ending import (
    LONGEST_S,
    PLAN_WITHOUT_S,
    can_finish,
    is_planned_without,
    round_remaining,
)


@pytest.mark.parametrize("left_s", [0.0, 0.4, 1.0, 7.9, 17.3, 59.0, 3600.0, 86_399.5, 9.9e5])
def test_what_is_told_is_less_than_the_truth_by_an_eighth_or_a_second_at_most(left_s: float) -> None:
    told = round_remaining(left_s)
    assert told <= left_s
    assert left_s - told <= max(1.0, left_s / 8)
    assert round_remaining(told) == told


def test_a_day_is_told_some_hundred_times() -> None:
    assert 50 < len({round_remaining(float(left)) for left in range(86_400)}) < 200


def test_what_cannot_be_told_is_cut() -> None:
    assert round_remaining(1e12) <= LONGEST_S
    assert round_remaining(-5.0) == 0.0


def test_plans_do_without_a_box_before_it_ends_and_requests_that_would_not_finish_go_elsewhere() -> None:
    assert is_planned_without(PLAN_WITHOUT_S)
    assert not is_planned_without(PLAN_WITHOUT_S + 1.0)
    assert not is_planned_without(None)
    assert can_finish(None, 1e9)
    assert can_finish(20.0, 20.0)
    assert not can_finish(20.0, 21.0)
