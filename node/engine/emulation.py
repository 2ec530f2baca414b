"""What an emulated engine pretends to have, as the protocol carries it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...coordinator.bounds import Figure
from ...coordinator.costs.gpus import GpuSpec
from ...coordinator.costs.model_shape import ModelShape


class Throttling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From `after_s` seconds after an emulated engine's first step on, steps take `factor` times as long."""

    after_s: Figure
    factor: Annotated[float, msgspec.Meta(gt=0, le=1e3)]


class Emulation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cards that are not there. `gpu_link_gbps` (Gb/s): between two; ids below `vocabulary`. `load_gb_s`: GB/s that
    weights are read at; 0: in no time."""

    model: ModelShape
    gpu: GpuSpec
    gpu_link_gbps: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
    vocabulary: Annotated[int, msgspec.Meta(ge=2)]
    load_gb_s: Figure = 0.0
    throttling: Throttling | None = None
