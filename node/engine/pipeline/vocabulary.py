"""Everything that the head and the other stages of a pipeline say to each other, and the classes it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.worker.worker_base import CompilationTimes

from ..kv.step_work import LoadedPart, LoadProgress, LoadWork, OpenTransfer, SendWork, StepWork, YieldBlocks
from ..protocol import AbortTransfer, CloseLink, SetLinkPaths
from .codec import MessageCodec

CALLABLE = frozenset(
    {
        "compile_or_warm_up_model",
        "compute_batch",
        "determine_available_memory",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "initialize_from_config",
        "load",
        "merge_activations",
        "reset_encoder_cache",
        "reset_mm_cache",
        "run_batch",
        "sample_batch",
        "set_kv_cache_layout",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Methods of a stage's worker that the head may call. Whoever else has a name, no peer's string reaches it."""


@dataclass(frozen=True, slots=True)
class LoadStage:
    """The head's first word on a control pipe, and its answer: both ends must speak of the same things."""

    vllm: str
    schema: str
    partition: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinStage:
    """For the stage's other workers: where torch.distributed meets, and their switchboard."""

    meeting: str
    switchboard: str


@dataclass(frozen=True, slots=True)
class Call:
    """The head wants a method of the worker called."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallResult:
    """What the call of that number returned. Calls are answered in the order in which they came."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The stage cannot go on: `reason` is one line for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Activations:
    """What a stage hands to the next one. `merged`: the hidden states hold the residual too."""

    merged: bool
    tensors: dict[str, torch.Tensor]


CODEC = MessageCodec(
    records=(
        *(LoadStage, JoinStage, Call, CallResult, CallFailed, Activations),
        *(SchedulerOutput, GrammarOutput, NewRequestData, CachedRequestData, KVCacheBlockCopy),
        *(SamplingParams, RequestOutputKind, StructuredOutputsParams, RepetitionDetectionParams),
        *(ModelRunnerOutput, KVConnectorOutput, LogprobsLists, LogprobsTensors, SamplingMaskLists, CUDAGraphStat),
        *(StepWork, SendWork, LoadWork, LoadProgress, LoadedPart),
        *(kv.KVCacheConfig, kv.KVCacheGroupSpec, kv.KVCacheGroupRole, kv.KVCacheTensor, kv.KVQuantMode, MultipleOf),
        *(kv.FullAttentionSpec, kv.SlidingWindowSpec, kv.ChunkedLocalAttentionSpec, kv.SinkFullAttentionSpec),
        *(kv.MLAAttentionSpec, kv.SparseCacheRole, kv.UniformTypeKVCacheSpecs, CompilationTimes),
    ),
    structs=(OpenTransfer, YieldBlocks, AbortTransfer, SetLinkPaths, CloseLink),
)
