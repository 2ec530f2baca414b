"""What of a card's paper rates a serving engine reaches, and what each of its steps costs besides.

The rows of `gpu_efficiency.csv` are fitted to published measurements, or taken from them; each row
says which. The command `python -m p2pserve.sims.roofline_errors` holds them against the data.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import Final

import msgspec

from .gpus import SLOWED, GpuSpec, Specs

DEFAULT: Final = "default"


class EfficiencyError(ValueError):
    """Factors that no card can have; the text names the row and the column."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one card.

    `compute_share` of the dense tensor rate is reached by big matrix products, `bandwidth_share` of
    the memory's rate by reading weights and KV. Every layer costs `layer_s` more (launching
    kernels, norms, activations), and every all-reduce `reduce_s` for each doubling of the cards in
    it.
    """

    name: str
    compute_share: float
    bandwidth_share: float
    layer_s: float
    reduce_s: float
    source: str

    def __post_init__(self) -> None:
        for field in ("compute_share", "bandwidth_share"):
            if not 0.0 < getattr(self, field) <= 1.0:
                raise EfficiencyError(f"{field} of {self.name} is {getattr(self, field)}; it is a share above 0")
        for field in ("layer_s", "reduce_s"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise EfficiencyError(f"{field} of {self.name} is {getattr(self, field)} s; it must be 0 to 1")


def parse_efficiencies(text: str) -> dict[str, Efficiency]:
    """By name of the card, from `gpu_efficiency.csv`'s text; times are in microseconds."""
    return {
        row["name"]: Efficiency(
            name=row["name"],
            compute_share=float(row["compute_share"]),
            bandwidth_share=float(row["bandwidth_share"]),
            layer_s=float(row["layer_us"]) * 1e-6,
            reduce_s=float(row["reduce_us"]) * 1e-6,
            source=row["source"],
        )
        for row in csv.DictReader(StringIO(text))
    }


@cache
def _packaged() -> Mapping[str, Efficiency]:
    return parse_efficiencies(
        (files(__package__.rpartition(".")[0]) / "data" / "gpu_efficiency.csv").read_text(encoding="utf-8")
    )


def efficiency_of(gpu: GpuSpec) -> Efficiency:
    """The card's own factors in the column `measured`, else the default ones. From rates that an
    engine has reached nothing is taken off."""
    rows = _packaged()
    if gpu.specs is Specs.ENGINE:
        return msgspec.structs.replace(rows[DEFAULT], compute_share=1.0, bandwidth_share=1.0)
    name = gpu.name.partition(SLOWED)[0]
    return rows.get(name, rows[DEFAULT]) if gpu.specs is Specs.MEASURED else rows[DEFAULT]
