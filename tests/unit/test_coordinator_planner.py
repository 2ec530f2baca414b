"""Roles and weights: tables for single decisions, properties for what must hold for any network."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator import BoxView, CapacityError, LinkView, Phase, Plan, PlanError, make_plan

P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED


def box(
    peer: str,
    tflops: float = 100.0,
    gbps: float = 1000.0,
    *,
    ready: bool = True,
    draining: bool = False,
    layers: int = 8,
    fits: int | None = None,
    tp: int = 1,
    emulated: bool = False,
) -> BoxView:
    return BoxView(
        peer=peer,
        service="llama",
        layers=layers,
        fits=layers if fits is None else fits,
        tp=tp,
        ready=ready,
        draining=draining,
        compute_tflops=tflops,
        memory_gbps=gbps,
        memory_gib=24.0,
        kv_tokens=10_000,
        emulated=emulated,
    )


def plan_of(
    *boxes: BoxView,
    links: tuple[LinkView, ...] = (),
    previous: Plan | None = None,
    epoch: int = 1,
    codec: str = "kv4",
) -> Plan | None:
    version = previous.version + 1 if previous is not None else 0
    return make_plan(boxes, links, service="llama", epoch=epoch, version=version, previous=previous, codec=codec)


def some_plan(*boxes: BoxView, links: tuple[LinkView, ...] = (), previous: Plan | None = None, epoch: int = 1) -> Plan:
    plan = plan_of(*boxes, links=links, previous=previous, epoch=epoch)
    assert plan is not None
    return plan


def roles(plan: Plan) -> dict[str, Phase]:
    return {item.head: item.phase for item in plan.replicas}


FLOP_RICH, MIDDLE, BYTE_RICH = box("f", 400.0, 800.0), box("m", 150.0, 1000.0), box("b", 60.0, 1500.0)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ((MIDDLE,), {"m": M}),
        ((MIDDLE, FLOP_RICH), {"m": D, "f": P}),
        ((MIDDLE, BYTE_RICH), {"m": P, "b": D}),
        ((BYTE_RICH, MIDDLE, FLOP_RICH), {"b": D, "m": D, "f": P}),
        ((box("a"), box("b")), {"a": P, "b": D}),  # alike: by peer id
        ((box("a", 10.0), box("b", 10.0), box("c", 10.0)), {"a": P, "b": P, "c": D}),  # little compute
        ((box("a"), box("b", draining=True)), {"a": M}),
        ((box("a"), box("b", ready=False)), {"a": M}),
        ((box("a", layers=8), box("b", layers=8), box("c", layers=6)), {"a": P, "b": D}),
        ((box("a"), box("b", emulated=True)), {"a": M}),
        ((box("a", emulated=True), box("b", emulated=True)), {"a": P, "b": D}),
    ],
)
def test_roles(boxes: tuple[BoxView, ...], expected: dict[str, Phase]) -> None:
    assert roles(some_plan(*boxes)) == expected


@pytest.mark.parametrize("boxes", [(), (box("a", ready=False),), (box("a", draining=True),)])
def test_no_box_ready_is_no_plan(boxes: tuple[BoxView, ...]) -> None:
    assert plan_of(*boxes) is None
    assert plan_of(*boxes, previous=some_plan(box("a"))) is None


def test_boxes_of_other_services_are_not_seen() -> None:
    assert make_plan([box("a")], [], service="other", epoch=1, version=0, previous=None, codec="raw") is None


def test_more_prefill_work_asks_for_more_prefill_boxes() -> None:
    boxes = [box(name) for name in "abcdef"]
    counts = []
    for ratio in (0.02, 0.1, 0.5):
        plan = make_plan(
            boxes,
            [],
            service="llama",
            epoch=1,
            version=0,
            previous=None,
            codec="kv4",
            prefill_tflop_per_decode_gb=ratio,
        )
        assert plan is not None
        counts.append(len(plan.in_phase(P)))
    assert counts == [1, 3, 5]


def test_a_joining_box_moves_no_one() -> None:
    before = some_plan(MIDDLE, BYTE_RICH)
    after = some_plan(MIDDLE, BYTE_RICH, FLOP_RICH, previous=before)
    assert roles(after) == {"m": P, "b": D, "f": P}  # afresh, m would decode
    assert after.newer_than(before)


def test_the_second_box_ends_mixed() -> None:
    before = some_plan(MIDDLE)
    assert roles(some_plan(MIDDLE, FLOP_RICH, previous=before)) == {"m": D, "f": P}


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (("p1", "p2"), {"p1": P, "p2": D}),  # no decode left: the one with the fewest FLOP per byte
        (("d1", "d2"), {"d1": P, "d2": D}),
        (("p2", "d1"), {"p2": P, "d1": D}),
        (("d2",), {"d2": M}),
    ],
)
def test_who_takes_over_when_boxes_go(left: tuple[str, ...], expected: dict[str, Phase]) -> None:
    boxes = [box("p1", 400.0), box("p2", 300.0), box("d1", 60.0), box("d2", 50.0)]
    before = make_plan(
        boxes,
        [],
        service="llama",
        epoch=1,
        version=0,
        previous=None,
        codec="kv4",
        prefill_tflop_per_decode_gb=0.3,
    )
    assert before is not None
    assert roles(before) == {"p1": P, "p2": P, "d1": D, "d2": D}
    after = some_plan(*(item for item in boxes if item.peer in left), previous=before)
    assert roles(after) == expected
    assert any("gone, draining or not ready" in line for line in after.why)


def test_nothing_new_is_the_same_object() -> None:
    before = some_plan(MIDDLE, FLOP_RICH, BYTE_RICH)
    assert plan_of(MIDDLE, FLOP_RICH, BYTE_RICH, previous=before) is before
    assert plan_of(MIDDLE, FLOP_RICH, BYTE_RICH, box("x", ready=False), previous=before) is before


def test_a_new_epoch_and_a_new_codec_are_changes() -> None:
    before = some_plan(MIDDLE, FLOP_RICH)
    again = some_plan(MIDDLE, FLOP_RICH, previous=before, epoch=2)
    assert (again.number, again.replicas) == ((2, 1), before.replicas)
    other = plan_of(MIDDLE, FLOP_RICH, previous=before, codec="raw")
    assert other is not None
    assert other.codec == "raw"
    assert any("raw" in line for line in other.why)


def links(near: float, far: float) -> tuple[LinkView, ...]:
    return (
        LinkView(source="p", target="d1", rtt_s=near),
        LinkView(source="d2", target="p", rtt_s=far),  # the way back tells as much
    )


def test_a_near_decode_box_gets_more() -> None:
    boxes = (box("p", 500.0), box("d1", 50.0), box("d2", 50.0))
    plan = some_plan(*boxes, links=links(0.0, 0.05))
    assert plan.weight("p", "d1") == pytest.approx(2 / 3)
    assert plan.weight("p", "d2") == pytest.approx(1 / 3)
    assert some_plan(*boxes, links=links(0.001, 0.055), previous=plan) is plan  # noise
    assert some_plan(*boxes, links=links(0.05, 0.0), previous=plan) is not plan


def test_refusals() -> None:
    before = some_plan(MIDDLE, FLOP_RICH)
    with pytest.raises(PlanError, match="not be newer"):
        make_plan([MIDDLE], [], service="llama", epoch=1, version=0, previous=before, codec="kv4")
    with pytest.raises(PlanError, match="service"):
        make_plan([MIDDLE], [], service="x", epoch=1, version=1, previous=before, codec="kv4")
    with pytest.raises(PlanError, match="twice"):
        plan_of(MIDDLE, MIDDLE)
    with pytest.raises(PlanError, match="above 0"):
        make_plan(
            [MIDDLE],
            [],
            service="llama",
            epoch=1,
            version=0,
            previous=None,
            codec="kv4",
            prefill_tflop_per_decode_gb=0.0,
        )


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_box_that_was_not_measured_cannot_be_planned(value: float) -> None:
    with pytest.raises(CapacityError, match=r"memory_gbps.*measure"):
        box("a", gbps=value)
    with pytest.raises(CapacityError, match=r"compute_tflops.*measure"):
        box("a", tflops=value)


@pytest.mark.parametrize("rtt", [-0.1, float("nan"), float("inf")])
def test_a_round_trip_is_a_time(rtt: float) -> None:
    with pytest.raises(CapacityError, match="rtt_s"):
        LinkView(source="a", target="b", rtt_s=rtt)


PEERS = [f"box{number}" for number in range(7)]
figures = st.floats(min_value=1.0, max_value=1000.0, allow_nan=False)
fleets = st.lists(
    st.builds(
        box,
        st.sampled_from(PEERS),
        figures,
        figures,
        ready=st.sampled_from([True, True, True, False]),
        draining=st.sampled_from([False, False, False, True]),
        layers=st.sampled_from([8, 8, 8, 6]),
    ),
    unique_by=lambda item: item.peer,
)
meshes = st.lists(
    st.builds(
        LinkView,
        source=st.sampled_from(PEERS),
        target=st.sampled_from(PEERS),
        rtt_s=st.floats(min_value=0.0, max_value=1.0),
    ),
    max_size=12,
)


@given(fleets, meshes)
def test_any_plan_is_valid_and_names_only_usable_boxes(fleet: list[BoxView], mesh: list[LinkView]) -> None:
    plan = plan_of(*fleet, links=tuple(mesh))
    usable = {item.peer for item in fleet if item.usable}
    if plan is None:
        assert not usable
        return
    assert set(plan.peers) <= usable
    assert plan.why
    named = " ".join(plan.why)
    assert not any(item.peer in named for item in fleet if not item.usable)
    if len(plan.replicas) == 1:
        assert roles(plan)[plan.peers[0]] is M
    else:
        assert set(roles(plan).values()) == {P, D}


@given(fleets, fleets, meshes, st.randoms(use_true_random=False))
def test_the_order_of_input_does_not_matter(
    first: list[BoxView], second: list[BoxView], mesh: list[LinkView], rng: Random
) -> None:
    previous = plan_of(*first)
    expected = plan_of(*second, links=tuple(mesh), previous=previous)
    rng.shuffle(second)
    rng.shuffle(mesh)
    assert plan_of(*second, links=tuple(mesh), previous=previous) == expected


@given(fleets, fleets)
def test_a_box_that_stays_keeps_its_role_while_both_are_filled(first: list[BoxView], second: list[BoxView]) -> None:
    before, after = plan_of(*first), None
    if before is not None:
        after = plan_of(*second, previous=before)
    if before is None or after is None or len(after.replicas) == 1:
        return
    kept = {peer: phase for peer, phase in roles(before).items() if peer in after.peers and phase is not M}
    moved = [peer for peer, phase in kept.items() if roles(after)[peer] is not phase]
    alone = len(set(kept.values())) == 1 and len(kept) == len(after.replicas)
    assert len(moved) == int(alone)  # one box flips, only when all that stay had one role and no one joined


@given(fleets, meshes)
def test_planning_again_changes_nothing(fleet: list[BoxView], mesh: list[LinkView]) -> None:
    plan = plan_of(*fleet, links=tuple(mesh))
    if plan is not None:
        assert plan_of(*fleet, links=tuple(mesh), previous=plan) is plan


# ---- replicas that span boxes ---------------------------------------------------------------------------------


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


def test_boxes_of_different_widths_are_not_mixed() -> None:
    plan = some_plan(box("a", fits=4, tp=2), box("b", fits=4), box("c", fits=4, tp=2), box("d", fits=4))
    assert [[stage.peer for stage in replica.stages] for replica in plan.replicas] == [["a", "c"], ["b", "d"]]
    assert {stage.tp for stage in plan.replicas[0].stages} == {2}
    assert plan_of(box("a", fits=4, tp=2), box("b", fits=4)) is None


def test_a_pipeline_is_kept_while_its_boxes_are_there() -> None:
    old = some_plan(box("a", fits=4), box("b", fits=4))
    larger = [box(peer, fits=7) for peer in ("x", "y")]
    both = some_plan(box("a", fits=4), box("b", fits=5), *larger, previous=old)
    assert layers_of(both) == [[("a", 4), ("b", 4)], [("x", 4), ("y", 4)]]
    for lost in (box("b", fits=3), box("b", fits=4, ready=False), box("b", fits=4, draining=True)):
        again = some_plan(box("a", fits=4), lost, *larger, previous=both)
        assert layers_of(again)[-1] == [("x", 4), ("y", 4)]
        assert not any(("b", 4) in stages for stages in layers_of(again))
    same = plan_of(box("b", fits=5), *larger, box("a", fits=4), previous=both)
    assert same is both


def test_a_pipeline_counts_as_fast_as_its_slowest_stage() -> None:
    """4 of 8 layers on a box of 100 TFLOP/s: 200 for the whole model, if the other stage keeps up."""
    plan = some_plan(box("a", 400.0, 1000.0, fits=4), box("b", 100.0, 4000.0, fits=4), box("w", 150.0, 1000.0))
    assert roles(plan) == {"a": D, "w": P}  # 200 TFLOP/s over 2000 GB/s, against 150 over 1000
    fast = some_plan(box("a", 400.0, 1000.0, fits=4), box("b", 400.0, 1000.0, fits=4), box("w", 150.0, 1000.0))
    assert roles(fast) == {"a": P, "w": D}


some_fits = st.lists(st.integers(0, 12), min_size=1, max_size=9)


@given(some_fits, st.integers(1, 12), st.randoms(use_true_random=False))
def test_whatever_the_boxes_every_replica_holds_the_model_and_no_box_more_than_fits(
    fits: list[int], layers: int, rng: Random
) -> None:
    boxes = [box(f"b{i}", layers=layers, fits=min(each, layers)) for i, each in enumerate(fits)]
    links = tuple(
        LinkView(source=one.peer, target=two.peer, rtt_s=rng.random()) for one in boxes for two in boxes if one != two
    )
    plan = plan_of(*boxes, links=links)
    waiting = [one for one in boxes if not one.whole]
    if plan is None:
        assert len(waiting) == len(boxes)
        assert sum(one.fits for one in waiting) < layers
        return
    room = {one.peer: one.fits for one in boxes}
    for replica in plan.replicas:
        assert replica.layers == layers
        assert all(stage.layers <= room[stage.peer] for stage in replica.stages)
        assert all(sum(room[peer] for peer in replica.peers if peer != out) < layers for out in replica.peers[1:])
    assert sum(one.fits for one in boxes if one.peer not in plan.peers) < layers
    shuffled = rng.sample(boxes, len(boxes))
    assert plan_of(*shuffled, links=links) == plan
    assert plan_of(*shuffled, links=links, previous=plan) is plan
