"""What a market offers: one box each, as frozen values, whatever format it came in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from ..costs.gpus import GpuSpec
from .places import Location

HOURS_PER_MONTH: Final = 730.0

MAX_RECORDS: Final = 20_000
"""Of one file: all that vast.ai has is about as many."""

MAX_GPUS_OFFERED: Final = 64

INTERRUPTED: Final = 0.1
"""Of the time that an interruptible box is taken to be away because somebody bid more: assumed."""

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""Of money, megabits, megabytes: neither negative nor infinite."""

GpuCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_GPUS_OFFERED)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class OfferError(ValueError):
    """A file of offers that cannot be used; one line."""


class Market(StrEnum):
    """Where boxes are rented."""

    VAST = "vast.ai"
    RUNPOD = "runpod"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A box that can be rented.

    `record`: its number in the file, from 1. `name`: what the market calls it in its commands (an
    offer's id, a GPU type's). `host`: who owns it. `usd_per_hour`: of the box without disk and
    traffic; `usd_per_gb_month` of its disk. `up_gbps`, `down_gbps`: as the market has measured its
    line, None where it says nothing; `up_usd_per_gb`, `down_usd_per_gb`: of traffic. `disk_gb`,
    `ports`, `cuda`, `compute_capability` (8.9): None where nothing is said. `away`: the share of
    the time that the box is not there.
    """

    id: str
    record: int
    market: Market
    name: str
    host: str
    place: Location
    gpu: GpuSpec
    gpus: int
    gpu_link_gbps: float
    usd_per_hour: float
    usd_per_gb_month: float = 0.0
    up_gbps: float | None = None
    down_gbps: float | None = None
    up_usd_per_gb: float = 0.0
    down_usd_per_gb: float = 0.0
    disk_gb: float | None = None
    ports: int | None = None
    cuda: float | None = None
    compute_capability: float | None = None
    away: float = 0.0
    interruptible: bool = False

    def hourly_usd(self, disk_gb: float) -> float:
        """With a disk of this size, without traffic."""
        return self.usd_per_hour + self.usd_per_gb_month * disk_gb / HOURS_PER_MONTH


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A record that is not looked at further, and why: one line that names its field. `broken`: it
    is not what the market writes."""

    record: int
    why: str
    broken: bool = False

    def __str__(self) -> str:
        return f"record {self.record}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """What a file holds: `taken` and `left_out` together are all of its records."""

    taken: tuple[Offer, ...]
    left_out: tuple[LeftOut, ...]
