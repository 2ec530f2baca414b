"""The seam for GPUs, against a stand-in for `torch.cuda` that writes down in which order things are asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from p2pserve.node.engine.device import CpuDevice, CudaDevice, choose, device_of, measure


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.asked.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.asked.append(f"event on {self.cuda.stream_now.name}")

    def query(self) -> bool:
        return "wait for event" in self.cuda.asked

    def synchronize(self) -> None:
        self.cuda.asked.append("wait for event")


class FakeTensor:
    """A tensor on the stand-in's GPU."""

    nbytes = 8

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.asked.append(f"{self.name} in use on {stream.name}")


class FakePinned:
    nbytes = 8

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def copy_(self, tensor: Any, non_blocking: bool = False) -> FakePinned:
        how = f"on {self.cuda.stream_now.name}" if non_blocking else "at once"
        self.cuda.asked.append(f"pinned <- {tensor.name} {how}")
        return self

    def to(self, device: torch.device, non_blocking: bool) -> str:
        assert non_blocking
        self.cuda.asked.append(f"{device} <- pinned on {self.cuda.stream_now.name}")
        return "on the GPU"


class FakeCuda:
    """What `CudaDevice` asks of `torch.cuda`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stream_now = FakeStream(self, "compute")

    def Stream(self) -> FakeStream:  # noqa: N802 (torch's name)
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:  # noqa: N802 (the same)
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self.stream_now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def synchronize(self) -> None:
        self.asked.append("wait for all")


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def device_on(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice(cuda, pinned=lambda _: FakePinned(cuda))  # type: ignore[arg-type,return-value]


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
    before = copies.ready
    assert len(copies.wait()) == 2
    assert (before, copies.ready) == (False, True)
    assert cuda.asked[6:] == ["wait for event"]


def test_copies_in_are_in_order_with_the_work_that_reads_them(cuda: FakeCuda) -> None:
    device = device_on(cuda)
    assert device.to_device(FakeTensor(cuda, "k")) == ("on the GPU",)  # type: ignore[arg-type,comparison-overlap]
    device.synchronize()
    assert cuda.asked == ["pinned <- k at once", "cuda <- pinned on compute", "wait for all"]


def test_a_cpu_copies_nothing() -> None:
    device = device_of("cpu")
    k, v = torch.zeros(2), torch.zeros(3)
    copies = device.to_host(k, v)
    assert copies.nbytes == 20
    assert copies.ready
    assert [a is b for a, b in zip(copies.wait(), (k, v), strict=True)] == [True, True]
    assert device.to_device(k)[0] is k
    device.synchronize()


def test_an_engine_on_a_cpu_has_a_cache_of_a_given_size_and_exact_numbers() -> None:
    choices = choose("cpu", dtype="auto", kv_cache_mib=None, stages=1, tp=1)
    assert choices.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert choices.arguments == {
        "dtype": "float32",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.01,
        "kv_cache_memory_bytes": 256 << 20,
        "async_scheduling": False,
    }
    assert choose("cpu", dtype="bfloat16", kv_cache_mib=None, stages=1, tp=1).arguments["dtype"] == "bfloat16"


def test_an_engine_on_a_gpu_keeps_the_hooks_between_layers() -> None:
    choices = choose("cuda", dtype="auto", kv_cache_mib=None, stages=1, tp=1)
    assert choices.environment == {}
    assert choices.arguments == {
        "dtype": "auto",
        "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        "gpu_memory_utilization": 0.92,
        "async_scheduling": True,
    }
    for tp in (1, 4):  # the box's cache is shared by its workers
        each = choose("cuda", dtype="auto", kv_cache_mib=64, stages=1, tp=tp).arguments["kv_cache_memory_bytes"]
        assert each == (64 << 20) // tp


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_stages_on_several_boxes_use_the_first_model_runner(kind: Any) -> None:
    environment = choose(kind, dtype="auto", kv_cache_mib=None, stages=2, tp=1).environment
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_owner_decides_on_asynchronous_scheduling_where_there_is_one_stage(kind: Any) -> None:
    for stages, asked, expected in ((1, True, True), (1, False, False), (2, True, False), (2, None, False)):
        choices = choose(kind, dtype="auto", kv_cache_mib=None, stages=stages, tp=1, async_scheduling=asked)
        assert choices.arguments["async_scheduling"] is expected


def test_a_device_is_measured() -> None:
    tflops, memory_gbps = measure(CpuDevice(), torch.float32, budget_s=0.0)
    assert tflops > 0
    assert memory_gbps > 0
