"""vLLM's KV connector: layers leave for the decode engine while the next ones are being computed.

vLLM makes one instance for its scheduler and one in each worker, and carries a value from the first to the others with
each step (`step_work`). Requests are matched to transfers by the transfer id, never by vLLM's request id, which differs
between engines.

Every load is reported to vLLM exactly once by every worker, whether it arrived, failed or was cancelled. After a
failure the blocks beyond the prefix that has arrived are reported as invalid and vLLM computes them (policy
"recompute").
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from ....kvtransport.routing.reslice import ShardLayout, ShardRank
from ..protocol import WorkerRank
from ..settings import TransferSettings
from ..transfers.hub import TransferHub, transfer_memory
from ..transfers.open_transfers import Tell
from ..vllm.layout import CacheForm, kv_heads
from .scheduler_side import SchedulerSide
from .step_work import LoadProgress, StepWork
from .switchboard import WorkerLine
from .worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ..transfers.outgoing import ReadKv
    from ..vllm.device import Device
    from ..vllm.layout import Shard

_SETTINGS: Final = "p2pserve"
_SERVED: Final = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)


class UnsupportedModelError(ValueError):
    """A model whose cache cannot be transferred through vLLM's connector interface."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every instance is told. `switchboard`: the name of this box's (see `switchboard`); `buffer_bytes`: host
    memory that one worker has for its transfers, in each direction; `codec`: that they are expected to use."""

    switchboard: str
    buffer_bytes: int
    codec: str
    transfers: TransferSettings


def transfer_config(settings: ConnectorSettings) -> KVTransferConfig:
    """The part of vLLM's configuration that makes it use this connector."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="P2PConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={_SETTINGS: msgspec.to_builtins(settings)},
    )


def read_settings(vllm_config: VllmConfig) -> ConnectorSettings:
    """What `transfer_config` has put there."""
    assert vllm_config.kv_transfer_config is not None
    return msgspec.convert(vllm_config.kv_transfer_config.kv_connector_extra_config[_SETTINGS], ConnectorSettings)


class P2PConnector(KVConnectorBase_V1):
    """Push connector over p2pserve's own encrypted links. `SchedulerSide` and `WorkerSide` do what vLLM asks for."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse_unsupported(kv_cache_config)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if role is KVConnectorRole.SCHEDULER:
            settings = read_settings(vllm_config)
            self._scheduler_side = SchedulerSide(block_size, time.monotonic, settings.transfers)
        else:
            self._worker_side = _worker_side(vllm_config, block_size)

    # ---- scheduler's side -------------------------------------------------------------------------------

    @property
    def scheduler_side(self) -> SchedulerSide:
        """Of the instance beside the scheduler."""
        assert self._scheduler_side is not None, "this instance is a worker's"
        return self._scheduler_side

    def has_pending_push_work(self) -> bool:
        """Steps go on until the last KV has been delivered, or given up."""
        return self.scheduler_side.has_held_blocks

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: `choose` has batches with prompts run piece by piece, with the hooks between layers, and a step that is
        replayed as one graph still begins (`bind_connector_metadata`) and ends (`wait_for_save`). To say yes would
        take whole graphs away from batches that only decode."""
        return False

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepWork:
        return self.scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What all workers together have said after a step. vLLM calls this before it looks at the loads itself."""
        self.scheduler_side.release_sent(connector_output.finished_sending or ())
        progress = connector_output.kv_connector_worker_meta
        assert progress is None or isinstance(progress, LoadProgress)
        connector_output.finished_recving = self.scheduler_side.update_progress(
            progress,
            connector_output.finished_recving or set(),
            connector_output.failed_recving,
            connector_output.invalid_block_ids,
        )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.request_finished(request), None

    # ---- worker's side ----------------------------------------------------------------------------------

    @property
    def worker_side(self) -> WorkerSide:
        """Of an instance in a worker."""
        assert self._worker_side is not None, "this instance is the scheduler's"
        return self._worker_side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(self._layers, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before each step, and before anything of the cache is overwritten."""
        assert isinstance(kv_connector_metadata, StepWork)
        self.worker_side.withdraw(kv_connector_metadata)
        self.worker_side.announce_rest()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.begin(self._work())

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Between two layers of a forward pass."""
        if self.has_connector_metadata():  # not while vLLM tries the model out
            self.worker_side.save_layer(self._work(), layer_name)

    def wait_for_save(self) -> None:
        """Nothing to wait for: blocks still to be read are held until `handle_preemptions`."""
        if self.has_connector_metadata():
            self.worker_side.end(self._work())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Between two forward passes."""
        if self.has_connector_metadata():
            self.worker_side.load(self._work())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a forward pass never waits for the network."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended since the last step, and requests whose KV need not be held any longer."""
        loaded, failed = self.worker_side.take_loaded()
        sent = self.worker_side.take_sent(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads that hold nothing useful."""
        return self.worker_side.take_invalid()

    def build_connector_worker_meta(self) -> LoadProgress | None:
        """How far loads are."""
        return self.worker_side.take_progress()

    def shutdown(self) -> None:
        """The instance is not used again."""
        if self._worker_side is not None:
            self._worker_side.close()

    def _work(self) -> StepWork:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        return work


def refuse_unsupported(kv_cache_config: KVCacheConfig) -> None:
    """Raises UnsupportedModelError for caches that are more than K and V, or one latent vector, of every token."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        # This connector does not claim hybrid caches, so vLLM joins sliding windows and full attention in one group;
        # what it cannot join (state-space layers) has no KV that could be transferred.
        raise UnsupportedModelError(
            f"this model keeps {len(groups)} kinds of cache; only plain attention can be transferred"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in _SERVED:  # not those derived from them
        raise UnsupportedModelError(f"this model's cache is {type(spec).__name__}, not K and V that can be transferred")
    assert isinstance(spec, AttentionSpec)
    if spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        raise UnsupportedModelError(
            f"this model's cache is stored as {spec.kv_quant_mode.name.lower()}; 16 bits or fp8 can be transferred"
        )
    value_size = 0 if isinstance(spec, MLAAttentionSpec) else spec.head_size
    if spec.head_size_v != value_size or spec.tokens_per_state != 1 or spec.state_content_bytes is not None:
        raise UnsupportedModelError(
            "this model's keys and values are of different sizes, or packed; they cannot be transferred"
        )


def _worker_side(vllm_config: VllmConfig, block_size: int) -> WorkerSide:
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    if multiprocessing.parent_process() is not None:
        # Forked while temporary files went to a folder that is removed once the engine has started.
        tempfile.tempdir = None
    settings = read_settings(vllm_config)
    rank = WorkerRank(stage=get_pp_group().rank_in_group, tp=get_tensor_model_parallel_rank())
    model = vllm_config.model_config
    one_stage = ShardLayout.uniform(vllm_config.parallel_config.tensor_parallel_size, (1,), kv_heads(model))
    form = CacheForm(block_size=block_size, dtype=cast("torch.dtype", model.dtype))

    def connect(shard: Shard, device: Device, read: ReadKv) -> WorkerLine:
        memory = transfer_memory(settings.buffer_bytes, device.kind, settings.transfers)

        def make_hub(tell: Tell, tell_news: Callable[[], None]) -> TransferHub:
            return TransferHub(shard, device, read, memory, tell, tell_news, settings.transfers)

        return WorkerLine(settings.switchboard, make_hub)

    heads = one_stage.heads_of(ShardRank(0, rank.tp))
    return WorkerSide(rank, heads, form, connect, codec=settings.codec, settings=settings.transfers)
