"""What `vastai search offers --raw` prints: a list of records with some eighty fields, of which these count."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ..costs.gpus import GpuError, Specs
from .cards import find_card, link_between_cards
from .offers import INTERRUPTED, Amount, GpuCount, Label, Market, Number, Offer
from .places import parse_place

MEGA: Final = 1e-3  # Gb/s in Mb/s


class VastRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One offer of vast.ai, in its units.

    `gpu_ram` MiB of one card; `dph_base` and `min_bid` $/h for the cards alone; `storage_cost`
    $/GB/month; `inet_*` Mb/s; `inet_*_cost` $/GB; `pcie_bw` and `bw_nvlink` GB/s; `disk_space` GB;
    `compute_cap` in hundredths. Fields may be missing or null.
    """

    id: Number
    gpu_name: Label
    num_gpus: GpuCount
    gpu_ram: Amount | None = None
    dph_base: Amount | None = None
    dph_total: Amount | None = None
    min_bid: Amount | None = None
    storage_cost: Amount | None = None
    inet_up: Amount | None = None
    inet_down: Amount | None = None
    inet_up_cost: Amount | None = None
    inet_down_cost: Amount | None = None
    pcie_bw: Amount | None = None
    bw_nvlink: Amount | None = None
    disk_space: Amount | None = None
    direct_port_count: int | None = None
    cuda_max_good: Amount | None = None
    compute_cap: Amount | None = None
    reliability2: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    reliability: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    geolocation: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    host_id: Number | None = None
    machine_id: Number | None = None
    cluster_id: Number | None = None
    public_ipaddr: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    is_bid: bool | None = None
    rentable: bool | None = None


NEW_HOST: Final = 0.6
"""What vast.ai's score begins at: the reliability of a host that says none."""


def read_vast(record: VastRecord, number: int, specs: Specs, *, interruptible: bool) -> Offer | str:
    """The offer, or why it is none. `interruptible`: at the least bid instead of the price that
    nobody can outbid."""
    if record.rentable is False:
        return "rentable: it is taken"
    try:
        card = find_card(record.gpu_name, record.gpu_ram, specs)
    except GpuError as error:
        return f"gpu_name, gpu_ram: {error}"
    bid = record.is_bid is True or interruptible
    usd = _price(record, bid=bid)
    if usd is None:
        return "min_bid: it is missing" if bid else "dph_base, dph_total: both are missing"
    if usd <= 0.0:
        return f"{'min_bid' if bid else 'dph_base'}: a price of 0 is none"
    reliability = next((told for told in (record.reliability2, record.reliability) if told is not None), NEW_HOST)
    return Offer(
        id=str(record.id), record=number, market=Market.VAST, name=str(record.id),
        host=str(record.host_id or record.machine_id or ""), place=parse_place(record.geolocation, _site(record)),
        gpu=card, gpus=record.num_gpus,
        gpu_link_gbps=link_between_cards(card, record.bw_nvlink or 0.0, record.pcie_bw),
        usd_per_hour=usd, usd_per_gb_month=record.storage_cost or 0.0,
        up_gbps=_gbps(record.inet_up), down_gbps=_gbps(record.inet_down),
        up_usd_per_gb=record.inet_up_cost or 0.0, down_usd_per_gb=record.inet_down_cost or 0.0,
        disk_gb=record.disk_space, ports=record.direct_port_count, cuda=record.cuda_max_good,
        compute_capability=None if record.compute_cap is None else record.compute_cap / 100.0,
        away=1.0 - reliability * (1.0 - INTERRUPTED if bid else 1.0), interruptible=bid,
    )  # fmt: skip


def _price(record: VastRecord, *, bid: bool) -> float | None:
    """Without disk; `dph_total` has a small one in it."""
    if not bid:
        return record.dph_base if record.dph_base is not None else record.dph_total
    if record.min_bid is not None:
        return record.min_bid
    return record.dph_base if record.is_bid else None


def _site(record: VastRecord) -> str:
    """What machines in one building have in common: a cluster, else an address, else a host's
    place."""
    if record.cluster_id is not None:
        return f"cluster {record.cluster_id}"
    if record.public_ipaddr:
        return record.public_ipaddr
    return f"host {record.host_id}, {record.geolocation}" if record.host_id and record.geolocation else ""


def _gbps(megabits: float | None) -> float | None:
    """A line of no rate is one of which nothing is known."""
    return megabits * MEGA if megabits else None
