"""The one seam for what differs between a GPU and a CPU: how vLLM is set up, how KV leaves and enters the device, and
what the device can do.

The choices for CUDA are read from vLLM's source, and the staging is tested against a stand-in for `torch.cuda`; what
was seen on a GPU is in `docs/gpu.md`. Everything else in this package is the same on both.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol, final

import torch

from ....kvtransport.wire.frames import MAX_PAYLOAD_BYTES
from ...box.hardware import CPU_KV_CACHE_MIB, GPU_SHARE

SIZED_SHARE_OF_MEMORY = 0.01  # vLLM wants one also where the size of the cache is given

COPY_STREAMS: Final = 4
"""Windows of KV that are read, coded or staged at once, of all transfers of a worker: some 20 MiB of a GPU's memory
each. More would keep neither a link nor the PCIe bus busier."""

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSetup:
    """How vLLM is to be set up. `environment` must be set before the engine is built, also by its worker processes;
    `arguments` are fields of `EngineArgs`.
    """

    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


def choose_setup(
    kind: DeviceKind,
    *,
    dtype: str,
    kv_cache_mib: int | None,
    stages: int,
    tp: int,
    async_scheduling: bool | None = None,
) -> VllmSetup:
    """The set-up of an engine whose replica spans `stages` boxes, and whose `tp` workers here share the KV cache.

    Model runner: the CPU build has only the first version. On a GPU the second one is vLLM's default, but it hands
    sampled tokens from stage to stage through torch.distributed, which stages on different boxes do not share.

    CUDA graphs: a batch that only decodes is replayed as one graph, which costs the CPU one call. Batches with prompts
    in them run piece by piece: KV leaves by hooks between the layers while the next ones are computed, and a graph has
    no hooks. vLLM takes a prompt's last token for decoding if it is all that a step reads of it, so what no hook has
    announced is announced when the step ends (`P2PConnector.wait_for_save`). Where an attention backend cannot be
    captured as a whole, vLLM goes back to pieces.

    Asynchronous scheduling: on where a GPU would wait for the scheduler, unless the owner decides. The first model
    runner cannot do it with stages.

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
        if arguments["dtype"] == "float32":
            # Of latent attention. Where there are AMX tiles vLLM would use them, and they take no float32; with other
            # attention it says that it does not know this one, and goes on with its own.
            arguments["attention_config"] = {"backend": "CPU_MLA"}
        arguments["enforce_eager"] = True  # compiling takes longer than it saves
        kv_cache_mib = kv_cache_mib or CPU_KV_CACHE_MIB
    else:
        # FlashInfer's sampler takes no seeds, which all our requests have; it would be compiled for minutes in vain.
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        arguments["compilation_config"] = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
        arguments["gpu_memory_utilization"] = GPU_SHARE
    arguments["async_scheduling"] = stages == 1 and (kind == "cuda" if async_scheduling is None else async_scheduling)
    if kv_cache_mib is not None:
        arguments["gpu_memory_utilization"] = SIZED_SHARE_OF_MEMORY
        arguments["kv_cache_memory_bytes"] = (kv_cache_mib << 20) // tp
    return VllmSetup(environment=environment, arguments=arguments)


@final
@dataclass(frozen=True, slots=True)
class HostCopies:
    """Copies in main memory that may still be on their way. `landed`: the event behind the last of them; None: all are
    there."""

    tensors: tuple[torch.Tensor, ...]
    landed: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_complete(self) -> bool:
        """Whether `wait` returns at once."""
        return self.landed is None or bool(self.landed.query())

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The copies, complete. Any thread may call it, more than once."""
        if self.landed is not None:
            self.landed.synchronize()
        return self.tensors


class Mark(Protocol):
    """A point in the model's work: what its thread had queued on the device when `Device.mark` was called."""

    @property
    def reached(self) -> bool:
        """Whether the device has done all of that."""

    def wait(self) -> None:
        """Until it is reached. Any thread may call it, and sleeps meanwhile."""

    def seconds_since(self, earlier: Mark) -> float:
        """From one reached mark to another."""


