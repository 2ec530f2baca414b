"""How many layers of a model a box has memory for. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Hardware
from .models import ModelInfo

__all__ = ["Room", "default_tp", "layers_that_fit", "room_on"]

GPU_SHARE = 0.92  # of a GPU's memory, as the engine takes it
GPU_WORKING_GIB = 1.5  # on each GPU, for activations and graphs
CPU_SHARE = 0.9  # of the box's memory
CPU_KV_CACHE_MIB = 256  # what the engine takes when nothing is said
_FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for weights and KV, and the dtype of an engine there.

    `float_bytes` is 0 where weights stay as they are stored. `kv_cache_bytes` None: at least one request of the full
    length must fit.
    """

    memory_bytes: int
    float_bytes: int
    kv_cache_bytes: int | None


def room_on(hardware: Hardware, *, tp: int, memory_gib: float | None, dtype: str, kv_cache_mib: int | None) -> Room:
    """What a box offers on `tp` of its GPUs, or in its own memory without any; `memory_gib` is the owner's limit."""
    if hardware.gpus:
        available = sum(gpu.memory_gib * GPU_SHARE - GPU_WORKING_GIB for gpu in hardware.gpus[:tp])
    else:
        available = hardware.memory_gib * CPU_SHARE
        kv_cache_mib = kv_cache_mib or CPU_KV_CACHE_MIB
    if memory_gib is not None:
        available = min(available, memory_gib)
    auto = 0 if hardware.gpus else _FLOAT_BYTES["float32"]
    return Room(
        memory_bytes=int(max(0.0, available) * 2**30),
        float_bytes=_FLOAT_BYTES.get(dtype, auto),
        kv_cache_bytes=kv_cache_mib << 20 if kv_cache_mib is not None else None,
    )


def default_tp(hardware: Hardware, kv_heads: int) -> int:
    """All GPUs of a box that can share a layer evenly; 1 without any."""
    return next(tp for tp in range(max(1, len(hardware.gpus)), 0, -1) if kv_heads % tp == 0 or tp % kv_heads == 0)


def layers_that_fit(model: ModelInfo, room: Room, *, tp: int, max_model_len: int | None) -> int:
    """How many layers fit on `tp` workers, wherever in the model they are and with what belongs to them there; 0 for
    none. Workers beyond the model's KV heads hold copies."""
    tokens = min(max_model_len or model.max_model_len, model.max_model_len)
    kv_float_bytes = room.float_bytes or model.weights.float_bytes or 2

    def needed(first: int, last: int) -> int:
        kv = room.kv_cache_bytes
        if kv is None:
            kv = model.kv_bytes(tokens, first, last, kv_float_bytes) * max(1, tp // model.kv_heads)
        return model.weights.of_stage(first, last, room.float_bytes) + kv

    for layers in range(model.layers, 0, -1):
        if all(needed(first, first + layers) <= room.memory_bytes for first in range(model.layers - layers + 1)):
            return layers
    return 0
