"""Boxes with room for it load the parts of a step beside what they serve, and go over when all are there."""

from typing import Any

import msgspec
import pytest

from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import BoxRecut, Groups, GroupStages, Regrouping, RegroupingStep
from p2pserve.coordinator.regrouping.beside import can_load_beside
from p2pserve.coordinator.regrouping.parts import BoxPart, PartBeside
from p2pserve.coordinator.regrouping.steps import RegroupingProgress, describe_boxes

from .test_steps import AB, CD, LIMITS, A, B, C, D, serving, step

WHOLE = Regrouping(steps=(step(AB, undo=(A, B)), step(CD, undo=(C, D))), reload_s=30.0)
BESIDE = msgspec.structs.replace(WHOLE, beside=True)


def told(parts: dict[str, BoxPart], *peers: str, **beside: Any) -> dict[str, BoxPart]:
    """What these boxes say of a second engine, added."""
    return parts | {peer: parts[peer]._replace(beside=PartBeside(**beside)) for peer in peers}


def roomy(*groups: GroupStages, room: int = 4) -> dict[str, BoxPart]:
    parts = serving(*groups)
    return told(parts, *parts, room=room)


def loaded(*peers: str, group: GroupStages = AB) -> dict[str, BoxPart]:
    return told(roomy(A, B, C, D), *peers, room=4, stages=group, is_loaded=True)


@pytest.mark.parametrize(
    ("parts", "beside"),
    [
        (roomy(A, B, C, D), True),
        (roomy(A, B, C, D, room=3), False),
        (serving(A, B, C, D), False),  # as boxes of the last release say
        (told(roomy(A, B), "b", room=0), False),
        (roomy(A), False),
        (roomy(A, B) | {"b": BoxPart(beside=PartBeside(room=8))}, False),  # it serves nothing: it just loads
    ],
)
def test_a_step_begins_beside_what_its_boxes_serve_where_all_have_room(parts: dict[str, BoxPart], beside: bool) -> None:
    progress = RegroupingProgress(LIMITS)
    progress.order(WHOLE)
    begun = progress.advance(None, parts, 0.0)
    assert begun == msgspec.structs.replace(WHOLE, beside=beside)


def test_what_is_loaded_beside_changes_no_part_until_all_of_it_is_there() -> None:
    assert (BESIDE.loading, BESIDE.boxes) == ((), ())
    assert (BESIDE.next_group_of("b"), BESIDE.next_group_of("c"), WHOLE.next_group_of("b")) == (AB, None, None)
    progress = RegroupingProgress(LIMITS)
    for number, parts in enumerate((roomy(A, B, C, D), loaded("a"), loaded("a", "b", group=CD))):
        assert progress.advance(BESIDE, parts, float(number)) == BESIDE
    over = progress.advance(BESIDE, loaded("a", "b"), 4.0)
    assert over == WHOLE
    assert (over.loading, over.boxes) == ((AB,), ("a", "b"))
    # The next step begins the same way.
    second = progress.advance(over, roomy(AB, C, D), 5.0)
    assert second == Regrouping(steps=WHOLE.steps[1:], done=1, reload_s=30.0, beside=True)


@pytest.mark.parametrize(
    "parts",
    [
        told(loaded("a"), "b", stages=AB, failed="no memory"),
        loaded("a") | {"b": BoxPart(detail="restarting")},
    ],
)
def test_where_a_box_cannot_the_step_goes_on_without(parts: dict[str, BoxPart]) -> None:
    assert RegroupingProgress(LIMITS).advance(BESIDE, parts, 0.0) == WHOLE


def test_it_has_as_long_as_any_step_and_then_as_long_again() -> None:
    progress = RegroupingProgress(LIMITS)
    assert progress.advance(BESIDE, roomy(A, B, C, D), 0.0) == BESIDE
    assert progress.advance(BESIDE, roomy(A, B, C, D), LIMITS.step_s(30.0)) == BESIDE
    late = LIMITS.step_s(30.0) + 1.0
    assert progress.advance(BESIDE, roomy(A, B, C, D), late) == WHOLE
    assert progress.advance(WHOLE, roomy(A, B, C, D), late + 1.0) == WHOLE


@pytest.mark.parametrize("gone", [{}, {"b": BoxPart(is_ready=True, leaves=True)}])
def test_a_box_that_leaves_meanwhile_ends_it_and_nothing_is_undone(gone: dict[str, BoxPart]) -> None:
    parts = {peer: part for peer, part in loaded("a").items() if peer != "b"} | gone
    progress = RegroupingProgress(LIMITS)
    assert progress.advance(BESIDE, parts, 0.0) is None
    assert name_of("b") in progress.explain(None)[0]


def test_what_was_before_is_never_loaded_beside() -> None:
    """A step is undone because something has failed: the boxes serve nothing."""
    progress = RegroupingProgress(LIMITS)
    failed = told(serving(C, D), "c", room=8) | {"a": BoxPart(leaves=True, stages=AB), "b": BoxPart(stages=AB)}
    back = progress.advance(WHOLE, failed, 0.0)
    assert back is not None
    assert back.undoes
    assert not back.beside


def test_a_box_that_is_divided_anew_is_never_loaded_beside() -> None:
    alone: Groups = (A,)
    recut = RegroupingStep(form=alone, recut=BoxRecut(head="a", was=1, replicas=2))
    assert can_load_beside(RegroupingStep(form=alone), roomy(A, room=8))
    assert not can_load_beside(recut, roomy(A, room=8))


def test_each_box_is_told_of() -> None:
    parts = told(loaded("a"), "b", stages=AB, failed="no memory")
    assert describe_boxes(BESIDE, parts) == [
        ("a", "loaded beside what it serves"),
        ("b", "cannot load beside what it serves: no memory"),
        ("c", "waits for its turn"),
        ("d", "waits for its turn"),
    ]
    begins = roomy(A, B, C, D)
    under_way = told(begins, "b", stages=AB)
    under_way["b"] = under_way["b"]._replace(detail="ready: for its next part: loads the model")
    assert describe_boxes(BESIDE, under_way)[:2] == [
        ("a", "begins to load beside what it serves"),
        ("b", "ready: for its next part: loads the model"),
    ]
