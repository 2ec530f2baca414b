"""About the most that offers can be worth: upper bounds that need no plan.

The planner's upper bounds (`planning.lower.upper_bound`) add up over groups of GPUs. Here a group
is cards of one kind in one box, as many as are best for a card; so a card has a value at each
price of a request, and a set of boxes is bounded by the sum over its cards, at the price where
that is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..costs.gpus import GpuSpec
from ..planning.lower.evaluator import LowerLevel
from ..planning.lower.replicas import ConfigurationCache
from ..planning.model.cluster import Box, Cluster
from ..planning.model.problem import Group, Problem, Slice
from ..planning.model.workload import Service
from ..planning.upper.search_space import PHASES
from .offers import Offer

Array = NDArray[np.float64]
CardKind = tuple[GpuSpec, float]

GROUP_SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Cards of the groups that a card's value is looked for in."""

SHARING: Final = 8
"""Replicas that are taken to share a queue; more let each be fuller."""


def card_values(kinds: Sequence[CardKind], service: Service, memory: ConfigurationCache) -> dict[CardKind, Array]:
    """[total price, prefill share], requests/s of one card; 0 where no group of its kind holds the
    model in time."""
    boxes = [
        Box(id=f"{number} x {size}", gpu=gpu, gpus=size, gpu_link_gbps=link)
        for number, (gpu, link) in enumerate(kinds)
        for size in GROUP_SIZES
    ]
    nothing = np.zeros((len(boxes), len(boxes)))
    cluster = Cluster(boxes=tuple(boxes), gbps=nothing, rtt_s=nothing, usd_per_gb=nothing)
    evaluator = LowerLevel(Problem(cluster=cluster, services=(service,), pinned={}), memory=memory)
    found: dict[CardKind, Array] = {}
    for number, kind in enumerate(kinds):
        places = range(number * len(GROUP_SIZES), (number + 1) * len(GROUP_SIZES))
        components = [
            (Group((Slice(place, size),), phase),)
            for place, size in zip(places, GROUP_SIZES, strict=True)
            if evaluator.can_hold((Slice(place, size),), 0)
            for phase in PHASES
        ]
        sizes = np.array([component[0].slices[0].gpus for component in components], dtype=np.float64)
        values = evaluator.component_values([*components, ()], [(SHARING, SHARING)])[:, 0]
        found[kind] = (values / np.append(sizes, 1.0)[:, None, None]).max(axis=0)
    return found


class OfferValues:
    """What each offer is worth at most, in the order of `offers`: `per_box` [offer, total price,
    prefill share]."""

    def __init__(self, offers: Sequence[Offer], service: Service, memory: ConfigurationCache) -> None:
        kinds = sorted({_kind(offer) for offer in offers}, key=lambda kind: (kind[0].name, kind))
        of_card = card_values(kinds, service, memory)
        self.per_box = np.array([of_card[_kind(offer)] * offer.gpus for offer in offers])

    def most(self, chosen: Sequence[int]) -> float:
        """About the most requests/s in time that these carry together."""
        # At the highest price of a request nothing is left of those that nobody serves.
        return float(self.per_box[list(chosen), 0].sum(axis=0).min()) if chosen else 0.0


def at_rate(service: Service, rate: float) -> Service:
    """The same service, asked for that often."""
    return replace(service, workload=replace(service.workload, rate=rate))


def _kind(offer: Offer) -> CardKind:
    return offer.gpu, offer.gpu_link_gbps
