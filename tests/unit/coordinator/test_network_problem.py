"""What a running network is taken for: its KV, its cards, its traffic, and what lies between its boxes."""

import re

import msgspec
import pytest

from p2pserve.coordinator import CapacityError, Demand, LinkView, Phase
from p2pserve.coordinator.capacity import UNKNOWN_GBPS, UNKNOWN_RTT_S, Links
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.network_problem import build_network_problem

from .networks import KV4, D, M, P, box, some_plan


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
