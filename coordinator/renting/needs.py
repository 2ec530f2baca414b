"""What a box must have, beside cards, before a node can serve from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..costs.model_shape import ModelShape
from ..costs.replica import GIB
from .offers import LeftOut, Offer

SOFTWARE_GB: Final = 20.0
"""Of disk for the image and the engine, as docs/install.md has it."""

GB: Final = 1e9

NO_CUDA: Final = ("MI", "V100")
"""Beginnings of cards that an engine for CUDA 13 has no code for: AMD's, and those before Turing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """`cuda`: the driver's; `compute_capability`: the card's; `reliability`: at least."""

    model: ModelShape
    cuda: float = 13.0
    compute_capability: float = 7.5
    ports: int = 1
    reliability: float = 0.0
    max_usd_per_gb: float = float("inf")

    def disk_gb(self, offer: Offer) -> float:
        """For the software and the weights that its cards may come to hold."""
        weights = min(self.model.weight_bytes, offer.gpus * offer.gpu.memory_gib * GIB)
        return SOFTWARE_GB + weights / GB

    def refuse(self, offer: Offer) -> str | None:
        """Why a box cannot do, with the field that says so; None where it can. What is not said is
        taken to be there."""
        if offer.gpu.name.startswith(NO_CUDA):
            return f"gpu_name: the engine for CUDA {self.cuda:g} has no code for a {offer.gpu.name}"
        told = offer.compute_capability
        if told is not None and told < self.compute_capability:
            return f"compute_cap: {told:g}; {self.compute_capability:g} is needed"
        if offer.cuda is not None and offer.cuda < self.cuda:
            return f"cuda_max_good: the driver is for CUDA {offer.cuda:g}; {self.cuda:g} is needed"
        if offer.ports is not None and offer.ports < self.ports:
            return f"direct_port_count: {offer.ports}; {self.ports} is needed, or others cannot dial the box"
        disk = self.disk_gb(offer)
        if offer.disk_gb is not None and offer.disk_gb < disk:
            return f"disk_space: {offer.disk_gb:.0f} GB; {disk:.0f} are needed for software and weights"
        if 1.0 - offer.away < self.reliability:
            return f"reliability: it is there {1.0 - offer.away:.1%} of the time; {self.reliability:.1%} is asked for"
        dearest = max(offer.up_usd_per_gb, offer.down_usd_per_gb)
        if dearest > self.max_usd_per_gb:
            return f"inet_up_cost, inet_down_cost: ${dearest:g}/GB; at most ${self.max_usd_per_gb:g} is asked for"
        return None


def usable_offers(offers: tuple[Offer, ...], needs: Needs) -> tuple[tuple[Offer, ...], tuple[LeftOut, ...]]:
    """Those that can do, and the others with their reasons."""
    reasons = [(offer, needs.refuse(offer)) for offer in offers]
    return (
        tuple(offer for offer, why in reasons if why is None),
        tuple(LeftOut(record=offer.record, why=why) for offer, why in reasons if why is not None),
    )