class CopyStream(Protocol):
    """Work of one thread on the device, beside the model's: reading the KV cache and coding KV."""

    @property
    def device(self) -> torch.device:
        """Where what is made on it lies."""

    def moment_of(self, mark: Mark) -> float:
        """When a mark was reached, on this process's monotonic clock."""

    def upload(self, payload: memoryview) -> memoryview | torch.Tensor:
        """The bytes where the device can decode them, good until the stream is given back."""

    def payload_for(self, into: torch.Tensor) -> torch.Tensor:
        """Where a payload is to be written that `download` is to bring into this host memory."""

    def download(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        """Bring a payload into host memory. It is there when the stream is drained."""

    def drain(self) -> None:
        """Wait until all that was queued here is done. Blocks this thread alone, which sleeps meanwhile."""


class Device(Protocol):
    """Where KV cache and activations live. For the model's thread, but for `copy_stream`."""

    kind: DeviceKind

    def mark(self) -> Mark:
        """A point in the model's work, behind all that is queued by now."""

    def copy_stream(self) -> AbstractContextManager[CopyStream]:
        """Borrow one of `COPY_STREAMS`, current in this thread; waits until one is free. So no more is read, coded and
        staged at once than so many windows, whatever the number of transfers."""

    def thread_clock(self) -> float:
        """Seconds between two calls of one thread that its copy stream was busy."""

    def adopt(self, *tensors: torch.Tensor) -> None:
        """The model's thread is about to use what another thread has made on a drained stream."""

    def allocate_host(self, size: int) -> torch.Tensor:
        """Host memory `[size]` in bytes that the device copies from and to without a detour."""

    def to_host(self, *tensors: torch.Tensor) -> HostCopies:
        """Copy out tensors that are final, once the work queued is done; does not wait."""

    def to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy in; work queued on the device after this call sees the copies."""

    def synchronize(self) -> None:
        """Wait for all that is queued."""


@final
@dataclass(frozen=True, slots=True)
class HostMark:
    """A moment (monotonic seconds): on a CPU all that was queued is done."""

    at: float
    reached: ClassVar[bool] = True

    def wait(self) -> None:
        """Nothing to wait for."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self.at - earlier.at


@final
class _HostStream:
    """On a CPU a thread does its work itself, at once."""

    device = torch.device("cpu")

    def moment_of(self, mark: Mark) -> float:
        assert isinstance(mark, HostMark)
        return mark.at

    def upload(self, payload: memoryview) -> memoryview | torch.Tensor:
        return payload

    def payload_for(self, into: torch.Tensor) -> torch.Tensor:
        return into

    def download(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        assert payload is into

    def drain(self) -> None:
        """Nothing is ever queued."""


@final
class CpuDevice:
    """Main memory: nothing is copied, nothing waits."""

    kind: DeviceKind = "cpu"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns = threading.BoundedSemaphore(COPY_STREAMS)
        self._stream = _HostStream()

    def mark(self) -> Mark:
        return HostMark(self._clock())

    @contextmanager
    def copy_stream(self) -> Iterator[CopyStream]:
        with self._turns:
            yield self._stream

    def thread_clock(self) -> float:
        """Of the thread's own computing: while it waits for a core, somebody else computes."""
        return time.thread_time()

    def adopt(self, *tensors: torch.Tensor) -> None:
        """Memory belongs to whoever holds it."""

    def allocate_host(self, size: int) -> torch.Tensor:
        """Memory that takes no room until it is written to."""
        return torch.empty(size, dtype=torch.uint8)

    def to_host(self, *tensors: torch.Tensor) -> HostCopies:
        return HostCopies(tensors)

    def to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    def synchronize(self) -> None:
        """Nothing is ever queued."""


@final
@dataclass(frozen=True, slots=True)
class EventMark:
    """An event in the model's stream."""

    event: Any

    @property
    def reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """By the device's own clock."""
        assert isinstance(earlier, EventMark)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


@final
class _CudaStream:
    """A stream beside the model's, with a pinned buffer through which bytes are uploaded."""

    def __init__(self, cuda: Any, stream: Any, staging: torch.Tensor) -> None:
        self._cuda = cuda
        self.stream = stream
        self._staging = staging

    @property
    def device(self) -> torch.device:
        """The stream's card."""
        return torch.device(self.stream.device)

    def moment_of(self, mark: Mark) -> float:
        assert isinstance(mark, EventMark)
        now = self._cuda.Event(enable_timing=True, blocking=True)
        now.record(self.stream)  # on a drained stream: reached at once
        now.synchronize()
        return time.monotonic() - EventMark(now).seconds_since(mark)

    def upload(self, payload: memoryview) -> memoryview | torch.Tensor:
        """The staging buffer is free: whoever had the stream before has drained it."""
        staged = self._staging[: payload.nbytes]
        staged.numpy().data[:] = payload.cast("B")
        return staged.to(self.device, non_blocking=True)

    def payload_for(self, into: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(into, device=self.device)

    def download(self, payload: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(payload, non_blocking=True)

    def drain(self) -> None:
        done = self._cuda.Event(blocking=True)
        done.record(self.stream)
        done.synchronize()


def pinned_bytes(size: int) -> torch.Tensor:
    """Uninitialised pinned memory `[size]`. Allocating it takes some 0.3 s a GiB, and the driver's lock. torch keeps
    freed memory, and gives none out again while a stream uses it."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


@final
class CudaDevice:
    """A GPU. KV is read and coded on a few streams beside the model's, by threads that transfers have; activations
    are copied to main memory on one of their own.

        model's stream   layer i --mark--. layer i + 1 --mark--. ...
        copy stream                       read KV | code | copy to pinned --drain

    `cuda` is `torch.cuda`, `pinned_memory` makes pinned memory of so many bytes; tests put stand-ins in their place.
    """

    kind: DeviceKind = "cuda"

    def __init__(self, cuda: Any = torch.cuda, pinned_memory: Callable[[int], torch.Tensor] = pinned_bytes) -> None:
        self._cuda = cuda
        self._pinned_memory = pinned_memory
        self._side = cuda.Stream()
        self._making = threading.Lock()
        self._made = False
        self._free: queue.SimpleQueue[_CudaStream] = queue.SimpleQueue()

    def mark(self) -> Mark:
        """An event in the model's stream, with a time. Who waits for one that is not `blocking` keeps a core busy."""
        event = self._cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return EventMark(event)

    @contextmanager
    def copy_stream(self) -> Iterator[CopyStream]:
        """A stream of this card for the body, drained before somebody else has it, with its staging
        buffer. All are made at the first call, before serving (`warm_up_codec`)."""
        with self._making:
            for _ in range(0 if self._made else COPY_STREAMS):
                self._free.put(_CudaStream(self._cuda, self._cuda.Stream(), self._pinned_memory(MAX_PAYLOAD_BYTES)))
            self._made = True
        borrowed = self._free.get()
        try:
            with self._cuda.stream(borrowed.stream):
                try:
                    yield borrowed
                finally:
                    borrowed.drain()
        finally:
            self._free.put(borrowed)

    def thread_clock(self) -> float:
        """The thread sleeps while its stream works."""
        return time.monotonic()

    def adopt(self, *tensors: torch.Tensor) -> None:
        """Else torch could give their memory to the copy stream again before the model's stream has read them."""
        stream = self._cuda.current_stream()
        for tensor in tensors:
            tensor.record_stream(stream)

    def allocate_host(self, size: int) -> torch.Tensor:
        return self._pinned_memory(size)

    def to_host(self, *tensors: torch.Tensor) -> HostCopies:
        """Pinned copies, made on the side stream once the compute stream has come this far."""
        self._side.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._side):
            copies = tuple(self._pinned(tensor).copy_(tensor, non_blocking=True) for tensor in tensors)
            landed = self._cuda.Event(blocking=True)
            landed.record()
        for tensor in tensors:
            tensor.record_stream(self._side)  # else its memory could be reused before the copy has run
        return HostCopies(copies, landed)

    def to_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies on the compute stream, in order with the work that reads them."""
        return tuple(
            self._pinned(tensor).copy_(tensor).to(torch.device("cuda"), non_blocking=True) for tensor in tensors
        )

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised pinned buffer like the tensor."""
        return self._pinned_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def device_of(kind: DeviceKind) -> Device:
    """The device that this process computes on."""
    return CudaDevice() if kind == "cuda" else CpuDevice()
