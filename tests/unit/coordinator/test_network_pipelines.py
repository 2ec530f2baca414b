"""Plans of boxes that are too small for the model: pipelines, and when those are kept."""

import pytest

from p2pserve.coordinator import LinkView, Plan

from .networks import D, M, P, box, fast, plan_of, roles, shares, some_plan


def layers_of(plan: Plan) -> list[list[tuple[str, int]]]:
    """Boxes and layers of each replica."""
    return [[(stage.peer, stage.layers) for stage in replica.stages] for replica in plan.replicas]


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        ({"a": 4, "b": 4}, [[("a", 4), ("b", 4)]]),
        ({"a": 6, "b": 3}, [[("a", 5), ("b", 3)]]),  # 5.33 and 2.67
        ({"a": 3, "b": 6}, [[("b", 5), ("a", 3)]]),  # the largest is the head
        ({"a": 7, "b": 1}, [[("a", 7), ("b", 1)]]),
        ({"a": 5, "b": 2, "c": 2, "d": 1}, [[("a", 4), ("b", 2), ("c", 2)]]),  # d is not needed
        ({"a": 4, "b": 4, "c": 4, "d": 4}, [[("a", 4), ("b", 4)], [("c", 4), ("d", 4)]]),
        ({"a": 8, "b": 4, "c": 4}, [[("a", 8)], [("b", 4), ("c", 4)]]),
        ({"a": 3, "b": 3, "c": 3}, [[("a", 3), ("b", 3), ("c", 2)]]),
        ({"a": 8, "b": 3, "c": 0}, [[("a", 8)]]),
    ],
)
def test_boxes_too_small_for_the_model_hold_it_together(
    fits: dict[str, int], expected: list[list[tuple[str, int]]]
) -> None:
    plan = some_plan(*(box(peer, fits=layers) for peer, layers in fits.items()))
    assert layers_of(plan) == expected


def test_boxes_that_are_too_small_even_together_are_no_plan() -> None:
    assert plan_of(box("a", fits=4), box("b", fits=3)) is None
    plan = some_plan(box("a", fits=4), box("b", fits=3), box("w"), box("n", fits=0))
    assert plan.peers == ("w",)
    assert any("wait" in line and "7 of 8" in line for line in plan.why)
    assert any("without room" in line for line in plan.why)


def test_nearby_boxes_form_a_replica_in_the_order_of_their_distance() -> None:
    boxes = [box("head", fits=3), *(box(peer, fits=2) for peer in ("far", "mid", "near", "next"))]
    rtts = {"near": 0.001, "next": 0.002, "mid": 0.05, "far": 0.15}
    links = [LinkView(source="head", target=peer, rtt_s=rtt) for peer, rtt in rtts.items()]
    links += [LinkView(source="near", target=peer, rtt_s=rtts[peer]) for peer in ("next", "mid", "far")]
    links += [LinkView(source="next", target=peer, rtt_s=rtts[peer]) for peer in ("mid", "far")]
    links.append(LinkView(source="mid", target="far", rtt_s=rtts["far"]))
    plan = some_plan(*boxes, links=tuple(links))
    assert [peer for peer, _ in layers_of(plan)[0]] == ["head", "near", "next", "mid"]


def test_boxes_with_different_numbers_of_gpus_form_a_replica() -> None:
    plan = some_plan(box("a", fits=6, tp=2), box("b", fits=2))
    assert layers_of(plan) == [[("a", 6), ("b", 2)]]
    assert [stage.tp for stage in plan.replicas[0].stages] == [2, 1]


def test_a_pipeline_is_kept_while_its_boxes_are_there() -> None:
    old = some_plan(box("a", fits=4), box("b", fits=4))
    larger = [box(peer, fits=7) for peer in ("x", "y")]
    both = some_plan(box("a", fits=4), box("b", fits=5), *larger, previous=old)
    assert layers_of(both) == [[("a", 4), ("b", 4)], [("x", 4), ("y", 4)]]
    for lost in (box("b", fits=3), box("b", fits=4, ready=False), box("b", fits=4, draining=True)):
        again = some_plan(box("a", fits=4), lost, *larger, previous=both)
        assert layers_of(again)[-1] == [("x", 4), ("y", 4)]
        assert not any(("b", 4) in stages for stages in layers_of(again))
    assert plan_of(box("b", fits=5), *larger, box("a", fits=4), previous=both) is both


def test_equal_pipelines_are_not_taken_for_each_other() -> None:
    """Their boxes are alike in all figures, but each holds its own layers."""
    plan = some_plan(*(box(peer, fits=4) for peer in "abcdef"))
    assert sorted(layers_of(plan)) == [[("a", 4), ("b", 4)], [("c", 4), ("d", 4)], [("e", 4), ("f", 4)]]
    assert plan_of(*(box(peer, fits=4) for peer in "abcdef"), previous=plan) is plan


def test_a_pipeline_obeys_its_pins_unless_they_contradict_each_other() -> None:
    alone = box("w", phase=M)
    plan = some_plan(box("a", fits=4, phase=P), box("b", fits=4), alone)
    assert roles(plan)["a"] is P
    plan = some_plan(box("a", fits=4, phase=P), box("b", fits=4, phase=D), alone)
    assert any("pinned to decode and prefill" in line for line in plan.why)


def test_a_slow_stage_makes_a_slow_pipeline() -> None:
    whole, half = box("w", 200.0, 1000.0), box("a", 200.0, 1000.0, fits=4)
    got = shares(some_plan(whole, half, box("b", 200.0, 1000.0, fits=4), links=fast("w", "a", "b")))
    slow = shares(some_plan(whole, half, box("b", 50.0, 250.0, fits=4), links=fast("w", "a", "b")))
    assert slow["a"] < 0.7 * got["a"]
