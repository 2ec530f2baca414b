"""The running network's plans: tables for single decisions, properties for what must hold for any network."""

import re
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import Phase as Drawing
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.coordinator import BoxView, CapacityError, Demand, LinkView, Phase, Plan, PlanError
from p2pserve.coordinator.capacity import UNKNOWN_GBPS, UNKNOWN_RTT_S, KvCodec, Links
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.costs.rounds import TOKEN_BUDGETS
from p2pserve.coordinator.network_plan import MAX_PAIRINGS, plan_network
from p2pserve.coordinator.network_problem import build_network_problem

KV4, RAW = KvCodec("kv4", 4.5), KvCodec("raw", 16.0)
P, D, M = Phase.PREFILL, Phase.DECODE, Phase.MIXED
PEER = "12D3KooW{:044d}".format


def model(layers: int = 8, name: str = "small") -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=32000
    )


def box(peer: str, tflops: float = 100.0, gbps: float = 1000.0, *, layers: int = 8, **more: Any) -> BoxView:
    """One with room for some layers only has not started an engine, which would say how much KV it holds."""
    tokens = 100_000 if more.get("fits", layers) == layers else 0
    figures = {"ready": True, "draining": False, "memory_gib": 24.0, "kv_tokens": tokens, "fits": layers}
    return BoxView(
        peer=peer, service="llama", model=model(layers), compute_tflops=tflops, memory_gbps=gbps, **(figures | more)
    )


def plan_of(
    *boxes: BoxView,
    links: tuple[LinkView, ...] = (),
    demands: tuple[Demand, ...] = (),
    previous: Plan | None = None,
    epoch: int = 1,
    codec: KvCodec = KV4,
) -> Plan | None:
    version = previous.version + 1 if previous is not None else 0
    return plan_network(
        boxes, links, demands, service="llama", epoch=epoch, version=version, previous=previous, codec=codec
    )


def some_plan(*boxes: BoxView, **more: Any) -> Plan:
    plan = plan_of(*boxes, **more)
    assert plan is not None
    return plan


def roles(plan: Plan) -> dict[str, Phase]:
    return {item.head: item.phase for item in plan.replicas}


def shares(plan: Plan) -> dict[str, float]:
    """Of all requests, what each replica writes."""
    return {item.id: sum(pair.weight for pair in plan.pairings if pair.decode == item.id) for item in plan.replicas}


# ---- who can be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boxes", [(), (box("a", ready=False),), (box("a", draining=True),)])
def test_no_box_ready_is_no_plan(boxes: tuple[BoxView, ...]) -> None:
    assert plan_of(*boxes) is None
    assert plan_of(*boxes, previous=some_plan(box("a"))) is None


def test_boxes_of_other_services_are_not_seen() -> None:
    assert plan_network([box("a")], [], [], service="other", epoch=1, version=0, previous=None, codec=RAW) is None


@pytest.mark.parametrize(
    ("boxes", "used"),
    [
        ((box("a"), box("b", draining=True)), {"a"}),
        ((box("a"), box("b", ready=False)), {"a"}),
        ((box("a", layers=8), box("b", layers=8), box("c", layers=6)), {"a", "b"}),
        ((box("a", layers=8, fits=3), box("c", layers=6)), {"c"}),
        ((box("a"), box("b", emulated=True)), {"a"}),
        ((box("a", emulated=True), box("b", emulated=True)), {"a", "b"}),
    ],
)
def test_who_is_used(boxes: tuple[BoxView, ...], used: set[str]) -> None:
    plan = some_plan(*boxes)
    assert set(plan.peers) == used
    left_out = {one.peer for one in boxes if one.usable} - used
    assert all(any(f"{peer} left out" in line for line in plan.why) for peer in left_out)


def test_the_same_model_from_another_folder_is_the_same_model() -> None:
    other = msgspec.structs.replace(box("b"), model=model(name="elsewhere"))
    assert set(some_plan(box("a"), other).peers) == {"a", "b"}


def test_a_single_replica_does_both_phases_for_itself() -> None:
    plan = some_plan(box("a"))
    assert roles(plan) == {"a": M}
    assert [(pair.prefill, pair.decode, pair.weight) for pair in plan.pairings] == [("a", "a", 1.0)]


# ---- phases ---------------------------------------------------------------------------------------------------

FLOP_RICH, BYTE_RICH = box("f", 900.0, 700.0), box("b", 60.0, 1500.0)


