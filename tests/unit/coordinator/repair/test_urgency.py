"""Which news of figures is planned with at once: those that the running plan rests on, and not what noise does."""

from dataclasses import replace

import msgspec
import pytest

from p2pserve.coordinator import Demand, LatencyProfile, LinkView, Pairing, PhaseCost, PhaseFit, Plan, Replica, Stage
from p2pserve.coordinator.repair.urgency import PlanFigures, find_urgent_news

from ..networks import D, M, P, box

PLAN = Plan(
    epoch=1,
    version=1,
    service="llama",
    replicas=tuple(
        Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=8),))
        for name, phase in (("p", P), ("d", D), ("m", M))
    ),
    pairings=(Pairing(prefill="p", decode="d", weight=0.6), Pairing(prefill="m", decode="m", weight=0.4)),
    codec="kv4",
    why=(),
)


def profile(step_s: float) -> LatencyProfile:
    return LatencyProfile(decode=PhaseFit(cost=PhaseCost(step_s=step_s), samples=100, error=0.1))


def link(source: str, target: str, gbps: float, usd_per_gb: float = 0.01) -> LinkView:
    return LinkView(source=source, target=target, rtt_s=0.01, gbps=gbps, usd_per_gb=usd_per_gb)


ASKED = Demand(requests_s=2.0, arrival_cv=1.0, lengths=((100, 20), (300, 40)))
BEFORE = PlanFigures(
    boxes=(*(box(peer, profile=profile(0.02), usd_per_hour=0.4) for peer in "pdm"), box("idle", usd_per_hour=0.4)),
    links=(link("p", "d", 8.0), link("d", "p", 8.0), link("m", "d", 8.0)),
    demands=(ASKED,),
)


def with_box(peer: str, **changes: object) -> PlanFigures:
    boxes = tuple(msgspec.structs.replace(each, **changes) if each.peer == peer else each for each in BEFORE.boxes)
    return replace(BEFORE, boxes=boxes)


def with_link(source: str, target: str, gbps: float, usd_per_gb: float = 0.01) -> PlanFigures:
    others = tuple(each for each in BEFORE.links if (each.source, each.target) != (source, target))
    return replace(BEFORE, links=(*others, link(source, target, gbps, usd_per_gb)))


def with_demand(**changes: object) -> PlanFigures:
    return replace(BEFORE, demands=(msgspec.structs.replace(ASKED, **changes),))


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (with_link("p", "d", 0.5), "went from 8 to 0.5 Gb/s"),
        (with_link("p", "d", 8.0, 0.05), "costs $0.05 per GB, before $0.01"),
        (with_box("m", profile=profile(0.04)), "takes 2.0 times as long as before"),
        (with_box("m", compute_tflops=50.0), "takes 2.0 times as long as before"),
        (with_box("m", usd_per_hour=0.8), "costs $0.8/h, before $0.4/h"),
        (with_demand(requests_s=4.0), "requests/s: 4, before 2"),
        (with_demand(requests_s=1.0), "requests/s: 1, before 2"),
        (with_demand(lengths=((800, 30),)), "tokens of a prompt: 800, before 200"),
        (with_demand(lengths=((200, 300),)), "tokens of an answer: 300, before 30"),
        (replace(BEFORE, demands=()), "requests/s: 0, before 2"),
    ],
)
def test_what_the_plan_rests_on_is_urgent_when_it_moves_far(now: PlanFigures, named: str) -> None:
    assert named in find_urgent_news(PLAN, BEFORE, now)


@pytest.mark.parametrize(
    "now",
    [
        BEFORE,
        with_link("p", "d", 5.0),  # within noise
        with_link("p", "d", 80.0),  # better can wait
        with_link("m", "d", 0.1),  # nothing is sent over it
        with_box("m", profile=profile(0.022)),
        with_box("m", profile=profile(0.01)),
        with_box("m", profile=None),
        with_box("idle", compute_tflops=1.0),  # not in the plan
        with_demand(requests_s=2.5),
        replace(BEFORE, boxes=(*BEFORE.boxes, box("new", usd_per_hour=9.0))),  # who is there is looked at elsewhere
    ],
)
def test_noise_and_what_the_plan_does_not_use_can_wait(now: PlanFigures) -> None:
    assert find_urgent_news(PLAN, BEFORE, now) == ""


def test_a_link_measured_one_way_only_counts_both_ways() -> None:
    before = replace(BEFORE, links=(link("d", "p", 8.0),))
    assert "went from 8 to 0.5" in find_urgent_news(PLAN, before, replace(BEFORE, links=(link("d", "p", 0.5),)))
