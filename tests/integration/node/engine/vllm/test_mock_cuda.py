"""Engines on GPUs, as far as they go without one: up to where vLLM makes its workers, on a platform that vLLM takes for
CUDA (`mock_cuda`). Nothing here has been run on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pserve.node.engine.vllm_program.backend import VLLM

pytestmark = [pytest.mark.beside, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[5]
# A process for each version of FlashAttention that vLLM would use: it chooses one while it is imported.
PROCESSES = (("8.0", "8.6", "8.9", "12.0"), ("9.0",))
CAPABILITIES = [capability for together in PROCESSES for capability in together]
ASYNC_SCHEDULING = {"tp 1": True, "tp 2": True, "stages": False}

ALL = {
    "worker_is_gpus": True,
    "start_method": "fork",
    "graphs": "FULL_AND_PIECEWISE",
    "splits_at_attention": True,
    "block_size": 16,
    "prefix_caching": True,
    "connector": "P2PConnector",
    "role": "kv_both",
    "load_failure": "recompute",
    "dtype": "torch.bfloat16",
    "attention": "FLASH_ATTN",
    "graphs_with_attention": "FULL_AND_PIECEWISE",
    "sprung": [],
    "initialised": False,
    "for_cpus": [],
}
WORKER = "vllm.v1.worker.gpu_worker.Worker"
LAYOUTS = {
    "tp 1": {"worker": WORKER, "executor": "uni", "model_runner": 2, "tp": 1, "pp": 1},
    "tp 2": {"worker": WORKER, "executor": "mp", "model_runner": 2, "tp": 2, "pp": 1},
    "stages": {
        "worker": "p2pserve.node.engine.pipeline.worker.StageWorker",
        "executor": "PipelineExecutor",
        "model_runner": 1,
        "tp": 1,
        "pp": 2,
    },
}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of `PROCESSES` has found, by `resolve_on_mock_cuda`."""
    folder = tmp_path_factory.mktemp("mock-cuda")
    environment = {**os.environ, **VLLM.environment, "OMP_NUM_THREADS": "1"}
    started: list[tuple[Path, subprocess.Popen[str]]] = []
    for together in PROCESSES:
        log = folder / f"{together[0]}.log"
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.integration.node.engine.vllm.resolve_on_mock_cuda",
            *together,
        ]
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        started.append((log, process))
    found: list[dict[str, Any]] = []
    for log, process in started:
        text, _ = process.communicate()
        assert process.returncode == 0, log.read_text()
        found.append(json.loads(text))
    return found


def test_the_fork_server_leaves_torch_and_cuda_alone(resolved: list[dict[str, Any]]) -> None:
    for found in resolved:
        preload = found["preload"]
        assert (preload["platform"], preload["version"]) == ("cuda", "0.32.0")
        assert preload["replaced"] == []
        assert preload["set_stream"] == preload["async_tensor_h2d"] == "vllm.utils.torch_utils"
        assert preload["UvaBuffer"] == "vllm.v1.worker.gpu.buffer_utils"
        assert preload["for_cpus"] == []
        assert (preload["initialised"], preload["sprung"]) == (False, [])
        assert preload["threads"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_engines_resolve_to_what_is_expected(resolved: list[dict[str, Any]], capability: str, layout: str) -> None:
    engines = {name: engine for found in resolved for name, engine in found["engines"].items()}
    expected = {**ALL, **LAYOUTS[layout], "async_scheduling": ASYNC_SCHEDULING[layout]}
    assert engines[f"{capability}, {layout}"] == expected


def test_spawned_workers_draw_as_forked_ones_do(resolved: list[dict[str, Any]]) -> None:
    for found in resolved:
        assert found["preload"]["model_runner"] == "SeededGPUModelRunner"
        assert found["spawned"] == {"before": "GPUModelRunner", "after": "SeededGPUModelRunner"}


def test_steps_begin_and_end_for_the_connector_also_without_hooks(resolved: list[dict[str, Any]]) -> None:
    for found in resolved:
        for asked in found["steps_without_hooks"].values():
            order = [asked.index(name) for name in ("bind_connector_metadata", "start_load_kv", "wait_for_save")]
            assert order == sorted(order)
            assert "save_kv_layer" not in asked
