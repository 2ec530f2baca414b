"""Of which models it is known what 8 bits for K and V in the engine's memory cost in quality.

By the costs that plans are made with 8 bits are never worse than 16: more tokens fit, and decode reads
half as much. So a plan has nothing to choose by but quality, for all of its replicas at once.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import Final, NamedTuple

from ...costs.model_shape import KvCacheDtype, KvChoice, ModelShape

FILE: Final = "kv_quality.csv"


class KvQuality(NamedTuple):
    """A model, by name, layers and hidden size, whose quality with KV in a format was measured:
    how much worse its perplexity is, in percent, and by whom on what."""

    model: str
    layers: int
    hidden: int
    kv_cache_dtype: str
    perplexity_percent: float
    source: str


@cache
def read_kv_quality() -> tuple[KvQuality, ...]:
    """All that is known."""
    package = (__package__ or "").rpartition(".planning")[0]
    text = (files(package) / "data" / FILE).read_text(encoding="utf-8")
    return tuple(
        KvQuality(
            model=row["model"], layers=int(row["layers"]), hidden=int(row["hidden"]),
            kv_cache_dtype=row["kv_cache_dtype"], perplexity_percent=float(row["perplexity_percent"]),
            source=row["source"],
        )
        for row in csv.DictReader(StringIO(text))
    )  # fmt: skip


def find_kv_quality(model: ModelShape, dtype: KvCacheDtype) -> KvQuality | None:
    """What is known of a model with KV in that format; None: nothing."""
    wanted = (model.name, model.layers, model.hidden, dtype)
    return next((row for row in read_kv_quality() if row[:4] == wanted), None)


def resolve_kv_cache_dtype(wanted: KvChoice, model: ModelShape) -> KvCacheDtype:
    """What is wanted; to choose: 8 bits where their quality is known for the model, else as its files say."""
    if wanted != "choose":
        return wanted
    return "fp8" if find_kv_quality(model, "fp8") is not None else "auto"
