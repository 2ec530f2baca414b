"""The kivi4 codec: what its specification guarantees about bytes, errors and bad input."""

from __future__ import annotations

import math
import runpy
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kernels import accelerate
from p2pserve.kernels.codec import decode, encode
from p2pserve.kernels.errors import CodecError, NonFiniteError, PayloadError
from p2pserve.kernels.format import HEADER_BYTES
from p2pserve.kernels.kivi4 import native as kivi4_native
from p2pserve.kernels.kivi4.layout import Kivi4Layout
from p2pserve.kernels.kivi4.reference import dequantise, quantise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIXTEEN = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128, 256)
CASES = runpy.run_path(str(Path(__file__).parent / "data" / "make_kernels_golden.py"))["CASES"]
GOLDEN = [case for case in CASES if case.codec == "kivi4"]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def compiled() -> Iterator[None]:
    """The C++ library is built at its first use."""
    before = accelerate.mode()
    accelerate.set_mode("compiled")
    yield
    accelerate.set_mode(before)


def block(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, heads, head_dim, generator=generator) for _ in range(2))
    return (k * 2.0 ** (torch.arange(head_dim) % 9 - 3)).to(dtype), v.to(dtype)


def there_and_back(k: torch.Tensor, v: torch.Tensor, start: int) -> Pair:
    return arrive(bytes(encode("kivi4", k, v, start=start, layer=3)), k, start)


def arrive(payload: bytes | bytearray, like: torch.Tensor, start: int) -> Pair:
    tokens, heads, head_dim = like.shape
    return decode(
        "kivi4", payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=like.dtype, start=start, layer=3
    )


def plain_kivi(groups: torch.Tensor, sixteen: torch.dtype) -> torch.Tensor:
    """What KIVI makes of groups along the last axis, in double precision but for its 16-bit
    parameters.
    """
    zero = groups.amin(-1, keepdim=True)
    scale = ((groups.amax(-1, keepdim=True) - zero) / 15).to(sixteen).double()
    codes = torch.where(scale > 0, ((groups - zero) / scale).round().clamp(0, 15), 0.0)
    return codes * scale + zero


