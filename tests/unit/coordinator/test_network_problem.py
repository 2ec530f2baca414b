"""What a running network is taken for: its KV, its cards, its traffic, and what lies between its boxes."""

import re
from typing import Any

import msgspec
import pytest

from p2pserve.coordinator import (
    BoxView,
    CapacityError,
    Demand,
    LatencyProfile,
    LinkView,
    Phase,
    PhaseCost,
    PhaseFit,
    PlanError,
)
from p2pserve.coordinator.capacity import UNKNOWN_GBPS, UNKNOWN_RTT_S, Links
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.profiled_times import FURTHEST
from p2pserve.coordinator.costs.replica import GIB, Hop, StageHardware, kv_capacity_tokens, replica_times
from p2pserve.coordinator.costs.step_times import StepTimes
from p2pserve.coordinator.costs.sweep import ENGINE_SWEEP, profile_times
from p2pserve.coordinator.network_problem import NetworkProblem, build_network_problem
from p2pserve.coordinator.planning.lower.parallel import MEMORY_SHARE, BoxGpus, GroupHardware, ParallelOptions
from p2pserve.coordinator.planning.lower.replicas import needs_of_service
from p2pserve.coordinator.planning.model.problem import Group, Slice
from p2pserve.coordinator.planning.model.slo import SloScale, slo_by

from .networks import KV4, D, M, P, box, fast, model, shares, some_plan

SHORT = Demand(requests_s=1.0, arrival_cv=1.0, lengths=((300, 7),))
EMULATED: dict[str, Any] = {"card": "A40-48GB", "specs": Specs.DENSE, "emulated": True}


def build(*boxes: BoxView, links: tuple[LinkView, ...] = (), demand: Demand = SHORT) -> NetworkProblem:
    found = build_network_problem(boxes, links, [demand], service="llama", codec=KV4, previous=None)
    assert found is not None
    return found


def tokens_beside(network: NetworkProblem, peer: str, layers: int, *, first: bool = True, last: bool = True) -> float:
    """Of KV, that the cards of a box hold beside the weights of its stage."""
    shape, place = model(), network.problem.cluster.index(peer)
    part = network.problem.cluster.boxes[place]
    free = part.gpus * part.gpu.memory_gib * GIB * 0.9 - shape.stage_weight_bytes(layers, first=first, last=last)
    return free / (layers * shape.kv_bytes_per_token_layer)


def test_the_engine_says_how_much_kv_there_is() -> None:
    held = []
    for tokens in (20_000, 40_000):
        plan = some_plan(box("a", kv_tokens=tokens, card="A40-48GB", specs=Specs.DENSE, emulated=True))
        held += [int(found[1]) for line in plan.why if (found := re.search(r"memory for (\d+) requests", line))]
    assert held[1] == pytest.approx(2 * held[0], abs=2)


@pytest.mark.parametrize("figures", [{}, EMULATED], ids=["measured", "emulated"])
def test_a_box_carries_as_much_as_its_part_of_the_gpu(figures: dict[str, Any]) -> None:
    slo = SloScale(50.0)  # what fits, not what is in time

    def carried(part: float) -> float:
        network = build_network_problem(
            [box("a", part=part, kv_tokens=round(40_000 * part), **figures)],
            [], [SHORT], service="llama", codec=KV4, previous=None, slo=slo,
        )  # fmt: skip
        assert network is not None
        return network.colocated_rate

    whole = carried(1.0)
    assert 2.0 * carried(0.5) == pytest.approx(whole, rel=0.15)
    assert 4.0 * carried(0.25) <= 1.05 * whole
    with pytest.raises(CapacityError, match=r"part of a"):
        box("a", part=0.0)


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


