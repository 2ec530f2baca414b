"""The Triton kernels on a GPU: the bytes of the references, by the kernels alone and behind the codec's front door."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pserve.kernels.codec import decode, decode_into, encode, encode_into
from p2pserve.kernels.errors import NonFiniteError
from p2pserve.kernels.soundness import Soundness

pytest.importorskip("triton")

CHECK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "kernels" / "data" / "check_triton.py"))
GEOMETRIES = (*CHECK["GEOMETRIES"], (512, 8, 128, 512), (1500, 8, 128, 0), (9000, 8, 64, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_kernels_make_the_bytes_of_the_references(dtype: torch.dtype, geometry: tuple[int, int, int, int]) -> None:
    assert list(CHECK["check"]("cuda", dtype, geometry)) == ["kv4", "fp8", "kivi4"]


@pytest.mark.parametrize("codec", ["kv4", "fp8", "kivi4"])
def test_encode_takes_tensors_on_the_gpu(codec: str) -> None:
    k, v = CHECK["block"](300, 2, 128, torch.bfloat16)
    expected = bytes(encode(codec, k, v, start=20, layer=0))
    assert bytes(encode(codec, k.cuda(), v.cuda(), start=20, layer=0)) == expected
    v[211, 1, 17] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 4: V is nan at position 231, head 1, channel 17"):
        encode(codec, k.cuda(), v.cuda(), start=20, layer=4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("codec", ["raw", "kv4", "fp8", "kivi4"])
def test_nothing_waits_before_the_verdict_is_asked(codec: str) -> None:
    run = Transfer(codec, 20)
    run.code()  # compiles, and makes what is made once
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run.code()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.received()


@pytest.mark.parametrize("codec", ["raw", "kv4", "fp8", "kivi4"])
def test_threads_code_on_streams_of_their_own(codec: str) -> None:
    def transfer(start: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            run = Transfer(codec, start)
            for _ in range(20):
                run.code()
            return run.received()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(transfer, (0, 20, 256, 511) * 4))


class Transfer:
    """A block on the GPU and back, as an engine moves it; the payload by way of pinned memory."""

    def __init__(self, codec: str, start: int) -> None:
        self._codec, self._start = codec, start
        k, v = CHECK["block"](300, 2, 128, torch.bfloat16)
        self._expected = encode(codec, k, v, start=start, layer=0)
        self._source, self._into = (k.cuda(), v.cuda()), (torch.empty_like(k).cuda(), torch.empty_like(v).cuda())
        size = len(self._expected)
        self._sent, self._come = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._verdicts: list[Soundness] = []

    def code(self) -> None:
        self._verdicts.append(encode_into(self._codec, *self._source, self._sent, start=self._start, layer=0))
        self._host.copy_(self._sent, non_blocking=True)
        self._come.copy_(self._host, non_blocking=True)
        self._verdicts.append(decode_into(self._codec, self._come, *self._into, start=self._start, layer=0))

    def received(self) -> bool:
        """Whether the payload and the values are what a CPU makes of the block."""
        for found in self._verdicts:
            found.raise_if_unsound()
        torch.cuda.current_stream().synchronize()
        tokens, heads, head_dim = self._source[0].shape
        shape = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "start": self._start, "layer": 0}
        values = decode(self._codec, self._expected, **shape, dtype=torch.bfloat16)
        same = all(torch.equal(one.cpu(), other) for one, other in zip(self._into, values, strict=True))
        return same and bytes(self._host.numpy()) == bytes(self._expected)