class TestErrors:
    @settings(max_examples=40, deadline=None)
    @given(
        tokens=st.integers(1, 100),
        heads=st.integers(1, 3),
        head_dim=st.sampled_from(HEAD_DIMS),
        dtype=st.sampled_from(DTYPES),
        start=st.integers(0, 100),
        seed=st.integers(0, 99),
    )
    def test_is_what_kivi_makes_of_whole_groups_and_exact_beside_them(
        self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, start: int, seed: int
    ) -> None:
        k, v = block(tokens, heads, head_dim, dtype, seed)
        sixteen = torch.float16 if dtype == torch.float16 else torch.bfloat16
        got_k, got_v = (x.double() for x in there_and_back(k, v, start))
        true_k, true_v = (x.to(sixteen).double() for x in (k, v))
        first = min(tokens, -start % 32)
        last = first + (tokens - first) // 32 * 32
        for part in (slice(first), slice(last, None)):
            assert torch.equal(got_k[part], true_k[part])
            assert torch.equal(got_v[part], true_v[part])
        if first < last:
            width = 40 if head_dim == 80 else 32
            groups = true_k[first:last].view(-1, 32, heads, head_dim).movedim(1, -1)
            expected_k = plain_kivi(groups, sixteen).movedim(-1, 1).reshape(-1, heads, head_dim)
            expected_v = plain_kivi(true_v[first:last].reshape(-1, heads, head_dim // width, width), sixteen)
            # fp32 and double may part at the middle between two codes: a step at most, and rarely.
            for got, expected in ((got_k[first:last], expected_k), (got_v[first:last], expected_v)):
                near = (got - expected.reshape(got.shape)).abs() <= got.abs() * 2.0**-8
                assert float(near.double().mean()) > 0.998

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_every_value_is_within_half_a_step(self, head_dim: int, dtype: torch.dtype) -> None:
        k, v = block(96, 2, head_dim, dtype)
        got_k, got_v = there_and_back(k, v, 32)
        width = 40 if head_dim == 80 else 32
        for got, true in (
            (got_k.float().view(3, 32, -1).movedim(1, -1), k.float().view(3, 32, -1).movedim(1, -1)),
            (got_v.float().reshape(-1, width), v.float().reshape(-1, width)),
        ):
            step = (true.amax(-1, keepdim=True) - true.amin(-1, keepdim=True)) / 15
            assert bool(((got - true).abs() <= step * 0.54 + true.abs() * 2.0**-8).all())

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 6e4, 1e-5])
    def test_constant_groups_are_exact(self, value: float, dtype: torch.dtype) -> None:
        x = torch.full((64, 2, 80), value).to(dtype).to(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
        got_k, got_v = there_and_back(x, x, 0)
        assert torch.equal(got_k, x)
        assert torch.equal(got_v, x)

    @pytest.mark.parametrize("dtype", SIXTEEN)
    def test_the_largest_values_stay_finite(self, dtype: torch.dtype) -> None:
        largest = 65504.0 if dtype == torch.float16 else 2.0**120
        x = torch.linspace(-largest, largest, 64 * 64).view(64, 1, 64).to(dtype)
        x[::7], x[::5] = largest, -largest
        for got in there_and_back(x, x, 0):
            assert bool(torch.isfinite(got).all())
            assert float((got.double() - x.double()).abs().max()) <= largest * 2 / 15 * 0.54

    def test_the_smallest_values_do_not_divide_by_zero(self) -> None:
        for dtype, tiny in ((torch.bfloat16, 1e-40), (torch.bfloat16, 2.0**-99), (torch.float16, 2.0**-24)):
            x = torch.zeros(64, 1, 64, dtype=dtype)
            x[::3, :, ::5] = tiny
            for got in there_and_back(x, x, 0):
                assert float((got - x).abs().max()) <= tiny


class TestFormat:
    @pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
    def test_golden_bytes(self, case: Any) -> None:
        assert case.payload() == case.path.read_bytes()

    def test_a_payload_by_hand(self) -> None:
        """33 tokens from 31: token 31 is residual, 32..63 a group. K rises by 0.5 from -1; V is
        0..3 per head.
        """
        k = torch.tensor([7.0, *(i * 0.5 - 1 for i in range(32))], dtype=torch.float16).view(33, 1, 1).expand(-1, -1, 4)
        v = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float16).expand(33, 1, 4)
        payload = bytes(encode("kivi4", k, v, start=31, layer=0))
        scale_k = 15.5 / 15
        assert struct.pack("<e", scale_k) == struct.pack("<e", 1.033203125)
        codes = [min(15, round(i * 0.5 * (1 / 1.033203125))) for i in range(32)]
        expected = struct.pack("<BB14x", 1, 1)
        expected += struct.pack("<4e", *[7.0] * 4) + struct.pack("<4e", 0, 1, 2, 3)
        expected += struct.pack("<4e", *[-1.0] * 4) + struct.pack("<4e", *[scale_k] * 4)
        expected += struct.pack("<32e", *[0.0] * 32) + struct.pack("<32e", *[0.2] * 32)
        expected += bytes(codes[i] | codes[i + 16] << 4 for i in range(16) for _ in range(4))
        expected += bytes([0 | 10 << 4, 5 | 15 << 4]) * 32
        assert payload == expected

    @settings(max_examples=40, deadline=None)
    @given(
        start=st.integers(0, 100),
        tokens=st.integers(1, 100),
        heads=st.integers(1, 3),
        head_dim=st.one_of(st.integers(1, 20), st.sampled_from(HEAD_DIMS)),
    )
    def test_length_is_known_beforehand(self, start: int, tokens: int, heads: int, head_dim: int) -> None:
        k, v = block(tokens, heads, head_dim, torch.bfloat16)
        layout = Kivi4Layout(start, tokens, heads, head_dim)
        assert len(encode("kivi4", k, v, start=start, layer=0)) == layout.total_bytes

    def test_five_bits_per_element_and_a_header(self) -> None:
        assert Kivi4Layout(512, 512, 8, 128).total_bytes == HEADER_BYTES + 2 * 512 * 8 * 128 * 5 // 8

    def test_chunks_at_multiples_of_32_decode_as_the_whole_does(self) -> None:
        k, v = block(150, 2, 64, torch.bfloat16)
        whole = there_and_back(k, v, 0)
        parts = [there_and_back(k[a:b], v[a:b], a) for a, b in ((0, 32), (32, 96), (96, 150))]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])

    @pytest.mark.parametrize("dtype", SIXTEEN)
    def test_a_shard_of_heads_decodes_as_all_of_them_do(self, dtype: torch.dtype) -> None:
        k, v = block(70, 4, 80, dtype)
        whole = there_and_back(k, v, 5)
        for heads in (slice(0, 1), slice(1, 3), slice(3, 4)):
            shard = there_and_back(k[:, heads], v[:, heads], 5)
            assert torch.equal(shard[0], whole[0][:, heads])
            assert torch.equal(shard[1], whole[1][:, heads])