def fast(*peers: str) -> tuple[LinkView, ...]:
    """Links that cost next to nothing."""
    return tuple(
        LinkView(source=one, target=two, rtt_s=1e-4, gbps=100.0) for one in peers for two in peers if one != two
    )


def test_boxes_do_what_they_are_good_at() -> None:
    plan = some_plan(FLOP_RICH, BYTE_RICH, links=fast("f", "b"))
    assert roles(plan)["b"] is D
    assert plan.weight("f", "b") > 0.5


def test_nobody_transfers_through_a_link_that_is_too_slow() -> None:
    slow = tuple(msgspec.structs.replace(link, gbps=0.01) for link in fast("f", "b"))
    assert roles(some_plan(FLOP_RICH, BYTE_RICH, links=slow)) == {"f": M, "b": M}


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ((P, D), {"a": P, "b": D}),
        ((D, P), {"a": D, "b": P}),
        ((M, M), {"a": M, "b": M}),
        ((P, P), {"a": P, "b": M}),
        ((D, D), {"a": D, "b": M}),
        ((P, None), {"a": P}),
    ],
)
def test_pins_are_obeyed_as_far_as_can_be(pins: tuple[Phase | None, ...], expected: dict[str, Phase]) -> None:
    boxes = [box(peer, phase=pin) for peer, pin in zip("ab", pins, strict=True)]
    plan = some_plan(*boxes)
    assert expected.items() <= roles(plan).items()
    impossible = len(set(pins)) == 1 and pins[0] is not M
    assert any("all the same" in line for line in plan.why) is impossible
    assert plan_of(*boxes, previous=plan) is plan


def test_a_single_box_that_is_pinned_to_one_phase_does_both_all_the_same() -> None:
    plan = some_plan(box("a", phase=P))
    assert roles(plan) == {"a": M}
    assert any("pinned to prefill" in line for line in plan.why)


def test_a_new_pin_changes_a_running_replica() -> None:
    before = some_plan(FLOP_RICH, BYTE_RICH, links=fast("f", "b"))
    pinned = msgspec.structs.replace(BYTE_RICH, phase=P)
    after = some_plan(FLOP_RICH, pinned, links=fast("f", "b"), previous=before)
    assert roles(after)["b"] is P
    assert any("b does not go on with decode: only prefill" in line for line in after.why)


@pytest.mark.parametrize("left", [("p1", "p2"), ("d1", "d2"), ("p2", "d1"), ("d2",)])
def test_whoever_is_left_takes_over(left: tuple[str, ...]) -> None:
    boxes = [box("p1", phase=P), box("p2", phase=P), box("d1", phase=D), box("d2", phase=D)]
    before = some_plan(*boxes)
    free = [msgspec.structs.replace(one, phase=None) for one in boxes]
    after = some_plan(*(one for one in free if one.peer in left), previous=before)
    assert set(after.peers) == set(left)
    assert any("gone, draining or not ready" in line for line in after.why)


def test_small_changes_of_figures_change_no_phase() -> None:
    rng = Random(1)
    boxes = [box(f"b{number}", rng.uniform(50, 400), rng.uniform(500, 2000)) for number in range(5)]
    names = [one.peer for one in boxes]
    before = some_plan(*boxes, links=fast(*names))
    for _ in range(3):
        noisy = [
            msgspec.structs.replace(
                one,
                compute_tflops=one.compute_tflops * rng.uniform(0.98, 1.02),
                memory_gbps=one.memory_gbps * rng.uniform(0.98, 1.02),
            )
            for one in boxes
        ]
        after = some_plan(*noisy, links=fast(*names), previous=before)
        assert roles(after) == roles(before)


def test_a_joining_box_moves_nobody_unless_that_pays() -> None:
    """Equal boxes that do both have no reason to change when one more comes."""
    boxes = [box(name) for name in "abc"]
    before = some_plan(*boxes)
    after = some_plan(*boxes, box("d"), previous=before)
    assert roles(before).items() <= roles(after).items()
    assert after.newer_than(before)


def test_nobody_is_left_to_write_and_hardly_anything_is_in_time() -> None:
    """Then no flip gains 2 % of all requests, and somebody has to write all the same."""
    before = some_plan(box("p", phase=P), box("q", phase=P), box("d", phase=D))
    flood = Demand(requests_s=1e5, arrival_cv=1.0, lengths=((1000, 200),))
    after = some_plan(box("p"), box("q"), previous=before, demands=(flood,))
    assert any(replica.decodes for replica in after.replicas)
    assert any("chosen anew" in line for line in after.why)


