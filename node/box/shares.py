"""How much of a model a box takes, and its engine's limits. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...coordinator import Stage
from ...coordinator.names import count_of
from ..models import ModelInfo
from ..settings import BoxEngineSettings
from .batch_limits import BatchLimits
from .errors import NodeError, NodeUsageError
from .fitting import (
    FEW_REQUESTS,
    MANY_REQUESTS,
    Room,
    can_share,
    choose_requests,
    choose_step_tokens,
    count_kv_tokens,
    count_lacking_bytes,
    count_layers_that_fit,
    default_tp,
    find_longest_that_fits,
    gpu_working_bytes,
    measure_kv_room,
    measure_room,
)
from .hardware import Hardware


@dataclass(frozen=True, slots=True)
class Share:
    """Layers a box takes at most on `tp` workers, and limits. `kv_cache_mib` None: the engine's."""

    layers: int
    tp: int
    limits: BatchLimits
    kv_cache_mib: int | None = None
    lacking_bytes: int = 0  # of memory, for the other layers


def share_of(model: ModelInfo, hardware: Hardware, settings: BoxEngineSettings) -> Share:
    """As many layers as there is room for: with fewer than all, the box is to be a stage. Unless the owner says how
    long requests may be, all layers go before long requests. Raises NodeError."""
    if settings.max_model_len is not None and settings.max_model_len > model.max_model_len:
        raise NodeUsageError(
            f"max-model-len: {settings.max_model_len} tokens are more than the {model.max_model_len} that "
            f"{model.name} was made for; take at most that, or leave the option out"
        )
    tp = _choose_tp(model, hardware, settings)
    fitting = settings.fitting
    tokens = choose_step_tokens(hardware, model.shape, tp=tp, fitting=fitting)
    most = choose_limits(settings, tokens, MANY_REQUESTS if hardware.gpus else FEW_REQUESTS)
    working = gpu_working_bytes(model.shape, most, tp=tp, fitting=fitting)
    room = measure_room(hardware, settings, tp=tp, working_bytes=working)
    layers, longest = _fit_layers(model, room, settings, tp)
    if layers == 0:
        if (option := _too_little(settings, room)) is not None:
            raise NodeUsageError(f"{option} not one of the {model.layers} layers of {model.name} fits")
        raise NodeError(
            f"model {model.name}: not one of its {model.layers} layers fits the memory of this box; take a smaller "
            "model, --max-model-len or --kv-cache-mib"
        )
    lacking = 0
    if layers < model.layers:
        lacking = count_lacking_bytes(model, room, tp=tp, max_model_len=settings.max_model_len)
    if not hardware.gpus:
        limits = choose_limits(settings, tokens, FEW_REQUESTS, longest)
        return Share(layers, tp, limits, settings.kv_cache_mib, lacking)
    kv_cache_mib = settings.kv_cache_mib
    if kv_cache_mib is None and settings.memory_gib is not None:  # left to itself, the engine takes all of the GPU
        kv_cache_mib = max(1, measure_kv_room(model, room, layers) >> 20)
    requests = choose_requests(count_kv_tokens(model, room, layers, tp=tp), fitting)
    return Share(layers, tp, choose_limits(settings, tokens, requests, longest), kv_cache_mib, lacking)


def share_of_stage(model: ModelInfo, hardware: Hardware, settings: BoxEngineSettings, layers: int) -> Share:
    """Limits of a box that holds the model, as a stage with so many layers: what the others leave free is for longer
    requests, and more of them. Raises NodeError."""
    tp = _choose_tp(model, hardware, settings)
    tokens = choose_step_tokens(hardware, model.shape, tp=tp, fitting=settings.fitting)
    if not hardware.gpus:
        return Share(layers, tp, choose_limits(settings, tokens, FEW_REQUESTS), settings.kv_cache_mib)
    most = choose_limits(settings, tokens, MANY_REQUESTS)
    working = gpu_working_bytes(model.shape, most, tp=tp, fitting=settings.fitting)
    room = measure_room(hardware, settings, tp=tp, working_bytes=working)
    kv_cache_mib = settings.kv_cache_mib
    if kv_cache_mib is None and settings.memory_gib is not None:
        kv_cache_mib = max(1, measure_kv_room(model, room, layers) >> 20)
    requests = choose_requests(count_kv_tokens(model, room, layers, tp=tp), settings.fitting)
    return Share(layers, tp, choose_limits(settings, tokens, requests), kv_cache_mib)