@needs_compiler
@pytest.mark.usefixtures("compiled")
class TestNative:
    """The C++ library beside the reference."""

    @pytest.mark.parametrize("head_dim", [1, 3, 33, 64, 80, 97, 128, 256, 1024])
    @pytest.mark.parametrize("dtype", SIXTEEN)
    def test_it_makes_the_bytes_and_values_of_the_reference(self, dtype: torch.dtype, head_dim: int) -> None:
        """Scales from those that vanish or are subnormal to the largest; zeros of both signs,
        constant groups.
        """
        layout = Kivi4Layout(0, 64, 3, head_dim)
        for scale in (2.0**-24, 2.0**-110, 1.0, 6e4 if dtype == torch.float16 else 2.0**115):
            k, v = (x.clamp(-1, 1).float() * scale for x in block(64, 3, head_dim, dtype))
            k[:, 0, 0], k[3, 0, 0], v[5], v[6] = 0.0, -0.0, 1.5 * min(scale, 1.0), -0.0
            k[:, 1] = -k[:, 1].abs()
            k, v = k.to(dtype), v.to(dtype)
            k[7, 1, -1], v[8], v[8, 1, 0] = -0.0, v[8].abs(), -0.0
            k[:32, 2, 0] = torch.arange(32).clamp(max=22) * 2.0**-24  # 22 / 15 is 1 in fp16's subnormal numbers
            plain, quick = (torch.zeros(layout.total_bytes, dtype=torch.uint8) for _ in range(2))
            assert quantise(k, v, plain, layout)
            assert kivi4_native.quantise(k, v, quick, layout)
            assert torch.equal(plain, quick)
            expected, got = torch.empty(2, *k.shape, dtype=dtype), torch.empty(2, *k.shape, dtype=dtype)
            assert dequantise(plain, expected[0], expected[1], layout)
            assert kivi4_native.dequantise(plain, got[0], got[1], layout)
            assert torch.equal(expected.view(torch.int16), got.view(torch.int16))

    @pytest.mark.parametrize("heads", [1, 3])
    def test_the_number_of_threads_changes_nothing(self, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kivi4_native, "threads", lambda _: 3)
        k, v = block(96, heads, 80, torch.bfloat16)
        layout = Kivi4Layout(0, 96, heads, 80)
        plain, quick = (torch.zeros(layout.total_bytes, dtype=torch.uint8) for _ in range(2))
        assert quantise(k, v, plain, layout)
        assert kivi4_native.quantise(k, v, quick, layout)
        assert torch.equal(plain, quick)

    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, 2.0**121, -(2.0**121)])
    @pytest.mark.parametrize("tensor", [0, 1])
    @pytest.mark.parametrize("at", [0, 17, 31, 63])
    def test_it_sees_values_that_are_not_finite(self, tensor: int, bad: float, at: int) -> None:
        pair = block(64, 1, 64, torch.bfloat16)
        pair[tensor][at, 0, at] = bad
        layout = Kivi4Layout(0, 64, 1, 64)
        payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        assert kivi4_native.quantise(*pair, payload, layout) is False

    def test_wider_heads_than_it_takes_go_to_the_reference(self) -> None:
        k, v = block(40, 1, 1025, torch.bfloat16)
        payload = torch.zeros(Kivi4Layout(0, 40, 1, 1025).total_bytes, dtype=torch.uint8)
        assert kivi4_native.quantise(k, v, payload, Kivi4Layout(0, 40, 1, 1025)) is None
        got, _ = there_and_back(k, v, 0)
        assert float((got - k).abs().max()) <= float(k.max() - k.min()) / 15


