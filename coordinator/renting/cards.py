"""Which card of the table an offer's is: markets have names of their own, some for two sizes of memory."""

from __future__ import annotations

from typing import Final

import msgspec

from ..costs.gpus import GpuError, GpuSpec, Specs, gpu_table
from ..costs.replica import GIB
from ..planning.model.cluster_file import card_link_gbps

MIB: Final = 1 << 20

LEAST_MEMORY: Final = 0.5
"""Of a card's memory by the table, what an offer may say: less is another card, or another unit."""

SAME_MEMORY: Final = 0.9
"""From here on the table's figure counts: markets round."""


def find_card(name: str, memory_mib: float | None, specs: Specs) -> GpuSpec:
    """By the market's name; of cards that come in two sizes, the one with that memory. Raises
    GpuError."""
    card = gpu_table().find(name.replace("_", " "), specs)
    if memory_mib is None:
        return card
    told_gib = memory_mib * MIB / GIB
    kind = card.name.rsplit("-", 1)[0]
    sizes = [other for other in gpu_table().names if other.rsplit("-", 1)[0] == kind]
    nearest = min(sizes, key=lambda other: abs(gpu_table().find(other).memory_gib - told_gib))
    card = gpu_table().find(nearest, specs)
    if told_gib < LEAST_MEMORY * card.memory_gib:
        raise GpuError(f"{memory_mib:g} MiB, and a {card.name} has {card.memory_gib * GIB / MIB:.0f}")
    if told_gib < SAME_MEMORY * card.memory_gib:
        return msgspec.structs.replace(card, memory_gib=told_gib)
    return card


def link_between_cards(card: GpuSpec, nvlink_gbps: float, pcie_gbps: float | None) -> float:
    """Gb/s between two cards of a box. `nvlink_gbps`, `pcie_gbps`: GB/s that the market has
    measured, 0 or None where there is none."""
    if nvlink_gbps > 0.0 and card.nvlink_gbps:
        return card_link_gbps(card, nvlink=True)
    usual = card_link_gbps(card, nvlink=False)
    return min(usual, 8.0 * pcie_gbps) if pcie_gbps else usual
