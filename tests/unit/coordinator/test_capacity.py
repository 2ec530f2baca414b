"""What is believed of boxes and links: bounds on figures, and what stands in for what nobody has measured."""

from typing import Any

import pytest

from p2pserve.coordinator import BoxView, CapacityError, LinkView
from p2pserve.coordinator.capacity import SLOWEST_GBPS, UNKNOWN_GBPS, UNKNOWN_RTT_S, Links
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import MODELS

MODEL = MODELS["llama-7b"]


def box(**changes: Any) -> BoxView:
    fields: dict[str, Any] = {
        "peer": "a", "service": "s", "model": MODEL, "fits": MODEL.layers, "ready": True, "draining": False,
        "compute_tflops": 100.0, "memory_gbps": 900.0, "memory_gib": 48.0, "kv_tokens": 1000,
    }  # fmt: skip
    return BoxView(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peer": ""}, "box.peer is empty"),
        ({"service": ""}, "box.service of a is empty"),
        ({"fits": -1}, "box.fits of a is -1"),
        ({"fits": MODEL.layers + 1}, "0 to 32 layers"),
        ({"tp": 0}, "box.tp of a is 0"),
        ({"kv_tokens": -1}, "box.kv_tokens of a is negative"),
        ({"compute_tflops": 0.0}, "box.compute_tflops of a is 0.0; measure the box first"),
        ({"memory_gbps": -1.0}, "box.memory_gbps of a"),
        ({"memory_gib": float("inf")}, "box.memory_gib of a is inf"),
        ({"card_link_gbps": float("nan")}, "box.card_link_gbps of a is nan"),
        ({"usd_per_hour": -0.1}, "box.usd_per_hour of a is -0.1"),
        ({"card": "no such card", "specs": Specs.DENSE}, "box.card of a: GPU 'no such card' is not in the table"),
    ],
)
def test_a_box_that_cannot_be_is_refused_by_the_field(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CapacityError, match=text):
        box(**changes)


def test_the_least_that_a_box_may_say() -> None:
    found = box(fits=0, kv_tokens=0, tp=1, usd_per_hour=0.0, ready=False)
    assert not found.whole
    assert not found.usable
    assert found.layers == MODEL.layers


@pytest.mark.parametrize(
    ("ready", "draining", "usable"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_box_is_given_work_when_it_is_ready_and_stays(ready: bool, draining: bool, usable: bool) -> None:
    assert box(ready=ready, draining=draining).usable is usable


def test_a_box_holds_the_model_alone_when_all_layers_fit() -> None:
    assert box().whole
    assert not box(fits=MODEL.layers - 1).whole


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"source": ""}, "link.source or link.target is empty"),
        ({"target": ""}, "link.source or link.target is empty"),
        ({"rtt_s": -1.0}, "link.rtt_s of a -> b is -1.0"),
        ({"gbps": float("nan")}, "link.gbps of a -> b is nan"),
        ({"usd_per_gb": float("inf")}, "link.usd_per_gb of a -> b is inf"),
    ],
)
def test_a_link_that_cannot_be_is_refused_by_the_field(changes: dict[str, Any], text: str) -> None:
    fields: dict[str, Any] = {"source": "a", "target": "b", "rtt_s": 0.01, "gbps": 1.0}
    with pytest.raises(CapacityError, match=text):
        LinkView(**(fields | changes))


def test_what_nobody_has_measured_is_assumed() -> None:
    links = Links([])
    assert links.rtt_s("a", "b") == UNKNOWN_RTT_S
    assert links.gbps("a", "b") == UNKNOWN_GBPS
    assert links.usd_per_gb("a", "b") == 0.0


def test_a_link_measured_one_way_counts_both_ways_but_for_its_price() -> None:
    links = Links([LinkView(source="a", target="b", rtt_s=0.03, gbps=4.0, usd_per_gb=0.02)])
    assert links.rtt_s("b", "a") == links.rtt_s("a", "b") == 0.03
    assert links.gbps("b", "a") == links.gbps("a", "b") == 4.0
    assert links.usd_per_gb("a", "b") == 0.02
    assert links.usd_per_gb("b", "a") == 0.0


def test_of_several_figures_the_worst_counts() -> None:
    views = [LinkView(source="a", target="b", rtt_s=rtt, gbps=gbps, usd_per_gb=usd)
             for rtt, gbps, usd in ((0.03, 4.0, 0.01), (0.05, 6.0, 0.03), (0.01, 2.0, 0.02))]  # fmt: skip
    for order in (views, views[::-1]):
        links = Links(order)
        assert (links.rtt_s("a", "b"), links.gbps("a", "b"), links.usd_per_gb("a", "b")) == (0.05, 2.0, 0.03)


def test_a_rate_of_nothing_is_no_measurement_and_a_tiny_one_is_raised() -> None:
    assert Links([LinkView(source="a", target="b", rtt_s=0.1)]).gbps("a", "b") == UNKNOWN_GBPS
    assert Links([LinkView(source="a", target="b", rtt_s=0.1, gbps=1e-9)]).gbps("a", "b") == SLOWEST_GBPS
    both = Links([LinkView(source="a", target="b", rtt_s=0.1, gbps=5.0), LinkView(source="b", target="a", rtt_s=0.1)])
    assert both.gbps("b", "a") == 5.0
