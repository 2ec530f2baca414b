"""What engines would be on a box with GPUs.

`python -m tests.integration.node.engine.vllm.resolve_on_mock_cuda CAPABILITY [...]`

Prints JSON: what `preload` has left of torch, and, for each capability ("8.0") and each way to lay an engine out, what
its vLLM resolves to. Each is forked from the process that has preloaded, as engines are, and built until vLLM would
make its workers.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn
from unittest.mock import MagicMock

from .mock_cuda import Installation, Trap, pretend

GPUS = 2
SWITCHBOARD = "nowhere"
LAYOUTS: dict[str, dict[str, Any]] = {"tp 1": {}, "tp 2": {"tp": 2}, "stages": {"partition": (3, 3)}}
DUMMIES_OF_CPU_WORKERS = (
    "torch.Event",
    "torch.Tensor.pin_memory",
    "torch.Tensor.record_stream",
    "torch.accelerator.empty_cache",
    "torch.accelerator.get_memory_info",
    "torch.accelerator.synchronize",
    "torch.cuda.Event",
    "torch.cuda.Stream",
    "torch.cuda.current_stream",
    "torch.cuda.stream",
)


class WorkersNext(BaseException):
    """The engine has come to where vLLM makes its workers. No `Exception`: those are reasons not to start."""


def look_up(name: str) -> object:
    """Something of torch by its full name."""
    import torch

    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def preload(trap: Trap) -> dict[str, Any]:
    """What the fork server does before it forks anything, and what it has changed."""
    import torch

    from p2pserve.node.engine.vllm_program import preload as fork_server_work

    before = {name: look_up(name) for name in DUMMIES_OF_CPU_WORKERS}
    version = fork_server_work.preload()
    import vllm.utils.torch_utils
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import buffer_utils

    return {
        "version": version,
        "platform": current_platform.device_type,
        "replaced": [name for name, value in before.items() if look_up(name) is not value],
        "set_stream": torch.cuda.set_stream.__module__,
        "async_tensor_h2d": vllm.utils.torch_utils.async_tensor_h2d.__module__,
        "UvaBuffer": buffer_utils.UvaBuffer.__module__,
        "for_cpus": sorted(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")),
        "initialised": torch.cuda.is_initialized(),
        "sprung": trap.sprung,
        "threads": threading.active_count(),
        "model_runner": model_runner(),
    }


def model_runner() -> str:
    """The class of vLLM's first model runner, as its worker would find it."""
    from vllm.v1.worker import gpu_model_runner

    return gpu_model_runner.GPUModelRunner.__name__


def build(layout: dict[str, Any]) -> tuple[Any, str]:
    """Build an engine until it makes its workers. Returns vLLM's configuration and how workers would be started."""
    from vllm.utils import system_utils
    from vllm.v1.executor import Executor

    from p2pserve.node.engine.protocol import EngineConfig
    from p2pserve.node.engine.vllm_program.arguments import build_engine
    from p2pserve.node.models import BUNDLED

    processes: Any = system_utils
    reached: list[Any] = []

    def make_workers(executor: Executor, vllm_config: Any) -> NoReturn:
        reached.extend((vllm_config, processes.get_mp_context().get_start_method()))
        raise WorkersNext

    executor_class: Any = Executor
    executor_class.__init__ = make_workers
    try:
        build_engine(EngineConfig(model=str(BUNDLED), **layout), SWITCHBOARD)
    except WorkersNext:
        pass
    return reached[0], reached[1]


