"""The KV codecs: what they promise about bytes, errors and bad input."""

from __future__ import annotations

import math
import runpy
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kernels import kv4
from p2pserve.kernels.codec import Codec, decode, encode, torch_dtype, wire_dtype
from p2pserve.kernels.errors import CodecError, NonFiniteError, PayloadError, TensorError
from p2pserve.kernels.format import Kv4Layout, WireDtype, codec_from_wire, dtype_from_wire, payload_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 256)
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


def relative_error(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.float() - true.float()).norm() / true.float().norm())


def scale_bound(spread: torch.Tensor) -> torch.Tensor:
    """The widest step a group of that spread may get: an eighth above, never below the smallest of the tensor."""
    wanted = spread / 15
    return torch.maximum(wanted * 1.125, wanted.max() * 2.0**-29)


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


class TestKv4Errors:
    @settings(max_examples=60, deadline=None)
    @given(
        tokens=st.integers(1, 200),
        heads=st.integers(1, 3),
        head_dim=st.sampled_from(HEAD_DIMS),
        dtype=st.sampled_from(DTYPES),
        start=st.integers(0, 300),
        power=st.integers(-6, 6),
        seed=st.integers(0, 99),
    )
    def test_every_value_is_within_half_a_step(
        self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, start: int, power: int, seed: int
    ) -> None:
        k, v = block(tokens, heads, head_dim, dtype, seed)
        k = k * 2.0 ** (torch.arange(head_dim) % 8 + power).to(dtype)  # channels of very different size
        v = v * 2.0**power
        got_k, got_v = there_and_back("kv4", k, v, start)
        layout = Kv4Layout(start, tokens, heads, head_dim)
        sixteen = torch.float16 if dtype == torch.float16 else torch.bfloat16
        true_k, true_v = k.to(sixteen).float(), v.to(sixteen).float()
        exempt = layout.exempt
        assert torch.equal(got_k[:exempt].float(), true_k[:exempt])
        assert torch.equal(got_v[:exempt].float(), true_v[:exempt])
        if layout.coded:
            check_keys(got_k.float(), true_k, layout)
            check_values(got_v.float()[exempt:], true_v[exempt:], head_dim)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_relative_error_of_gaussian_values(self, head_dim: int, dtype: torch.dtype) -> None:
        k, v = block(256, 2, head_dim, dtype)
        got_k, got_v = there_and_back("kv4", k, v, 256)
        assert relative_error(got_k, k) < 0.10
        assert relative_error(got_v, v) < 0.115

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 6e4, 1e-5])
    @pytest.mark.parametrize("head_dim", [64, 80, 256])
    def test_constant_tensors_are_exact(self, value: float, head_dim: int, dtype: torch.dtype) -> None:
        k = torch.full((70, 2, head_dim), value).to(dtype)
        if dtype == torch.float32:
            k = k.to(torch.bfloat16).float()
        got_k, got_v = there_and_back("kv4", k, k, 0)
        assert torch.equal(got_k, k)
        assert torch.equal(got_v, k)

    def test_constant_after_the_rotation_only(self) -> None:
        spike = torch.zeros(10, 1, 64)
        spike[..., 0] = 5.0
        _, got = there_and_back("kv4", spike, spike, 8)
        assert torch.allclose(got, spike, atol=1e-6)

    def test_one_constant_row_beside_ordinary_ones(self) -> None:
        k, v = block(20, 2, 256, torch.float16)
        v[7, 1] = 1000.5  # fp16 holds it, bf16 would not
        _, got = there_and_back("kv4", k, v, 8)
        assert torch.equal(got[7, 1], v[7, 1])
        assert relative_error(got[:7], v[:7]) < 0.12

    def test_an_outlier_channel_of_k_costs_its_neighbours_nothing(self) -> None:
        k, v = block(64, 1, 64, torch.bfloat16)
        plain, _ = there_and_back("kv4", k, v, 64)
        k2 = k.clone()
        k2[..., 5] = k2[..., 5] * 50 + 900
        got, _ = there_and_back("kv4", k2, v, 64)
        others = [i for i in range(64) if i != 5]
        assert torch.equal(got[..., others], plain[..., others])
        assert relative_error(got[..., 5], k2[..., 5]) < 0.02

    def test_an_outlier_in_v_is_spread_by_the_rotation(self) -> None:
        k, v = block(64, 1, 64, torch.bfloat16)
        v[:, 0, 9] = 30.0
        _, got = there_and_back("kv4", k, v, 64)
        assert relative_error(got, v) < 0.1

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_largest_values_stay_finite(self, dtype: torch.dtype) -> None:
        largest = 65504.0 if dtype == torch.float16 else kv4.LARGEST
        generator = torch.Generator().manual_seed(1)
        x = ((torch.rand(70, 1, 64, generator=generator) * 2 - 1) * largest).to(dtype)
        x[10:20] = largest
        x[20:30] = -largest
        got_k, got_v = there_and_back("kv4", x, -x, 0)
        assert relative_error(got_k / largest, x / largest) < 0.1
        assert relative_error(got_v / largest, -x / largest) < 0.1

    def test_the_smallest_values_do_not_divide_by_zero(self) -> None:
        x = torch.zeros(70, 1, 64, dtype=torch.bfloat16)
        x[::3, :, ::5] = 1e-40
        got_k, got_v = there_and_back("kv4", x, x, 0)
        assert float((got_k - x).abs().max()) < 1e-37
        assert float((got_v - x).abs().max()) < 1e-37


