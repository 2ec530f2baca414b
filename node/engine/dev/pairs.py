"""Measurements of ours and vLLM's that took turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class EnginePair(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of both, in the unit of the figure."""

    ours: float
    vllm: float


def median_ratio(pairs: Sequence[EnginePair]) -> float:
    """Ours over vLLM's."""
    return statistics.median(pair.ours / pair.vllm for pair in pairs)


def median_added(pairs: Sequence[EnginePair]) -> float:
    """What ours has more than vLLM's."""
    return statistics.median(pair.ours - pair.vllm for pair in pairs)


def describe_pairs(pairs: Sequence[EnginePair], unit: str) -> str:
    """The medians of both, for people."""
    ours, vllm = (statistics.median(getattr(pair, name) for pair in pairs) for name in ("ours", "vllm"))
    return f"ours {ours:.1f}, vLLM {vllm:.1f} {unit}"
