"""K and V as vLLM keeps them in 8 bits (`kv_cache_dtype`), emulated in torch: what is kept is rounded, and all
arithmetic is as before. Scales are 1, vLLM's own where a model's files have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch


def round_to_nearest(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """As vLLM's kernels for GPUs do; beyond its largest number a format saturates."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype).to(values.dtype)


def round_towards_zero(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """As vLLM's kernels for CPUs do."""
    nearest = round_to_nearest(dtype, values)
    # Codes of one sign are numbered by size, so that the next smaller number has the code before.
    codes = nearest.to(dtype).view(torch.uint8)
    before = (codes - (nearest.abs() > values.abs()).to(torch.uint8)).view(dtype)
    return before.to(values.dtype)


@dataclass(frozen=True, slots=True)
class KeptFormat:
    """How an engine keeps KV. `codec`: by which a prompt's comes from an engine whose format is `source`; "": it was
    computed here."""

    about: str
    round: Callable[[torch.Tensor], torch.Tensor]
    codec: str = ""
    source: str = ""


_FP8: Final = "kept-fp8"
_E4M3: Final = partial(round_to_nearest, torch.float8_e4m3fn)

KEPT: Final[Mapping[str, KeptFormat]] = {
    _FP8: KeptFormat("kv_cache_dtype fp8, which is e4m3", _E4M3),
    "kept-e5m2": KeptFormat("kv_cache_dtype fp8_e5m2", partial(round_to_nearest, torch.float8_e5m2)),
    "kept-cpu": KeptFormat(
        "fp8 as vLLM's engine for CPUs rounds, towards zero", partial(round_towards_zero, torch.float8_e4m3fn)
    ),
    "kept+kv4": KeptFormat("fp8 at both ends of a KV transfer in kv4", _E4M3, "kv4", _FP8),
}
"""By the name of the column that shows it."""
