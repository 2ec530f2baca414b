"""Compare the Triton kernels with the plain torch references, byte for byte: `python check_triton.py DEVICE`.

On a CPU this runs in Triton's interpreter, which TRITON_INTERPRET=1 must have chosen before Triton is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from p2pserve.kernels import (
    fp8_reference,
    kivi4_reference,
    kv4_reference,
    triton_fp8,
    triton_kivi4,
    triton_kv4,
)
from p2pserve.kernels.blocks import new_flag
from p2pserve.kernels.codec import decode, encode
from p2pserve.kernels.format import Fp8Layout, Kivi4Layout, Kv4Layout

# tokens, heads, head_dim, start
GEOMETRIES = (
    (64, 1, 64, 0),
    (70, 1, 80, 5),
    (36, 1, 96, 31),
    (33, 1, 128, 7),
    (34, 1, 256, 100),
    (150, 1, 16, 250),
)
BAD = (float("nan"), -float("inf"), 2.0**121)


def block(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels and tokens of very different size, constant ones, zeros of both signs."""
    rng = torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(tokens, heads, head_dim, generator=rng) for _ in range(2))
    k = k * 3 + 20 * torch.randn(heads, head_dim, generator=rng)
    v = v * torch.exp(2 * torch.randn(tokens, heads, 1, generator=rng))
    k[:, 0, 1], k[:, :, 2] = 2.5, k[:, :, 2] * 1e-6
    v[0], v[-1, 0], v[tokens // 2] = 0.0, -3.0, v[tokens // 2] * 1e-7
    v[tokens // 2, 0, 3] = -0.0
    return k.to(dtype), v.to(dtype)


def check(device: str, dtype: torch.dtype, geometry: tuple[int, int, int, int]) -> Iterator[str]:
    """One name for each codec that agrees; AssertionError for the first that does not."""
    tokens, heads, head_dim, start = geometry
    k, v = block(tokens, heads, head_dim, dtype)
    for codec in ("kv4", "fp8", "kivi4"):
        payload = bytearray(encode(codec, k, v, start=start, layer=0))
        expected = torch.frombuffer(payload, dtype=torch.uint8)
        plain = decode(codec, payload, tokens=tokens, heads=heads, head_dim=head_dim, dtype=dtype, start=start, layer=0)
        run = {"kv4": run_kv4, "fp8": run_fp8, "kivi4": run_kivi4}[codec]
        got, values = run(expected, k.to(device), v.to(device), start)
        # The header and 16-bit tokens are not the kernels' work; they hand over what they were given.
        assert torch.equal(got.cpu(), expected), f"{codec} {dtype} {geometry}: other bytes"
        for name, one, other in zip("KV", plain, values, strict=True):
            assert torch.equal(one, other.cpu()), f"{codec} {dtype} {geometry}: other values of {name}"
        yield codec


Outcome = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def run_kv4(expected: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> Outcome:
    layout = Kv4Layout(start, *k.shape)
    first = layout.exempt
    got = cleared(expected, sum(layout.section_bytes[:3]), k.device)
    sections = kv4_reference.Sections.of(got, layout, k.dtype)
    out = k.clone(), v.clone()
    if layout.coded:
        flag = new_flag(k.device)
        triton_kv4.quantise(k[first:], v[first:], sections, layout, flag)
        triton_kv4.dequantise(sections, out[0][first:].zero_(), out[1][first:].zero_(), layout, flag)
        assert not bool(flag)
        for bad in BAD:
            for pair in spoilt(k, v, first, bad):
                other = kv4_reference.Sections.of(torch.zeros_like(got), layout, k.dtype)
                triton_kv4.quantise(pair[0][first:], pair[1][first:], other, layout, flag.zero_())
                assert bool(flag)
    return got, out


def run_fp8(expected: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> Outcome:
    layout = Fp8Layout(start, *k.shape)
    got = cleared(expected, layout.section_bytes[0], k.device)
    sections = fp8_reference.Sections.of(got, layout, k.dtype)
    flag = new_flag(k.device)
    triton_fp8.quantise(k, v, sections, layout, flag)
    out = torch.zeros_like(k), torch.zeros_like(v)
    triton_fp8.dequantise(sections, *out, layout, flag)
    assert not bool(flag)
    for bad in BAD:
        for pair in spoilt(k, v, 0, bad):
            other = fp8_reference.Sections.of(torch.zeros_like(got), layout, k.dtype)
            triton_fp8.quantise(*pair, other, layout, flag.zero_())
            assert bool(flag)
    return got, out


def run_kivi4(expected: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> Outcome:
    layout = Kivi4Layout(start, *k.shape)
    coded = slice(layout.lead, layout.lead + layout.coded)
    got = cleared(expected, sum(layout.section_bytes[:3]), k.device)
    sections = kivi4_reference.Sections.of(got, layout, k.dtype)
    out = k.clone(), v.clone()
    if layout.coded:
        flag = new_flag(k.device)
        triton_kivi4.quantise(k[coded], v[coded], sections, flag)
        triton_kivi4.dequantise(sections, out[0][coded].zero_(), out[1][coded].zero_(), flag)
        assert not bool(flag)
        for bad in BAD:
            for pair in spoilt(k, v, layout.lead, bad):
                other = kivi4_reference.Sections.of(torch.zeros_like(got), layout, k.dtype)
                triton_kivi4.quantise(pair[0][coded], pair[1][coded], other, flag.zero_())
                assert bool(flag)
    return got, out


def cleared(expected: torch.Tensor, kept: int, device: torch.device) -> torch.Tensor:
    """A payload of which only the first bytes are there yet."""
    payload = torch.zeros_like(expected)
    payload[:kept] = expected[:kept]
    return payload.to(device)


def spoilt(k: torch.Tensor, v: torch.Tensor, first: int, bad: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pair with one bad value in K, then with one in V; of blocks of 64 tokens, which is enough."""
    for which in range(2 if len(k) == 64 else 0):
        pair = k.clone(), v.clone()
        pair[which][first + 2, -1, -1] = bad  # 2**121 is infinite in fp16
        yield pair


def main() -> None:
    device = sys.argv[1]
    for dtype in (torch.bfloat16, torch.float16):
        for geometry in GEOMETRIES:
            sys.stdout.write(f"{' '.join(check(device, dtype, geometry))}\n")


if __name__ == "__main__":
    main()