@pytest.mark.parametrize("figures", [(1e-6, 1e-6), (1e5, 1e-6), (1e-6, 1e5)])
def test_a_box_with_figures_that_make_no_sense_stops_nobody(figures: tuple[float, float]) -> None:
    flood = Demand(requests_s=1e6, arrival_cv=50.0, lengths=((90_000, 90_000),))
    for others in ((), (box("a"),)):
        plan = some_plan(*others, box("odd", *figures, kv_tokens=1), box("even", *figures), demands=(flood,))
        assert {"odd", "even"} <= set(plan.peers)


# ---- routing --------------------------------------------------------------------------------------------------


def test_equal_boxes_share_alike() -> None:
    plan = some_plan(*(box(name) for name in "abcd"))
    assert all(share == pytest.approx(0.25, abs=0.02) for share in shares(plan).values())


def test_a_faster_box_gets_more() -> None:
    got = shares(some_plan(box("a", 100.0, 1000.0), box("b", 200.0, 2000.0)))
    assert got["b"] > 1.3 * got["a"] > 0.0


def test_a_box_that_is_too_slow_for_the_deadlines_gets_nothing_and_is_named() -> None:
    plan = some_plan(box("a", 400.0, 2000.0), box("slow", 1.0, 10.0))
    assert shares(plan)["slow"] == 0.0
    assert any(line.startswith("no requests for slow") for line in plan.why)


def test_a_plan_of_many_boxes_fits_the_gossip() -> None:
    rng = Random(3)
    boxes = [
        box(PEER(number), rng.uniform(100, 300), rng.uniform(800, 1600), phase=P if number < 30 else D)
        for number in range(60)
    ]
    plan = some_plan(*boxes)
    assert len(plan.pairings) <= MAX_PAIRINGS + len(boxes)
    assert len(msgspec.msgpack.encode(plan)) < 60_000


# ---- what is a change -----------------------------------------------------------------------------------------


def test_a_plan_says_how_much_a_step_may_compute_and_keeps_to_it() -> None:
    boxes = [msgspec.structs.replace(FLOP_RICH, phase=P), msgspec.structs.replace(BYTE_RICH, phase=D)]
    plan = some_plan(*boxes, links=fast("f", "b"))
    steps = {replica.id: replica.step_tokens for replica in plan.replicas}
    assert steps["f"] == TOKEN_BUDGETS[0]  # it only reads
    assert steps["b"] in TOKEN_BUDGETS

    def running(tokens: int) -> Plan:
        """The plan, with another budget for who decodes."""
        replicas = tuple(
            msgspec.structs.replace(replica, step_tokens=tokens) if replica.id == "b" else replica
            for replica in plan.replicas
        )
        return msgspec.structs.replace(plan, replicas=replicas)

    near, far = running(round(steps["b"] * 1.5)), running(steps["b"] * 2)
    assert some_plan(*boxes, links=fast("f", "b"), previous=near) is near
    again = some_plan(*boxes, links=fast("f", "b"), previous=far)
    assert {replica.id: replica.step_tokens for replica in again.replicas} == steps


def test_nothing_new_is_the_same_object() -> None:
    boxes = (box("m"), FLOP_RICH, BYTE_RICH)
    before = some_plan(*boxes)
    assert plan_of(*boxes, previous=before) is before
    assert plan_of(*boxes, box("x", ready=False), previous=before) is before


def test_a_new_epoch_and_a_new_codec_are_changes() -> None:
    before = some_plan(box("m"), FLOP_RICH)
    again = some_plan(box("m"), FLOP_RICH, previous=before, epoch=2)
    assert (again.number, again.replicas, again.pairings) == ((2, 1), before.replicas, before.pairings)
    other = some_plan(box("m"), FLOP_RICH, previous=before, codec=RAW)
    assert other.codec == "raw"
    assert any("KV travels as raw" in line for line in other.why)


def test_noise_on_links_is_no_news_and_a_link_that_breaks_down_is() -> None:
    boxes = (box("p", 500.0, phase=P), box("d1", phase=D), box("d2", phase=D))
    links = fast("p", "d1", "d2")
    before = some_plan(*boxes, links=links)
    noisy = tuple(msgspec.structs.replace(link, rtt_s=2e-4, gbps=90.0) for link in links)
    assert plan_of(*boxes, links=noisy, previous=before) is before
    broken = tuple(msgspec.structs.replace(link, gbps=0.02) if "d1" in link.target else link for link in links)
    after = some_plan(*boxes, links=broken, previous=before)
    assert after.weight("p", "d1") < 0.5 * before.weight("p", "d1")


