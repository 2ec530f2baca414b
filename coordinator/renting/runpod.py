"""What RunPod's API says of `gpuTypes`: prices of a card, not single machines. A pod of one, two,
four or eight of them is an offer each, as often as the stock is said to allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from ..costs.gpus import GpuError, Specs
from .cards import MIB, find_card, link_between_cards
from .offers import INTERRUPTED, Amount, Label, Market, Offer
from .places import Location

POD_SIZES: Final = (1, 2, 4, 8)

PODS_IN_STOCK: Final = {"High": 4, "Medium": 2, "Low": 1}
"""Pods of one size that may be had at once, by `stockStatus`: assumed."""

AWAY: Final = {"secure": 0.005, "community": 0.02}
"""The share of the time that a pod is not there: assumed, RunPod says nothing of it."""

GB: Final = 1e9

MostCards = Annotated[int, msgspec.Meta(ge=0, le=64)]

DISK_USD_PER_GB_MONTH: Final = 0.10
"""Of a running pod's container disk; RunPod's JSON does not say it."""


class RunpodPrice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`lowestPrice`: $/h of one card, and how many there are."""

    minimum_bid_price: Amount | None = None
    uninterruptable_price: Amount | None = None
    stock_status: Label | None = None


class RunpodRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A GPU type. Prices are $/h of one card; `memoryInGb` is what the vendor calls it."""

    id: Label
    display_name: Label | None = None
    memory_in_gb: Amount | None = None
    secure_cloud: bool | None = None
    community_cloud: bool | None = None
    secure_price: Amount | None = None
    community_price: Amount | None = None
    secure_spot_price: Amount | None = None
    community_spot_price: Amount | None = None
    max_gpu_count: MostCards | None = None
    max_gpu_count_secure_cloud: MostCards | None = None
    max_gpu_count_community_cloud: MostCards | None = None
    lowest_price: RunpodPrice | None = None


def read_runpod(record: RunpodRecord, number: int, specs: Specs, *, interruptible: bool) -> tuple[Offer, ...] | str:
    """The pods of a type, or why there are none."""
    try:
        card = find_card(record.display_name or record.id, None, specs)
    except GpuError:
        try:
            card = find_card(record.id, None, specs)
        except GpuError as error:
            return f"id, displayName: {error}"
    if record.memory_in_gb is not None and abs(record.memory_in_gb - card.memory_gib) > 0.25 * card.memory_gib:
        try:
            card = find_card(card.name, record.memory_in_gb * GB / MIB, specs)
        except GpuError as error:
            return f"memoryInGb: {error}"
    lowest = record.lowest_price or RunpodPrice()
    stock = PODS_IN_STOCK.get(lowest.stock_status or "", 1)
    offers = tuple(
        Offer(
            id=f"{record.id} x{gpus} {cloud} {copy}", record=number, market=Market.RUNPOD, name=record.id, host=cloud,
            place=Location(), gpu=card, gpus=gpus, gpu_link_gbps=link_between_cards(card, card.nvlink_gbps * sxm, None),
            usd_per_hour=usd * gpus, usd_per_gb_month=DISK_USD_PER_GB_MONTH, compute_capability=None,
            away=1.0 - (1.0 - AWAY[cloud]) * (1.0 - INTERRUPTED * interruptible), interruptible=interruptible,
        )
        for sxm in ("SXM" in card.name,)
        for cloud, usd, most in _clouds(record, lowest, interruptible=interruptible)
        for gpus in POD_SIZES
        if gpus <= most
        for copy in range(1, stock + 1)
    )  # fmt: skip
    return offers or "securePrice, communityPrice: no cloud has a price for it now"


def _clouds(record: RunpodRecord, lowest: RunpodPrice, *, interruptible: bool) -> Iterator[tuple[str, float, int]]:
    """Each cloud that has it: its name, $/h of a card, cards of one pod at most."""
    secure = record.secure_spot_price if interruptible else record.secure_price
    community = record.community_spot_price if interruptible else record.community_price
    any_price = lowest.minimum_bid_price if interruptible else lowest.uninterruptable_price
    for cloud, has, usd, most in (
        ("secure", record.secure_cloud, secure, record.max_gpu_count_secure_cloud),
        ("community", record.community_cloud, community, record.max_gpu_count_community_cloud),
    ):
        price = usd or any_price
        if has is not False and price:
            yield cloud, price, most if most is not None else record.max_gpu_count or 1
