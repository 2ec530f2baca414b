"""What this box has: the GPUs that CUDA shows to an engine, in its order, else processor cores and memory.

NVML lists all GPUs of a machine by their place on the bus. An engine sees those that CUDA_VISIBLE_DEVICES names, in the
order named there, and counts them as NVML does because the node sets CUDA_DEVICE_ORDER for it.

Speed is measured by the engine process on the device it serves from (see `engine.vllm.speed.measure`);
here only what can be read without running anything.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from ...coordinator.bounds import MAX_GPUS, Name
from ...coordinator.costs.gpus import Specs, gpu_table
from .errors import NodeError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
HIDDEN: Final = ("-1", "NoDevFiles")  # what batch systems write there for none
CPU_KV_CACHE_MIB: Final = 256  # what an engine on a CPU takes for KV when nothing is said
GPU_SHARE: Final = 0.92  # of what CUDA sees of a GPU's memory: what an engine takes in all

Memory = Annotated[float, msgspec.Meta(ge=0.01, le=1e6)]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML names it."""

    name: Name
    memory_gib: Memory
    uuid: Annotated[str, msgspec.Meta(max_length=128)]


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A box as it is advertised. `cores` and `memory_gib` are what this process may use. `emulated_as`: its GPUs are
    only modelled, with the figures of this column of the project's table, and named as there."""

    cores: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    memory_gib: Memory
    processor: Annotated[str, msgspec.Meta(max_length=256)]
    gpus: Annotated[tuple[Gpu, ...], msgspec.Meta(max_length=MAX_GPUS)] = ()
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


class Card(NamedTuple):
    """A GPU as NVML lists it, and its MIG slices where it is cut into such."""

    gpu: Gpu
    slices: tuple[Gpu, ...] = ()


def select_visible(cards: Sequence[Card], variable: str | None) -> dict[str, Gpu]:
    """The GPUs that CUDA shows of `cards`, in NVML's order, when CUDA_VISIBLE_DEVICES has this value: by the name that
    the engine is to know them by, an index in `cards` or the UUID of a MIG slice, in CUDA's order.

    Entries are indices, UUIDs, or the beginnings of UUIDs. Of a card in slices CUDA takes the first one, unless another
    is named. Where CUDA would silently show fewer GPUs than there are entries, this raises NodeError.
    """
    if not cards:
        return {}
    by_index = {str(index): card.slices[0] if card.slices else card.gpu for index, card in enumerate(cards)}
    if variable is None:
        return by_index
    by_uuid = {card.gpu.uuid: str(index) for index, card in enumerate(cards)}
    slices = {part.uuid: part for card in cards for part in card.slices}
    found: dict[str, Gpu] = {}
    for entry in (part.strip() for part in variable.split(",") if variable.strip()):
        if entry in HIDDEN:
            break  # as CUDA does: what comes after it is hidden too
        if entry.startswith(("GPU-", "MIG-")):
            matches = [by_uuid.get(uuid, uuid) for uuid in (*by_uuid, *slices) if uuid.startswith(entry)]
        else:
            matches = [entry] if entry in by_index else []
        if len(matches) != 1 or matches[0] in found:
            problem = "no GPU" if not matches else "several GPUs" if len(matches) > 1 else "named twice, as a GPU"
            raise NodeError(
                f"{VISIBLE}: '{entry}' in '{variable}' is {problem} of this box; name each once, by an index from 0 to "
                f"{len(cards) - 1} or a UUID (nvidia-smi -L)"
            )
        found[matches[0]] = {**by_index, **slices}[matches[0]]
    return found


def find_visible(environ: Mapping[str, str] = os.environ) -> dict[str, Gpu]:
    """The GPUs that CUDA shows of this box, by the names that an engine is to know them by, in CUDA's order. Raises
    NodeError."""
    return select_visible(_cards(), environ.get(VISIBLE))


def probe(environ: Mapping[str, str] = os.environ) -> Hardware:
    """Read the box. Without a working NVIDIA driver there are no GPUs to serve from. Raises NodeError."""
    import psutil  # clients, which have it not, read what others say of theirs

    return Hardware(
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        processor=platform.processor() or platform.machine(),
        gpus=tuple(find_visible(environ).values()),
    )


def cuda_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What makes CUDA count as `probe` does: vLLM knows no beginnings of UUIDs. Raises NodeError."""
    order = {ORDER: "PCI_BUS_ID"}
    if VISIBLE not in environ:
        return order
    return {**order, VISIBLE: ",".join(find_visible(environ))}


def _cards() -> tuple[Card, ...]:
    import pynvml  # the driver's library is opened by nvmlInit only

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(Card(_gpu(pynvml, handle), _slices(pynvml, handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_gib=nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def _slices(nvml: Any, handle: Any) -> tuple[Gpu, ...]:
    """The MIG slices of a card; NVML numbers them with gaps, and refuses to look at cards that cannot have any."""
    found: list[Gpu] = []
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return ()
    for index in range(count):
        try:
            found.append(_gpu(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
        except nvml.NVMLError_NotFound:
            continue
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