def test_refusals() -> None:
    one = box("m")
    before = some_plan(one, FLOP_RICH)
    with pytest.raises(PlanError, match="not be newer"):
        plan_network([one], [], [], service="llama", epoch=1, version=0, previous=before, codec=KV4)
    with pytest.raises(PlanError, match="service"):
        plan_network([one], [], [], service="x", epoch=1, version=1, previous=before, codec=KV4)
    with pytest.raises(PlanError, match="twice"):
        plan_of(one, one)


# ---- what the network is taken for ----------------------------------------------------------------------------


def test_the_engine_says_how_much_kv_there_is() -> None:
    held = []
    for tokens in (20_000, 40_000):
        plan = some_plan(box("a", kv_tokens=tokens, card="A40-48GB", specs=Specs.DENSE, emulated=True))
        held += [int(found[1]) for line in plan.why if (found := re.search(r"memory for (\d+) requests", line))]
    assert held[1] == pytest.approx(2 * held[0], abs=2)


def test_requests_longer_than_any_kv_cache_are_shortened() -> None:
    demand = Demand(requests_s=1.0, arrival_cv=1.0, lengths=((90_000, 10_000),))
    network = build_network_problem(
        [box("a", kv_tokens=20_000), box("b", kv_tokens=3_000)],
        [], [demand], service="llama", codec=KV4, previous=None,
    )  # fmt: skip
    assert network is not None
    workload = network.service.workload
    assert 18_000 < int(workload.prompts[0] + workload.outputs[0]) <= 20_000
    assert set(network.heads) == {"a", "b"}


def test_a_quiet_network_is_planned_for_what_it_could_carry() -> None:
    network = build_network_problem([box("a"), box("b")], [], [], service="llama", codec=KV4, previous=None)
    assert network is not None
    assert network.service.workload.rate == pytest.approx(network.colocated_rate)
    assert network.asked < network.service.workload.rate
    silent = Demand(requests_s=0.0, arrival_cv=1.0, lengths=((300, 7),))
    idle = build_network_problem([box("a"), box("b")], [], [silent], service="llama", codec=KV4, previous=None)
    assert idle is not None
    assert idle.asked == 0.0
    assert idle.service.workload.rate == pytest.approx(idle.colocated_rate)
    assert idle.service.workload.mean_prompt == 300
    asked = build_network_problem([box("a")], [], [], service="llama", codec=KV4, previous=None, rate=0.5)
    assert asked is not None
    assert asked.service.workload.rate == 0.5


def test_emulated_boxes_count_for_their_card_and_real_ones_for_what_was_measured() -> None:
    shown = box("a", 1.0, 1.0, card="A40-48GB", specs=Specs.DENSE, emulated=True)
    network = build_network_problem([shown], [], [], service="llama", codec=KV4, previous=None)
    assert network is not None
    card = network.problem.cluster.boxes[0].gpu
    assert (card.name, card.tflops, card.memory_gbps, card.specs) == ("A40-48GB", 149.7, 696.0, Specs.DENSE)
    real = build_network_problem(
        [box("a", 240.0, 1200.0, tp=2, card="A40-48GB")], [], [], service="llama", codec=KV4, previous=None
    )
    assert real is not None
    card = real.problem.cluster.boxes[0].gpu
    assert card.specs is Specs.ENGINE
    assert [card.tflops, card.memory_gbps] == pytest.approx([120.0, 600.0], rel=0.02)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["memory_gbps", "compute_tflops", "memory_gib", "card_link_gbps"])
def test_a_box_that_was_not_measured_cannot_be_planned(field: str, value: float) -> None:
    with pytest.raises(CapacityError, match=rf"{field} of a .*measure"):
        msgspec.structs.replace(box("a"), **{field: value})


def test_figures_of_boxes_and_links_that_cannot_be() -> None:
    with pytest.raises(CapacityError, match="usd_per_hour"):
        box("a", usd_per_hour=-1.0)
    with pytest.raises(CapacityError, match=r"box\.card of a: GPU 'toaster'"):
        box("a", card="toaster", specs=Specs.DENSE)
    with pytest.raises(CapacityError, match=r"box\.card of a: .*engines"):
        box("a", card="A40-48GB", specs=Specs.ENGINE)
    for field in ("rtt_s", "gbps", "usd_per_gb"):
        for value in (-0.1, float("nan"), float("inf")):
            with pytest.raises(CapacityError, match=field):
                msgspec.structs.replace(LinkView(source="a", target="b", rtt_s=0.1), **{field: value})


