"""`kv4`: its bytes, its errors, what it is compared with, and what it makes of bad input."""

from __future__ import annotations

import math
import runpy
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pserve.kernels import accelerate
from p2pserve.kernels.codec import decode, encode, wire_dtype
from p2pserve.kernels.errors import CodecError, NonFiniteError, PayloadError
from p2pserve.kernels.format import WireDtype, payload_bytes
from p2pserve.kernels.kv4 import KV4
from p2pserve.kernels.kv4 import native as kv4_native
from p2pserve.kernels.kv4.layout import LARGEST, Kv4Layout
from p2pserve.kernels.kv4.reference import hadamard

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 256)
GOLDEN = [
    case
    for case in runpy.run_path(str(Path(__file__).parent / "data" / "make_kernels_golden.py"))["CASES"]
    if case.codec == "kv4"
]

Pair = tuple[torch.Tensor, torch.Tensor]


def block(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, heads, head_dim, generator=generator)
    v = torch.randn(tokens, heads, head_dim, generator=generator)
    return k.to(dtype), v.to(dtype)


def there_and_back(k: torch.Tensor, v: torch.Tensor, start: int) -> Pair:
    payload = encode("kv4", k, v, start=start, layer=3)
    tokens, heads, head_dim = k.shape
    return decode("kv4", payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=k.dtype, start=start, layer=3)


def relative_error(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.float() - true.float()).norm() / true.float().norm())


class TestErrors:
    @settings(max_examples=25, deadline=None)
    @given(
        tokens=st.integers(1, 300),
        heads=st.integers(1, 3),
        head_dim=st.sampled_from(HEAD_DIMS),
        dtype=st.sampled_from(DTYPES),
        start=st.integers(0, 600),
        power=st.integers(-6, 6),
        seed=st.integers(0, 99),
    )
    def test_every_error_is_bounded(
        self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, start: int, power: int, seed: int
    ) -> None:
        k, v = block(tokens, heads, head_dim, dtype, seed)
        k = k * 2.0 ** (torch.arange(head_dim) % 8 + power).to(dtype)  # channels of very different size
        v = v * 2.0**power
        got_k, got_v = there_and_back(k, v, start)
        layout = Kv4Layout(start, tokens, heads, head_dim)
        sixteen = torch.float16 if dtype == torch.float16 else torch.bfloat16
        true_k, true_v = k.to(sixteen).float(), v.to(sixteen).float()
        exempt = layout.exempt
        assert torch.equal(got_k[:exempt].float(), true_k[:exempt])
        assert torch.equal(got_v[:exempt].float(), true_v[:exempt])
        if not layout.coded:
            return
        # At most half a step, or what the widest step clips where its grid lies off the middle: 13 units, of which
        # 205 or more make a span.
        spread = true_k[exempt:].amax(0) - true_k[exempt:].amin(0)
        assert bool(((got_k.float() - true_k).abs() <= spread * (13 / 205) + true_k.abs() * 2.0**-8).all())
        # The same of the largest rotated value, with 1 unit more from rounding the place; a rotation keeps lengths.
        length = true_v.norm(dim=-1)
        bound = 14 / 102 * math.sqrt(head_dim) + 0.01
        assert bool(((got_v.float() - true_v).norm(dim=-1) <= length * bound + 2.0**-30).all())

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_relative_error_of_gaussian_values(self, head_dim: int, dtype: torch.dtype) -> None:
        k, v = block(256, 2, head_dim, dtype)
        got_k, got_v = there_and_back(k, v, 256)
        assert relative_error(got_k, k) < 0.075
        assert relative_error(got_v, v) < 0.079

    @pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 6e4, 1e-5])
    def test_constant_values(self, value: float) -> None:
        k = torch.full((70, 2, 64), value).to(torch.bfloat16)
        got_k, got_v = there_and_back(k, k, 0)
        assert torch.equal(got_k, k)
        assert relative_error(got_v, k) < 0.2 if value else torch.equal(got_v, k)

    def test_an_outlier_channel_of_k_costs_its_neighbours_nothing(self) -> None:
        k, v = block(64, 1, 64, torch.bfloat16)
        plain, _ = there_and_back(k, v, 64)
        k2 = k.clone()
        k2[..., 5] = k2[..., 5] * 50 + 900
        got, _ = there_and_back(k2, v, 64)
        others = [i for i in range(64) if i != 5]
        assert torch.equal(got[..., others], plain[..., others])
        assert relative_error(got[..., 5], k2[..., 5]) < 0.02

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_largest_values_stay_finite(self, dtype: torch.dtype) -> None:
        largest = 65504.0 if dtype == torch.float16 else LARGEST
        generator = torch.Generator().manual_seed(1)
        x = ((torch.rand(70, 1, 64, generator=generator) * 2 - 1) * largest).to(dtype)
        x[10:20] = largest
        x[20:30] = -largest
        got_k, got_v = there_and_back(x, -x, 0)
        assert relative_error(got_k / largest, x / largest) < 0.1
        assert relative_error(got_v / largest, -x / largest) < 0.2  # a constant vector is one spike after the rotation

    def test_the_smallest_values_do_not_divide_by_zero(self) -> None:
        x = torch.zeros(70, 1, 64, dtype=torch.bfloat16)
        x[::3, :, ::5] = 1e-40
        got_k, got_v = there_and_back(x, x, 0)
        assert float((got_k - x).abs().max()) < 2.0**-40
        assert float((got_v - x).abs().max()) < 2.0**-40


