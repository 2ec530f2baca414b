"""A machine that is divided anew, as a step of a regrouping."""

from typing import Any

import msgspec
import pytest

from p2pserve.coordinator import Plan, PlanError, Stage
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import BoxRecut, Regrouping, RegroupingStep
from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer
from p2pserve.coordinator.regrouping.parts import BoxPart
from p2pserve.coordinator.regrouping.steps import (
    RegroupingProgress,
    StepLimits,
    describe_boxes,
    make_recutting,
)

from ..networks import box, some_plan

LIMITS = StepLimits(loads=5.0, least_s=100.0)
OFFERS = tuple(CutOffer(replicas=number, tp=4 // number, longest=8192) for number in (1, 2, 4))
WHOLE = BoxDivision(head="a", nodes=("a",), offers=OFFERS)
FOUR = BoxDivision(head="a", nodes=("a", "n2", "n3", "n4"), offers=OFFERS)
RECUT = BoxRecut(head="a", replicas=4, was=1)


def alone(peer: str, tp: int = 1) -> tuple[Stage, ...]:
    return (Stage(peer=peer, tp=tp, first_layer=0, last_layer=8),)


def recutting(*recuts: BoxRecut, divided: BoxDivision = WHOLE, plan: Plan | None = None) -> Regrouping:
    boxes = [box("a", tp=4), box("b")]
    return make_recutting(
        plan or some_plan(*boxes), recuts, {"a": divided}, boxes, before=1.0, after=2.0, reload_s=30.0
    )


def test_the_step_names_the_nodes_as_they_are_before() -> None:
    found = recutting(RECUT)
    assert found.steps == (RegroupingStep(form=(alone("a", 4),), recut=RECUT),)
    assert (found.before, found.after, found.reload_s) == (1.0, 2.0, 30.0)


@pytest.mark.parametrize(
    ("recuts", "divided", "fault"),
    [
        ((), WHOLE, "no box is to be divided"),
        ((BoxRecut(head="b", replicas=2, was=1),), WHOLE, f"{name_of('b')} is not the first node of a box"),
        ((BoxRecut(head="a", replicas=4, was=2),), WHOLE, "has 1 nodes now, and not 2"),
        ((BoxRecut(head="a", replicas=3, was=1),), WHOLE, "among 1, 2, 4 nodes, and not among 3"),
        ((RECUT, BoxRecut(head="a", replicas=2, was=1)), WHOLE, "named twice"),
        ((BoxRecut(head="a", replicas=1, was=4),), FOUR, f"{name_of('n2')}, a node of the box"),
    ],
)
def test_a_cut_that_cannot_be_is_refused_with_the_reason(
    recuts: tuple[BoxRecut, ...], divided: BoxDivision, fault: str
) -> None:
    with pytest.raises(PlanError, match=fault):
        recutting(*recuts, divided=divided)


def test_a_node_that_is_part_of_a_pipeline_is_not_taken_out_of_it() -> None:
    plan = some_plan(box("a", tp=4), box("b"))
    half = Stage(peer="a", tp=4, first_layer=0, last_layer=4), Stage(peer="b", tp=1, first_layer=4, last_layer=8)
    replica = msgspec.structs.replace(plan.replicas[0], id="a", stages=half)
    pair = msgspec.structs.replace(plan.pairings[0], prefill="a", decode="a", weight=1.0)
    with pytest.raises(PlanError, match="part of a pipeline"):
        recutting(RECUT, plan=msgspec.structs.replace(plan, replicas=(replica,), pairings=(pair,)))


@pytest.mark.parametrize(
    ("form", "recut"),
    [
        ((alone("b"),), {"head": "a", "replicas": 4, "was": 1}),
        (((Stage(peer="a", tp=1, first_layer=0, last_layer=4), Stage(peer="b", tp=1, first_layer=4, last_layer=8)),),
         {"head": "a", "replicas": 4, "was": 1}),
        ((alone("a"),), {"head": "a", "replicas": 2, "was": 2}),
    ],
)  # fmt: skip
def test_a_step_of_a_machine_that_is_none_is_not_one(form: Any, recut: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        RegroupingStep(form=form, recut=BoxRecut(**recut))


def ready(division: BoxDivision, *peers: str, **changes: Any) -> dict[str, BoxPart]:
    """These nodes serve; the head tells of the machine."""
    parts = {peer: BoxPart(is_ready=True, division=BoxDivision(head="a")) for peer in peers}
    return parts | {"a": BoxPart(division=division, **({"is_ready": True} | changes))}


def test_it_is_over_when_all_nodes_of_the_new_cut_serve() -> None:
    progress, way = RegroupingProgress(LIMITS), recutting(RECUT)
    progress.order(way)
    assert progress.advance(None, ready(WHOLE), 0.0) == way
    progress.on_planned(way)
    for parts in (
        ready(WHOLE),
        ready(WHOLE, leaves=True),
        {},  # its nodes have left
        ready(FOUR, is_ready=False),
        ready(FOUR, "n2", "n3"),
        ready(FOUR, "n2", "n3") | {"n4": BoxPart(is_ready=False)},
        ready(FOUR, "n2", "n3", "n4", leaves=True),
    ):
        assert progress.advance(way, parts, 1.0) == way
    assert progress.advance(way, ready(FOUR, "n2", "n3", "n4"), 2.0) is None
    assert progress.explain(None) == ()


def test_a_machine_that_refuses_is_planned_around_and_the_rest_is_left() -> None:
    progress, way = RegroupingProgress(LIMITS), recutting(RECUT)
    refused = msgspec.structs.replace(WHOLE, refused=4, why="node-3: no memory")
    assert progress.advance(way, ready(msgspec.structs.replace(refused, refused=2)), 1.0) == way  # of another cut
    assert progress.advance(way, ready(refused), 2.0) is None
    (line,) = progress.explain(None)
    assert f"the box of {name_of('a')} cannot be 4 nodes: node-3: no memory" in line
    (told,) = progress.refusals.tell(3.0)
    assert (told.peer, told.reason) == ("a", "node-3: no memory")


def test_one_that_takes_too_long_is_given_up_and_goes_back_by_itself() -> None:
    progress, way = RegroupingProgress(LIMITS), recutting(RECUT)
    assert progress.advance(way, {}, 0.0) == way
    assert progress.advance(way, {}, LIMITS.step_s(30.0)) == way
    assert progress.advance(way, {}, LIMITS.step_s(30.0) + 1.0) is None
    (told,) = progress.refusals.tell(152.0)
    assert told.peer == "a"
    assert "not ready after" in told.reason


def test_how_far_a_machine_is_is_told_of_its_head() -> None:
    two = recutting(RECUT)
    later = msgspec.structs.replace(two, steps=(RegroupingStep(form=(alone("b"),)), *two.steps))
    change = "its box is divided anew, 1 -> 4 nodes"
    assert describe_boxes(later, ready(WHOLE))[1] == ("a", f"{change}: waits for its turn")
    for parts, how_far in (
        (ready(WHOLE), "begins"),
        (ready(WHOLE, leaves=True), "finishes its requests"),
        ({}, "its nodes start"),
        (ready(FOUR, "n2"), "2 ready"),
    ):
        assert describe_boxes(two, parts) == [("a", f"{change}: {how_far}")]


def test_a_step_survives_the_wire_and_older_releases_read_past_it() -> None:
    way = recutting(RECUT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(way), type=Regrouping) == way
    told = msgspec.to_builtins(way)
    del told["steps"][0]["recut"]
    assert msgspec.convert(told, Regrouping).steps[0].form == way.steps[0].form