def check_keys(got: torch.Tensor, true: torch.Tensor, layout: Kv4Layout) -> None:
    first, last = layout.start + layout.exempt, layout.start + layout.tokens
    cuts = sorted({first, last, *(p for p in range(0, last, 64) if p > first)})
    runs = [slice(a - layout.start, b - layout.start) for a, b in pairwise(cuts)]
    spreads = torch.stack([true[run].amax(0) - true[run].amin(0) for run in runs])
    for run, step in zip(runs, scale_bound(spreads), strict=True):
        slack = step * 0.501 + true[run].abs() * 2.0**-8
        assert bool(((got[run] - true[run]).abs() <= slack + step * 2.0**-7).all())


def check_values(got: torch.Tensor, true: torch.Tensor, head_dim: int) -> None:
    width = 128 if head_dim % 128 == 0 else head_dim
    rotated = kv4.hadamard(true).view(*true.shape[:2], -1, width)
    lowest, highest = rotated.amin(-1), rotated.amax(-1)
    step = scale_bound(highest - lowest + lowest.abs() * 2.0**-7).amax(-1)
    # The rotation keeps lengths, so half a step per rotated value bounds the length of the error.
    slack = step * 0.501 * math.sqrt(head_dim) + true.norm(dim=-1) * 2.0**-8
    constant = (true == true[..., :1]).all(-1)
    assert bool((((got - true).norm(dim=-1) <= slack) | constant).all())


