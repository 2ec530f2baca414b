"""How many layers of a model a box has memory for, how long a request may be there, and what a step may hold. No I/O,
no clock.

vLLM measures a GPU when it starts: of its share of the memory it takes off weights, activations and graphs, and refuses
to start when one request of the full length does not fit into the rest. What is estimated here must not be more than it
finds, so all of it is on the safe side. The estimates have not yet been held against a GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from ...coordinator.costs.efficiency import efficiency_of
from ...coordinator.costs.gpus import GpuError, gpu_table
from ...coordinator.costs.model_shape import ModelShape
from ..models import ModelInfo
from ..settings import BoxEngineSettings, FittingSettings
from .batch_limits import BatchLimits
from .hardware import CPU_KV_CACHE_MIB, GPU_SHARE, Gpu, Hardware

FITTING: Final = FittingSettings()
CUDA_SEES = 0.98  # of what NVML counts: 1 to 2 % are the driver's
GRAPH_BYTES_PER_LAYER: Final = 12 << 20  # on each GPU: captured graphs
SAMPLING_BYTES: Final = 24  # per request and token of the vocabulary: logits, and their sorted copies
_FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

KEPT_BACK_TOKENS: Final = 128  # vLLM gives out all blocks of the cache but one, which has so many on a CPU
LEAST_MODEL_LEN: Final = 2048
"""A box that has room for less beside all weights is a stage instead. Shortened lengths are multiples of it."""

CPU_STEP_TOKENS: Final = 512
GPU_STEP_TOKENS: Final = (2048, 4096, 8192)
"""What a step computes at most, unless the owner says otherwise or the plan wants less. No plan asks for more than the
first beside answers; more serves boxes that only prefill."""
LARGE_GPU_GIB: Final = 70.0  # from here on vLLM takes larger steps too

FEW_REQUESTS: Final = 64
MANY_REQUESTS: Final = 256
"""At once. Graphs are captured for twice as many tokens, at most 512; the planner's batches end there too."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for weights and KV, and the dtype of an engine there.

    `float_bytes` 0: weights as stored. `kv_cache_bytes` None: one request of full length must fit.
    """

    memory_bytes: int
    float_bytes: int
    kv_cache_bytes: int | None


def measure_room(hardware: Hardware, settings: BoxEngineSettings, *, tp: int, working_bytes: int = 0) -> Room:
    """What a box offers on `tp` of its GPUs, or in its own memory without any, within the owner's limits.
    `working_bytes` is what each GPU needs besides weights and KV."""
    kv_cache_mib = settings.kv_cache_mib
    if hardware.gpus:
        least = min(gpu.memory_gib for gpu in hardware.gpus[:tp])  # each holds as much as the others
        available = tp * (least * CUDA_SEES * GPU_SHARE - working_bytes / 2**30)
    else:
        available = hardware.memory_gib * settings.fitting.cpu_share
        kv_cache_mib = kv_cache_mib or CPU_KV_CACHE_MIB
    if settings.memory_gib is not None:
        available = min(available, settings.memory_gib)
    auto = 0 if hardware.gpus else _FLOAT_BYTES["float32"]
    return Room(
        memory_bytes=int(max(0.0, available) * 2**30),
        float_bytes=_FLOAT_BYTES.get(settings.dtype, auto),
        kv_cache_bytes=kv_cache_mib << 20 if kv_cache_mib is not None else None,
    )


def gpu_working_bytes(shape: ModelShape, limits: BatchLimits, *, tp: int, fitting: FittingSettings = FITTING) -> int:
    """What each of `tp` GPUs holds besides weights and KV: activations of the largest step, logits of all requests,
    graphs, and what libraries take."""
    wide = 3 * shape.intermediate * shape.active_experts // tp  # both halves of the gated product, and the result
    activations = limits.max_batched_tokens * (4 * shape.hidden + wide) * 2
    logits = limits.max_requests * shape.vocabulary * SAMPLING_BYTES
    return fitting.gpu_fixed_bytes + shape.layers * GRAPH_BYTES_PER_LAYER + activations + logits


def choose_step_tokens(hardware: Hardware, shape: ModelShape, *, tp: int, fitting: FittingSettings = FITTING) -> int:
    """The largest budget that `tp` GPUs of the box compute in `step_s`, or by memory for unknown
    cards; a larger one saves little and makes short prompts wait."""
    if not hardware.gpus:
        return CPU_STEP_TOKENS
    card = hardware.gpus[0]
    token_flop = 2.0 * shape.layers * shape.active_layer_parameters
    flop_s = _reached_flop_s(card)
    if flop_s is None:
        return GPU_STEP_TOKENS[-1] if card.memory_gib >= LARGE_GPU_GIB else GPU_STEP_TOKENS[0]
    in_time = [tokens for tokens in GPU_STEP_TOKENS if tokens * token_flop <= fitting.step_s * flop_s * tp]
    return max(in_time, default=GPU_STEP_TOKENS[0])


def _reached_flop_s(card: Gpu) -> float | None:
    """What an engine is expected to reach on this card, if it is in the table."""
    try:
        known = gpu_table().find(card.name)
    except GpuError:
        return None
    return known.tflops * 1e12 * efficiency_of(known).compute_share


def choose_requests(kv_tokens: int, fitting: FittingSettings = FITTING) -> int:
    """How many requests so many positions of KV are enough for: a power of two, as graphs are captured for."""
    enough = max(1, kv_tokens // fitting.tokens_per_request)
    return min(MANY_REQUESTS, max(FEW_REQUESTS, 1 << (enough.bit_length() - 1)))


def can_share(model: ModelInfo, tp: int) -> bool:
    """Whether so many workers can share a layer evenly. Each has whole heads; where there are more workers than KV
    heads, several hold the same one."""
    return model.shape.heads % tp == 0 and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)


def default_tp(hardware: Hardware, model: ModelInfo) -> int:
    """All GPUs of a box that can share a layer; 1 without any."""
    return next(tp for tp in range(max(1, len(hardware.gpus)), 0, -1) if can_share(model, tp))


def count_layers_that_fit(model: ModelInfo, room: Room, *, tp: int, max_model_len: int | None) -> int:
    """How many layers fit on `tp` workers, wherever in the model they are and with what belongs to them there; 0 for
    none. Workers beyond the model's KV heads hold copies."""
    tokens = min(max_model_len or model.max_model_len, model.max_model_len)

    def fits(first: int, last: int) -> bool:
        kv = room.kv_cache_bytes
        if kv is None:
            kv = _kv_bytes(model, room, tokens, first, last, tp)
        return model.weights.of_stage(first, last, room.float_bytes) + kv <= room.memory_bytes

    for layers in range(model.layers, 0, -1):
        if all(fits(first, first + layers) for first in range(model.layers - layers + 1)):
            return layers
    return 0


