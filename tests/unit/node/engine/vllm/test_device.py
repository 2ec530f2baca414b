"""The seam for GPUs, against a stand-in for `torch.cuda` that writes down in which order things are asked of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.worker.utils import request_memory

from p2pserve.kvtransport.wire.frames import MAX_PAYLOAD_BYTES
from p2pserve.node.engine.vllm.device import (
    COPY_STREAMS,
    CpuDevice,
    CudaDevice,
    Device,
    DeviceKind,
    choose_setup,
    device_of,
)
from p2pserve.node.engine.vllm.speed import SpeedTest, Work, measure

WAIT_LIMIT_S = 30.0


class FakeStream:
    device = torch.device("meta")  # tensors that are made there have no values, and need no GPU

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.asked.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    """As torch has them: who waits for one that is not `blocking` spins, and only some have times."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool, blocking: bool) -> None:
        self.cuda, self.timed, self.blocking = cuda, enable_timing, blocking
        self.reached = False
        self.at_ms = 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        self.at_ms = self.cuda.now_ms
        self.cuda.asked.append(f"event on {(stream or self.cuda.current_stream()).name}")

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.cuda.asked.append("sleep until event" if self.blocking else "spin until event")
        if self.cuda.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.reached = True

    def elapsed_time(self, later: FakeEvent) -> float:
        """In milliseconds."""
        assert self.timed
        assert later.timed
        return later.at_ms - self.at_ms


class FakeTensor:
    """A tensor on the stand-in's GPU."""

    nbytes, dtype, shape = 8, torch.float32, (2,)

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.asked.append(f"{self.name} in use on {stream.name}")


class FakePinned:
    """Pinned memory: of a tensor, or a piece of what streams stage in."""

    nbytes = 8

    def __init__(self, cuda: FakeCuda, memory: torch.Tensor | None = None) -> None:
        self.cuda = cuda
        self.memory = torch.empty(0, dtype=torch.uint8) if memory is None else memory

    def view(self, form: object) -> FakePinned:
        """Like a tensor."""
        return FakePinned(self.cuda)

    def __getitem__(self, part: slice) -> FakePinned:
        return FakePinned(self.cuda, self.memory[part])

    def numpy(self) -> Any:
        return self.memory.numpy()

    def copy_(self, tensor: Any, non_blocking: bool = False) -> FakePinned:
        how = f"on {self.cuda.current_stream().name}" if non_blocking else "at once"
        self.cuda.asked.append(f"pinned <- {tensor.name} {how}")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        how = f"on {self.cuda.current_stream().name}" if non_blocking else "at once"
        self.cuda.asked.append(f"{device} <- pinned {how}")
        return bytes(self.memory.tolist()) if len(self.memory) else "on the GPU"