class TestKv4Format:
    @pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
    def test_golden_bytes(self, case: Any) -> None:
        assert case.payload() == case.path.read_bytes()

    @pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
    def test_golden_payloads_decode(self, case: Any) -> None:
        k, v = case.block()
        got_k, got_v = decode(
            case.codec,
            case.path.read_bytes(),
            tokens=case.tokens,
            heads=case.heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            start=case.start,
            layer=0,
        )
        assert relative_error(got_k, k) < 0.1
        assert relative_error(got_v, v) < 0.2

    def test_a_payload_by_hand(self) -> None:
        """Two tokens at 62 and 63, one head of 2: K per channel, V rotated by [[1, 1], [1, -1]] / sqrt(2)."""
        k = torch.tensor([[[0.0, 2.0]], [[15.0, 2.0]]], dtype=torch.bfloat16)
        v = torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]]], dtype=torch.bfloat16)
        payload = bytes(encode("kv4", k, v, start=62, layer=0))
        header = struct.pack("<BBhhH", 1, 0, 0, -95, 0)  # top: 2**0 for K; V is constant, so the lowest
        zeros_k = bytes.fromhex("0000 0040")  # 0.0, 2.0
        zeros_v = bytes.fromhex("803f 0000")  # 1.0, 0.0
        scales = bytes([31 * 8, 0]) + bytes([0, 0])  # 1.0 * 2**(0 + 31 - 31), constant; both rows constant
        codes = bytes([0x00, 0x0F]) + bytes(2)
        assert payload == header + zeros_k + zeros_v + scales + codes

    def test_chunks_at_multiples_of_64_decode_as_the_whole_does(self) -> None:
        k, v = block(300, 2, 64, torch.bfloat16)
        whole = there_and_back("kv4", k, v, 0)
        parts = [there_and_back("kv4", k[a:b], v[a:b], a) for a, b in ((0, 64), (64, 256), (256, 300))]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])

    def test_a_shard_of_heads_decodes_as_all_of_them_do(self) -> None:
        k, v = block(100, 4, 64, torch.bfloat16)
        whole = there_and_back("kv4", k, v, 0)
        for head in range(4):
            shard = there_and_back("kv4", k[:, head : head + 1], v[:, head : head + 1], 0)
            assert torch.equal(shard[0][:, 0], whole[0][:, head])
            assert torch.equal(shard[1][:, 0], whole[1][:, head])

    def test_bits_per_element(self) -> None:
        """1500 tokens in chunks of 512, two heads of 64: at most 4.5 with everything."""
        chunks = ((0, 512), (512, 512), (1024, 476))
        total = sum(
            payload_bytes(Codec.KV4, WireDtype.BF16, start=start, tokens=tokens, heads=2, head_dim=64)
            for start, tokens in chunks
        )
        assert total * 8 / (1500 * 2 * 64 * 2) == pytest.approx(4.4115, abs=1e-4)

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
        for codec in Codec:
            expected = payload_bytes(
                codec, wire_dtype(dtype), start=start, tokens=tokens, heads=heads, head_dim=head_dim
            )
            assert len(encode(codec, k, v, start=start, layer=0)) == expected

    def test_hadamard_is_its_own_inverse_and_orthonormal(self) -> None:
        for head_dim in (1, 6, 64, 80, 96, 256):
            x = torch.randn(5, 2, head_dim, generator=torch.Generator().manual_seed(0))
            y = kv4.hadamard(x)
            assert torch.allclose(kv4.hadamard(y), x, atol=1e-5)
            assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)

    def test_hadamard_is_sylvesters(self) -> None:
        expected = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
        assert torch.equal(kv4.hadamard(torch.eye(4)), expected)

    @settings(max_examples=50, deadline=None)
    @given(exponents=st.lists(st.floats(-60, 60), min_size=1, max_size=20))
    def test_scales_are_rounded_up_by_less_than_an_eighth(self, exponents: list[float]) -> None:
        wanted = torch.tensor([2.0**e for e in exponents])
        codes, top = kv4.round_scales(wanted)
        got = kv4.expand_scales(codes, top)
        assert bool((got >= wanted).all())
        floor = 2.0 ** (top - 31) * 1.125
        assert bool((got <= torch.clamp(wanted * 1.125, min=floor)).all())

    def test_wire_numbers_never_change(self) -> None:
        assert [(codec.value, codec.wire) for codec in Codec] == [("raw", 0), ("kv4", 1)]
        assert [(dtype.value, dtype.wire) for dtype in WireDtype] == [("bf16", 0), ("fp16", 1), ("fp32", 2)]
        for codec in Codec:
            assert codec_from_wire(codec.wire) is codec
        for dtype in WireDtype:
            assert dtype_from_wire(dtype.wire) is dtype
            assert wire_dtype(torch_dtype(dtype)) is dtype


