"""KV on its way: bytes, time on the link, and what of it is seen after prefill."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.kv_cost import kv_gigabits, visible_s

LLAMA_30B = model_shape("llama-30b")


def test_one_prompt_of_appendix_h() -> None:
    # 1024 tokens * 60 layers * 2 * 6656 elements of 16 bit are 1.636 GB: table 8's 584 ms is 22.4 Gb/s
    assert kv_gigabits(LLAMA_30B, 1024.0, 16.0) == pytest.approx(8 * 1.636, rel=1e-3)
    assert kv_gigabits(LLAMA_30B, 1024.0, 16.0) / 22.4 == pytest.approx(0.584, rel=2e-3)
    assert kv_gigabits(LLAMA_30B, 1024.0, 4.0) / 22.4 == pytest.approx(0.146, rel=2e-3)


def test_grouped_queries_and_windows_send_less() -> None:
    many, few = model_shape("llama2-13b"), model_shape("qwen2.5-14b")
    assert kv_gigabits(few, 100.0, 16.0) / kv_gigabits(many, 100.0, 16.0) == pytest.approx(48 * 8 / (40 * 40))
    windowed = msgspec.structs.replace(LLAMA_30B, window=256, windowed_layers=30)
    assert kv_gigabits(windowed, 1024.0, 16.0) == pytest.approx(kv_gigabits(LLAMA_30B, (1024 + 256) / 2, 16.0))
    assert kv_gigabits(windowed, 200.0, 16.0) == pytest.approx(kv_gigabits(LLAMA_30B, 200.0, 16.0))


def test_what_is_sent_does_not_depend_on_how_engines_keep_it() -> None:
    kept = LLAMA_30B.with_kv_cache_dtype("fp8")
    assert kv_gigabits(kept, 1024.0, 4.5) == kv_gigabits(LLAMA_30B, 1024.0, 4.5)


def test_what_is_seen_of_four_layers_counted_by_hand() -> None:
    # a layer is done every 1 s; sending one takes 0.5 s: the last leaves at 4 s, and is there at 4.5
    assert visible_s(2.0, 0.1, 4.0, 4) == pytest.approx(0.6)
    # sending one takes 2 s: the link is busy from 1 s on, for 8 s
    assert visible_s(8.0, 0.1, 4.0, 4) == pytest.approx(5.1)


@given(
    tokens=st.floats(1, 1e5), gbps=st.floats(0.1, 400), prefill=st.floats(0, 100), rtt=st.floats(0, 1),
)  # fmt: skip
def test_layerwise_hides_something_and_never_all(tokens: float, gbps: float, prefill: float, rtt: float) -> None:
    wire = kv_gigabits(LLAMA_30B, tokens, 4.5) / gbps
    whole, seen = rtt / 2 + wire, visible_s(wire, rtt / 2, prefill, LLAMA_30B.layers)
    assert rtt / 2 + (whole - rtt / 2) / LLAMA_30B.layers <= seen * (1 + 1e-9)
    assert seen <= whole * (1 + 1e-9)
    assert seen >= (whole - prefill) * (1 - 1e-9)


def test_arrays_are_taken_element_by_element() -> None:
    tokens = np.array([10.0, 2000.0])
    gigabits = kv_gigabits(LLAMA_30B, tokens, 4.5)
    both = visible_s(gigabits / np.array([1.0, 5.0]), np.array([0.05, 0.1]), np.array([3.0, 4.0]), 60)
    assert both[1] == pytest.approx(visible_s(float(gigabits[1]) / 5.0, 0.1, 4.0, 60))