@pytest.mark.parametrize(
    ("phases", "pinned", "told"),
    [
        ((None, None), {}, ""),
        ((P, None), {"a": P}, ""),
        ((P, D), {"a": P, "b": D}, ""),
        ((P, P), {"a": P, "b": M}, "b is pinned to prefill and does both phases all the same"),
        ((D, D), {"a": D, "b": M}, "b is pinned to decode and does both phases all the same"),
        ((M, M), {"a": M, "b": M}, ""),
    ],
)
def test_owners_pin_boxes_as_far_as_both_phases_are_done(
    phases: tuple[Phase | None, ...], pinned: dict[str, Phase], told: str
) -> None:
    boxes = [box(name, phase=phase) for name, phase in zip("ab", phases, strict=True)]
    network = build_network_problem(boxes, [], [], service="llama", codec=KV4, previous=None)
    assert network is not None
    assert network.problem.pinned == pinned
    assert any(told in why for why in network.why) if told else not any("pinned" in why for why in network.why)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_box_holds_as_much_kv_as_its_engine_says_and_half_a_token(tp: int) -> None:
    assert tokens_beside(build(box("a", kv_tokens=20_000, tp=tp, **EMULATED)), "a", 8) == pytest.approx(20_000.5)
    measured = tokens_beside(build(box("a", kv_tokens=20_000, tp=tp)), "a", 8)
    assert measured == pytest.approx(20_000, rel=0.015)  # rounded to steps of 3 %
    assert tokens_beside(build(box("a", kv_tokens=20_100, tp=tp)), "a", 8) == measured


def test_a_box_has_room_for_the_longest_request_that_others_take() -> None:
    long = Demand(requests_s=1.0, arrival_cv=1.0, lengths=((9_000, 1_000),))
    network = build(box("a", kv_tokens=20_000, **EMULATED), box("b", kv_tokens=3_000, **EMULATED), demand=long)
    assert tokens_beside(network, "a", 8) == pytest.approx(20_000.5)
    assert tokens_beside(network, "b", 8) == pytest.approx(10_000.5)


def test_a_pipeline_that_has_not_started_holds_what_its_boxes_have_memory_for() -> None:
    """Parts of a token keep two pipelines from being exchanged for each other: a third in one, two in the other."""
    peers = ("a", "b", "c", "d")
    far = [LinkView(source=one, target=two, rtt_s=0.1 if {one, two} in ({"a", "b"}, {"c", "d"}) else 0.3)
           for one in peers for two in peers if one != two]  # fmt: skip
    network = build(*(box(peer, fits=4) for peer in peers), links=tuple(far))
    assert network.heads == {"a": (Slice(0, 1), Slice(1, 1)), "c": (Slice(2, 1), Slice(3, 1))}
    card = msgspec.structs.replace(network.problem.cluster.boxes[0].gpu, memory_gib=24.0)
    room = kv_capacity_tokens(model(), [StageHardware(card, 1, 4, 160.0)] * 2, memory_share=0.9)
    for head, other, part in (("a", "b", 1 / 3), ("c", "d", 2 / 3)):
        assert tokens_beside(network, head, 4, last=False) == pytest.approx(room + part)
        assert tokens_beside(network, other, 4, first=False) == pytest.approx(room + part)


def test_the_stages_of_a_pipeline_are_in_layer_order_and_its_slices_in_the_order_of_boxes() -> None:
    links = (
        LinkView(source="b", target="a", rtt_s=0.02, gbps=5.0),
        LinkView(source="a", target="b", rtt_s=0.04, gbps=2.0),
    )
    network = build(box("a", fits=3), box("b", fits=5, tp=2, card_link_gbps=320.0, site="here"), links=links)
    slices = (Slice(0, 1), Slice(1, 2))
    assert network.heads == {"b": slices}
    assert network.evaluator.stages_of(network.colocated) == {slices: (((1, 2, 5), (0, 1, 3)),)}
    assert [(stage.peer, stage.layers) for stage in network.stages["b"]] == [("b", 5), ("a", 3)]
    one, two = network.problem.cluster.boxes
    times = replica_times(
        model(),
        [StageHardware(two.gpu, 2, 5, 320.0), StageHardware(one.gpu, 1, 3, 160.0)],
        [Hop(0.02, 5.0), Hop(0.04, 2.0)],
    )
    assert (two.gpus, two.site, two.atomic, two.gpu_link_gbps) == (2, "here", True, 320.0)
    # the part of a token beside whole ones is in the memory only, and of the times nothing depends on that
    assert network.service.slo == slo_by(times, network.service.workload, SloScale(5.0))


