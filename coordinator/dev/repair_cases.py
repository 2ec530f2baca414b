"""A running network of 32 boxes of one GPU each, and what may happen to it that is planned with at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from ..calibration import BATCH, step_times_of
from ..capacity import BoxView, LinkView
from ..costs.gpus import Specs, gpu_table
from ..costs.model_shape import model_shape
from ..costs.replica import StageHardware, kv_capacity_tokens
from ..demand import MAX_LENGTHS, Demand
from ..demand_meter import azure_lengths
from ..plan import Plan
from ..profile import LatencyProfile, PhaseCost, PhaseFit
from ..repair.urgency import PlanFigures

MODEL: Final = "llama-7b"
CARDS: Final = ("A40-48GB", "RTX-A5000-24GB", "RTX-A6000-48GB", "RTX-3090TI-24GB")
BOXES: Final = 32
SITE_BOXES: Final = 8
NEAR: Final = (10.0, 5e-4)
"""Gb/s, and seconds of a round trip, between boxes of a site,"""

FAR: Final = (2.0, 0.03)
"""and between sites."""

REQUESTS_S: Final = 0.3 * BOXES
THROTTLED: Final = 2.0
"""So many times as long the steps of a throttled engine take."""

DEGRADED: Final = 0.1
"""What is left of a link's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairCase:
    """What has happened, and the figures after it. `is_news`: it is a matter of figures, and not of who is there."""

    name: str
    figures: PlanFigures
    is_news: bool = True


def running_network() -> PlanFigures:
    """Before anything happens: conversations, real cards that have been measured and profiled."""
    boxes = tuple(_make_box(number) for number in range(BOXES))
    links = tuple(
        _make_link(one.peer, two.peer, *(NEAR if one.site == two.site else FAR))
        for one in boxes
        for two in boxes
        if one is not two
    )
    return PlanFigures(boxes=boxes, links=links, demands=(_demand("conversation", REQUESTS_S),))


def repair_cases(before: PlanFigures, plan: Plan) -> Iterator[RepairCase]:
    """One thing after the other, each to the network as it was."""
    busiest = max(plan.pairings, key=lambda pair: pair.weight).decode
    lost = tuple(box for box in before.boxes if box.peer != busiest)
    yield RepairCase(name="box lost", figures=replace(before, boxes=lost), is_news=False)
    yield RepairCase(name="engine failed", figures=_with_box(before, busiest, ready=False), is_news=False)
    new = msgspec.structs.replace(before.boxes[0], peer="box-new", site="")
    yield RepairCase(name="box joined", figures=replace(before, boxes=(*before.boxes, new)), is_news=False)
    (box,) = (box for box in before.boxes if box.peer == busiest)
    yield RepairCase(name="engine throttled", figures=_with_box(before, busiest, profile=_profile_of(box, THROTTLED)))
    between = [pair for pair in plan.pairings if pair.prefill != pair.decode]
    if between:
        used = max(between, key=lambda pair: pair.weight)
        ends = (used.prefill, used.decode)
        slow = tuple(
            msgspec.structs.replace(link, gbps=link.gbps * DEGRADED) if (link.source, link.target) == ends else link
            for link in before.links
        )
        yield RepairCase(name="link degraded", figures=replace(before, links=slow))
    other = (_demand("coding", REQUESTS_S),)
    yield RepairCase(name="workload shifted", figures=replace(before, demands=other))
    yield RepairCase(name="price changed", figures=_with_box(before, busiest, usd_per_hour=2.0))


def _with_box(figures: PlanFigures, peer: str, **changes: object) -> PlanFigures:
    boxes = tuple(msgspec.structs.replace(b, **changes) if b.peer == peer else b for b in figures.boxes)
    return replace(figures, boxes=boxes)


def _make_box(number: int) -> BoxView:
    model, card = model_shape(MODEL), gpu_table().find(CARDS[number % len(CARDS)], Specs.MEASURED)
    box = BoxView(
        peer=f"box-{number:02}", service=MODEL, model=model, fits=model.layers, ready=True, draining=False,
        compute_tflops=card.tflops, memory_gbps=card.memory_gbps, memory_gib=card.memory_gib,
        kv_tokens=kv_capacity_tokens(model, [StageHardware(card, 1, model.layers, 160.0)]),
        card=card.name, usd_per_hour=card.usd_per_hour, site=f"site-{number // SITE_BOXES}",
    )  # fmt: skip
    return msgspec.structs.replace(box, profile=_profile_of(box, 1.0))


def _profile_of(box: BoxView, slower: float) -> LatencyProfile:
    """What its engine's steps would say, by the roofline, if they took so many times as long."""
    times, prompt, context = step_times_of(box), 1024, 1024.0
    prefill = PhaseCost(token_s=slower * times.prefill_s(prompt, prompt * (prompt + 1.0) / 2.0) / prompt)
    decode = PhaseCost(step_s=slower * times.decode_line(BATCH).step_s(BATCH * context))
    return LatencyProfile(
        prefill=PhaseFit(cost=prefill, samples=1000, error=0.05), decode=PhaseFit(cost=decode, samples=1000, error=0.05)
    )


def _make_link(source: str, target: str, gbps: float, rtt_s: float) -> LinkView:
    return LinkView(source=source, target=target, rtt_s=rtt_s, gbps=gbps)


def _demand(kind: str, requests_s: float) -> Demand:
    prompts, outputs = azure_lengths(kind)
    lengths = tuple(zip(prompts[:MAX_LENGTHS].tolist(), outputs[:MAX_LENGTHS].tolist(), strict=True))
    return Demand(requests_s=requests_s, arrival_cv=1.0, lengths=lengths)
