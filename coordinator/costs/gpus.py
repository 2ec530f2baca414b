"""The table of GPUs: what a card can do on paper, in three columns, and its rent."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import Final

import msgspec

SLOWED: Final = "/"
"""In the name of a card, before what its rates are divided by."""

SLOWEST: Final = 100.0


class GpuError(ValueError):
    """A GPU that is not in the table, or a table that cannot be read; one line."""


class Specs(StrEnum):
    """Which figures of a GPU count.

    DENSE: the datasheet's dense tensor rate. TABLE1: ThunderServe's Table 1, which mixes tensor and
    shader rates, for the five cards that it names. MEASURED: dense, times the share of it that was
    measured on that card. ENGINE: in no table: what the engine of a running node has measured
    there, all of which counts.
    """

    DENSE = "dense"
    TABLE1 = "thunderserve-table1"
    MEASURED = "measured"
    ENGINE = "engine"


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One card: `memory_gbps`, `nvlink_gbps` in GB/s, `tflops` in 16 bit, price per hour, `tdp_w`
    in watts (0: not known)."""

    name: str
    memory_gib: float
    memory_gbps: float
    tflops: float
    nvlink_gbps: float
    pcie_gen: int
    usd_per_hour: float
    specs: Specs = Specs.DENSE
    tdp_w: float = 0.0


# memory bandwidth GB/s, "peak FP16" TFLOPS, memory GiB, $/h: ThunderServe, Table 1, as printed
_TABLE1: Final[Mapping[str, tuple[float, float, float, float]]] = {
    "A100-SXM4-80GB": (2000.0, 312.0, 80.0, 1.753),
    "RTX-A6000-48GB": (768.0, 38.7, 48.0, 0.483),
    "RTX-A5000-24GB": (626.8, 27.8, 24.0, 0.223),
    "A40-48GB": (696.0, 149.7, 48.0, 0.403),
    "RTX-3090TI-24GB": (1008.0, 71.0, 24.0, 0.307),
}


class GpuTable:
    """Cards by name or alias, in any case."""

    def __init__(self, cards: Mapping[str, GpuSpec], aliases: Mapping[str, str]) -> None:
        self._cards = dict(cards)
        self._names = {key.lower(): name for key, name in {**aliases, **{name: name for name in cards}}.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical names."""
        return tuple(self._cards)

    def find(self, name: str, specs: Specs = Specs.DENSE) -> GpuSpec:
        """A card in one column; `A40/4`: an imagined one with a quarter of the A40's rates, and its memory. Raises
        GpuError with near names for one that is missing."""
        name, slash, divisor = name.partition(SLOWED)
        if slash:
            return _slow_down(self.find(name, specs), divisor)
        known = self._names.get(name.strip().lower())
        if known is None:
            near = [card for card in self._cards if name.strip().lower().split("-")[0][:4] in card.lower()]
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise GpuError(f"GPU {name!r} is not in the table of {len(self._cards)} cards{hint}")
        if specs is Specs.ENGINE:
            raise GpuError(f"GPU {name!r}: the table has no figures that engines measure")
        card = self._cards[known]
        if specs is Specs.TABLE1:
            if known not in _TABLE1:
                raise GpuError(f"ThunderServe's Table 1 has no {known}: use --specs dense or measured")
            bandwidth, tflops, memory, price = _TABLE1[known]
            return msgspec.structs.replace(
                card, memory_gbps=bandwidth, tflops=tflops, memory_gib=memory, usd_per_hour=price, specs=specs
            )
        return msgspec.structs.replace(card, specs=specs)


def _slow_down(card: GpuSpec, divisor: str) -> GpuSpec:
    """With rates divided by that. Raises GpuError."""
    try:
        factor = float(divisor)
    except ValueError:
        factor = 0.0
    if not 1.0 < factor <= SLOWEST:
        raise GpuError(
            f"GPU {card.name!r}: {divisor.strip()!r} is no number above 1 to divide its rates by, {SLOWEST:g} at most"
        )
    return msgspec.structs.replace(
        card,
        name=f"{card.name}{SLOWED}{factor:g}",
        memory_gbps=card.memory_gbps / factor,
        tflops=card.tflops / factor,
    )


def parse_gpus(text: str) -> GpuTable:
    """The table from the text of `gpu_specs.csv`."""
    cards: dict[str, GpuSpec] = {}
    aliases: dict[str, str] = {}
    for row in csv.DictReader(StringIO(text)):
        name = row["name"]
        cards[name] = GpuSpec(
            name=name,
            memory_gib=float(row["memory_gib"]),
            memory_gbps=float(row["mem_bw_gbps"]),
            tflops=float(row["fp16_tflops_dense"]),
            nvlink_gbps=float(row["nvlink_gbps"]),
            pcie_gen=int(row["pcie_gen"]),
            usd_per_hour=float(row["typical_usd_per_hour"]),
            tdp_w=float(row.get("tdp_w") or 0.0),
        )
        aliases.update((alias.strip(), name) for alias in row["aliases"].split("|") if alias.strip())
    return GpuTable(cards, aliases)


@cache
def gpu_table() -> GpuTable:
    """The table that comes with the project: it never changes while the program runs."""
    return parse_gpus((files(__package__.rpartition(".")[0]) / "data" / "gpu_specs.csv").read_text(encoding="utf-8"))