def tensors(kind: str, tokens: int = 1024, heads: int = 2, head_dim: int = 128) -> Pair:
    generator = torch.Generator().manual_seed(7)
    shape = (tokens, heads, head_dim)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    k, v = normal(*shape), normal(*shape)
    if kind == "heavy-tailed":  # Student's t with 3 degrees of freedom
        k, v = (x / (normal(3, *shape).square().mean(0)).sqrt() for x in (k, v))
    elif kind == "outlier-channel":
        factor = torch.ones(head_dim)
        factor[[3, 20, 40, 61]] = torch.tensor([10.0, 30.0, 8.0, 50.0])
        k, v = k * factor, v * factor
    elif kind == "qwen2-like":
        bias = normal(heads, head_dim) * 10
        bias[:, :4] += torch.tensor([300.0, -200.0, 600.0, 100.0])
        k = k + bias
    elif kind == "rotary":
        angle = torch.arange(tokens)[:, None, None] * 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
        x, y = (k + normal(heads, head_dim) * 5).chunk(2, -1)
        k = torch.cat((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()), -1)
    elif kind == "drifting":
        k = (normal(*shape) * 0.2).cumsum(0) + k * 0.5
    return k.to(torch.bfloat16), v.to(torch.bfloat16)


def kivi(x: torch.Tensor, dim: int) -> torch.Tensor:
    """KIVI's 4-bit quantisation, group 32, fp16 zeros and scales, along `dim`."""
    groups: torch.Tensor = x.float().unflatten(dim, (-1, 32))
    low, high = groups.amin(dim + 1, keepdim=True), groups.amax(dim + 1, keepdim=True)
    scale, zero = ((high - low) / 15).half().float(), low.half().float()
    codes = ((groups - zero) / scale.clamp(min=1e-8)).round().clamp(0, 15)
    got: torch.Tensor = (codes * scale + zero).view(x.shape).to(x.dtype)
    return got


def logit_error(got: torch.Tensor, true: torch.Tensor) -> float:
    q = torch.randn(32, *true.shape[1:], generator=torch.Generator().manual_seed(1))
    wrong = torch.einsum("qhd,thd->hqt", q, got.float() - true.float())
    return float(wrong.var(-1).mean() / torch.einsum("qhd,thd->hqt", q, true.float()).var(-1).mean())


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "outlier-channel", "qwen2-like", "rotary", "drifting"])
def test_is_no_worse_than_kivi_with_half_a_bit_less(kind: str) -> None:
    k, v = tensors(kind)
    got_k, got_v = there_and_back(k, v, 1024)
    assert relative_error(got_k, k) <= relative_error(kivi(k, 0), k)
    assert relative_error(got_v, v) <= relative_error(kivi(v, 2), v)
    assert logit_error(got_k, k) <= logit_error(kivi(k, 0), k)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "outlier-channel"])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_values_of_small_heads_are_no_worse_either(kind: str, head_dim: int) -> None:
    k, v = tensors(kind, tokens=512, head_dim=head_dim)
    _, got = there_and_back(k, v, 1024)
    assert relative_error(got, v) <= relative_error(kivi(v, 2), v)


