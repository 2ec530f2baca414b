"""The compute capabilities of GPUs, without initialising CUDA: no process that has can fork others that use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from vllm.platforms import current_platform


@contextmanager
def capabilities_from_nvml() -> Iterator[None]:
    """Meanwhile, torch tells the capabilities that NVML does.

    FlashInfer asks torch for them while it is imported. vLLM imports it to configure tensor parallelism on Hopper and
    Blackwell, before it starts the workers; having initialised CUDA it would spawn them, and each would import for a
    quarter of a minute what a fork inherits.
    """
    if current_platform.is_cpu():
        yield
        return
    cuda = cast("Any", torch.cuda)
    own = cuda.get_device_capability
    cuda.get_device_capability = _capability
    try:
        yield
    finally:
        cuda.get_device_capability = own


def _capability(device: torch.device | str | int | None = None) -> tuple[int, int]:
    """(major, minor) of a visible device, by default the first. Raises RuntimeError."""
    index = device if isinstance(device, int) else torch.device(device or "cuda").index or 0
    found = current_platform.get_device_capability(index)
    if found is None:
        raise RuntimeError(f"NVML knows no GPU {index}")
    return found.major, found.minor