class FakeCuda:
    """What `CudaDevice` asks of `torch.cuda`. The model's stream is that of every thread which has chosen no other."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now_ms = 0.0
        self.broken = False
        self._compute = FakeStream(self, "compute")
        self._chosen = threading.local()
        self._names = itertools.chain(["side"], (f"copy {number}" for number in itertools.count()))

    def Stream(self) -> FakeStream:  # noqa: N802 (torch's name)
        return FakeStream(self, next(self._names))

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:  # noqa: N802 (the same)
        return FakeEvent(self, enable_timing, blocking)

    def current_stream(self) -> FakeStream:
        return getattr(self._chosen, "stream", self._compute)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._chosen.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._chosen.stream = before

    def synchronize(self) -> None:
        self.asked.append("wait for all")


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def device_on(cuda: FakeCuda) -> CudaDevice:
    def pinned_memory(size: int) -> FakePinned:
        return FakePinned(cuda, torch.empty(size, dtype=torch.uint8))

    return CudaDevice(cuda, pinned_memory)  # type: ignore[arg-type]


def test_copies_out_run_beside_the_next_layer_and_after_this_one(cuda: FakeCuda) -> None:
    copies = device_on(cuda).to_host(FakeTensor(cuda, "k"), FakeTensor(cuda, "v"))  # type: ignore[arg-type]
    assert cuda.asked == [
        "side waits for compute",
        "pinned <- k on side",
        "pinned <- v on side",
        "event on side",
        "k in use on side",
        "v in use on side",
    ]
    assert copies.nbytes == 16
    before = copies.is_complete
    assert len(copies.wait()) == 2
    assert (before, copies.is_complete) == (False, True)
    assert cuda.asked[6:] == ["sleep until event"]


def test_copies_in_are_in_order_with_the_work_that_reads_them(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    assert device.to_device(FakeTensor(cuda, "k")) == ("on the GPU",)  # type: ignore[arg-type,comparison-overlap]
    device.synchronize()
    assert cuda.asked == ["pinned <- k at once", "cuda <- pinned on compute", "wait for all"]


def test_a_mark_is_an_event_in_the_model_s_stream_that_threads_sleep_for(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    began = device.mark()
    cuda.now_ms = 250.0
    ended = device.mark()
    assert cuda.asked == ["event on compute"] * 2
    assert (began.reached, ended.reached) == (False, False)
    ended.wait()
    assert ended.reached
    assert cuda.asked[2:] == ["sleep until event"]
    assert ended.seconds_since(began) == 0.25


def test_a_payload_goes_up_and_down_on_a_copy_stream_and_the_model_s_waits_for_nothing(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    with device.copy_stream() as stream:
        assert cuda.current_stream().name == "copy 0"  # kernels of the codecs are launched there
        assert stream.upload(memoryview(b"payload")) == b"payload"
        into = FakePinned(cuda)
        assert stream.payload_for(torch.empty(5, dtype=torch.uint8)).device == FakeStream.device
        stream.download(FakeTensor(cuda, "payload"), into)  # type: ignore[arg-type]
        assert cuda.asked == ["meta <- pinned on copy 0", "pinned <- payload on copy 0"]
        stream.drain()
    assert cuda.current_stream().name == "compute"
    assert cuda.asked[2:] == ["event on copy 0", "sleep until event"] * 2


def test_what_is_uploaded_next_takes_the_place_of_what_was(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    for _ in range(COPY_STREAMS + 1):  # the first is used again
        with device.copy_stream() as stream:
            stream.upload(memoryview(bytes(range(9))))
    with device.copy_stream() as stream:
        assert stream.upload(memoryview(b"four")) == b"four"


def test_the_moment_of_a_mark_is_told_on_this_process_s_clock(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    mark = device.mark()
    cuda.now_ms = 2500.0
    with device.copy_stream() as stream:
        before = time.monotonic()
        moment = stream.moment_of(mark)
        assert before <= moment + 2.5 <= time.monotonic()
    assert cuda.asked[1:3] == ["event on copy 0", "sleep until event"]  # one of its own, with a time


def test_what_another_thread_has_made_is_kept_until_the_model_has_read_it(cuda: FakeCuda) -> None:
    device_on(cuda).adopt(FakeTensor(cuda, "k"), FakeTensor(cuda, "v"))  # type: ignore[arg-type]
    assert cuda.asked == ["k in use on compute", "v in use on compute"]


def test_pinned_memory_is_made_once(cuda: FakeCuda) -> None:
    """It takes the driver's lock: where streams stage is made for the first of them. A process that moves no KV has
    none."""
    sizes: list[int] = []

    def pinned_memory(size: int) -> Any:
        sizes.append(size)
        return FakePinned(cuda, torch.empty(size, dtype=torch.uint8))

    device = CudaDevice(cuda, pinned_memory=pinned_memory)
    assert sizes == []
    for _ in range(COPY_STREAMS + 1):
        with device.copy_stream() as stream:
            stream.upload(memoryview(b"payload"))
    assert sizes == [MAX_PAYLOAD_BYTES] * COPY_STREAMS
    device.allocate_host(12345)
    assert sizes[COPY_STREAMS:] == [12345]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_so_many_copy_streams_are_lent_at_once_and_the_next_waits(cuda: FakeCuda, kind: DeviceKind) -> None:
    device: Device = CpuDevice() if kind == "cpu" else device_on(cuda)
    begun, lent, done = threading.Event(), threading.Event(), threading.Event()

    def borrow() -> None:
        begun.set()
        with device.copy_stream():
            lent.set()
            done.wait(WAIT_LIMIT_S)

    with ExitStack() as others:
        with ExitStack() as last:
            for number in range(COPY_STREAMS):
                stream = (others if number else last).enter_context(device.copy_stream())
                assert kind == "cpu" or stream.stream.name == f"copy {number}"  # type: ignore[attr-defined]
            waiting = threading.Thread(target=borrow, daemon=True)
            waiting.start()
            assert begun.wait(WAIT_LIMIT_S)
            assert not lent.wait(0.02)
        assert lent.wait(WAIT_LIMIT_S)  # although the others are still out
        done.set()
        waiting.join(WAIT_LIMIT_S)


@pytest.mark.parametrize("broken", [False, True])
def test_a_copy_stream_comes_back_drained_also_after_an_error(cuda: FakeCuda, broken: bool) -> None:
    """Also where the device itself has failed: who waits for a stream must hear of that too, not wait for ever."""
    device = device_on(cuda)
    cuda.broken = broken
    for number in range(COPY_STREAMS):
        with (
            pytest.raises((ValueError, RuntimeError), match="CUDA error" if broken else "a bad value"),
            device.copy_stream(),
        ):
            raise ValueError("a bad value")
        assert cuda.asked[2 * number :] == [f"event on copy {number}", "sleep until event"]
        assert cuda.current_stream().name == "compute"
    cuda.broken = False
    with ExitStack() as borrowed:
        for _ in range(COPY_STREAMS):
            borrowed.enter_context(device.copy_stream())


def test_on_a_cpu_threads_work_in_place_and_marks_are_moments() -> None:
    ticks = itertools.count(1.0, 0.5)
    device = CpuDevice(clock=lambda: next(ticks))
    began, ended = device.mark(), device.mark()
    assert began.reached
    began.wait()
    assert ended.seconds_since(began) == 0.5
    payload, memory = memoryview(b"payload"), device.allocate_host(7)
    assert (memory.dtype, memory.numel()) == (torch.uint8, 7)
    with device.copy_stream() as stream:
        assert stream.moment_of(ended) == 1.5
        assert stream.upload(payload) is payload
        assert stream.payload_for(memory) is memory
        stream.download(memory, memory)
        stream.drain()
    device.adopt(memory)


def test_a_cpu_copies_nothing() -> None:
    device = device_of("cpu")
    k, v = torch.zeros(2), torch.zeros(3)
    copies = device.to_host(k, v)
    assert copies.nbytes == 20
    assert copies.is_complete
    assert [a is b for a, b in zip(copies.wait(), (k, v), strict=True)] == [True, True]
    assert device.to_device(k)[0] is k
    device.synchronize()


def test_an_engine_on_a_cpu_has_a_cache_of_a_given_size_and_exact_numbers() -> None:
    choices = choose_setup("cpu", dtype="auto", kv_cache_mib=None, stages=1, tp=1)
    assert choices.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert choices.arguments == {
        "dtype": "float32",
        "attention_config": {"backend": "CPU_MLA"},
        "enforce_eager": True,
        "gpu_memory_utilization": 0.01,
        "kv_cache_memory_bytes": 256 << 20,
        "async_scheduling": False,
    }
    halves = choose_setup("cpu", dtype="bfloat16", kv_cache_mib=None, stages=1, tp=1).arguments
    assert halves["dtype"] == "bfloat16"
    assert "attention_config" not in halves  # AMX takes them


def test_an_engine_on_a_gpu_keeps_the_hooks_between_layers() -> None:
    choices = choose_setup("cuda", dtype="auto", kv_cache_mib=None, stages=1, tp=1)
    assert choices.environment == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    assert choices.arguments == {
        "dtype": "auto",
        "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        "gpu_memory_utilization": 0.92,
        "async_scheduling": True,
    }


@pytest.mark.parametrize("tp", [1, 4])
def test_a_cache_of_a_given_size_asks_for_next_to_nothing_of_the_gpu(tp: int) -> None:
    """vLLM wants its share of the memory to be free when it starts, and then takes what the cache is given instead: so
    that four engines start on one card, the share must be small, however large the cache."""
    arguments = choose_setup("cuda", dtype="auto", kv_cache_mib=64, stages=1, tp=tp).arguments
    assert arguments["kv_cache_memory_bytes"] == (64 << 20) // tp  # the box's cache is shared by its workers
    assert arguments["gpu_memory_utilization"] == 0.01
    assert (
        choose_setup("cuda", dtype="auto", kv_cache_mib=1 << 16, stages=1, tp=tp).arguments["gpu_memory_utilization"]
        == 0.01
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_stages_on_several_boxes_use_the_first_model_runner(kind: Any) -> None:
    environment = choose_setup(kind, dtype="auto", kv_cache_mib=None, stages=2, tp=1).environment
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_owner_decides_on_asynchronous_scheduling_where_there_is_one_stage(kind: Any) -> None:
    for stages, asked, expected in ((1, True, True), (1, False, False), (2, True, False), (2, None, False)):
        choices = choose_setup(kind, dtype="auto", kv_cache_mib=None, stages=stages, tp=1, async_scheduling=asked)
        assert choices.arguments["async_scheduling"] is expected


def test_four_engines_with_caches_of_their_own_pass_the_check_that_one_without_fails() -> None:
    """The check that vLLM's worker makes before it loads anything, where three engines have left 2 of 24 GiB."""
    left = MemorySnapshot(total_memory=24 << 30, free_memory=2 << 30, device="cpu", auto_measure=False)

    def asks(kv_cache_mib: int | None) -> int:
        arguments = choose_setup("cuda", dtype="auto", kv_cache_mib=kv_cache_mib, stages=1, tp=1).arguments
        share = arguments["gpu_memory_utilization"]
        return request_memory(left, CacheConfig(gpu_memory_utilization=share))

    assert asks(32) < 1 << 30
    with pytest.raises(ValueError, match="Free memory on device"):
        asks(None)