class TestFormat:
    @pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
    def test_golden_bytes(self, case: Any) -> None:
        assert case.payload() == case.path.read_bytes()

    def test_a_payload_by_hand(self) -> None:
        """Four tokens at 8..11, one head of 2: K per channel, V rotated by [[1, 1], [1, -1]]."""
        k = torch.tensor([[[0.0, 2.0]], [[16.0, 2.0]], [[4.0, 2.0]], [[8.0, 2.0]]], dtype=torch.bfloat16)
        v = torch.tensor([[[1.0, 1.0]], [[0.0, 0.0]], [[3.0, -1.0]], [[2.0, 0.0]]], dtype=torch.bfloat16)
        payload = bytes(encode("kv4", k, v, start=8, layer=0))
        header = bytes([3, 0]) + bytes(14)
        # Bases 0 and 2. Unit 16 / 256, and the least for the constant channel. Zeros 4/16 (12/16 is as good) and 2.
        # Steps of 16 units, stored less 1; the other group of the pair is not there: 0.
        keys = bytes.fromhex("0000 0040") + bytes([144, 0]) + bytes([4, 0]) + bytes([0x0F, 0])
        # Tokens 8..11 low; positions 24..27, which are not there, high: as the last token.
        key_codes = bytes.fromhex("8000 8F00 8400 8800")
        # Whole numbers (128, 128), (0, 0), (192, -64), (128, 0) rotate to (256, 0), (0, 0), (128, 256), (128, 128).
        # In units (128, 0), (0, 0), (64, 128), (128, 128): steps of 9 from -8 (place 15), or from -72 (place -1).
        values = bytes([132, 0, 136, 132]) + bytes([31 << 3, 15 << 3, 31 << 3, 31 << 3])
        value_codes = bytes.fromhex("1F 88 F8 FF")
        assert payload == header + keys + key_codes + values + value_codes
        got_k, got_v = there_and_back(k, v, 8)
        assert got_k[:, 0, 0].tolist() == [0.25, 15.25, 4.25, 8.25]
        assert got_v[3, 0].tolist() == [2 * 127 / 128, 0.0]

    def test_chunks_at_multiples_of_256_decode_as_the_whole_does(self) -> None:
        k, v = block(900, 2, 64, torch.bfloat16)
        whole = there_and_back(k, v, 0)
        parts = [there_and_back(k[a:b], v[a:b], a) for a, b in ((0, 256), (256, 768), (768, 900))]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_a_shard_of_heads_decodes_as_all_of_them_do(self, head_dim: int) -> None:
        k, v = block(100, 4, head_dim, torch.bfloat16)
        k, v = (x * torch.tensor([1.0, 1e-3, 1e4, 7.0]).view(4, 1).to(x.dtype) for x in (k, v))
        whole = there_and_back(k, v, 0)
        for shard in (slice(0, 1), slice(1, 3), slice(3, 4)):
            got = there_and_back(k[:, shard], v[:, shard], 0)
            assert torch.equal(got[0], whole[0][:, shard])
            assert torch.equal(got[1], whole[1][:, shard])

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_at_most_four_and_a_half_bits_per_element(self, head_dim: int) -> None:
        """1500 tokens in chunks of 512, with everything."""
        total = sum(
            payload_bytes(KV4, WireDtype.BF16, start=start, tokens=tokens, heads=8, head_dim=head_dim)
            for start, tokens in ((0, 512), (512, 512), (1024, 476))
        )
        assert total * 8 / (1500 * 8 * head_dim * 2) <= 4.5

    @settings(max_examples=50, deadline=None)
    @given(
        start=st.integers(0, 600),
        tokens=st.integers(1, 330),
        head_dim=st.integers(1, 20),
        dtype=st.sampled_from(DTYPES),
    )
    def test_any_geometry(self, start: int, tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        k, v = block(tokens, 1, head_dim, dtype)
        expected = payload_bytes(KV4, wire_dtype(dtype), start=start, tokens=tokens, heads=1, head_dim=head_dim)
        assert len(encode("kv4", k, v, start=start, layer=0)) == expected
        got_k, got_v = there_and_back(k, v, start)
        assert relative_error(got_k, k) < 0.25
        assert relative_error(got_v, v) < 0.25

    def test_the_rotation_is_sylvesters(self) -> None:
        four = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
        assert torch.equal(hadamard(4), four)
        assert torch.equal(hadamard(12), torch.block_diag(four, four, four))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
class TestNative:
    """The C++ library beside the reference: the same payloads, the same values."""

    @pytest.fixture(autouse=True)
    def mode(self) -> Iterator[None]:
        before = accelerate.mode()
        yield
        accelerate.set_mode(before)

    def results(self, k: torch.Tensor, v: torch.Tensor, start: int) -> tuple[bytes, torch.Tensor, torch.Tensor]:
        payload = bytes(encode("kv4", k, v, start=start, layer=0))
        tokens, heads, head_dim = k.shape
        back = decode(
            "kv4", payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=k.dtype, start=start, layer=0
        )
        return payload, *back

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 144, 256, 528])
    def test_all_shapes_agree(self, head_dim: int, dtype: torch.dtype) -> None:
        """Blocks that begin and end anywhere in a span; whole and half runs of lanes; heads that it does not take."""
        for heads, tokens, start in ((1, 70, 2), (3, 300, 100), (2, 260, 0), (1, 5, 37), (2, 256, 256)):
            k, v = block(tokens, heads, head_dim, dtype, seed=tokens)
            k = k * 2.0 ** (torch.arange(head_dim) % 9 - 4).to(dtype) + 100 * (torch.arange(head_dim) % 5 == 0)
            k[:, 0, 3], k[:, 0, 5] = 5.0, k[:, 0, 5] * 0  # constant, and zeros of both signs
            v = v**3
            v[:: max(1, tokens // 3)], v[-1, 0] = 0.75, 0.0
            v[tokens // 2 :] *= 2.0 ** -(torch.arange(tokens - tokens // 2) % 20).view(-1, 1, 1).to(dtype)
            accelerate.set_mode("eager")
            expected = self.results(k, v, start)
            accelerate.set_mode("compiled")
            found = self.results(k, v, start)
            assert found[0] == expected[0]
            for got, true in zip(found[1:], expected[1:], strict=True):
                assert torch.equal(got.view(torch.int16), true.view(torch.int16))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_equally_good_grids_agree(self, dtype: torch.dtype) -> None:
        """Of small whole numbers many lie half a step off, and more than one grid has the least error."""
        generator = torch.Generator().manual_seed(3)
        for most in (2, 3, 16, 31, 60):
            k, v = (torch.randint(-1, most, (300, 2, 64), generator=generator).to(dtype) for _ in range(2))
            accelerate.set_mode("eager")
            expected = self.results(k, v, 100)
            accelerate.set_mode("compiled")
            assert self.results(k, v, 100)[0] == expected[0]

    def test_values_next_to_powers_of_two_are_rounded_alike(self) -> None:
        """Whole multiples of a unit, less a base far smaller than bf16 has room for beside them."""
        generator = torch.Generator().manual_seed(4)
        k = torch.randint(0, 16, (40, 2, 64), generator=generator) * 0.25
        k[0] = -(2.0**-18) * torch.rand(2, 64, generator=generator)
        k = k.to(torch.bfloat16)
        accelerate.set_mode("eager")
        expected = self.results(k, k, 256)
        accelerate.set_mode("compiled")
        found = self.results(k, k, 256)
        assert found[0] == expected[0]
        assert torch.equal(found[1], expected[1])

    def test_the_number_of_threads_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerate.set_mode("compiled")
        k, v = block(600, 2, 64, torch.bfloat16)
        alone = self.results(k, v, 100)
        monkeypatch.setattr(kv4_native, "threads", lambda _: 3)
        shared = self.results(k, v, 100)
        assert shared[0] == alone[0]
        assert torch.equal(shared[1], alone[1])
        assert torch.equal(shared[2], alone[2])


class TestBadInput:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**31])
    @pytest.mark.parametrize("tensor", ["K", "V"])
    def test_values_that_cannot_be_coded_are_named(self, tensor: str, bad: float) -> None:
        k, v = block(10, 2, 64, torch.float32)
        (k if tensor == "K" else v)[7, 1, 33] = bad
        match = rf"layer 5: {tensor} is .* at position 107, head 1, channel 33; .* at most 2\*\*30"
        with pytest.raises(NonFiniteError, match=match):
            encode("kv4", k, v, start=100, layer=5)

    @pytest.mark.parametrize("token", [2, 9, 300])
    @pytest.mark.parametrize("tensor", ["K", "V"])
    def test_infinite_halves_are_named(self, tensor: str, token: int) -> None:
        """torch rounds what it compares fp16 with to fp16: infinity does not exceed 2**30 there."""
        k, v = block(310, 1, 64, torch.float16)
        (k if tensor == "K" else v)[token, 0, 5] = math.inf
        with pytest.raises(NonFiniteError, match=f"{tensor} is inf at position {token}, head 0, channel 5"):
            encode("kv4", k, v, start=0, layer=0)

    def test_an_exempt_token_is_checked_too(self) -> None:
        k, v = block(10, 1, 64, torch.float16)
        v[2, 0, 0] = math.nan
        with pytest.raises(NonFiniteError, match="V is nan at position 2"):
            encode("kv4", k, v, start=0, layer=0)


class TestBadPayloads:
    def decode(self, payload: bytes | bytearray, dtype: torch.dtype = torch.bfloat16) -> Pair:
        return decode("kv4", payload, dtype=dtype, tokens=70, heads=2, head_dim=16, start=0, layer=4)

    def payload(self, dtype: torch.dtype = torch.bfloat16) -> bytearray:
        return bytearray(encode("kv4", *block(70, 2, 16, dtype), start=0, layer=4))

    @pytest.mark.parametrize(("at", "value", "message"), [(0, 1, "version 1"), (1, 1, "dtype 1"), (9, 1, "corrupt")])
    def test_header(self, at: int, value: int, message: str) -> None:
        payload = self.payload()
        payload[at] = value
        with pytest.raises(PayloadError, match=message):
            self.decode(payload)

    def test_the_other_16_bit_dtype(self) -> None:
        with pytest.raises(PayloadError, match="dtype 0, expected 1"):
            self.decode(self.payload(), torch.float16)

    @pytest.mark.parametrize(
        ("section", "offset", "name", "where"),
        [
            (1, 2 * (2 * 32 + 16 + 3), "K", "position 2, head 1, channel 3"),
            (2, 2 * (2 * 32 + 16 + 3), "V", "position 2, head 1, channel 3"),
            (3, 2 * (16 + 5), "K", "position 4, head 1, channel 5"),
        ],
    )
    def test_nan_is_named(self, section: int, offset: int, name: str, where: str) -> None:
        payload = self.payload()
        at = sum(Kv4Layout(0, 70, 2, 16).section_bytes[:section]) + offset
        payload[at : at + 2] = b"\xff\x7f"
        with pytest.raises(PayloadError, match=f"layer 4: {name} has a parameter nan at {where}"):
            self.decode(payload)

    def test_infinite_halves_in_a_payload_are_refused(self) -> None:
        sizes = Kv4Layout(0, 70, 2, 16).section_bytes
        for section in (1, 2, 3):
            payload = self.payload(torch.float16)
            at = sum(sizes[:section])
            payload[at : at + 2] = b"\x00\x7c"
            with pytest.raises(PayloadError, match="has a parameter inf at"):
                self.decode(payload, torch.float16)

    @settings(max_examples=80, deadline=None)
    @given(
        edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=30),
        dtype=st.sampled_from(DTYPES),
    )
    def test_corruption_never_gives_nan(self, edits: list[tuple[int, int]], dtype: torch.dtype) -> None:
        payload = self.payload(dtype)
        for at, value in edits:
            # Half of the edits hit the parameters, which are few; codes cannot be wrong, only different.
            payload[at % (len(payload) if at % 2 else 700)] = value
        self.is_finite_or_refused(payload, dtype)

    @settings(max_examples=60, deadline=None)
    @given(data=st.randoms(use_true_random=False), dtype=st.sampled_from(DTYPES))
    def test_random_bytes_never_give_nan(self, data: Any, dtype: torch.dtype) -> None:
        payload = self.payload(dtype)
        payload[16:] = data.randbytes(len(payload) - 16)
        self.is_finite_or_refused(payload, dtype)

    def is_finite_or_refused(self, payload: bytes | bytearray, dtype: torch.dtype) -> None:
        try:
            k, v = self.decode(bytes(payload), dtype)
        except CodecError:
            return
        assert bool(torch.isfinite(k).all())
        assert bool(torch.isfinite(v).all())


def test_layouts_tile_the_block() -> None:
    """Rows of codes, groups and spans of neighbouring blocks add up to no less than those of the whole."""
    for cut, start in product(range(1, 40, 3), (0, 4, 16, 31, 250)):
        layout = Kv4Layout(start, cut, 1, 2)
        if not layout.coded:
            continue
        positions = range(layout.lead, layout.lead + layout.coded)
        rows = {position // 32 * 16 + position % 16 for position in positions}
        stored = range(layout.code_rows.start, layout.code_rows.stop)
        assert rows <= set(stored)
        assert {position // 32 for position in positions} == set(range(*layout.group_rows.indices(99)))