def count_layers_beside(model: ModelInfo, hardware: Hardware, settings: BoxEngineSettings, serving: Stage) -> int:
    """How many layers a second engine has memory for, wherever in the model they lie, beside one that serves this
    stage. None where the first takes all of a GPU for its cache. Both have a cache of the size that the owner says."""
    if hardware.gpus and settings.kv_cache_mib is None:
        return 0
    tp, fitting = serving.tp, settings.fitting
    tokens = choose_step_tokens(hardware, model.shape, tp=tp, fitting=fitting)
    most = choose_limits(settings, tokens, MANY_REQUESTS if hardware.gpus else FEW_REQUESTS)
    working = gpu_working_bytes(model.shape, most, tp=tp, fitting=fitting)
    room = measure_room(hardware, settings, tp=tp, working_bytes=2 * working)
    weights = model.weights.of_stage(serving.first_layer, serving.last_layer, room.float_bytes)
    left = room.memory_bytes - weights - (room.kv_cache_bytes or 0)
    return count_layers_that_fit(model, replace(room, memory_bytes=left), tp=tp, max_model_len=None)


def _too_little(settings: BoxEngineSettings, room: Room) -> str | None:
    """What the owner has said of the memory, where that leaves too little of it."""
    kv_bytes = room.kv_cache_bytes or 0
    if settings.kv_cache_mib is not None and kv_bytes >= room.memory_bytes:
        gib = room.memory_bytes / 2**30
        return f"kv-cache-mib: {settings.kv_cache_mib} MiB are more than this box has ({gib:.1f} GiB); beside them"
    if settings.memory_gib is not None:
        return f"memory-gib: in {settings.memory_gib:g} GiB"
    return None


def _choose_tp(model: ModelInfo, hardware: Hardware, settings: BoxEngineSettings) -> int:
    """How many workers share each layer. Raises NodeError."""
    tp = settings.tp or default_tp(hardware, model)
    if not can_share(model, tp):
        heads = f"{model.shape.heads} heads and {model.kv_heads} KV heads"
        raise NodeUsageError(f"tp: {tp} workers cannot share the {heads} of {model.name} evenly")
    if hardware.gpus and tp > len(hardware.gpus):
        raise NodeUsageError(f"tp: {tp} is more than the {count_of(len(hardware.gpus), 'GPU')} of this box")
    return tp


def _fit_layers(model: ModelInfo, room: Room, settings: BoxEngineSettings, tp: int) -> tuple[int, int | None]:
    """How many layers fit, and the length of a request where it is not the model's own."""
    wanted = settings.max_model_len
    if wanted is not None:
        return count_layers_that_fit(model, room, tp=tp, max_model_len=wanted), wanted
    longest = find_longest_that_fits(model, room, tp=tp)
    if longest:
        return model.layers, longest if longest < model.max_model_len else None
    return count_layers_that_fit(model, room, tp=tp, max_model_len=settings.fitting.stage_model_len), None


def choose_limits(settings: BoxEngineSettings, tokens: int, requests: int, longest: int | None = None) -> BatchLimits:
    """So many tokens and requests in a step, and a request of that length, unless the owner says otherwise. A request
    that decodes takes a token, so there are no more requests than tokens. Raises NodeError."""
    tokens = settings.max_batched_tokens or tokens
    if settings.max_requests is not None and settings.max_requests > tokens:
        raise NodeUsageError(
            f"max-requests: {settings.max_requests} are more than the {tokens} tokens of a step; take fewer"
        )
    return BatchLimits(
        max_model_len=settings.max_model_len or longest,
        max_batched_tokens=tokens,
        max_requests=settings.max_requests or min(requests, tokens),
    )
