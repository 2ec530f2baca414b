"""How much of a model a box takes, and the limits of its engine, by its hardware and its owner's wishes. No I/O, no
clock."""

from __future__ import annotations

from dataclasses import dataclass

from ...coordinator.costs.gpus import Specs
from ..engine.protocol import BatchLimits
from ..models import ModelInfo
from .fitting import (
    FEW_REQUESTS,
    MANY_REQUESTS,
    STAGE_MODEL_LEN,
    Room,
    can_share,
    default_tp,
    gpu_working_bytes,
    kv_room,
    kv_tokens_in,
    layers_that_fit,
    longest_that_fits,
    requests_at_once,
    room_on,
    step_tokens_on,
)
from .hardware import Hardware
from .home import NodeError

__all__ = ["EngineSettings", "Share", "choose_limits", "share_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of a node's engine; see `engine.protocol.EngineConfig` for what they cost."""

    backend: str = "vllm"  # the engine: a name of `engine.backends`
    dtype: str = "auto"
    kv_cache_mib: int | None = None
    max_batched_tokens: int | None = None  # None: by the device
    max_requests: int | None = None  # None: by the device and its room for KV
    max_model_len: int | None = None  # None: what fits, at most the model's
    async_scheduling: bool | None = None  # None: by the device
    threads: int = 0  # 0: all cores but one
    tp: int | None = None  # None: all GPUs
    memory_gib: float | None = None  # for weights and KV; None: what the box has
    emulate: str | None = None  # of the emulated engine: the GPUs that it models, like 4xA40
    emulate_specs: str = Specs.DENSE  # the column of the GPU table that counts for them


@dataclass(frozen=True, slots=True)
class Share:
    """How many layers of the model a box takes at most, each shared by `tp` workers, and the limits of an engine there.

    `kv_cache_mib` None: as the engine finds right.
    """

    layers: int
    tp: int
    limits: BatchLimits
    kv_cache_mib: int | None = None


def share_of(model: ModelInfo, hardware: Hardware, knobs: EngineSettings) -> Share:
    """As many layers as there is room for: with fewer than all, the box is to be a stage. Unless the owner says how
    long requests may be, all layers go before long requests. Raises NodeError."""
    tp = _choose_tp(model, hardware, knobs)
    tokens = step_tokens_on(hardware, model.shape, tp=tp)
    most = choose_limits(knobs, tokens, MANY_REQUESTS if hardware.gpus else FEW_REQUESTS)
    room = room_on(
        hardware,
        tp=tp,
        memory_gib=knobs.memory_gib,
        dtype=knobs.dtype,
        kv_cache_mib=knobs.kv_cache_mib,
        working_bytes=gpu_working_bytes(model.shape, most, tp=tp),
    )
    layers, longest = _fit_layers(model, room, knobs.max_model_len, tp)
    if layers == 0:
        raise NodeError(
            f"model {model.name}: not one of its {model.layers} layers fits the memory of this box; take a smaller "
            "model, --max-model-len or --kv-cache-mib"
        )
    if not hardware.gpus:
        return Share(layers, tp, choose_limits(knobs, tokens, FEW_REQUESTS, longest), knobs.kv_cache_mib)
    kv_cache_mib = knobs.kv_cache_mib
    if kv_cache_mib is None and knobs.memory_gib is not None:  # left to itself, the engine takes all of the GPU
        kv_cache_mib = max(1, kv_room(model, room, layers) >> 20)
    requests = requests_at_once(kv_tokens_in(model, room, layers, tp=tp))
    return Share(layers, tp, choose_limits(knobs, tokens, requests, longest), kv_cache_mib)


def _choose_tp(model: ModelInfo, hardware: Hardware, knobs: EngineSettings) -> int:
    """How many workers share each layer. Raises NodeError."""
    tp = knobs.tp or default_tp(hardware, model)
    if not can_share(model, tp):
        heads = f"{model.shape.heads} heads and {model.kv_heads} KV heads"
        raise NodeError(f"tp: {tp} workers cannot share the {heads} of {model.name} evenly")
    if hardware.gpus and tp > len(hardware.gpus):
        raise NodeError(f"tp: {tp} is more than the {len(hardware.gpus)} GPUs of this box")
    return tp


def _fit_layers(model: ModelInfo, room: Room, max_model_len: int | None, tp: int) -> tuple[int, int | None]:
    """How many layers fit, and the length of a request where it is not the model's own."""
    if max_model_len is not None:
        return layers_that_fit(model, room, tp=tp, max_model_len=max_model_len), max_model_len
    longest = longest_that_fits(model, room, tp=tp)
    if longest:
        return model.layers, longest if longest < model.max_model_len else None
    return layers_that_fit(model, room, tp=tp, max_model_len=STAGE_MODEL_LEN), None


def choose_limits(knobs: EngineSettings, tokens: int, requests: int, longest: int | None = None) -> BatchLimits:
    """So many tokens and requests in a step, and a request of that length, unless the owner says otherwise. A request
    that decodes takes a token, so there are no more requests than tokens. Raises NodeError."""
    tokens = knobs.max_batched_tokens or tokens
    if knobs.max_requests is not None and knobs.max_requests > tokens:
        raise NodeError(f"max-requests: {knobs.max_requests} are more than the {tokens} tokens of a step; take fewer")
    return BatchLimits(
        max_model_len=knobs.max_model_len or longest,
        max_batched_tokens=tokens,
        max_requests=knobs.max_requests or min(requests, tokens),
    )
