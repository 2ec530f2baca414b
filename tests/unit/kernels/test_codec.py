"""The KV codecs: what they guarantee about bytes, errors and bad input."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kernels.codec import decode, encode, torch_dtype, wire_dtype
from p2pserve.kernels.codecs import CODEC_NAMES, CODECS, codec_from_wire, codec_named
from p2pserve.kernels.errors import CodecError, PayloadError, TensorError
from p2pserve.kernels.format import WireDtype, dtype_from_wire, payload_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GOLDEN = runpy.run_path(str(Path(__file__).parent / "data" / "make_kernels_golden.py"))["CASES"]

Pair = tuple[torch.Tensor, torch.Tensor]


def block(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, heads, head_dim, generator=generator)
    v = torch.randn(tokens, heads, head_dim, generator=generator)
    return k.to(dtype), v.to(dtype)


def there_and_back(codec: str, k: torch.Tensor, v: torch.Tensor, start: int) -> Pair:
    payload = encode(codec, k, v, start=start, layer=3)
    tokens, heads, head_dim = k.shape
    return decode(codec, payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=k.dtype, start=start, layer=3)


class TestRaw:
    @settings(max_examples=40, deadline=None)
    @given(
        tokens=st.integers(1, 40),
        heads=st.integers(1, 4),
        head_dim=st.integers(1, 80),
        dtype=st.sampled_from(DTYPES),
        start=st.integers(0, 1000),
        seed=st.integers(0, 99),
    )
    def test_is_bit_exact(
        self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, start: int, seed: int
    ) -> None:
        k, v = block(tokens, heads, head_dim, dtype, seed)
        payload = encode("raw", k, v, start=start, layer=0)
        assert len(payload) == 2 * k.numel() * k.itemsize
        got_k, got_v = there_and_back("raw", k, v, start)
        assert torch.equal(got_k, k)
        assert torch.equal(got_v, v)
        assert got_k.dtype == dtype

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keeps_every_bit_of_special_values(self, dtype: torch.dtype) -> None:
        values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-42]).to(dtype).view(1, 1, 6)
        got, _ = there_and_back("raw", values, values, 0)
        assert bytes(got.view(torch.uint8).numpy().data) == bytes(values.view(torch.uint8).numpy().data)

    def test_accepts_a_strided_view(self) -> None:
        k, v = block(6, 2, 8, torch.bfloat16)
        got_k, got_v = there_and_back("raw", k[::2], v[::2], 0)
        assert torch.equal(got_k, k[::2])
        assert torch.equal(got_v, v[::2])


class TestFormats:
    @settings(max_examples=60, deadline=None)
    @given(
        start=st.integers(0, 200),
        tokens=st.integers(1, 150),
        heads=st.integers(1, 3),
        head_dim=st.integers(1, 20),
        dtype=st.sampled_from(DTYPES),
    )
    def test_length_is_known_beforehand(
        self, start: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        k, v = block(tokens, heads, head_dim, dtype)
        for codec in CODECS:
            expected = payload_bytes(
                codec, wire_dtype(dtype), start=start, tokens=tokens, heads=heads, head_dim=head_dim
            )
            assert len(encode(codec, k, v, start=start, layer=0)) == expected

    def test_wire_numbers_never_change(self) -> None:
        assert [(codec.name, codec.wire) for codec in CODECS] == [("raw", 0), ("kv4", 1), ("fp8", 2), ("kivi4", 3)]
        assert [(dtype.value, dtype.wire) for dtype in WireDtype] == [("bf16", 0), ("fp16", 1), ("fp32", 2)]
        for codec in CODECS:
            assert codec_from_wire(codec.wire) is codec is codec_named(codec.name)
        for dtype in WireDtype:
            assert dtype_from_wire(dtype.wire) is dtype
            assert wire_dtype(torch_dtype(dtype)) is dtype


class TestBadInput:
    @pytest.mark.parametrize(
        ("shape_k", "shape_v", "message"),
        [
            ((4, 64), (4, 64), "expected"),
            ((0, 2, 64), (0, 2, 64), "empty"),
            ((4, 0, 64), (4, 0, 64), "empty"),
            ((4, 2, 0), (4, 2, 0), "empty"),
            ((4, 2, 64), (4, 2, 32), "must agree"),
        ],
    )
    @pytest.mark.parametrize("codec", CODEC_NAMES)
    def test_shapes(self, codec: str, shape_k: tuple[int, ...], shape_v: tuple[int, ...], message: str) -> None:
        with pytest.raises(TensorError, match=f"layer 2.*{message}"):
            encode(codec, torch.zeros(shape_k), torch.zeros(shape_v), start=0, layer=2)

    def test_dtypes(self) -> None:
        with pytest.raises(TensorError, match="float64"):
            encode("raw", torch.zeros(1, 1, 2).double(), torch.zeros(1, 1, 2).double(), start=0, layer=0)
        with pytest.raises(TensorError, match="must agree"):
            encode("raw", torch.zeros(1, 1, 2), torch.zeros(1, 1, 2).half(), start=0, layer=0)

    def test_unknown_codec_and_numbers(self) -> None:
        with pytest.raises(CodecError, match="'zip' is unknown; known are raw, kv4, fp8, kivi4"):
            encode("zip", torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), start=0, layer=0)
        with pytest.raises(PayloadError):
            codec_from_wire(9)
        with pytest.raises(PayloadError):
            dtype_from_wire(9)

    def test_negative_start(self) -> None:
        for codec in CODECS:
            with pytest.raises(TensorError, match="start=-1"):
                encode(codec, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), start=-1, layer=0)


class TestBadPayloads:
    @pytest.mark.parametrize("codec", CODEC_NAMES)
    @pytest.mark.parametrize("change", [-1, 1, -(10**6)])
    def test_wrong_length(self, codec: str, change: int) -> None:
        payload = bytes(encode(codec, *block(70, 2, 16, torch.bfloat16), start=0, layer=4))
        wrong = payload[:change] if change < 0 else payload + b"x" * change
        with pytest.raises(PayloadError, match=f"layer 4: {codec} .*{len(payload)} bytes.*{len(wrong)}"):
            decode(codec, wrong, dtype=torch.bfloat16, tokens=70, heads=2, head_dim=16, start=0, layer=4)


class TestMemory:
    @pytest.mark.parametrize("codec", CODEC_NAMES)
    def test_every_kind_of_buffer_decodes_alike(self, codec: str) -> None:
        k, v = block(70, 2, 16, torch.bfloat16)
        payload = bytes(encode(codec, k, v, start=3, layer=0))
        odd = bytearray(b"x" + payload)
        buffers = (payload, bytearray(payload), memoryview(odd)[1:], torch.frombuffer(odd[1:], dtype=torch.uint8))
        first, *others = (
            decode(codec, buffer, tokens=70, heads=2, head_dim=16, dtype=torch.bfloat16, start=3, layer=0)
            for buffer in buffers
        )
        for other in others:
            assert torch.equal(other[0], first[0])
            assert torch.equal(other[1], first[1])

    @pytest.mark.parametrize("codec", CODEC_NAMES)
    def test_results_own_their_memory(self, codec: str) -> None:
        k, v = block(70, 2, 16, torch.bfloat16)
        payload = encode(codec, k, v, start=0, layer=0)
        kept = bytes(payload)
        k.zero_()
        assert bytes(payload) == kept
        buffer = bytearray(kept)
        got, _ = decode(codec, buffer, tokens=70, heads=2, head_dim=16, dtype=torch.bfloat16, start=0, layer=0)
        before = got.clone()
        buffer[:] = bytes(len(buffer))
        assert torch.equal(got, before)