def test_what_lies_between_boxes() -> None:
    links = Links([
        LinkView(source="a", target="b", rtt_s=0.1, gbps=2.0, usd_per_gb=0.01),
        LinkView(source="a", target="b", rtt_s=0.2, gbps=1.5),
        LinkView(source="c", target="b", rtt_s=0.3),
        LinkView(source="a", target="c", rtt_s=0.3, gbps=1e-9),
    ])  # fmt: skip
    assert (links.rtt_s("a", "b"), links.gbps("a", "b"), links.usd_per_gb("a", "b")) == (0.2, 1.5, 0.01)
    assert (links.rtt_s("b", "a"), links.gbps("b", "a"), links.usd_per_gb("b", "a")) == (0.2, 1.5, 0.0)
    assert (links.rtt_s("b", "c"), links.gbps("b", "c")) == (0.3, UNKNOWN_GBPS)
    assert (links.rtt_s("x", "y"), links.gbps("x", "y")) == (UNKNOWN_RTT_S, UNKNOWN_GBPS)
    assert links.gbps("a", "c") > 1e-9


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


# ---- properties -----------------------------------------------------------------------------------------------

DRAW_ONLY = (Drawing.explicit, Drawing.reuse, Drawing.generate)  # a plan takes too long to look for the least failure
PEERS = [f"box{number}" for number in range(5)]
figures = st.floats(min_value=1.0, max_value=1000.0, allow_nan=False)
fleets = st.lists(
    st.builds(
        lambda peer, tflops, gbps, sizes, **more: box(peer, tflops, gbps, **sizes, **more),
        st.sampled_from(PEERS),
        figures,
        figures,
        sizes=st.sampled_from([
            {"kv_tokens": 1}, {"kv_tokens": 500}, {"kv_tokens": 50_000}, {"kv_tokens": 0}, {"layers": 6}, {"fits": 5},
            {"fits": 3}, {"fits": 5, "tp": 2}, {"fits": 0},
        ]),
        ready=st.sampled_from([True, True, True, False]),
        draining=st.sampled_from([False, False, False, True]),
        phase=st.sampled_from([None, None, P, D, M]),
    ),
    unique_by=lambda item: item.peer,
    max_size=5,
)  # fmt: skip
meshes = st.lists(
    st.builds(
        LinkView,
        source=st.sampled_from(PEERS),
        target=st.sampled_from(PEERS),
        rtt_s=st.floats(min_value=0.0, max_value=1.0),
        gbps=st.sampled_from([0.0, 1e-6, 0.5, 100.0]),
    ),
    max_size=12,
)


@settings(max_examples=15, deadline=None, phases=DRAW_ONLY, derandomize=True)
@given(fleets, fleets, meshes, st.randoms(use_true_random=False))
def test_whatever_the_network_its_plan_can_be_followed(
    first: list[BoxView], second: list[BoxView], mesh: list[LinkView], rng: Random
) -> None:
    """It uses only boxes that may be used, names those that it leaves out, obeys pins where it can, does not depend on
    the order of anything, and soon stays as it is while nothing changes."""
    previous = plan_of(*first)
    plan = plan_of(*second, links=tuple(mesh), previous=previous)
    usable = {one.peer: one for one in second if one.usable}
    if plan is None:
        assert not any(one.whole for one in usable.values())
        return
    assert set(plan.peers) <= usable.keys()
    told = " ".join(plan.why)
    for one in usable.values() if plan is not previous else ():
        assert one.peer in plan.peers or one.peer in told or ("wait for" if one.fits else "without room") in told
    for replica in plan.replicas:
        assert all(stage.layers <= usable[stage.peer].fits for stage in replica.stages)
        pins = {usable[peer].phase for peer in replica.peers} - {None}
        assert replica.phase in pins or len(pins) != 1 or "all the same" in told
    rng.shuffle(second)
    rng.shuffle(mesh)
    assert plan_of(*second, links=tuple(mesh), previous=previous) == plan
    for _ in range(3):
        following = plan_of(*second, links=tuple(mesh), previous=plan)
        if following is plan:
            break
        plan = following
    else:
        pytest.fail("the plan goes on changing")


@settings(max_examples=12, deadline=None, phases=DRAW_ONLY)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 12), st.randoms(use_true_random=False))
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
        assert all(sum(room[peer] for peer in replica.peers if peer != out) < layers for out in replica.peers[1:])
    assert sum(one.fits for one in boxes if one.peer not in plan.peers) < layers
    assert plan_of(*boxes, links=links, previous=plan) is plan
