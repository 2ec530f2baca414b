"""The roofline of one stage: arithmetic of a model small enough to do by hand, and what never gets faster."""

from __future__ import annotations

from math import hypot

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.coordinator.costs.efficiency import (
    DEFAULT,
    Efficiency,
    EfficiencyError,
    efficiency_of,
    parse_efficiencies,
)
from p2pserve.coordinator.costs.gpus import GpuSpec, Specs, gpu_table
from p2pserve.coordinator.costs.model_shape import ModelShape, model_shape
from p2pserve.coordinator.costs.roofline import LINK_SHARE, REQUEST_S, StageCost, stage_cost

# Half of 1 GFLOP/s and half of 1 GB/s are reached.
TINY_GPU = GpuSpec(
    name="tiny", memory_gib=1.0, memory_gbps=1.0, tflops=0.001, nvlink_gbps=0.0, pcie_gen=3, usd_per_hour=0.0
)
HALF = Efficiency(name="tiny", compute_share=0.5, bandwidth_share=0.5, layer_s=1e-3, reduce_s=1e-4, source="made up")
# 48 attention and 96 feed-forward parameters a layer, 40 of the logits; 8 bytes of KV a token and layer.
TINY = ModelShape(name="tiny", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocabulary=10)


def cost(model: ModelShape = TINY, *, layers: int = 2, tp: int = 1, last: bool = True) -> StageCost:
    return stage_cost(model, TINY_GPU, HALF, layers=layers, tp=tp, link_gbps=8.0, last=last)


def test_prefill_by_hand() -> None:
    read = 2 * (2 * 144 + 40) / 0.5e9
    compute = 10 * 2 * 2 * 144 / 0.5e9
    attention = 55 * 2 * 4 * 4 / 0.5e9
    assert cost().step_s(10, 55, 0, 0) == pytest.approx(2e-3 + hypot(compute, read) + attention)


def test_decode_by_hand() -> None:
    read = 2 * (2 * 144 + 40) / 0.5e9
    compute = 3 * 2 * (2 * 144 + 40) / 0.5e9
    line = cost().decode_line(3)
    assert line.fixed_s == pytest.approx(2e-3 + hypot(compute, read) + 3 * REQUEST_S)
    assert line.context_s == pytest.approx(2 * 8 / 0.5e9)


def test_both_together_read_the_weights_once() -> None:
    stage = cost()
    both = stage.step_s(10, 55, 3, 100)
    assert both < stage.step_s(10, 55, 0, 0) + stage.step_s(0, 0, 3, 100)
    assert both > max(stage.step_s(10, 55, 0, 0), stage.step_s(0, 0, 3, 100))


def test_only_the_last_stage_has_logits() -> None:
    assert cost(last=False).logits_s == 0.0
    assert cost(last=False).weights_s == pytest.approx(2 * 2 * 144 / 0.5e9)


def test_tensor_parallelism_splits_work_and_adds_reduces() -> None:
    one, two = cost(), cost(tp=2)
    assert two.token_s == pytest.approx(one.token_s / 2)
    assert two.weights_s == pytest.approx(one.weights_s / 2)
    # two all-reduces a layer; each card of a ring of two sends a token's 8 bytes once
    assert two.fixed_s == pytest.approx(one.fixed_s + 4 * 1e-4)
    assert two.reduce_s == pytest.approx(4 * 8 / (1e9 * LINK_SHARE))
    assert one.reduce_s == 0.0


def test_a_kv_head_is_not_split() -> None:
    assert cost(tp=2).context_s == pytest.approx(cost().context_s)  # one KV head: both cards read it
    assert cost(msgspec.structs.replace(TINY, kv_heads=2), tp=2).context_s == pytest.approx(cost().context_s)


