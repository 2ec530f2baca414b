"""Boxes that could not take another part keep theirs for a while: how long, and how that ends."""

from math import inf

import pytest

from p2pserve.coordinator.bounds import MAX_REFUSED
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import RefusedPart, Regrouping
from p2pserve.coordinator.regrouping.parts import BoxPart
from p2pserve.coordinator.regrouping.refusals import MAX_REASON, Refusals, RefusalSettings, describe_refusal
from p2pserve.coordinator.regrouping.steps import FAILURES, RegroupingProgress, find_refusals

from .test_steps import AB, CD, LIMITS, A, B, C, D, loading, serving, step

SETTINGS = RefusalSettings(first_s=100.0, longest_s=300.0)


def test_each_further_refusal_holds_twice_as_long_and_telling_again_is_none() -> None:
    refusals = Refusals(SETTINGS)
    refusals.note({"a": "no memory"}, 0.0)
    refusals.note({"a": "no memory"}, 99.0)
    assert refusals.keeping(99.0) == {"a"}
    assert not refusals.keeping(100.0)
    refusals.note({"a": "no disk"}, 150.0)
    assert refusals.keeping(349.0) == {"a"}
    assert not refusals.keeping(350.0)
    assert refusals.tell(150.0) == (RefusedPart(peer="a", reason="no disk", for_s=200.0),)
    refusals.note({"a": "no disk"}, 350.0)
    assert refusals.wake_at(350.0) == 650.0  # not 400 s: that is the longest


def test_what_was_over_for_as_long_again_is_forgotten_and_so_is_who_left() -> None:
    refusals = Refusals(SETTINGS)
    refusals.note({"a": "", "b": ""}, 0.0)
    refusals.forget({"a"}, 50.0)
    assert refusals.keeping(50.0) == {"a"}
    refusals.forget({"a"}, 200.0)
    refusals.note({"a": ""}, 200.0)
    assert refusals.wake_at(200.0) == 300.0
    assert refusals.wake_at(300.0) == inf


def test_memory_is_bounded_and_what_ends_first_goes_first() -> None:
    refusals = Refusals(SETTINGS)
    for number in range(MAX_REFUSED + 2):
        refusals.note({f"box{number}": "x" * 1000}, float(number))
    told = refusals.tell(50.0)
    assert len(told) == MAX_REFUSED
    assert {"box0", "box1"}.isdisjoint(each.peer for each in told)
    assert {len(each.reason) for each in told} == {MAX_REASON}


def test_a_coordinator_that_comes_later_learns_from_the_plan() -> None:
    refusals = Refusals(SETTINGS)
    told = (RefusedPart(peer="a", reason="no memory", for_s=60.0), RefusedPart(peer="b", for_s=1e6))
    refusals.learn(told, 0.0)
    refusals.learn(told, 50.0)
    assert refusals.keeping(59.0) == {"a", "b"}
    assert refusals.keeping(61.0) == {"b"}
    assert refusals.wake_at(61.0) == 300.0  # no longer than ours
    line = describe_refusal(RefusedPart(peer="a", reason="no memory", for_s=5400.0))
    assert line == f"{name_of('a')} keeps its part for 1.5 h from this plan on: it could not take another (no memory)"


@pytest.mark.parametrize(
    ("parts", "refused"),
    [
        (loading(AB), {}),
        (loading(AB, failures=FAILURES - 1), {}),
        (loading(A, B, failures=FAILURES), {}),  # of what they were before
        (loading(AB) | {"a": BoxPart(stages=AB, failures=FAILURES, detail="no memory")}, {"a": "no memory"}),
        (
            {
                "a": BoxPart(stages=AB, failures=FAILURES, detail="stage 2: no disk"),
                "b": BoxPart(stages=AB, failures=1, detail="no disk"),
            },
            {"b": "no disk"},  # the head cannot start without it
        ),
    ],
)
def test_who_has_refused(parts: dict[str, BoxPart], refused: dict[str, str]) -> None:
    assert find_refusals(step(AB), parts) == refused


def test_a_step_that_fails_is_remembered_of_its_boxes_and_undoing_is_not() -> None:
    whole = Regrouping(steps=(step(AB, undo=(A, B)), step(CD, undo=(C, D))))
    progress = RegroupingProgress(LIMITS)
    parts = serving(C, D) | loading(AB) | {"a": BoxPart(stages=AB, failures=FAILURES, detail="no memory")}
    back = progress.advance(whole, parts, 1.0)
    assert progress.refusals.keeping(1.0) == {"a"}
    progress.advance(back, serving(C, D) | loading(A, B, failures=FAILURES), 2.0)
    assert progress.refusals.keeping(2.0) == {"a"}


def test_boxes_that_were_not_ready_in_time_have_refused_too() -> None:
    progress, way = RegroupingProgress(LIMITS), Regrouping(steps=(step(AB, undo=(A, B)),))
    parts = loading(AB) | {"a": BoxPart(stages=AB, is_ready=True)}
    progress.advance(way, parts, 0.0)
    progress.advance(way, parts, 101.0)
    (told,) = progress.refusals.tell(101.0)
    assert (told.peer, told.reason) == ("b", "not ready after 101 s")
