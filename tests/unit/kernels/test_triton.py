"""The Triton kernels without a GPU: how they cut their work, and what they are compiled for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from p2pserve.kernels.codec import decode_into, encode_into, warm_up, wire_dtype
from p2pserve.kernels.codecs import codec_named
from p2pserve.kernels.format import payload_bytes

pytest.importorskip("triton")


def test_vectors_of_all_widths_are_cut_into_chunks_that_a_gpu_can_hold() -> None:
    from p2pserve.kernels.kv4.triton import value_shape

    for head_dim in range(1, 1025):
        _, width, taken, groups, half, side, together, vectors = (part.value for part in value_shape(head_dim))
        chunk, run = width * taken, 2**together
        assert head_dim % chunk == 0
        assert taken <= groups
        assert width <= 2 * half
        assert 2 * groups * half * vectors <= 8192, f"{head_dim}: more than 64 numbers a thread"
        for first in range(0, head_dim, chunk):
            runs = -(-(first + chunk) // run) - first // run
            assert runs * run <= side or (run % side == 0 and chunk == side), f"{head_dim}: runs outside the matrix"


@pytest.mark.parametrize("head_dim", [16, 80, 144, 288, 512, 1024])
def test_the_small_matrix_and_the_signs_make_the_whole_one(head_dim: int) -> None:
    from p2pserve.kernels.kv4.reference import hadamard
    from p2pserve.kernels.kv4.triton import sign, small_hadamard

    small = small_hadamard(head_dim).to(torch.float32)
    run = head_dim & -head_dim
    parts = max(1, run // len(small))
    signs = torch.tensor([[sign.fn(line, column) for column in range(parts)] for line in range(parts)])
    assert torch.equal(torch.kron(signs, small)[:run, :run], hadamard(run))


class Variants:
    """Stands in for a kernel: notes what Triton would compile for the arguments of a launch."""

    def __init__(self, kernel: Any, found: set[Any]) -> None:
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.jit import create_function_from_signature

        self._name, self._found = kernel.fn.__name__, found
        self._bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            _, specialization, *_ = self._bind(*arguments, **options)
            self._found.add((self._name, str(specialization)))

        return launch


@pytest.mark.parametrize("codec", ["kv4", "fp8", "kivi4"])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 128), (2, 128), (8, 128), (1, 288)])
def test_after_the_warm_up_no_window_needs_another_kernel(
    codec: str, heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton takes seconds to compile for what it has not seen: integers that are multiples of 16,
    others, and 1.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets in this process")
    from p2pserve.kernels import payload as payloads
    from p2pserve.kernels import soundness
    from p2pserve.kernels.fp8 import triton as triton_fp8
    from p2pserve.kernels.kivi4 import triton as triton_kivi4
    from p2pserve.kernels.kv4 import triton as triton_kv4

    found: set[Any] = set()
    for module in (triton_kv4, triton_fp8, triton_kivi4):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Variants(getattr(module, name), found))
    monkeypatch.setattr(payloads, "has_triton", lambda _: True)
    monkeypatch.setattr(soundness, "record_moment", Mock())
    dtype = torch.bfloat16
    warm_up(codec, heads=heads, head_dim=head_dim, dtype=dtype, device=torch.device("cpu"))
    compiled = set(found)
    assert len(compiled) >= 4
    for start, tokens in (
        (0, 512),
        (512, 512),
        (1024, 256),
        (0, 300),
        (512, 16),
        (100, 157),
        (4, 33),
        (769, 98),
        (5, 90),
    ):
        k, v = (torch.zeros(tokens, heads, head_dim, dtype=dtype) for _ in range(2))
        size = payload_bytes(
            codec_named(codec), wire_dtype(dtype), start=start, tokens=tokens, heads=heads, head_dim=head_dim
        )
        payload = torch.zeros(size, dtype=torch.uint8)
        encode_into(codec, k, v, payload, start=start, layer=0)
        decode_into(codec, payload, k, v, start=start, layer=0)
    assert found == compiled
