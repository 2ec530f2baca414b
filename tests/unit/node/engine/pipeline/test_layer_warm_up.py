"""What a stage computes for nothing while it waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear

from p2pserve.node.engine.pipeline.warm_up import LayerWarmUp, small_products
from p2pserve.node.engine.settings import PipelineSettings

SETTINGS = PipelineSettings()


@pytest.fixture(autouse=True)
def lone_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))


def linear(inputs: int, outputs: int) -> LinearBase:
    """One of vLLM's layers."""
    with set_current_vllm_config(VllmConfig()):
        made = ReplicatedLinear(inputs, outputs, bias=False, params_dtype=torch.float32, disable_tp=True)
    made.weight.data = torch.ones(outputs, inputs)
    made.quant_method.process_weights_after_loading(made)
    return made


def test_parts_take_turns_one_at_a_time() -> None:
    now = 100.0
    done: list[str] = []
    warming = LayerWarmUp([lambda: done.append("first"), lambda: done.append("second")], SETTINGS, lambda: now)
    warming.run_if_due()
    warming.run_if_due()  # no time has passed
    assert done == ["first"]
    for pause in (SETTINGS.layer_warm_up_s / 2, SETTINGS.layer_warm_up_s, 10_000.0):
        now += pause
        warming.run_if_due()
    assert done == ["first", "second", "first"]


def test_there_may_be_nothing_to_do() -> None:
    LayerWarmUp([], SETTINGS).run_if_due()


def test_products_are_those_of_small_matrices_and_change_nothing() -> None:
    small, large = linear(8, 6), linear(8, 7)
    model = torch.nn.Sequential(small, torch.nn.Linear(4, 4), torch.nn.Sequential(large))
    (product,) = small_products(model, 8 * 6 * 4)
    computed: list[torch.Tensor] = []
    small.register_forward_hook(lambda layer, given, found: computed.append(found[0]))
    LayerWarmUp([product], SETTINGS).run_if_due()
    (found,) = computed
    assert torch.equal(found, torch.zeros(1, 6))


def test_shares_of_a_matrix_are_left_alone() -> None:
    """Their products would be added up among all workers, who wait for one another."""
    share = linear(8, 6)
    share.tp_size = 2
    assert small_products(share, 1 << 20) == []


def test_what_is_quantized_is_left_alone() -> None:
    quantized = linear(8, 6)
    quantized.quant_method = object()  # type: ignore[assignment]
    assert small_products(quantized, 1 << 20) == []
