"""How fast a device is: products of matrices and copies, as an engine process times them on the one it serves from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from .device import Device, DeviceKind, device_of


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
    """(TFLOP/s of matrix products, GB/s of copies, read and write counted), medians, summed over
    `tp` equal GPUs; workers on a CPU share its cores."""
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


def measure_worker(worker: Any, kind: DeviceKind, dtype: torch.dtype) -> tuple[float, float]:
    """The same of the device of one of vLLM's workers, in its process. `worker` is not looked at: vLLM gives it to
    whatever it has its workers call."""
    return measure(device_of(kind), dtype)
