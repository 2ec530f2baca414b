"""The Triton kernels on a GPU: the bytes of the references, by the kernels alone and behind the codec's front door."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pserve.kernels.codec import decode_into, encode, encode_into
from p2pserve.kernels.errors import NonFiniteError

pytest.importorskip("triton")

CHECK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "data" / "check_triton.py"))
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


@pytest.mark.parametrize("codec", ["raw", "kv4", "fp8", "kivi4"])
def test_streams_of_several_threads_code_without_waiting(codec: str) -> None:
    """As an engine does it: each thread on a stream of its own, payloads into pinned memory, then the verdicts."""

    def there_and_back(start: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            k, v = (x.cuda() for x in CHECK["block"](300, 2, 128, torch.bfloat16))
            expected = encode(codec, k, v, start=start, layer=0)  # compiles, and makes what is made once
            payload = torch.empty(len(expected), dtype=torch.uint8, device="cuda")
            host = torch.empty(len(expected), dtype=torch.uint8, pin_memory=True)
            into = torch.empty_like(k), torch.empty_like(v)
            decode_into(
                codec, payload.copy_(torch.frombuffer(expected, dtype=torch.uint8)), *into, start=start, layer=0
            )
            torch.cuda.current_stream().synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                verdicts = [encode_into(codec, k, v, payload, start=start, layer=0)]
                host.copy_(payload, non_blocking=True)
                verdicts.append(decode_into(codec, payload, *into, start=start, layer=0))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for found in verdicts:
                found.raise_if_unsound()
            return bytes(host.numpy()) == bytes(expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, (0, 20, 256, 511) * 4))
