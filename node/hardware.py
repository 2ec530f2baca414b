"""What this box has: GPUs through NVML, else processor cores and memory.

Speed is measured by the engine process on the device it serves from (see `engine.device.measure`);
here only what can be read without running anything.
"""

from __future__ import annotations

import os
import platform
from typing import Annotated

import msgspec
import psutil

from ..coordinator.costs.gpus import Specs, gpu_table

Memory = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML names it."""

    name: str
    memory_gib: Memory
    uuid: str


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A box as it is advertised. `cores` and `memory_gib` are what this process may use. `emulated_as`: its GPUs are
    only modelled, with the figures of this column of the project's table, and named as there."""

    cores: int
    memory_gib: Memory
    processor: str
    gpus: tuple[Gpu, ...] = ()
    emulated_as: Specs | None = None

    def __post_init__(self) -> None:
        if self.emulated_as is None:
            return
        if len({gpu.name for gpu in self.gpus}) != 1:
            raise ValueError("hardware.emulated_as is set, and the GPUs are not of one kind")
        gpu_table().find(self.gpus[0].name, self.emulated_as)

    @property
    def emulated(self) -> bool:
        """Whether the GPUs are only modelled."""
        return self.emulated_as is not None

    def summary(self) -> str:
        """One phrase for people: `2x NVIDIA A40 (45 GiB)` or `8 cores, 31 GiB`."""
        if self.gpus:
            first = self.gpus[0]
            label = "emulated " if self.emulated else ""
            return f"{label}{len(self.gpus)}x {first.name} ({first.memory_gib:.0f} GiB)"
        return f"{self.cores} cores, {self.memory_gib:.0f} GiB"


def probe() -> Hardware:
    """Read the box. Without a working NVIDIA driver there are no GPUs to serve from."""
    return Hardware(
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        processor=platform.processor() or platform.machine(),
        gpus=_gpus(),
    )


def _gpus() -> tuple[Gpu, ...]:
    import pynvml  # the driver's library is opened by nvmlInit only

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Gpu(
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                memory_gib=pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30,
                uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
            )
            for handle in handles
        )
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