def count_lacking_bytes(model: ModelInfo, room: Room, *, tp: int, max_model_len: int | None) -> int:
    """How much more memory would hold all layers, and a request of that length, or else of the least."""
    kv = room.kv_cache_bytes
    if kv is None:
        kv = _kv_bytes(model, room, max_model_len or LEAST_MODEL_LEN + KEPT_BACK_TOKENS, 0, model.layers, tp)
    return max(0, model.weights.of_stage(0, model.layers, room.float_bytes) + kv - room.memory_bytes)


def measure_kv_room(model: ModelInfo, room: Room, layers: int) -> int:
    """Bytes for KV beside any `layers` layers, or those that the cache is to have; 0 where these do not fit."""
    weights = max(
        model.weights.of_stage(first, first + layers, room.float_bytes) for first in range(model.layers - layers + 1)
    )
    left = room.memory_bytes - weights
    if room.kv_cache_bytes is None:
        return max(0, left)
    return room.kv_cache_bytes if room.kv_cache_bytes <= left else 0


def count_kv_tokens(model: ModelInfo, room: Room, layers: int, *, tp: int) -> int:
    """Positions of KV in that room, in layers that look back over all of them."""
    bytes_each = _kv_bytes(model, room, 1, 0, layers, tp)
    return measure_kv_room(model, room, layers) // bytes_each


def find_longest_that_fits(model: ModelInfo, room: Room, *, tp: int) -> int:
    """How long a request may be that fits beside all of the weights: the model's own length, or the largest multiple
    of `LEAST_MODEL_LEN` below it; 0 for none."""
    available = measure_kv_room(model, room, model.layers)

    def needed(tokens: int) -> int:
        return _kv_bytes(model, room, tokens + KEPT_BACK_TOKENS, 0, model.layers, tp)

    if needed(model.max_model_len) <= available:
        return model.max_model_len
    steps = range(LEAST_MODEL_LEN, model.max_model_len, LEAST_MODEL_LEN)
    return LEAST_MODEL_LEN * bisect_right(steps, available, key=needed)


def _kv_bytes(model: ModelInfo, room: Room, tokens: int, first: int, last: int, tp: int) -> int:
    """Of one request, on all `tp` workers together."""
    float_bytes = room.float_bytes or model.weights.float_bytes or 2
    return model.kv_bytes(tokens, first, last, float_bytes) * max(1, tp // model.kv_heads)