class Clocked:
    """A GPU that computes while nobody waits. Products and copies take what they take, and launching either takes a
    while too; the second of two that are queued is launched while the first is under way."""

    kind: DeviceKind = "cuda"

    def __init__(
        self, *, flop_s: float = 4e14, byte_s: float = 2e12, launch_s: float = 5e-6, room: int = 1 << 40
    ) -> None:
        self.flop_s, self.byte_s, self.launch_s, self.room = flop_s, byte_s, launch_s, room
        self.now = self.done_at = 0.0
        self.asked: list[SpeedTest] = []

    def clock(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.now = max(self.now, self.done_at)

    def prepare(self, kind: DeviceKind, dtype: torch.dtype, test: SpeedTest) -> tuple[Work, Work]:
        self.asked.append(test)
        if 2 * test.product**2 * dtype.itemsize + 2 * test.copy_bytes > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")

        def work(seconds: float) -> Work:
            def launch() -> None:
                self.now += self.launch_s
                self.done_at = max(self.now, self.done_at) + seconds

            return launch

        return work(2 * test.product**3 / self.flop_s), work(2 * test.copy_bytes / self.byte_s)

    def measure(self, tp: int = 1) -> tuple[float, float]:
        return measure(self, torch.bfloat16, tp=tp, clock=self.clock, prepare=self.prepare)  # type: ignore[arg-type]


@pytest.mark.parametrize(("flop_s", "byte_s"), [(9e14, 3e12), (1.5e14, 7e11), (3e13, 3e11)])
def test_what_a_gpu_is_measured_to_do_is_what_it_does(flop_s: float, byte_s: float) -> None:
    for launch_s in (5e-6, 5e-5):  # a slow processor does not make the card look slow
        card = Clocked(flop_s=flop_s, byte_s=byte_s, launch_s=launch_s)
        assert card.measure() == pytest.approx((flop_s / 1e12, byte_s / 1e9), rel=0.04)
        assert [test.product for test in card.asked] == [8192]


def test_workers_of_an_engine_are_counted_on_gpus_and_share_a_cpu() -> None:
    one, four = Clocked().measure(), Clocked().measure(tp=4)
    assert four == pytest.approx((4 * one[0], 4 * one[1]))

    def seconds_each(kind: DeviceKind, dtype: torch.dtype, test: SpeedTest) -> tuple[Work, Work]:
        return lambda: None, lambda: None

    found = set()
    for tp in (1, 2):
        ticks = itertools.count(0.0, 0.25)
        found.add(measure(CpuDevice(), torch.float32, tp=tp, clock=lambda: next(ticks), prepare=seconds_each))  # noqa: B023
    assert found == {(2 * 1024**3 / 0.25 / 1e12, 2 * (64 << 20) / 0.25 / 1e9)}


def test_what_does_not_fit_beside_a_full_cache_is_measured_with_less() -> None:
    assert [test.product for test in _asked_with(512 << 20)] == [8192, 4096]
    assert [test.product for test in _asked_with(160 << 20)] == [8192, 4096, 2048]
    with pytest.raises(torch.OutOfMemoryError):
        _asked_with(100 << 20)


def _asked_with(room: int) -> list[SpeedTest]:
    card = Clocked(room=room)
    assert card.measure() == pytest.approx((400, 2000), rel=0.1)
    return card.asked


def test_a_device_is_measured() -> None:
    tflops, memory_gbps = measure(CpuDevice(), torch.float32, budget_s=0.0)
    assert tflops > 0
    assert memory_gbps > 0
