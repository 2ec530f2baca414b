"""Planning goes on without the boxes that it fails with, and they are found by halving."""

from collections.abc import Collection

import pytest

from p2pserve.coordinator.names import name_of
from p2pserve.node.planning.set_aside import FIRST_HOLD_S, LONGEST_HOLD_S, SetAside

BOXES = [f"box-{letter}" for letter in "abcdefgh"]


def attempt(aside: SetAside, boxes: Collection[str], culprits: Collection[str], now: float) -> bool | None:
    """One planning: True when it went well, False when it failed, None when there was nothing left to try."""
    used = set(boxes) - aside.left_out(now)
    if used.isdisjoint(culprits):
        aside.on_planned(now)
        return True
    return False if aside.on_failed(used, "out of memory", now) else None


@pytest.mark.parametrize("culprit", BOXES)
def test_one_box_is_found_in_so_many_attempts_as_halvings(culprit: str) -> None:
    aside = SetAside()
    attempts = [attempt(aside, BOXES, [culprit], 1.0) for _ in range(4)]
    assert attempts[0] is False
    assert aside.left_out(1.0) == {culprit}
    assert attempt(aside, BOXES, [culprit], 1.0) is True
    assert aside.left_out(1.0) == {culprit}
    assert aside.explain(1.0) == (
        f"{name_of(culprit)} is set aside: planning fails with what it says (out of memory); tried again in 60 s",
    )


@pytest.mark.parametrize("number", range(2, 9))
def test_the_first_attempt_after_a_failure_is_with_half_of_the_boxes(number: int) -> None:
    aside = SetAside()
    assert aside.on_failed(BOXES[:number], "out of memory", 1.0)
    assert len(aside.left_out(1.0)) == number // 2


@pytest.mark.parametrize("culprits", [BOXES[:2], BOXES[3:5], [BOXES[0], BOXES[7]], BOXES[:3], BOXES])
def test_several_boxes_are_found_one_after_the_other(culprits: list[str]) -> None:
    aside = SetAside()
    for _ in range(4 * len(culprits)):
        attempt(aside, BOXES, culprits, 1.0)
    assert aside.left_out(1.0) == set(culprits)


def test_planning_that_fails_with_no_suspect_left_is_not_blamed_on_anybody() -> None:
    aside = SetAside()
    assert aside.on_failed(BOXES, "a bug", 1.0)
    assert aside.on_failed([], "a bug", 1.0) is False
    assert aside.left_out(1.0) == frozenset()
    assert aside.explain(1.0) == ()


def test_a_box_is_tried_again_and_held_twice_as_long_each_time_that_it_fails() -> None:
    aside, now = SetAside(), 0.0
    for expected_s in (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, LONGEST_HOLD_S, LONGEST_HOLD_S):
        aside.on_failed(["box-a"], "no end", now)
        assert aside.left_out(now + expected_s - 0.001) == {"box-a"}
        now += expected_s
        assert aside.left_out(now) == frozenset()


def test_boxes_that_left_are_forgotten() -> None:
    aside = SetAside()
    aside.on_failed(["box-a"], "no end", 0.0)
    aside.on_failed(BOXES[1:], "no end", 0.0)
    assert len(aside.left_out(1.0)) == 1 + 3
    aside.forget(BOXES[1:], 1.0)
    assert len(aside.left_out(1.0)) == 1 + 3  # the search goes on
    aside.forget(BOXES[2:], 1.0)
    assert aside.left_out(1.0) == {"box-a"}  # the other was not to be found any more; going and coming frees nobody
    aside.forget(BOXES[2:], FIRST_HOLD_S)
    aside.on_failed(["box-a"], "no end", FIRST_HOLD_S)
    assert aside.left_out(2 * FIRST_HOLD_S - 1.0) == {"box-a"}
    assert aside.left_out(2 * FIRST_HOLD_S) == frozenset()