def test_deadlines_are_five_times_what_the_fastest_replica_takes_alone() -> None:
    network = build(box("a", 100.0, 1000.0), box("b", 400.0, 2000.0), box("c", 50.0, 500.0))
    stage = StageHardware(network.problem.cluster.boxes[1].gpu, 1, 8, 160.0)
    assert network.service.slo == slo_by(replica_times(model(), [stage]), network.service.workload, SloScale(5.0))


def test_what_a_replica_may_do_is_up_to_its_owner_unless_it_is_alone() -> None:
    network = build(box("a", phase=P), box("b"))
    assert (network.allowed("a"), network.allowed("b")) == ((P,), (M, P, D))
    assert build(box("a", phase=M)).allowed("a") == build(box("a")).allowed("a") == (M,)
    solution = network.solution({"a": P, "b": D})
    assert set(solution) == {Group((Slice(0, 1),), P), Group((Slice(1, 1),), D)}
    assert network.phases(solution) == {"a": P, "b": D}
    assert [network.phases(solution)[head] for head in network.ids(solution)] == [group.phase for group in solution]
    assert network.phases(network.colocated) == {"a": P, "b": M}


def test_a_pipeline_of_boxes_with_different_owners_is_free_in_what_it_does() -> None:
    both = build(box("a", fits=4, phase=P), box("b", fits=4, phase=D), box("c"))
    assert both.problem.pinned == {}
    assert any("a is free in what it does: its boxes are pinned to decode and prefill" in why for why in both.why)
    one = build(box("a", fits=4), box("b", fits=4, phase=D), box("c"))
    assert one.problem.pinned == {"a": D, "b": D}


def test_of_boxes_with_unlike_models_those_are_used_that_can_serve_and_then_the_most() -> None:
    assert set(build(box("a"), box("b", layers=6), box("c", layers=6)).heads) == {"b", "c"}
    # the others need one layer more than they have room for together
    short = (box("b", layers=6, fits=2), box("c", layers=6, fits=3))
    found = build(box("a"), *short)
    assert set(found.heads) == {"a"}
    assert [why.split(":")[0] for why in found.why] == ["b left out", "c left out"]
    enough = (box("b", layers=6, fits=3), box("c", layers=6, fits=3))
    assert set(build(box("a"), *enough).heads) == {"b"}


def test_the_service_counts_with_8_bits_where_all_boxes_keep_kv_so() -> None:
    eight = [msgspec.structs.replace(box(peer), model=model().with_kv_cache_dtype("fp8")) for peer in "ab"]
    assert build(*eight).service.model.kv_value_bytes == 1
    assert build(eight[0], box("b")).service.model.kv_value_bytes == 2
    told = [msgspec.structs.replace(one, kv_tokens=20_000) for one in eight]
    # what fits is what the engines say: the cards count as half as large beside their weights
    half, whole = (
        build(*boxes).problem.cluster.boxes[0].gpu.memory_gib for boxes in (told, [box("a", kv_tokens=20_000)])
    )
    weights = model().weight_bytes / GIB / MEMORY_SHARE
    assert half - weights == pytest.approx((whole - weights) / 2, rel=0.01)


def test_emulated_boxes_are_left_to_themselves() -> None:
    found = build(box("a"), box("b", **EMULATED))
    assert set(found.heads) == {"a"}
    assert found.why == ("b left out: emulated boxes do not share requests with real ones",)
    alike = build(box("a", **EMULATED), box("b", **EMULATED))
    assert (set(alike.heads), alike.why) == ({"a", "b"}, ())
    with pytest.raises(PlanError, match="box a is there twice"):
        build(box("a"), box("a"))


def test_a_card_that_makes_no_sense_counts_as_the_slowest() -> None:
    network = build(box("a", 1e-9, 1e-9), box("b"))
    gpu = network.problem.cluster.boxes[0].gpu
    assert [gpu.tflops, gpu.memory_gbps] == pytest.approx([1e-3, 0.1], rel=0.015)


