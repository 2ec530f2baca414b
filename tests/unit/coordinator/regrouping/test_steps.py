"""The way from the groups that run to others: its steps, and what becomes of each."""

import msgspec
import pytest

from p2pserve.coordinator import Plan, PlanError, Stage
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import Groups, GroupStages, Regrouping, RegroupingStep
from p2pserve.coordinator.regrouping.parts import BoxPart
from p2pserve.coordinator.regrouping.steps import (
    FAILURES,
    RegroupingProgress,
    StepLimits,
    describe_boxes,
    find_steps,
    make_regrouping,
)

from ..networks import box, some_plan

LIMITS = StepLimits(loads=5.0, least_s=100.0)


def group(*peers: str, layers: int = 8) -> GroupStages:
    """These boxes with equal shares of the layers."""
    share = layers // len(peers)
    return tuple(
        Stage(peer=peer, tp=1, first_layer=number * share, last_layer=(number + 1) * share)
        for number, peer in enumerate(peers)
    )


A, B, C, D = (group(peer) for peer in "abcd")
AB, CD = group("a", "b"), group("c", "d")


def step(*form: GroupStages, undo: Groups = ()) -> RegroupingStep:
    return RegroupingStep(form=form, undo=undo)


def serving(*groups: GroupStages) -> dict[str, BoxPart]:
    """Boxes that are ready in these groups."""
    return {
        stage.peer: BoxPart(stages=each if len(each) > 1 else (), is_ready=True) for each in groups for stage in each
    }


def loading(*groups: GroupStages, failures: int = 0, detail: str = "loading: weights 1/2") -> dict[str, BoxPart]:
    """Boxes that have taken their part of these groups, and are not ready."""
    parts = serving(*groups)
    return {peer: part._replace(is_ready=False, failures=failures, detail=detail) for peer, part in parts.items()}


def running(*groups: GroupStages) -> Plan:
    """A plan of boxes that each serve alone."""
    return some_plan(*(box(stage.peer) for each in groups for stage in each))


@pytest.mark.parametrize(
    ("now", "wanted", "steps"),
    [
        ((A, B, C, D), (A, B, C, D), ()),
        ((A, B, C, D), (AB, C, D), (step(AB, undo=(A, B)),)),
        ((A, B, C, D), (AB, CD), (step(AB, undo=(A, B)), step(CD, undo=(C, D)))),
        ((AB, C), (A, B, C), (step(A, B, undo=(AB,)),)),
        ((AB, CD), (group("a", "c"), B, D), (step(group("a", "c"), B, D, undo=(AB, CD)),)),
        ((A, B, CD), (group("b", "a"), CD), (step(group("b", "a"), undo=(A, B)),)),
        ((A,), (A, B), (step(B),)),
        ((A, B, C, D), (group("a", "b", "c", "d"),), (step(group("a", "b", "c", "d"), undo=(A, B, C, D)),)),
    ],
)
def test_groups_that_share_boxes_change_together_and_what_shares_none_goes_on(
    now: Groups, wanted: Groups, steps: tuple[RegroupingStep, ...]
) -> None:
    assert find_steps(now, wanted) == steps


