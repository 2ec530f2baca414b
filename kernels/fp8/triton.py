"""`fp8` for GPUs. Same bytes as `fp8`, which says what they mean."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..triton_bits import clamped, finite, from_e4m3, power, raise_flag, rounded, to_e4m3
from .layout import Fp8Layout
from .reference import Fp8Sections

CHANNELS = 64
"""Channels of K per program and run: 32 x 64 values in rows of 128 bytes. One warp, so that no
reduction needs shared memory or a barrier."""

ELEMENTS = 4096
"""Values of V per program."""

_VARYING = ["tokens", "lead"]
"""What differs between blocks; Triton would compile anew for multiples of 16, others, and 1."""


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Fp8Layout, flag: torch.Tensor) -> None:
    """Fill parameters and codes from `[tokens, heads, head_dim]` 16-bit values."""
    kernels = quantise_keys_kernel, quantise_values_kernel
    _launch(kernels, (k.contiguous(), v.contiguous()), Fp8Sections.of(payload, layout, k.dtype), layout, flag)


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Fp8Layout, flag: torch.Tensor) -> None:
    """Write the `[tokens, heads, head_dim]` 16-bit values, both contiguous."""
    kernels = dequantise_keys_kernel, dequantise_values_kernel
    _launch(kernels, (k, v), Fp8Sections.of(payload, layout, k.dtype), layout, flag)


def _launch(
    kernels: tuple[Any, Any],
    kv: tuple[torch.Tensor, torch.Tensor],
    sections: Fp8Sections,
    layout: Fp8Layout,
    flag: torch.Tensor,
) -> None:
    """Run the kernel of K over groups of tokens, then that of V over rows of channels."""
    row = layout.heads * layout.head_dim
    grid = (layout.key_groups, triton.cdiv(row, CHANNELS))
    keys = (sections.key_zeros, sections.key_exponents, sections.key_codes, flag)
    kernels[0][grid](kv[0], keys, layout.tokens, layout.lead, row, CHANNELS, num_warps=1)
    rows = layout.tokens * layout.heads
    count = max(1, ELEMENTS // int(triton.next_power_of_2(layout.head_dim)))
    values = (sections.value_exponents, sections.value_codes, flag)
    kernels[1][(triton.cdiv(rows, count),)](kv[1], values, rows, layout.head_dim, count)


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[misc]
def quantise_keys_kernel(
    x: tl.tensor, into: tl.tensor, tokens: tl.tensor, lead: tl.tensor, width: tl.tensor, block: tl.constexpr
) -> None:
    zeros, exponents, codes, flag = into
    group = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    low = tl.full((block,), float("inf"), tl.float32)
    high = -low
    inner_low, inner_high = high, low
    sound = tl.full((block,), 1, tl.int32)
    for run in range(4):
        token = group * 128 - lead + run * 32 + tl.arange(0, 32)
        here = ((token >= 0) & (token < tokens))[:, None] & inside[None, :]
        at = token.to(tl.int64)[:, None] * width + channel[None, :]
        values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        sound = sound & tl.min(finite(values).to(tl.int32), 0)
        least = tl.min(tl.where(here, values, float("inf")), 0)
        most = tl.max(tl.where(here, values, float("-inf")), 0)
        low, high = tl.minimum(low, least), tl.maximum(high, most)
        inner_low = tl.maximum(inner_low, tl.where(least == float("inf"), float("-inf"), least))
        inner_high = tl.minimum(inner_high, tl.where(most == float("-inf"), float("inf"), most))
    sixteen: tl.constexpr = x.dtype.element_ty
    zero = rounded((inner_low + inner_high) * 0.5, sixteen) + 0.0  # never -0
    exponent = _exponent(tl.maximum(high - zero, zero - low))
    factor = power(135 - exponent)
    at = group.to(tl.int64) * width + channel
    tl.store(zeros + at, zero.to(sixteen), mask=inside)
    tl.store(exponents + at, exponent.to(tl.uint8), mask=inside)
    raise_flag(flag, sound == 0)
    for run in range(4):  # a second read, which the caches answer
        token = group * 128 - lead + run * 32 + tl.arange(0, 32)
        here = ((token >= 0) & (token < tokens))[:, None] & inside[None, :]
        there = token.to(tl.int64)[:, None] * width + channel[None, :]
        values = tl.load(x + there, mask=here, other=0.0).to(tl.float32)
        code = to_e4m3((values - zero[None, :]) * factor[None, :])
        tl.store(codes + there, code.to(tl.uint8), mask=here)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[misc]
def quantise_values_kernel(
    x: tl.tensor, into: tl.tensor, rows: tl.tensor, width: tl.constexpr, block: tl.constexpr
) -> None:
    exponents, codes, flag = into
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    channel = tl.arange(0, triton.next_power_of_2(width))
    here = (row < rows)[:, None] & (channel < width)[None, :]
    at = row[:, None] * width + channel[None, :]
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    sound = tl.min(finite(values).to(tl.int32), 1)
    exponent = _exponent(tl.max(tl.abs(values), 1))
    code = to_e4m3(values * power(135 - exponent)[:, None])
    tl.store(codes + at, code.to(tl.uint8), mask=here)
    tl.store(exponents + row, exponent.to(tl.uint8), mask=row < rows)
    raise_flag(flag, sound == 0)


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[misc]
def dequantise_keys_kernel(
    x: tl.tensor, stored: tl.tensor, tokens: tl.tensor, lead: tl.tensor, width: tl.tensor, block: tl.constexpr
) -> None:
    zeros, exponents, codes, flag = stored
    group = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    at = group.to(tl.int64) * width + channel
    zero = tl.load(zeros + at, mask=inside, other=0.0).to(tl.float32)
    exponent = _loaded_exponents(exponents + at, inside)
    raise_flag(flag, (finite(zero) == 0) | _out_of_range(exponent))
    factor = power(exponent - 135)
    sixteen: tl.constexpr = x.dtype.element_ty
    for run in range(4):
        token = group * 128 - lead + run * 32 + tl.arange(0, 32)
        here = ((token >= 0) & (token < tokens))[:, None] & inside[None, :]
        there = token.to(tl.int64)[:, None] * width + channel[None, :]
        code = tl.load(codes + there, mask=here, other=0).to(tl.int32)
        values = clamped(from_e4m3(code) * factor[None, :] + zero[None, :], sixteen)
        tl.store(x + there, values.to(sixteen), mask=here)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[misc]
def dequantise_values_kernel(
    x: tl.tensor, stored: tl.tensor, rows: tl.tensor, width: tl.constexpr, block: tl.constexpr
) -> None:
    exponents, codes, flag = stored
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    channel = tl.arange(0, triton.next_power_of_2(width))
    here = (row < rows)[:, None] & (channel < width)[None, :]
    at = row[:, None] * width + channel[None, :]
    exponent = _loaded_exponents(exponents + row, row < rows)
    raise_flag(flag, _out_of_range(exponent))
    factor = power(exponent - 135)
    code = tl.load(codes + at, mask=here, other=0).to(tl.int32)
    sixteen: tl.constexpr = x.dtype.element_ty
    tl.store(x + at, clamped(from_e4m3(code) * factor[:, None], sixteen).to(sixteen), mask=here)


@triton.jit  # type: ignore[misc]
def _exponent(reach: tl.tensor) -> tl.tensor:
    """Clamped so far that a reach beyond fp32 still gives a scale that is a number."""
    return tl.minimum(tl.maximum((reach.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23, 32), 250)


@triton.jit  # type: ignore[misc]
def _loaded_exponents(at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """As int32; 135, which is in range, where `mask` is false. Not by `other`: where a thread loads several bytes,
    Triton 3.7 fills them wrongly with a number beyond 127."""
    return tl.where(mask, tl.load(at, mask=mask, other=0).to(tl.int32), 135)


@triton.jit  # type: ignore[misc]
def _out_of_range(exponent: tl.tensor) -> tl.tensor:
    """Whether no encoder writes this exponent: `EXPONENT_RANGE` of the reference."""
    return (exponent < 32) | (exponent > 250)
