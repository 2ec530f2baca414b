"""Boxes that hold the model together: as few and as near as possible, and those that run stay as they are."""

import pytest

from p2pserve.coordinator import BoxView, LinkView, Pairing, Phase, Plan, Replica
from p2pserve.coordinator.capacity import Links
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.pipelines import BoxGroup, group_boxes

LAYERS = 12
MODEL = ModelShape(
    name="m", layers=LAYERS, hidden=512, heads=8, kv_heads=8, head_dim=64, intermediate=2048, vocabulary=32000
)  # fmt: skip


def box(peer: str, fits: int, tp: int = 1) -> BoxView:
    return BoxView(
        peer=peer, service="s", model=MODEL, fits=fits, ready=True, draining=False, compute_tflops=10.0,
        memory_gbps=100.0, memory_gib=8.0, kv_tokens=0, tp=tp,
    )  # fmt: skip


def grouped(*boxes: BoxView, near: tuple[tuple[str, str], ...] = (), previous: Plan | None = None) -> list[BoxGroup]:
    """`near`: pairs of boxes with a round trip of a millisecond; others have the one that is assumed."""
    links = Links(LinkView(source=a, target=b, rtt_s=0.001) for a, b in near)
    return group_boxes(boxes, links, previous, [])


def shape(groups: list[BoxGroup]) -> list[list[tuple[str, int]]]:
    return [[(stage.peer, stage.layers) for stage in group.stages] for group in groups]


def test_a_box_that_holds_the_model_is_a_replica() -> None:
    assert shape(grouped(box("b", LAYERS), box("a", LAYERS))) == [[("a", LAYERS)], [("b", LAYERS)]]


def test_layers_go_by_memory_and_the_largest_leads() -> None:
    assert shape(grouped(box("a", 4), box("b", 8))) == [[("b", 8), ("a", 4)]]
    assert shape(grouped(box("a", 8), box("b", 8))) == [[("a", 6), ("b", 6)]]
    assert shape(grouped(box("a", 10), box("b", 5))) == [[("a", 8), ("b", 4)]]


@pytest.mark.parametrize("fits", [(11, 11, 1), (7, 6, 5), (5, 4, 4), (12 - 1, 1, 1)])
def test_every_stage_has_a_layer_and_no_more_than_fits(fits: tuple[int, ...]) -> None:
    boxes = [box(name, room) for name, room in zip("abc", fits, strict=True)]
    (found,) = grouped(*boxes)
    room = {one.peer: one.fits for one in boxes}
    assert sum(stage.layers for stage in found.stages) == LAYERS
    assert all(1 <= stage.layers <= room[stage.peer] for stage in found.stages)
    firsts = [stage.first_layer for stage in found.stages]
    assert firsts[0] == 0
    assert firsts == sorted(firsts)


def test_near_boxes_are_taken_and_others_wait() -> None:
    why: list[str] = []
    links = Links([LinkView(source="a", target="c", rtt_s=0.001)])
    found = group_boxes([box("a", 6), box("b", 6), box("c", 6)], links, None, why)
    assert shape(found) == [[("a", 6), ("c", 6)]]
    assert why == [
        "2 boxes form one replica, layers in proportion to memory: 6 on a, 6 on c",
        "boxes that wait for more memory to join them: 1, with room for 6 of 12",
    ]


def test_a_box_that_is_not_needed_after_all_leaves_again() -> None:
    """`b` is nearest and is taken first; with `c`, which is needed, it is not any more."""
    assert shape(grouped(box("a", 7), box("b", 2), box("c", 6), near=(("a", "b"),))) == [[("a", 6), ("c", 6)]]


def test_each_stage_is_followed_by_the_nearest() -> None:
    near = (("a", "d"), ("d", "b"), ("b", "c"))
    found = grouped(box("a", 4), box("b", 3), box("c", 3), box("d", 3), near=near)
    assert [stage.peer for stage in found[0].stages] == ["a", "d", "b", "c"]


def test_boxes_for_several_replicas_become_several() -> None:
    found = grouped(*(box(name, 6) for name in "abcd"), near=(("a", "b"), ("c", "d")))
    assert shape(found) == [[("a", 6), ("b", 6)], [("c", 6), ("d", 6)]]
    assert [group.head for group in found] == ["a", "c"]


def test_too_little_memory_is_no_replica_and_a_box_without_room_is_named() -> None:
    why: list[str] = []
    assert group_boxes([box("a", 4), box("b", 4), box("c", 0)], Links([]), None, why) == []
    assert why == [
        "boxes that wait for more memory to join them: 2, with room for 8 of 12",
        "boxes without room for a single layer, left out: 1",
    ]


def running(*groups: BoxGroup) -> Plan:
    replicas = tuple(Replica(id=group.head, phase=Phase.MIXED, stages=group.stages) for group in groups)
    pairings = tuple(Pairing(prefill=one.id, decode=one.id, weight=1.0 / len(replicas)) for one in replicas)
    return Plan(epoch=1, version=1, service="s", replicas=replicas, pairings=pairings, codec="kv4", why=())


def test_a_running_pipeline_goes_on_whatever_comes() -> None:
    old = running(*grouped(box("a", 4), box("b", 8)))
    found = grouped(box("a", 4), box("b", 8), box("c", 11), near=(("b", "c"),), previous=old)
    assert shape(found) == [[("b", 8), ("a", 4)]]


@pytest.mark.parametrize(
    "changed",
    [box("a", 3), box("a", 4, tp=2)],  # has less room now; has other GPUs now
)
def test_a_pipeline_whose_boxes_have_changed_is_made_anew(changed: BoxView) -> None:
    old = running(*grouped(box("a", 4), box("b", 8)))
    found = grouped(changed, box("b", 9), previous=old)
    assert [stage.tp for stage in found[0].stages if stage.peer == "a"] == [changed.tp]
    assert sum(stage.layers for stage in found[0].stages) == LAYERS


def test_a_pipeline_that_has_lost_a_box_is_no_more() -> None:
    old = running(*grouped(box("a", 4), box("b", 8)))
    assert grouped(box("b", 8), previous=old) == []
