"""KV on its way: bytes, time on the link, and what of it is seen after prefill."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.planning.model.kv_cost import kv_gigabits, kv_transfer_s, visible_kv_s, visible_s

LLAMA_30B = model_shape("llama-30b")


def test_one_prompt_of_appendix_h() -> None:
    # 1024 tokens * 60 layers * 2 * 6656 elements of 16 bit are 1.636 GB: table 8's 584 ms is 22.4 Gb/s
    assert kv_gigabits(LLAMA_30B, 1024.0, 16.0) == pytest.approx(8 * 1.636, rel=1e-3)
    assert kv_transfer_s(LLAMA_30B, 1024.0, rtt_s=0.0, gbps=22.4, kv_bits=16.0) == pytest.approx(0.584, rel=2e-3)
    assert kv_transfer_s(LLAMA_30B, 1024.0, rtt_s=0.02, gbps=22.4, kv_bits=4.0) == pytest.approx(0.01 + 0.146, rel=2e-3)


def test_grouped_queries_and_windows_send_less() -> None:
    many, few = model_shape("llama2-13b"), model_shape("qwen2.5-14b")
    assert kv_gigabits(few, 100.0, 16.0) / kv_gigabits(many, 100.0, 16.0) == pytest.approx(48 * 8 / (40 * 40))
    windowed = msgspec.structs.replace(LLAMA_30B, window=256, windowed_layers=30)
    assert kv_gigabits(windowed, 1024.0, 16.0) == pytest.approx(kv_gigabits(LLAMA_30B, (1024 + 256) / 2, 16.0))
    assert kv_gigabits(windowed, 200.0, 16.0) == pytest.approx(kv_gigabits(LLAMA_30B, 200.0, 16.0))


def test_what_is_seen_of_four_layers_counted_by_hand() -> None:
    # a layer is done every 1 s; sending one takes 0.5 s: the last leaves at 4 s, and is there at 4.5
    assert visible_s(2.0, 0.1, 4.0, 4) == pytest.approx(0.6)
    # sending one takes 2 s: the link is busy from 1 s on, for 8 s
    assert visible_s(8.0, 0.1, 4.0, 4) == pytest.approx(5.1)


@given(
    tokens=st.floats(1, 1e5), gbps=st.floats(0.1, 400), prefill=st.floats(0, 100), rtt=st.floats(0, 1),
)  # fmt: skip
def test_layerwise_hides_something_and_never_all(tokens: float, gbps: float, prefill: float, rtt: float) -> None:
    whole = kv_transfer_s(LLAMA_30B, tokens, rtt_s=rtt, gbps=gbps, kv_bits=4.5)
    seen = visible_kv_s(LLAMA_30B, tokens, rtt_s=rtt, gbps=gbps, kv_bits=4.5, prefill_s=prefill)
    assert rtt / 2 + (whole - rtt / 2) / LLAMA_30B.layers <= seen * (1 + 1e-9)
    assert seen <= whole * (1 + 1e-9)
    assert seen >= (whole - prefill) * (1 - 1e-9)


def test_arrays_are_taken_element_by_element() -> None:
    tokens = np.array([10.0, 2000.0])
    both = kv_transfer_s(
        LLAMA_30B, tokens, rtt_s=np.array([0.1, 0.2]), gbps=np.array([1.0, 5.0]), kv_bits=4.5
    )  # fmt: skip
    one = kv_transfer_s(LLAMA_30B, 2000.0, rtt_s=0.2, gbps=5.0, kv_bits=4.5)
    assert both[1] == pytest.approx(one)
