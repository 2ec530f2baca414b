"""Of which models the quality of KV in 8 bits is known, and what plans make of it."""

from __future__ import annotations

import msgspec

from p2pserve.coordinator.costs.model_shape import KV_CACHE_DTYPES, MODELS, shape_of_config
from p2pserve.coordinator.planning.model.kv_quality import find_kv_quality, read_kv_quality, resolve_kv_cache_dtype
from p2pserve.node.models import BUNDLED
from p2pserve.node.models.opening import read_json

MODEL = shape_of_config(read_json(BUNDLED / "config.json", "bundled"), "bundled")


def test_every_row_names_a_format_its_cost_and_who_measured_it() -> None:
    rows = read_kv_quality()
    assert len({row[:4] for row in rows}) == len(rows) > 0
    for row in rows:
        assert row.kv_cache_dtype in KV_CACHE_DTYPES[1:]
        assert -1.0 < row.perplexity_percent < 10.0
        assert row.source


def test_of_the_bundled_model_it_is_known_and_8_bits_are_taken() -> None:
    known = find_kv_quality(MODEL, "fp8")
    assert known is not None
    assert known.perplexity_percent < 1.0
    assert resolve_kv_cache_dtype("choose", MODEL) == "fp8"
    worse = find_kv_quality(MODEL, "fp8_e5m2")
    assert worse is not None
    assert worse.perplexity_percent > known.perplexity_percent


def test_of_others_it_is_not_known_and_kv_is_left_as_it_is() -> None:
    for shape in (*MODELS.values(), msgspec.structs.replace(MODEL, layers=9), msgspec.structs.replace(MODEL, name="m")):
        assert find_kv_quality(shape, "fp8") is None
        assert resolve_kv_cache_dtype("choose", shape) == "auto"
        assert resolve_kv_cache_dtype("fp8_e5m2", shape) == "fp8_e5m2", "whoever names one gets it"
