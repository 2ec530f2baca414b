"""vLLM's worker as a stage of a pipeline: vLLM's own but for the group of stages.

vLLM finds worker classes and groups through globals, so a process has one place in one pipeline."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from ..vllm.device import DeviceKind, device_of
from ..vllm.layout import kv_heads
from .group import HIDDEN, RESIDUAL, SocketGroup
from .pipes import StageRank
from .shards import join_head_shards, take_head_shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sequence import IntermediateTensors
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_PROBE_TOKENS = 8


class StageWorker(gpu_worker.Worker):
    """A worker of one stage. Where the KV cache is concerned it speaks for all workers of its stage (`shards`).
    `stage_rank` is set once, before vLLM makes the worker."""

    stage_rank: ClassVar[StageRank | None] = None
    module: ClassVar[ModuleType] = gpu_worker  # where its base class looks for the function that joins the world

    def init_device(self) -> None:
        """Join a world of this stage alone, then take the place among the stages."""
        with _joining(self.module, own_stage_rank()):
            super().init_device()

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The caches of the stage's layers."""
        return {name: join_head_shards(spec, self._shards) for name, spec in super().get_kv_cache_spec().items()}

    def determine_available_memory(self) -> int:
        """Bytes for them, if the other workers have as much."""
        return super().determine_available_memory() * self._shards

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate this worker's part of them."""
        super().initialize_from_config(take_head_shard(kv_cache_config, self._shards))

    def warm_up(self) -> None:
        """What it does again and again while it waits for others: nothing."""

    def run_batch(self, scheduler_output: SchedulerOutput) -> Any:
        """Compute a batch and sample, in one call; returns what sampling does."""
        output = self.execute_model(scheduler_output)
        return self.sample_tokens(None) if scheduler_output.num_scheduled_tokens else output

    def compute_batch(self, scheduler_output: SchedulerOutput) -> None:
        """The first half of that, for a batch with answers that follow a grammar."""
        self.execute_model(scheduler_output)

    def sample_batch(self, grammar_output: GrammarOutput | None) -> Any:
        """The second half, which knows what may come next."""
        return self.sample_tokens(grammar_output)

    def merges(self) -> bool:
        """Whether this stage may be given hidden states and residual added up, to the last bit.
        Asks its first norm, whose kernel decides whether the sum is rounded on the way."""
        empty = self._empty_activations(_PROBE_TOKENS)
        norms = (getattr(module, "input_layernorm", None) for module in self._model.modules())
        norm = next((norm for norm in norms if norm is not None), None)
        if norm is None or empty.tensors.keys() != {HIDDEN, RESIDUAL}:
            return False
        random = torch.Generator().manual_seed(0)
        hidden, residual = (
            torch.randn(empty[HIDDEN].shape, generator=random).to(empty[HIDDEN].dtype).to(self.device) for _ in range(2)
        )
        with torch.inference_mode():
            apart = norm(hidden.clone(), residual.clone())
            merged = norm(hidden + residual, torch.zeros_like(hidden))
        return all(torch.equal(one, other) for one, other in zip(apart, merged, strict=True))

    def merge_activations(self, behind: list[bool]) -> None:
        """`behind`: for each stage but the first, whether it is to be given hidden states and residual added up."""
        group = stage_group()
        group.merges = not group.is_last_rank and behind[group.rank]

    @property
    def _shards(self) -> int:
        """How many workers of the stage hold different heads."""
        return min(own_stage_rank().tp, kv_heads(self.model_config))

    @property
    def _model(self) -> Any:
        return self.model_runner.get_model()

    def _empty_activations(self, tokens: int) -> IntermediateTensors:
        made = self._model.make_empty_intermediate_tensors(
            batch_size=tokens, dtype=self.model_config.dtype, device=self.device
        )
        return cast("IntermediateTensors", made)


def stage_group() -> SocketGroup:
    """The group of stages that this process belongs to."""
    return cast("SocketGroup", parallel_state.get_pp_group())


def own_stage_rank() -> StageRank:
    if StageWorker.stage_rank is None:
        raise RuntimeError("this process has no place in a pipeline")
    return StageWorker.stage_rank


def worker_class() -> str:
    """What vLLM is told to make its workers of. A CPU's is only named: importing it takes a GPU away (`cpu_worker`)."""
    if current_platform.is_cpu():
        return f"{__package__}.cpu_worker.CPUStageWorker"
    return f"{StageWorker.__module__}.{StageWorker.__qualname__}"


def make_worker(config: VllmConfig, meeting: str) -> Any:
    """This process's worker in vLLM's wrapper, layers loaded; workers meet at `meeting`."""
    stage_rank = own_stage_rank()
    # Of what vLLM says to each of its workers, there is one for each stage.
    worker: Any = WorkerWrapperBase(rpc_rank=0, global_rank=stage_rank.stage)
    arguments = {
        "vllm_config": config,
        "local_rank": stage_rank.rank,
        "rank": stage_rank.stage * stage_rank.tp + stage_rank.rank,
        "distributed_init_method": meeting,
        "is_driver_worker": stage_rank.rank == 0,
        "shared_worker_lock": multiprocessing.Lock(),
    }
    worker.init_worker(all_kwargs=[arguments])
    worker.init_device()
    worker.load_model()
    current_platform.update_block_size_for_backend(config)
    return worker


@contextmanager
def _joining(module: Any, stage_rank: StageRank) -> Iterator[None]:
    """While the worker sets up its device: it joins a world of its stage, and takes its place."""
    join = module.init_worker_distributed_environment

    def join_stage(config: VllmConfig, rank: int, *args: Any, **kwargs: Any) -> None:
        parallel = config.parallel_config
        parallel.pipeline_parallel_size, parallel.world_size, parallel.rank = 1, stage_rank.tp, stage_rank.rank
        try:
            join(config, stage_rank.rank, *args, **kwargs)
        finally:
            parallel.pipeline_parallel_size, parallel.world_size = stage_rank.stages, stage_rank.stages * stage_rank.tp
            parallel.rank = rank
        device = device_of(cast("DeviceKind", current_platform.device_type))
        group = SocketGroup(stage_rank, parallel_state.get_pp_group(), parallel_state.get_tp_group(), device)
        parallel_state._PP = cast("Any", group)  # noqa: SLF001 (there is no other way to it)

    module.init_worker_distributed_environment = join_stage
    try:
        yield
    finally:
        module.init_worker_distributed_environment = join
