"""The one seam for what differs between a GPU and a CPU: how vLLM is set up, how KV leaves and enters the device, and
what the device can do.

Not yet run on a GPU: the choices for CUDA are read from vLLM's source, and the staging is tested against a stand-in
for `torch.cuda` (`docs/engines.md`). Everything else in this package is the same on both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, final

import torch

CPU_KV_CACHE_MIB = 256
GPU_SHARE_OF_MEMORY = 0.92
SIZED_SHARE_OF_MEMORY = 0.01  # vLLM wants one also where the size of the cache is given

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How vLLM is to be set up. `environment` must be set before the engine is built, also by its worker processes;
    `arguments` are fields of `EngineArgs`.
    """

    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def choose(kind: DeviceKind, *, dtype: str, kv_cache_mib: int | None, stages: int, tp: int) -> Choices:
    """The set-up of an engine whose replica spans `stages` boxes, and whose `tp` workers here share the KV cache.

    Model runner: the CPU build has only the first version. On a GPU the second one is vLLM's default, but it hands
    sampled tokens from stage to stage through torch.distributed, which stages on different boxes do not share.

    Graphs: layers are saved by hooks between them, and a fully captured graph would replay without those. Any engine
    may be told to prefill without loading its weights again, so all are captured piece by piece.

    Memory: where the size of the KV cache is given, vLLM takes that and what it needs besides, whatever its share of
    the memory is; but first it requires that share to be free. So several engines on one GPU must ask for little.
    """
    arguments: dict[str, Any] = {"dtype": dtype}
    environment: dict[str, str] = {}
    if kind == "cpu" or stages > 1:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if kind == "cpu":
        # Engines share the cores as they come: pinned to some, two of one box would meet on the same ones.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # On a CPU 16-bit products round differently with each batch shape, and greedy answers would depend on who
        # else is being served; float32 costs little there and makes a replayed request exact.
        arguments["dtype"] = "float32" if dtype == "auto" else dtype
        arguments["enforce_eager"] = True  # compiling takes longer than it saves
        kv_cache_mib = kv_cache_mib or CPU_KV_CACHE_MIB
    else:
        arguments["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
        arguments["gpu_memory_utilization"] = GPU_SHARE_OF_MEMORY
    if kv_cache_mib is not None:
        arguments["gpu_memory_utilization"] = SIZED_SHARE_OF_MEMORY
        arguments["kv_cache_memory_bytes"] = (kv_cache_mib << 20) // tp
    return Choices(environment=environment, arguments=arguments)


class OnHost(Protocol):
    """Copies in main memory that may still be on their way."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The copies, complete. Any thread may call it, more than once."""


class Device(Protocol):
    """Where the paged KV cache and the activations live. One per engine process; its methods belong to the thread
    that runs the model."""

    kind: DeviceKind

    def to_host(self, *tensors: torch.Tensor) -> OnHost:
        """Copy out tensors that nobody will write to again. Work queued on the device before this call is seen, the
        call itself waits for nothing."""

    def to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy in; work queued on the device after this call sees the copies."""

    def synchronize(self) -> None:
        """Wait for all that is queued."""


@final
@dataclass(frozen=True, slots=True)
class _Here:
    """Tensors that are in main memory already."""

    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def ready(self) -> bool:
        return True

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self.tensors


@final
class CpuDevice:
    """Main memory: nothing is copied, nothing waits."""

    kind: DeviceKind = "cpu"

    def to_host(self, *tensors: torch.Tensor) -> OnHost:
        """The tensors themselves."""
        return _Here(tensors)

    def to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors themselves."""
        return tensors

    def synchronize(self) -> None:
        """Nothing is ever queued."""


@final
@dataclass(frozen=True, slots=True)
class _Landing:
    """Pinned buffers that a side stream is filling; `landed` is the event after the last copy."""

    tensors: tuple[torch.Tensor, ...]
    landed: Any

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def ready(self) -> bool:
        return bool(self.landed.query())

    def wait(self) -> tuple[torch.Tensor, ...]:
        self.landed.synchronize()
        return self.tensors


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised pinned buffer. torch keeps freed ones, and gives none out again while a stream uses it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


@final
class CudaDevice:
    """A GPU. Copies to main memory run on a stream of their own, so that the next layer computes meanwhile.

        compute stream   layer i | gather KV |  layer i+1 | gather KV | ...
                                 '--event--.              '--event--.
        side stream                        copy to pinned           copy to pinned
                                                        '--landed            '--landed

    `cuda` is `torch.cuda` and `pinned` makes a pinned buffer like a tensor; tests put stand-ins in their place.
    """

    kind: DeviceKind = "cuda"

    def __init__(self, cuda: Any = torch.cuda, pinned: Callable[[torch.Tensor], torch.Tensor] = pinned_like) -> None:
        self._cuda = cuda
        self._pinned = pinned
        self._side = cuda.Stream()

    def to_host(self, *tensors: torch.Tensor) -> OnHost:
        """Pinned copies, made on the side stream once the compute stream has come this far."""
        self._side.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._side):
            copies = tuple(self._pinned(tensor).copy_(tensor, non_blocking=True) for tensor in tensors)
            landed = self._cuda.Event()
            landed.record()
        for tensor in tensors:
            tensor.record_stream(self._side)  # else its memory could be reused before the copy has run
        return _Landing(copies, landed)

    def to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies on the compute stream, in order with the work that reads them."""
        return tuple(
            self._pinned(tensor).copy_(tensor).to(torch.device("cuda"), non_blocking=True) for tensor in tensors
        )

    def synchronize(self) -> None:
        """Wait for all streams."""
        self._cuda.synchronize()


def device_of(kind: DeviceKind) -> Device:
    """The device that this process computes on."""
    return CudaDevice() if kind == "cuda" else CpuDevice()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTest:
    """What a device is timed with: products of two matrices of `product` rows and columns, and copies of so many bytes.
    `queued` of each are begun before the device is waited for."""

    product: int
    copy_bytes: int
    queued: int


SPEED_TESTS: Final[Mapping[DeviceKind, tuple[SpeedTest, ...]]] = {
    "cpu": (SpeedTest(product=1024, copy_bytes=64 << 20, queued=1),),
    # Large enough to fill any GPU, and in a row, so that launching one hides behind another. In 16 bit the first takes
    # 768 MiB beside weights and KV; where that is too much, less has to do.
    "cuda": (
        SpeedTest(product=8192, copy_bytes=256 << 20, queued=8),
        SpeedTest(product=4096, copy_bytes=64 << 20, queued=32),
        SpeedTest(product=2048, copy_bytes=64 << 20, queued=32),
    ),
}

Work = Callable[[], object]


def put_on_device(kind: DeviceKind, dtype: torch.dtype, test: SpeedTest) -> tuple[Work, Work]:
    """The product and the copy, on the device. Raises torch.OutOfMemoryError."""
    a = torch.rand(test.product, test.product, device=kind, dtype=dtype)
    source = torch.empty(test.copy_bytes, dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    return lambda: a @ a, lambda: target.copy_(source)


def measure(
    device: Device,
    dtype: torch.dtype,
    *,
    tp: int = 1,
    budget_s: float = 0.05,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[DeviceKind, torch.dtype, SpeedTest], tuple[Work, Work]] = put_on_device,
) -> tuple[float, float]:
    """Return (TFLOP/s of matrix products, GB/s of copies, read and write counted), medians of batches.

    Those of `tp` GPUs, which are alike, are added up; workers on a CPU share its cores.
    """
    devices = tp if device.kind == "cuda" else 1

    def rates(test: SpeedTest) -> tuple[float, float]:
        product, copy = prepare(device.kind, dtype, test)
        product_s = _seconds_each(product, test.queued, device, budget_s, clock)
        copy_s = _seconds_each(copy, test.queued, device, budget_s, clock)
        return devices * 2 * test.product**3 / product_s / 1e12, devices * 2 * test.copy_bytes / copy_s / 1e9

    *larger, least = SPEED_TESTS[device.kind]
    try:
        for test in larger:
            with suppress(torch.OutOfMemoryError):
                return rates(test)
        return rates(least)
    finally:
        if device.kind == "cuda":
            torch.cuda.empty_cache()  # others may need what the tensors took


def _seconds_each(work: Work, queued: int, device: Device, budget_s: float, clock: Callable[[], float]) -> float:
    """Median time of one piece of work, of batches of `queued`, after a first one that warms the device up."""

    def seconds(count: int) -> float:
        device.synchronize()
        begin = clock()
        for _ in range(count):
            work()
        device.synchronize()
        return (clock() - begin) / count

    first = seconds(1)
    if queued == 1 and first > 10 * budget_s:
        return first  # 16-bit products on a CPU that has none: not even being warm makes up for that
    samples: list[float] = []
    until = clock() + budget_s
    while clock() < until or len(samples) < 3:
        samples.append(seconds(queued))
    return sorted(samples)[len(samples) // 2]