def test_a_mixture_reads_the_experts_that_are_asked_for() -> None:
    mixture = msgspec.structs.replace(TINY, experts=4, active_experts=1)
    stage = cost(mixture)
    alone = stage.decode_line(1).fixed_s - stage.decode_line(0).fixed_s
    assert stage.weights_s == pytest.approx(2 * (2 * 48 + 40) / 0.5e9)
    assert stage.experts_s == pytest.approx(2 * 2 * 4 * 96 / 0.5e9)
    assert stage.token_s == pytest.approx(cost().token_s)  # a token computes with one expert
    one_expert = stage.experts_s / 4
    expected = hypot(stage.token_s + stage.logits_s, stage.weights_s + one_expert) - stage.weights_s
    assert alone == pytest.approx(expected + REQUEST_S)
    read_all = hypot(1000 * (stage.token_s + stage.logits_s), stage.weights_s + stage.experts_s)
    assert stage.decode_line(1000).fixed_s == pytest.approx(2e-3 + read_all + 1000 * REQUEST_S)


def test_windows_cap_pairs() -> None:
    windowed = msgspec.structs.replace(TINY, window=4, windowed_layers=1)
    stage = cost(windowed)
    whole, capped = 10 * 11 / 2, 10 * 4
    expected = cost().step_s(10, (whole + capped) / 2, 0, 0)
    assert stage.step_s(10, whole, 0, 0) == pytest.approx(expected)
    assert stage.step_s(2, 3, 0, 0) == pytest.approx(cost().step_s(2, 3, 0, 0))  # a short prompt has no more pairs


def test_short_windows_are_full_and_long_ones_are_none() -> None:
    plain = cost().decode_line(3)
    short = cost(msgspec.structs.replace(TINY, window=4, windowed_layers=1)).decode_line(3)
    assert short.context_s == pytest.approx(plain.context_s / 2)
    assert short.fixed_s == pytest.approx(plain.fixed_s + 3 * 4 * plain.context_s / 2)
    long = cost(msgspec.structs.replace(TINY, window=4096, windowed_layers=2)).decode_line(3)
    assert long == pytest.approx(plain)


@settings(deadline=None)
@given(
    tokens=st.integers(1, 20_000),
    more=st.integers(1, 5_000),
    requests=st.integers(0, 500),
    context=st.integers(0, 1_000_000),
    tp=st.sampled_from((1, 2, 4, 8)),
    card=st.sampled_from(("A100", "A40", "RTX-3090-24GB", "T4")),
    specs=st.sampled_from((Specs.DENSE, Specs.MEASURED)),
)
def test_more_is_never_faster(
    tokens: int, more: int, requests: int, context: int, tp: int, card: str, specs: Specs
) -> None:
    gpu, model = gpu_table().find(card, specs), model_shape("llama2-70b")
    stage = stage_cost(model, gpu, efficiency_of(gpu), layers=40, tp=tp, link_gbps=160.0, last=True)
    base = stage.step_s(tokens, tokens, requests, context)
    assert stage.step_s(tokens + more, tokens + more, requests, context) > base
    assert stage.step_s(tokens, tokens + more, requests, context) > base
    assert stage.step_s(tokens, tokens, requests + more, context) > base
    assert stage.step_s(tokens, tokens, requests, context + more) > base


def test_factors_follow_the_column() -> None:
    table = gpu_table()
    assert efficiency_of(table.find("A100", Specs.MEASURED)).name == "A100-SXM4-80GB"
    assert efficiency_of(table.find("A100", Specs.DENSE)).name == DEFAULT
    assert efficiency_of(table.find("A100", Specs.TABLE1)).name == DEFAULT
    assert efficiency_of(table.find("H200", Specs.MEASURED)).name == DEFAULT  # nobody has measured it


def test_every_row_of_factors_is_of_a_card_in_the_table() -> None:
    cards = gpu_table().names
    named = {efficiency_of(gpu_table().find(card, Specs.MEASURED)).name for card in cards}
    assert {"A40-48GB", "RTX-A6000-48GB", "RTX-A5000-24GB", "RTX-3090TI-24GB", "H100-SXM5-80GB"} < named
    assert named <= {*cards, DEFAULT}


def test_factors_that_cannot_be_are_refused() -> None:
    head = "name,compute_share,bandwidth_share,layer_us,reduce_us,source\n"
    with pytest.raises(EfficiencyError, match=r"compute_share of x is 1\.5"):
        parse_efficiencies(head + "x,1.5,0.8,10,10,none\n")
    with pytest.raises(EfficiencyError, match="layer_s of x"):
        parse_efficiencies(head + "x,0.5,0.8,-10,10,none\n")