class TestBadInput:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**121])
    @pytest.mark.parametrize("tensor", ["K", "V"])
    def test_non_finite_values_are_named(self, tensor: str, bad: float) -> None:
        k, v = block(10, 2, 64, torch.float32)
        (k if tensor == "K" else v)[7, 1, 33] = bad
        match = f"layer 5: {tensor} is .* at position 107, head 1, channel 33"
        with pytest.raises(NonFiniteError, match=match):
            encode("kv4", k, v, start=100, layer=5)

    def test_an_exempt_token_is_checked_too(self) -> None:
        k, v = block(10, 1, 64, torch.float16)
        v[2, 0, 0] = math.nan
        with pytest.raises(NonFiniteError, match="V is nan at position 2"):
            encode("kv4", k, v, start=0, layer=0)

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
    @pytest.mark.parametrize("codec", ["raw", "kv4"])
    def test_shapes(self, codec: str, shape_k: tuple[int, ...], shape_v: tuple[int, ...], message: str) -> None:
        with pytest.raises(TensorError, match=f"layer 2.*{message}"):
            encode(codec, torch.zeros(shape_k), torch.zeros(shape_v), start=0, layer=2)

    def test_dtypes(self) -> None:
        with pytest.raises(TensorError, match="float64"):
            encode("raw", torch.zeros(1, 1, 2).double(), torch.zeros(1, 1, 2).double(), start=0, layer=0)
        with pytest.raises(TensorError, match="must agree"):
            encode("raw", torch.zeros(1, 1, 2), torch.zeros(1, 1, 2).half(), start=0, layer=0)

    def test_unknown_codec_and_numbers(self) -> None:
        with pytest.raises(CodecError, match="'zip' is unknown; known are raw, kv4"):
            encode("zip", torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), start=0, layer=0)
        with pytest.raises(PayloadError):
            codec_from_wire(9)
        with pytest.raises(PayloadError):
            dtype_from_wire(9)

    def test_negative_start(self) -> None:
        for codec in Codec:
            with pytest.raises(TensorError, match="start=-1"):
                encode(codec, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), start=-1, layer=0)


class TestBadPayloads:
    def decode(self, payload: bytes, dtype: torch.dtype = torch.bfloat16, codec: str = "kv4") -> Pair:
        return decode(codec, payload, dtype=dtype, tokens=70, heads=2, head_dim=16, start=0, layer=4)

    def payload(self, dtype: torch.dtype = torch.bfloat16) -> bytes:
        return bytes(encode("kv4", *block(70, 2, 16, dtype), start=0, layer=4))

    @pytest.mark.parametrize("codec", ["raw", "kv4"])
    @pytest.mark.parametrize("change", [-1, 1, -(10**6)])
    def test_wrong_length(self, codec: str, change: int) -> None:
        payload = bytes(encode(codec, *block(70, 2, 16, torch.bfloat16), start=0, layer=4))
        wrong = payload[:change] if change < 0 else payload + b"x" * change
        with pytest.raises(PayloadError, match=f"layer 4: {codec} .*{len(payload)} bytes.*{len(wrong)}"):
            self.decode(wrong, codec=codec)

    @pytest.mark.parametrize(
        ("at", "value", "message"),
        [(0, 2, "version 2"), (1, 1, "dtype 1"), (3, 0x7F, "corrupt"), (5, 0x80, "corrupt"), (6, 1, "corrupt")],
    )
    def test_header(self, at: int, value: int, message: str) -> None:
        payload = bytearray(self.payload())
        payload[at] = value
        with pytest.raises(PayloadError, match=message):
            self.decode(bytes(payload))

    def test_the_other_16_bit_dtype(self) -> None:
        with pytest.raises(PayloadError, match="dtype 0, expected 1"):
            self.decode(self.payload(), torch.float16)

    def test_nan_in_any_section_of_16_bit_values(self) -> None:
        sizes = Kv4Layout(0, 70, 2, 16).section_bytes
        for section in range(1, 5):
            payload = bytearray(self.payload())
            at = sum(sizes[:section])
            payload[at : at + 2] = b"\xff\x7f"
            with pytest.raises(PayloadError, match=r"layer 4: [KV] decodes to"):
                self.decode(bytes(payload))

    @settings(max_examples=80, deadline=None)
    @given(
        edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=30),
        dtype=st.sampled_from(DTYPES),
    )
    def test_corruption_never_gives_nan(self, edits: list[tuple[int, int]], dtype: torch.dtype) -> None:
        payload = bytearray(self.payload(dtype))
        for at, value in edits:
            # Half of the edits hit the parameters, which are few; codes cannot be wrong, only different.
            payload[at % (len(payload) if at % 2 else 700)] = value
        try:
            k, v = self.decode(bytes(payload), dtype)
        except CodecError:
            return
        assert bool(torch.isfinite(k).all())
        assert bool(torch.isfinite(v).all())
