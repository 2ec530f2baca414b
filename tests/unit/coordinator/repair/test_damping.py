"""Boxes that fail again and again are trusted less, for a while that grows, and never too many of them at once."""

from math import inf

import pytest

from p2pserve.coordinator.repair.damping import BoxSign, DampingSettings, FlapDamping

BOXES = ("a", "b", "c", "d")
UP = BoxSign(serves=True, started=1, leaving=False)
DOWN = UP._replace(serves=False)


def failed(times: int, box: str = "a", at: float = 0.0) -> FlapDamping:
    damping = FlapDamping()
    for _ in range(times):
        damping.note_fault(box, "it was lost", at)
    return damping


def test_one_fault_holds_nobody_and_a_second_one_soon_does() -> None:
    assert failed(1).held(BOXES, 0.0) == frozenset()
    assert failed(2).held(BOXES, 0.0) == {"a"}


def test_further_faults_hold_longer_up_to_a_bound() -> None:
    settings = DampingSettings()
    spans = [failed(times).held_for_s("a", 0.0) for times in (2, 3, 4, 8, 100)]
    assert spans == sorted(spans)
    assert len(set(spans)) == len(spans)
    assert spans[-1] == settings.held_for_s(settings.most)


def test_a_hold_ends_at_the_moment_that_was_told_and_faults_are_forgotten() -> None:
    damping = failed(3)
    end = damping.wake_at(0.0)
    assert damping.held(BOXES, end - 1.0) == {"a"}
    assert damping.held(BOXES, end) == frozenset()
    assert damping.wake_at(end) == inf
    damping.note_fault("a", "it was lost", end)  # soon after: it is remembered
    assert damping.held(BOXES, end) == {"a"}
    damping.note_fault("b", "it was lost", 1e6)
    damping.note_fault("a", "it was lost", 1e6)  # long after: it is not
    assert damping.held(BOXES, 1e6) == frozenset()


@pytest.mark.parametrize(("boxes", "most"), [("a", 0), ("ab", 1), ("abc", 1), ("abcd", 2)])
def test_no_more_than_half_are_held_and_those_the_worst(boxes: str, most: int) -> None:
    damping = FlapDamping()
    for number, box in enumerate(boxes):
        for _ in range(2 + number):
            damping.note_fault(box, "it was lost", 0.0)
    assert damping.held(boxes, 0.0) == frozenset(boxes[len(boxes) - most :])


@pytest.mark.parametrize(
    ("before", "after", "is_fault"),
    [
        (UP, None, True),
        (UP, DOWN, True),
        (UP, UP._replace(started=2), True),  # it had ended between two looks
        (UP, UP, False),
        (DOWN, UP._replace(started=2), False),  # that it ended has been counted
        (UP._replace(leaving=True), None, False),
        (UP._replace(leaving=True), DOWN, False),
        (UP, DOWN._replace(leaving=True), False),
    ],
)
def test_what_counts_as_a_fault(before: BoxSign, after: BoxSign | None, is_fault: bool) -> None:
    damping = FlapDamping()
    for now in (0.0, 1.0):
        damping.observe({"a": before}, now)
        damping.observe({"a": after} if after is not None else {}, now + 0.5)
    assert (damping.held(BOXES, 2.0) == {"a"}) is is_fault


def test_a_box_that_comes_back_is_explained_with_its_latest_fault() -> None:
    damping = failed(2)
    damping.note_fault("a", "its engine stopped serving", 10.0)
    (line,) = damping.explain(["a"], 10.0)
    assert f"gets no requests for {damping.held_for_s('a', 10.0):.0f} s" in line
    assert line.endswith("at last: its engine stopped serving")


def test_what_is_remembered_of_boxes_that_are_gone_does_not_grow() -> None:
    damping = FlapDamping()
    for number in range(100):
        damping.observe({str(number): UP}, 3600.0 * number)
    assert repr(damping) == "<FlapDamping boxes=1>"