def test_fewer_boxes_change_first() -> None:
    found = find_steps((A, B, C, D, group("e")), (group("a", "b", "c", "d"), group("e", "f")))
    assert [len(each.boxes) for each in found] == [2, 4]


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        ((A, B), "grouped like that already"),
        ((AB, A), "in two groups"),
        ((group("a", "z"),), "not ready to take a part"),
        ((group("a", "b", layers=6),), "holds 6 layers, the model has 8"),
        (((msgspec.structs.replace(AB[0], tp=2), AB[1]),), "all of its 1 GPUs"),
    ],
)
def test_groups_that_boxes_cannot_be_are_refused_with_the_reason(wanted: Groups, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        make_regrouping(running(A, B), wanted, (box("a"), box("b")), before=1.0, after=2.0, reload_s=3.0)


def test_a_part_beyond_the_room_of_a_box_is_refused_by_its_name() -> None:
    small = box("a", fits=3)
    with pytest.raises(PlanError, match=f"{name_of('a')} has room for 3 layers, not for 4"):
        make_regrouping(running(B), (AB,), (small, box("b")), before=1.0, after=2.0, reload_s=3.0)


def test_a_box_that_no_group_names_serves_alone() -> None:
    plan = running(A, B, C)
    boxes = [box(peer) for peer in "abc"]
    joined = make_regrouping(plan, (AB,), boxes, before=1.0, after=2.0, reload_s=3.0)
    assert joined.steps == (step(AB, undo=(A, B)),)


def follow(progress: RegroupingProgress, current: Regrouping | None, *looks: tuple[dict[str, BoxPart], float]) -> None:
    """What is decided at each look, if that is that all stays as it is."""
    for parts, now in looks:
        assert progress.advance(current, parts, now) == current


def test_steps_load_one_after_the_other() -> None:
    whole = Regrouping(steps=(step(AB, undo=(A, B)), step(CD, undo=(C, D))), before=1.0, after=2.0)
    progress = RegroupingProgress(LIMITS)
    assert progress.advance(None, {}, 0.0) is None
    progress.order(whole)
    assert progress.advance(None, serving(A, B, C, D), 1.0) == whole
    progress.on_planned(whole)
    half = serving(C, D) | loading(AB) | {"a": BoxPart(stages=AB, is_ready=True)}
    follow(progress, whole, (serving(A, B, C, D), 2.0), (serving(C, D) | loading(AB), 3.0), (half, 4.0))
    second = progress.advance(whole, serving(AB, C, D), 5.0)
    assert second == Regrouping(steps=whole.steps[1:], done=1, before=1.0, after=2.0)
    assert progress.advance(second, serving(AB, CD), 6.0) is None
    progress.on_planned(None)
    assert progress.advance(None, serving(AB, CD), 7.0) is None
    assert progress.explain(None) == ()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (loading(AB, failures=FAILURES, detail="restarting: no memory"), "cannot take its part: restarting: no memory"),
        (loading(A), f"{name_of('b')} is not here any more"),
        (loading(AB) | {"b": BoxPart(leaves=True)}, f"{name_of('b')} is draining"),
    ],
)
def test_a_step_that_a_box_cannot_do_is_undone_and_the_rest_is_left(parts: dict[str, BoxPart], why: str) -> None:
    whole = Regrouping(steps=(step(AB, undo=(A, B)), step(CD, undo=(C, D))))
    progress = RegroupingProgress(LIMITS)
    back = progress.advance(whole, serving(C, D) | parts, 1.0)
    assert back is not None
    assert back.steps == (step(A, B),)
    assert why in back.undoes
    assert progress.advance(back, serving(A, B, C, D), 2.0) is None
    (line,) = progress.explain(None)
    assert why in line
    assert progress.advance(None, serving(A, B, C, D), 3.0) is None


def test_one_failure_and_failures_at_an_earlier_part_are_no_reason() -> None:
    whole = Regrouping(steps=(step(AB, undo=(A, B)),))
    progress = RegroupingProgress(LIMITS)
    follow(progress, whole, (loading(AB, failures=FAILURES - 1), 0.0), (loading(A, B, failures=FAILURES), 1.0))


def test_a_step_has_as_long_as_it_is_expected_to_take_several_times_over() -> None:
    whole = Regrouping(steps=(step(AB, undo=(A, B)),), reload_s=30.0)
    progress = RegroupingProgress(LIMITS)
    follow(progress, whole, (loading(AB), 10.0), (loading(AB), 160.0))
    back = progress.advance(whole, loading(AB), 161.0)
    assert back is not None
    assert "not ready after 151 s" in back.undoes
    # Undoing has as long again, and then each box is left to itself.
    follow(progress, back, (loading(A, B), 161.0), (loading(A, B), 311.0))
    assert progress.advance(back, loading(A, B), 312.0) is None


def test_a_coordinator_that_is_elected_meanwhile_goes_on() -> None:
    whole = Regrouping(steps=(step(AB, undo=(A, B)), step(CD, undo=(C, D))))
    second = RegroupingProgress(LIMITS).advance(whole, serving(AB, C, D), 50.0)
    assert second is not None
    assert (second.steps, second.done) == (whole.steps[1:], 1)


def test_each_box_is_told_of() -> None:
    whole = Regrouping(steps=(step(AB, undo=(A, B)), step(CD, undo=(C, D))))
    parts = serving(A, C, D) | {"b": BoxPart(stages=AB, detail="loading: weights 3/8")}
    assert describe_boxes(whole, parts) == [
        ("a", "finishes its requests"),
        ("b", "loading: weights 3/8"),
        ("c", "waits for its turn"),
        ("d", "waits for its turn"),
    ]
    assert describe_boxes(whole, serving(AB))[0] == ("a", "ready")


@pytest.mark.parametrize("form", [(), (AB, A), ((AB[1],),)])
def test_a_step_that_is_none_is_not_one(form: Groups) -> None:
    with pytest.raises(PlanError):
        RegroupingStep(form=form)
