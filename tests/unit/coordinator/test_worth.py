"""What a box is worth: its price for a million tokens, what is wrong with it, and when that is told."""

import msgspec
import pytest

from p2pserve.coordinator.capacity import BoxView
from p2pserve.coordinator.costs.box_worth import BoxWorth
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.demand_meter import expected_workload
from p2pserve.coordinator.profile import LatencyProfile, PhaseCost, PhaseFit
from p2pserve.coordinator.worth import LINKS_S, SETTLED_S, BoxLine, WorthWatch, weigh_boxes

MODEL = model_shape("llama-30b")
WORKLOAD = expected_workload((), 8192)


def box(name: str, usd: float = 1.6, **changed: object) -> BoxView:
    plain = BoxView(
        peer=name, service="llama", model=MODEL, fits=MODEL.layers, ready=True, draining=False, memory_gib=180.0,
        kv_tokens=50_000, tp=4, card="A40", usd_per_hour=usd,
        compute_tflops=4 * 110.0, memory_gbps=4 * 560.0,  # what an A40 reaches, and some
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changed)


def weigh(*boxes: BoxView, **lines: BoxLine) -> dict[str, BoxWorth]:
    return weigh_boxes(boxes, lines, WORKLOAD)


def test_a_box_as_it_should_be_has_no_faults() -> None:
    found = weigh(box("a"), box("b"), a=BoxLine(0.9, 0.8))["a"]
    assert found.faults == {}
    assert found.usd_per_mtok == pytest.approx(1.6 / found.mtok_per_hour)
    assert found.median_usd_per_mtok == pytest.approx(found.usd_per_mtok)
    assert str(found).startswith("1.6 $/h, expected ")


def test_faster_boxes_do_more_and_dearer_ones_cost_more() -> None:
    found = weigh(box("a"), box("fast", compute_tflops=880.0, memory_gbps=4480.0), box("dear", usd=3.2))
    assert found["fast"].mtok_per_hour > 1.3 * found["a"].mtok_per_hour
    assert found["dear"].usd_per_mtok == pytest.approx(2.0 * found["a"].usd_per_mtok)
    assert "price" in found["dear"].faults
    assert "2 times as much" in found["dear"].faults["price"]


def test_a_box_alone_has_no_median() -> None:
    assert weigh(box("a"))["a"].median_usd_per_mtok is None


def test_a_box_without_a_price_is_not_weighed() -> None:
    assert weigh(box("a", usd=0.0)) == {}


@pytest.mark.parametrize(
    ("figure", "measured", "fault", "text"),
    [
        ("compute_tflops", 4 * 50.0, "compute", "of what a A40-48GB reaches"),
        ("memory_gbps", 4 * 200.0, "memory", "its memory is 0.3"),
    ],
)
def test_a_card_that_is_not_what_it_should_be(figure: str, measured: float, fault: str, text: str) -> None:
    found = weigh(msgspec.structs.replace(box("a"), **{figure: measured}))["a"]
    assert set(found.faults) == {fault}
    assert text in found.faults[fault]


def test_cards_that_nobody_knows_have_no_faults() -> None:
    assert weigh(box("a", card="X9000", compute_tflops=1.0))["a"].faults == {}
    assert weigh(box("a", card="", compute_tflops=1.0))["a"].faults == {}


def test_a_line_that_is_less_than_was_offered() -> None:
    found = weigh(box("a"), a=BoxLine(up_share=0.3, down_share=0.9))["a"]
    assert found.faults == {"up": "its link up is 0.3 of what was offered"}


def profile(slower: float) -> LatencyProfile:
    """Of steps that take so many times as long as a third of a second."""
    fit = PhaseFit(cost=PhaseCost(step_s=0.35 * slower), error=0.01, samples=100)
    return LatencyProfile(prefill=fit, decode=None)


def test_a_box_whose_steps_slow_down_beside_the_others() -> None:
    boxes = [box(name, profile=profile(1.0)) for name in "abc"]
    assert not any(worth.faults for worth in weigh(*boxes).values())
    found = weigh(*boxes, box("hot", profile=profile(3.0)))
    assert set(found["hot"].faults) >= {"steps"}
    assert "throttled or shared" in found["hot"].faults["steps"]
    assert "steps" not in found["a"].faults


def test_a_box_that_says_what_cannot_be_costs_no_other_its_worth() -> None:
    assert set(weigh(box("a"), box("liar", tp=7))) >= {"a"}
    assert set(weigh(box("a"), box("liar", compute_tflops=1e-300, memory_gbps=1e-300))) >= {"a"}


def worth(*faults: str) -> BoxWorth:
    return BoxWorth(
        peer="a", usd_per_hour=1.0, mtok_per_hour=2.0, usd_per_mtok=0.5, faults={fault: fault for fault in faults}
    )


def test_the_owner_is_told_once_when_the_links_are_known() -> None:
    watch = WorthWatch()
    assert watch.consider(None, BoxLine(), 0.0) is None
    assert watch.consider(worth(), BoxLine(), 10.0) is None
    told = watch.consider(worth(), BoxLine(up_share=1.0), 15.0)
    assert told == "this box: 1 $/h, expected 2 M tokens/h here: 0.5 $/M"
    assert watch.consider(worth(), BoxLine(up_share=1.0), 20.0) is None


def test_links_that_nobody_measures_are_not_waited_for_for_long() -> None:
    watch = WorthWatch()
    assert watch.consider(worth(), BoxLine(), 0.0) is None
    assert watch.consider(worth(), BoxLine(), LINKS_S) is not None


def test_what_changes_is_told_when_it_lasts() -> None:
    watch, line = WorthWatch(), BoxLine(up_share=1.0)
    watch.consider(worth(), line, 0.0)
    assert watch.consider(worth("steps"), line, 10.0) is None
    assert watch.consider(worth(), line, 20.0) is None  # it came and went
    assert watch.consider(worth("steps"), line, 30.0) is None
    assert watch.consider(worth("steps"), line, 29.0 + SETTLED_S) is None
    told = watch.consider(worth("steps"), line, 30.0 + SETTLED_S)
    assert told is not None
    assert told.startswith("this box is worth less than it was: ")
    assert watch.consider(worth("steps"), line, 500.0) is None
    watch.consider(worth(), line, 510.0)
    told = watch.consider(worth(), line, 510.0 + SETTLED_S)
    assert told is not None
    assert told.startswith("this box is better again: ")