class TestBadInput:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**121])
    @pytest.mark.parametrize("tensor", ["K", "V"])
    @pytest.mark.parametrize("token", [7, 33, 63, 69])
    def test_values_that_are_not_finite_are_named(self, tensor: str, bad: float, token: int) -> None:
        k, v = block(70, 2, 64, torch.float32)
        (k if tensor == "K" else v)[token, 1, 33] = bad
        with pytest.raises(
            NonFiniteError, match=f"layer 5: {tensor} is .* at position {token + 20}, head 1, channel 33"
        ):
            encode("kivi4", k, v, start=20, layer=5)

    @pytest.mark.parametrize("tensor", ["K", "V"])
    @pytest.mark.parametrize("token", [7, 40])
    def test_infinite_halves_are_named(self, tensor: str, token: int) -> None:
        k, v = block(70, 2, 64, torch.float16)
        (k if tensor == "K" else v)[token, 1, 33] = math.inf
        with pytest.raises(NonFiniteError, match=f"layer 5: {tensor} is inf at position {token + 20}, head 1"):
            encode("kivi4", k, v, start=20, layer=5)

    def payload(self, dtype: torch.dtype = torch.bfloat16) -> bytearray:
        return bytearray(encode("kivi4", *block(70, 2, 64, dtype), start=20, layer=3))

    def decode(self, payload: bytearray, dtype: torch.dtype = torch.bfloat16) -> Pair:
        return arrive(payload, torch.empty(70, 2, 64, dtype=dtype), 20)

    @pytest.mark.parametrize(
        ("at", "value", "message"),
        [(0, 2, "kivi4 version 2"), (1, 1, "dtype 1, expected 0"), (2, 1, "corrupt"), (15, 1, "corrupt")],
    )
    def test_header(self, at: int, value: int, message: str) -> None:
        payload = self.payload()
        payload[at] = value
        with pytest.raises(PayloadError, match=f"layer 3: .*{message}"):
            self.decode(payload)

    @pytest.mark.parametrize("cut", [-1, 1])
    def test_wrong_length(self, cut: int) -> None:
        payload = self.payload()
        with pytest.raises(PayloadError, match="layer 3: kivi4"):
            self.decode(payload[:cut] if cut < 0 else payload + b"x")

    @pytest.mark.parametrize(
        ("section", "where"),
        [
            (1, "K has the value nan at position 20, head 0, channel 1"),
            (2, "V has the value nan at position 20, head 0, channel 1"),
            (3, "K has the zero nan at position 32, head 0, channel 1"),
            (4, "K has the scale nan at position 32, head 0, channel 1"),
            (5, "V has the zero nan at position 32, head 0, group 1"),
            (6, "V has the scale nan at position 32, head 0, group 1"),
        ],
    )
    def test_nan_in_any_section_of_16_bit_values(self, section: int, where: str) -> None:
        payload = self.payload()
        at = sum(Kivi4Layout(20, 70, 2, 64).section_bytes[:section]) + 2
        payload[at : at + 2] = b"\xff\x7f"
        with pytest.raises(PayloadError, match=f"layer 3: {where}"):
            self.decode(payload)

    @pytest.mark.parametrize("section", range(1, 7))
    def test_infinite_halves_in_any_section(self, section: int) -> None:
        payload = self.payload(torch.float16)
        at = sum(Kivi4Layout(20, 70, 2, 64).section_bytes[:section])
        payload[at : at + 2] = b"\x00\x7c"
        with pytest.raises(PayloadError, match=r"layer 3: [KV] has the (value|zero|scale) inf at position"):
            self.decode(payload, torch.float16)

    def test_a_negative_scale(self) -> None:
        payload = self.payload()
        payload[sum(Kivi4Layout(20, 70, 2, 64).section_bytes[:4]) + 1] |= 0x80
        with pytest.raises(PayloadError, match="K has the scale -"):
            self.decode(payload)

    @settings(max_examples=60, deadline=None)
    @given(noise=st.binary(min_size=64, max_size=64), seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES))
    def test_corruption_never_gives_nan(self, noise: bytes, seed: int, dtype: torch.dtype) -> None:
        payload = self.payload(dtype)
        at = seed % (len(payload) - len(noise))
        payload[at : at + len(noise)] = noise
        try:
            k, v = self.decode(payload, dtype)
        except CodecError:
            return
        assert bool(torch.isfinite(k).all() and torch.isfinite(v).all())
