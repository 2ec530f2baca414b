"""The Triton kernels on a GPU: the bytes of the references, by the kernels alone and behind the codec's front door."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pserve.kernels.codec import encode
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
