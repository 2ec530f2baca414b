"""How long boxes take to load weights: what replicas of a new plan wait for before they can work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import isfinite

from ..plan import Replica
from .model_shape import ModelShape


class LoadRatesError(ValueError):
    """A rate or a time of loading that cannot be; the text names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRates:
    """What loading takes on every box.

    - `disk_gb_s`: GB/s that weights are read at from the box's own disk.
    - `download_gbps`: Gb/s that layers come at which the box has not had before.
    - `start_s`: seconds of an engine's start besides its weights: processes, memory, CUDA graphs.
    """

    disk_gb_s: float = 1.0
    download_gbps: float = 1.0
    start_s: float = 20.0

    def __post_init__(self) -> None:
        for field in ("disk_gb_s", "download_gbps"):
            value = getattr(self, field)
            if not (isfinite(value) and value > 0.0):
                raise LoadRatesError(f"{field} is {value}; it must be above 0")
        if not (isfinite(self.start_s) and self.start_s >= 0.0):
            raise LoadRatesError(f"start_s is {self.start_s}; it must not be negative")


def load_seconds(
    model: ModelShape, replicas: Sequence[Replica], on_disk: Mapping[str, AbstractSet[int]], rates: LoadRates
) -> dict[str, float]:
    """Seconds by id until replicas that begin to load together are ready. `on_disk`: by box, the
    layers that it has had before.

    A box reads each layer once, whoever of its replicas needs it: the others find it in memory.
    What it downloads is in memory as well. A replica is ready when the slowest of its boxes is.
    """
    needed: defaultdict[str, set[int]] = defaultdict(set)
    for replica in replicas:
        for stage in replica.stages:
            needed[stage.peer].update(range(stage.first_layer, stage.last_layer))
    seconds = {box: _box_seconds(model, layers, on_disk.get(box, frozenset()), rates) for box, layers in needed.items()}
    return {replica.id: max(seconds[box] for box in replica.peers) for replica in replicas}


def _box_seconds(model: ModelShape, layers: AbstractSet[int], held: AbstractSet[int], rates: LoadRates) -> float:
    read, fetched = _weight_bytes(model, layers & held), _weight_bytes(model, layers - held)
    return rates.start_s + read / (rates.disk_gb_s * 1e9) + fetched * 8.0 / (rates.download_gbps * 1e9)


def _weight_bytes(model: ModelShape, layers: AbstractSet[int]) -> int:
    """With what belongs to the first and to the last layer: the embedding and the logits' matrix."""
    return model.stage_weight_bytes(len(layers), first=0 in layers, last=model.layers - 1 in layers)