def graphs_with_attention(config: Any) -> tuple[str, str]:
    """The attention backend that a worker would choose, and the graphs that are left with it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        backend: Any = get_attn_backend(model.get_head_size(), model.dtype, "auto")
    support = backend.get_builder_cls().get_cudagraph_support(config, None)
    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
        support, backend.get_name(), use_v2_model_runner=config.use_v2_model_runner
    )
    return str(backend.get_name()), str(mode.name)


def describe(config: Any, start_method: str, installation: Installation, trap: Trap) -> dict[str, Any]:
    """What matters of a resolved configuration."""
    import torch
    from vllm.utils.import_utils import resolve_obj_by_qualname

    parallel, transfer, executor = (
        config.parallel_config,
        config.kv_transfer_config,
        config.parallel_config.distributed_executor_backend,
    )
    found = {
        "worker": parallel.worker_cls,
        "worker_is_gpus": "vllm.v1.worker.gpu_worker"
        in {base.__module__ for base in resolve_obj_by_qualname(parallel.worker_cls).__mro__},
        "executor": executor if isinstance(executor, str) else executor.__name__,
        "start_method": start_method,
        "model_runner": 2 if config.use_v2_model_runner else 1,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "splits_at_attention": config.compilation_config.splitting_ops_contain_attention(),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "connector": transfer.kv_connector,
        "role": transfer.kv_role,
        "load_failure": transfer.kv_load_failure_policy,
        "dtype": str(config.model_config.dtype),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "sprung": trap.sprung,
        "initialised": torch.cuda.is_initialized(),
        "for_cpus": sorted(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")),
    }
    installation.flashinfer = False  # workers have initialised CUDA when they look at it
    found["attention"], found["graphs_with_attention"] = graphs_with_attention(config)
    return found


def spawned() -> dict[str, Any]:
    """What a worker has that vLLM could not fork, so that multiprocessing imports the main program in it again."""
    from vllm.v1.worker import gpu_model_runner

    stock: Any = gpu_model_runner
    stock.GPUModelRunner = stock.GPUModelRunner.__mro__[1]
    before = model_runner()
    runpy.run_module("p2pserve.node.engine.forkserver", run_name="__mp_main__")
    return {"before": before, "after": model_runner()}


def steps_without_hooks() -> dict[str, Any]:
    """What each model runner asks of a connector in a step without hooks, as one that is replayed as a graph."""
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
    from vllm.forward_context import set_forward_context
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    config, _ = build({})
    step = SchedulerOutput.make_empty()
    step.kv_connector_metadata = KVConnectorMetadata()
    state: Any = kv_transfer_state
    found: dict[str, Any] = {}

    connector = state._KV_CONNECTOR_AGENT = MagicMock(spec=KVConnectorBase_V1)
    second = ActiveKVConnector(config, {})
    connector.reset_mock()
    second.pre_forward(step)
    second.finish_forward()
    second.post_forward(set())
    found["second"] = [name for name, _, _ in connector.method_calls]

    connector.reset_mock()
    with set_forward_context(None, config), KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step):
        """The model, or its graph."""
    found["first"] = [name for name, _, _ in connector.method_calls]
    return found


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run it in a fork of this process, and return what it returns."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with os.fdopen(writing, "w") as pipe:
                json.dump(work(), pipe)
            status = 0
        except BaseException:
            traceback.print_exc()  # nobody else would: the process ends below
            raise
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError("a fork has failed")
    return dict(json.loads(text))


def main(capabilities: list[str]) -> None:
    """Standard output has the JSON alone: vLLM writes to it, too."""
    answer = os.dup(1)
    os.dup2(2, 1)
    parsed = {text: (int(text.split(".")[0]), int(text.split(".")[1])) for text in capabilities}
    installation, trap = pretend(next(iter(parsed.values())), GPUS)
    found: dict[str, Any] = {"preload": preload(trap), "engines": {}}
    found |= {"spawned": in_child(spawned), "steps_without_hooks": in_child(steps_without_hooks)}
    from vllm.platforms import current_platform

    for text, capability in parsed.items():
        for name, layout in LAYOUTS.items():

            def resolve(capability: tuple[int, int] = capability, layout: dict[str, Any] = layout) -> dict[str, Any]:
                platform: Any = current_platform
                platform.get_device_capability.cache_clear()
                installation.capability = capability
                return describe(*build(layout), installation, trap)

            found["engines"][f"{text}, {name}"] = in_child(resolve)
    with os.fdopen(answer, "w") as output:
        json.dump(found, output)


if __name__ == "__main__":
    main(sys.argv[1:])