def told(slower: float, **figures: Any) -> BoxView:
    """A box whose engine says that its steps take so many times as long as its card is taken for."""
    plain = box("a", **figures)
    swept = profile_times(step_times_as_planned(plain), 0, ENGINE_SWEEP)

    def fit(cost: PhaseCost) -> PhaseFit:
        scaled = {name: slower * value for name, value in msgspec.structs.asdict(cost).items()}
        return PhaseFit(cost=PhaseCost(**scaled), samples=40, error=0.03)

    return msgspec.structs.replace(plain, profile=LatencyProfile(prefill=fit(swept.prefill), decode=fit(swept.decode)))


def step_times_as_planned(one: BoxView) -> StepTimes:
    card = build(one).problem.cluster.boxes[0].gpu
    return replica_times(model(), [StageHardware(card, 1, 8, one.card_link_gbps)])


def planned_times(network: NetworkProblem, peer: str) -> StepTimes:
    """Those that the planner estimates with."""
    place = network.problem.cluster.index(peer)
    part = network.problem.cluster.boxes[place]
    hardware = GroupHardware((BoxGpus(part.gpu, 1, part.gpu_link_gbps, True, part.measured),), ())
    found = ParallelOptions(hardware, needs_of_service(network.service)).best(M)
    assert found is not None
    return found.times


@pytest.mark.parametrize("figures", [{}, EMULATED])
@pytest.mark.parametrize("slower", [1.43, 0.8])
def test_plans_go_by_the_constants_that_an_engine_tells(figures: dict[str, Any], slower: float) -> None:
    plain, own = build(box("a", **figures), box("b", **figures)), build(told(slower, **figures), box("b", **figures))
    prefill, held = (300, 300 * 301 / 2), 8 * 300
    before, now = planned_times(plain, "a"), planned_times(own, "a")
    assert now.prefill_s(*prefill) == pytest.approx(slower * before.prefill_s(*prefill), rel=0.1)
    assert now.decode_line(8).step_s(held) == pytest.approx(slower * before.decode_line(8).step_s(held), rel=0.1)
    other = planned_times(own, "b")
    assert other.prefill_s(*prefill) == planned_times(plain, "b").prefill_s(*prefill)
    assert other.decode_line(8) == planned_times(plain, "b").decode_line(8)


def test_a_throttled_box_gets_fewer_requests_and_the_plan_says_why() -> None:
    same = [box("a", **EMULATED), box("b", **EMULATED)]
    links = fast("a", "b")
    before = some_plan(*same, links=links, demands=(SHORT,))
    plan = some_plan(told(2.0, **EMULATED), same[1], links=links, demands=(SHORT,))
    assert shares(plan)["a"] < shares(before)["a"] < shares(plan)["b"]
    reasons = [line for line in plan.why if "its engine's own steps" in line]
    assert len(reasons) == 1
    assert reasons[0].startswith("a counts by its engine's own steps")
    assert not [line for line in before.why if "own steps" in line]


@pytest.mark.parametrize("claim", [1e-6, 1e6])
def test_a_claim_moves_nothing_of_another_box(claim: float) -> None:
    """A box may call itself as fast or slow as it likes: deadlines get no tighter, and others count as they did."""
    plain, lied = (
        build(box("a", **EMULATED), box("b", **EMULATED)),
        build(told(claim, **EMULATED), box("b", **EMULATED)),
    )
    assert lied.service.slo == plain.service.slo
    held = 8 * 300
    assert planned_times(lied, "b").decode_line(8).step_s(held) == planned_times(plain, "b").decode_line(8).step_s(held)
    assert planned_times(lied, "a").decode_line(8).step_s(held) == pytest.approx(
        min(max(claim, 1 / FURTHEST), FURTHEST) * planned_times(plain, "a").decode_line(8).step_s(held), rel=0.1
    )


def test_deadlines_follow_the_fastest_box_when_it_throttles() -> None:
    plain, slow = build(box("a", **EMULATED)), build(told(1.43, **EMULATED))
    assert slow.service.slo.e2e_s == pytest.approx(1.43 * plain.service.slo.e2e_s, rel=0.1)
    fast_one = build(told(0.5, **EMULATED))
    assert fast_one.service.slo.e2e_s == pytest.approx(plain.service.slo.e2e_s)
