"""The fp8 codec: what its specification guarantees about bytes, errors and bad input."""

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
from p2pserve.kernels.fp8 import native as fp8_native
from p2pserve.kernels.fp8.layout import Fp8Layout
from p2pserve.kernels.fp8.reference import Fp8Sections, dequantise, quantise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIXTEEN = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128, 256)
CASES = runpy.run_path(str(Path(__file__).parent / "data" / "make_kernels_golden.py"))["CASES"]
GOLDEN = [case for case in CASES if case.codec == "fp8"]

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
    """K with a large constant on every fifth channel; V of very different size from token to token."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(tokens, heads, head_dim, generator=generator) for _ in range(2))
    k += 60.0 * (torch.arange(head_dim) % 5 == 0)
    return k.to(dtype), (v * 2.0 ** (torch.arange(tokens) % 9 - 4)[:, None, None]).to(dtype)


def there_and_back(k: torch.Tensor, v: torch.Tensor, start: int) -> Pair:
    return arrive(bytes(encode("fp8", k, v, start=start, layer=3)), k, start)


def arrive(payload: bytes | bytearray, like: torch.Tensor, start: int) -> Pair:
    tokens, heads, head_dim = like.shape
    return decode("fp8", payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=like.dtype, start=start, layer=3)


class TestErrors:
    @settings(max_examples=40, deadline=None)
    @given(
        tokens=st.integers(1, 150),
        heads=st.integers(1, 3),
        head_dim=st.sampled_from(HEAD_DIMS),
        dtype=st.sampled_from(DTYPES),
        start=st.integers(0, 300),
        seed=st.integers(0, 99),
    )
    def test_the_error_is_in_proportion_to_the_distance_from_the_zero(
        self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, start: int, seed: int
    ) -> None:
        k, v = block(tokens, heads, head_dim, dtype, seed)
        got_k, got_v = there_and_back(k, v, start)
        sixteen = torch.float16 if dtype == torch.float16 else torch.bfloat16
        true_k, true_v = k.to(sixteen).float(), v.to(sixteen).float()
        # 3 bits of mantissa: half a step is at most a 16th of the value; fixed steps below 2**-14 of the largest.
        size = true_v.abs()
        assert bool(((got_v.float() - true_v).abs() <= size / 16 + size.amax(-1, keepdim=True) * 2.0**-14).all())
        groups = (torch.arange(start, start + tokens) // 128).unique_consecutive(return_counts=True)[1].tolist()
        for got, true in zip(got_k.float().split(groups), true_k.split(groups), strict=True):
            reach = true.amax(0) - true.amin(0)  # the zero lies between the two, so no value is farther from it
            assert bool(((got - true).abs() <= reach / 16 + true.abs() * 2.0**-8).all())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_large_constant_costs_nothing(self, dtype: torch.dtype) -> None:
        k, v = block(256, 2, 64, dtype)
        plain = k - (60.0 * (torch.arange(64) % 5 == 0)).to(dtype)
        got, _ = there_and_back(k, v, 0)
        rounding = 60 * 2.0**-9 if dtype != torch.float16 else 0.03
        assert float((got.float() - k.float()).norm() / plain.float().norm()) < 0.035 + rounding

    def test_an_outlier_does_not_move_the_zero(self) -> None:
        k, v = block(128, 1, 64, torch.bfloat16)
        plain, _ = there_and_back(k, v, 0)
        k2 = k.clone()
        k2[100, 0, 1] = 300.0
        got, _ = there_and_back(k2, v, 0)
        errors = [float((a - b)[:100, 0, 1].float().norm()) for a, b in ((got, k2), (plain, k))]
        assert errors[0] < 1.3 * errors[1]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 6e4, 1e-5])
    def test_constant_channels_of_k_are_exact(self, value: float, dtype: torch.dtype) -> None:
        x = torch.full((200, 2, 80), value).to(dtype).to(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
        got, near = there_and_back(x, x, 60)
        assert torch.equal(got, x)
        assert float((near.float() - x.float()).abs().max()) <= abs(float(x[0, 0, 0])) / 16

    @pytest.mark.parametrize("dtype", SIXTEEN)
    def test_the_largest_values_stay_finite(self, dtype: torch.dtype) -> None:
        largest = 65504.0 if dtype == torch.float16 else 2.0**120
        x = torch.linspace(-largest, largest, 64 * 64).view(64, 1, 64).to(dtype)
        x[::7], x[::5] = largest, -largest
        for got in there_and_back(x, x, 0):
            assert bool(torch.isfinite(got).all())
            assert float((got.double() - x.double()).abs().max()) <= largest / 14

    def test_the_smallest_values_vanish_without_harm(self) -> None:
        for dtype, tiny in ((torch.bfloat16, 1e-40), (torch.float16, 2.0**-24)):
            x = torch.zeros(64, 1, 64, dtype=dtype)
            x[::3, :, ::5] = tiny
            for got in there_and_back(x, x, 0):
                assert float((got - x).abs().max()) <= tiny


class TestFormat:
    @pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
    def test_golden_bytes(self, case: Any) -> None:
        assert case.payload() == case.path.read_bytes()

    def test_a_payload_by_hand(self) -> None:
        """Two tokens across the border of two groups: each is its own zero; V's codes are e4m3 by
        the book.
        """
        k = torch.tensor([3.0, -5.5], dtype=torch.bfloat16).expand(2, 1, 2)
        v = torch.tensor([[1.0, -0.40625], [0.0, 2.0**-9]], dtype=torch.bfloat16).view(2, 1, 2)
        payload = bytes(encode("fp8", k, v, start=127, layer=0))
        expected = struct.pack("<BB14x", 1, 0) + bytes.fromhex("4040 b0c0") * 2
        expected += bytes([32] * 4)  # no reach
        expected += bytes(4)
        # 1.0 reaches 2**8 at exponent 127: 256 is 1111.000; -0.40625 * 256 = -104 = -1.625 * 2**6 is 1101.101.
        # The second row: 2**-9 reaches 2**8 at exponent 118.
        expected += bytes([0x78, 0x80 | 0x6D, 0x00, 0x78])
        expected += bytes([127, 118])
        assert payload == expected

    def test_the_zero_is_the_middle_of_the_inner_bounds_of_the_runs(self) -> None:
        """Runs of 32 tokens: bounds (0, 8), (1, 100), (-40, 6), (2, 7): max of minima 2, min of
        maxima 6.
        """
        k = torch.zeros(128, 1, 1, dtype=torch.float16)
        for run, (low, high) in enumerate(((0, 8), (1, 100), (-40, 6), (2, 7))):
            k[32 * run : 32 * run + 32] = low
            k[32 * run + 9] = high
        payload = bytes(encode("fp8", k, k, start=256, layer=0))
        assert struct.unpack_from("<e", payload, 16) == (4.0,)
        assert payload[18] == 127 + 6  # reach 96 = 1.5 * 2**6, which is 384 <= 448 at that exponent

    @pytest.mark.parametrize(("reach", "exponent"), [(1.75, 127), (1.7578125, 128), (2.0, 128)])
    def test_the_largest_code_is_at_most_448(self, reach: float, exponent: int) -> None:
        x = torch.tensor([reach, -reach], dtype=torch.bfloat16).view(1, 1, 2)
        payload = bytes(encode("fp8", x, x, start=0, layer=0))
        assert payload[-1] == exponent
        assert arrive(payload, x, 0)[1].flatten().tolist() == ([2.0, -2.0] if reach == 2 else [1.75, -1.75])

    @settings(max_examples=40, deadline=None)
    @given(
        start=st.integers(0, 300),
        tokens=st.integers(1, 150),
        heads=st.integers(1, 3),
        head_dim=st.one_of(st.integers(1, 20), st.sampled_from(HEAD_DIMS)),
    )
    def test_length_is_known_beforehand(self, start: int, tokens: int, heads: int, head_dim: int) -> None:
        k, v = block(tokens, heads, head_dim, torch.bfloat16)
        layout = Fp8Layout(start, tokens, heads, head_dim)
        assert len(encode("fp8", k, v, start=start, layer=0)) == layout.total_bytes

    def test_bits_per_element(self) -> None:
        """1500 tokens in chunks of 512, 8 heads of 128: at most 8.3 with everything."""
        total = sum(
            Fp8Layout(start, tokens, 8, 128).total_bytes for start, tokens in ((0, 512), (512, 512), (1024, 476))
        )
        assert total * 8 / (1500 * 8 * 128 * 2) == pytest.approx(8.127, abs=1e-3)

    def test_chunks_at_multiples_of_128_decode_as_the_whole_does(self) -> None:
        k, v = block(300, 2, 64, torch.bfloat16)
        whole = there_and_back(k, v, 0)
        parts = [there_and_back(k[a:b], v[a:b], a) for a, b in ((0, 128), (128, 256), (256, 300))]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])

    @pytest.mark.parametrize("dtype", SIXTEEN)
    def test_a_shard_of_heads_decodes_as_all_of_them_do(self, dtype: torch.dtype) -> None:
        k, v = block(70, 4, 80, dtype)
        whole = there_and_back(k, v, 100)
        for heads in (slice(0, 1), slice(1, 3), slice(3, 4)):
            shard = there_and_back(k[:, heads], v[:, heads], 100)
            assert torch.equal(shard[0], whole[0][:, heads])
            assert torch.equal(shard[1], whole[1][:, heads])

    def test_every_code_decodes_to_its_number(self) -> None:
        """All 256 bytes under exponent 135, which scales by 1; those of NaN give 0."""
        payload = bytearray(encode("fp8", *block(1, 1, 256, torch.float16), start=0, layer=3))
        payload[-257:] = bytes(range(256)) + bytes([135])
        _, got = arrive(bytes(payload), torch.empty(1, 1, 256, dtype=torch.float16), 0)
        for code, value in enumerate(got.flatten().tolist()):
            mantissa, exponent = code & 7, (code >> 3) & 15
            size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
            expected = 0.0 if code & 0x7F == 0x7F else -size if code & 0x80 else size
            assert value == expected


@needs_compiler
@pytest.mark.usefixtures("compiled")
class TestNative:
    """The C++ library beside the reference."""

    @pytest.mark.parametrize(("start", "tokens"), [(0, 256), (100, 300), (130, 20), (0, 1), (127, 2)])
    @pytest.mark.parametrize("head_dim", [1, 3, 33, 80, 128])
    @pytest.mark.parametrize("dtype", SIXTEEN)
    def test_it_makes_the_bytes_and_values_of_the_reference(
        self, dtype: torch.dtype, head_dim: int, start: int, tokens: int
    ) -> None:
        """Scales from those that vanish to the largest; zeros of both signs, constant channels;
        then any codes.
        """
        generator = torch.Generator().manual_seed(tokens)
        layout = Fp8Layout(start, tokens, 3, head_dim)
        for scale in (2.0**-25, 2.0**-118, 1.0, 600.0 if dtype == torch.float16 else 2.0**110):
            k, v = (x.clamp(-100, 100) * scale for x in block(tokens, 3, head_dim, torch.float32))
            k[3:40, 0, 0], k[:, 2], v[:, 1], v[tokens // 2, 0, 0] = 0.0, -0.0, -0.0, -0.0
            k, v = k.to(dtype), v.to(dtype)
            plain, quick = (torch.zeros(layout.total_bytes, dtype=torch.uint8) for _ in range(2))
            assert quantise(k, v, plain, layout)
            assert fp8_native.quantise(k, v, quick, layout)
            assert torch.equal(plain, quick)
            for _ in range(2):
                expected, got = torch.empty(2, *k.shape, dtype=dtype), torch.empty(2, *k.shape, dtype=dtype)
                assert dequantise(plain, expected[0], expected[1], layout)
                assert fp8_native.dequantise(plain, got[0], got[1], layout)
                assert torch.equal(expected.view(torch.int16), got.view(torch.int16))
                sections = Fp8Sections.of(plain, layout, dtype)
                for codes in (sections.key_codes, sections.value_codes):
                    codes.copy_(torch.randint(256, codes.shape, generator=generator))

    def test_the_number_of_threads_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fp8_native, "threads", lambda _: 3)
        k, v = block(200, 3, 80, torch.bfloat16)
        layout = Fp8Layout(40, 200, 3, 80)
        plain, quick = (torch.zeros(layout.total_bytes, dtype=torch.uint8) for _ in range(2))
        assert quantise(k, v, plain, layout)
        assert fp8_native.quantise(k, v, quick, layout)
        assert torch.equal(plain, quick)

    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, 2.0**121, -(2.0**121)])
    @pytest.mark.parametrize("tensor", [0, 1])
    @pytest.mark.parametrize("at", [0, 60, 127, 199])
    def test_it_sees_values_that_are_not_finite(self, tensor: int, bad: float, at: int) -> None:
        pair = block(200, 1, 67, torch.bfloat16)
        pair[tensor][at, 0, at % 67] = bad
        layout = Fp8Layout(0, 200, 1, 67)
        payload = torch.zeros(layout.total_bytes, dtype=torch.uint8)
        assert fp8_native.quantise(*pair, payload, layout) is False


class TestBadInput:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**121])
    @pytest.mark.parametrize("tensor", ["K", "V"])
    def test_values_that_are_not_finite_are_named(self, tensor: str, bad: float) -> None:
        k, v = block(10, 2, 64, torch.float32)
        (k if tensor == "K" else v)[7, 1, 33] = bad
        with pytest.raises(NonFiniteError, match=f"layer 5: {tensor} is .* at position 107, head 1, channel 33"):
            encode("fp8", k, v, start=100, layer=5)

    @pytest.mark.parametrize("tensor", ["K", "V"])
    @pytest.mark.parametrize("token", [7, 40])
    def test_infinite_halves_are_named(self, tensor: str, token: int) -> None:
        k, v = block(70, 2, 64, torch.float16)
        (k if tensor == "K" else v)[token, 1, 33] = math.inf
        with pytest.raises(NonFiniteError, match=f"layer 5: {tensor} is inf at position {token + 20}, head 1"):
            encode("fp8", k, v, start=20, layer=5)

    def payload(self, dtype: torch.dtype = torch.bfloat16) -> bytearray:
        return bytearray(encode("fp8", *block(70, 2, 64, dtype), start=100, layer=3))

    def decode(self, payload: bytearray, dtype: torch.dtype = torch.bfloat16) -> Pair:
        return arrive(payload, torch.empty(70, 2, 64, dtype=dtype), 100)

    @pytest.mark.parametrize(
        ("at", "value", "message"),
        [(0, 2, "fp8 version 2"), (1, 1, "dtype 1, expected 0"), (2, 1, "corrupt"), (15, 1, "corrupt")],
    )
    def test_header(self, at: int, value: int, message: str) -> None:
        payload = self.payload()
        payload[at] = value
        with pytest.raises(PayloadError, match=f"layer 3: .*{message}"):
            self.decode(payload)

    @pytest.mark.parametrize("cut", [-1, 1])
    def test_wrong_length(self, cut: int) -> None:
        payload = self.payload()
        with pytest.raises(PayloadError, match="layer 3: fp8"):
            self.decode(payload[:cut] if cut < 0 else payload + b"x")

    @pytest.mark.parametrize(
        ("section", "offset", "value", "where"),
        [
            (1, 2, b"\xff\x7f", "K has the zero nan at position 100, head 0, channel 1"),
            (1, 2 * 128 + 2, b"\xff\x7f", "K has the zero nan at position 128, head 0, channel 1"),
            (2, 128 + 65, b"\xff", "K has the exponent 255 at position 128, head 1, channel 1"),
            (2, 0, b"\x1f", "K has the exponent 31 at position 100, head 0, channel 0"),
            (5, 3, b"\xfb", "V has the exponent 251 at position 101, head 1"),
        ],
    )
    def test_parameters_that_no_encoder_writes(self, section: int, offset: int, value: bytes, where: str) -> None:
        payload = self.payload()
        at = sum(Fp8Layout(100, 70, 2, 64).section_bytes[:section]) + offset
        payload[at : at + len(value)] = value
        with pytest.raises(PayloadError, match=f"layer 3: {where}"):
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
