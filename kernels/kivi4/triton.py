"""`kivi4` for GPUs: the same bytes as the reference makes.

One kernel serves K and V. A column is one group, its elements `inner` apart: K's stand side by side
(`inner` = heads * head_dim), V's one behind the other (`inner` = 1, a constant to Triton).
Neighbouring threads touch neighbouring addresses; the input is read once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..triton_bits import clamped, finite, nearby, raise_flag, rounded
from .layout import GROUP, Kivi4Layout
from .reference import Kivi4Sections

COLUMNS = 64
"""Columns per program: 32 x 64 values of 2 bytes, read in rows of 128 bytes."""

_LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
"""One warp: reductions need no shared memory or barrier; 16 wide loads per thread in flight."""


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Kivi4Layout, flag: torch.Tensor) -> None:
    """Fill parameters and codes from `[coded, heads, head_dim]` 16-bit values in whole groups."""
    _launch(quantise_kernel, (k.contiguous(), v.contiguous()), payload, layout, flag)


def dequantise(
    payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kivi4Layout, flag: torch.Tensor
) -> None:
    """Write the `[coded, heads, head_dim]` 16-bit values in whole groups, both contiguous."""
    _launch(dequantise_kernel, (k, v), payload, layout, flag)


def _launch(
    kernel: Any, kv: tuple[torch.Tensor, torch.Tensor], payload: torch.Tensor, layout: Kivi4Layout, flag: torch.Tensor
) -> None:
    """Run a kernel over the groups of K, then over those of V. It finds the scales right behind the zeros."""
    k, v = kv
    sections = Kivi4Sections.of(payload, layout, k.dtype)
    row, width = layout.heads * layout.head_dim, layout.head_dim // layout.value_groups
    for x, zeros, packed, inner, channels in (
        (k, sections.key_zeros, sections.key_codes, row, GROUP),
        (v, sections.value_zeros, sections.value_codes, 1, width),
    ):
        columns = zeros.numel()
        grid = (triton.cdiv(columns, COLUMNS),)
        kernel[grid](x, zeros, packed, flag, columns, inner, channels, COLUMNS, **_LAUNCH)


@triton.jit  # type: ignore[misc]
def quantise_kernel(
    x: tl.tensor,
    zeros: tl.tensor,
    packed: tl.tensor,
    flag: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    half: tl.constexpr = (width + 1) // 2
    column = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    valid = column < columns
    group, lane = column // inner, column % inner
    row = tl.arange(0, triton.next_power_of_2(half))
    here = (row < half)[:, None] & valid[None, :]
    there = (row < width - half)[:, None] & valid[None, :]
    first = x + (group * (width * inner) + lane)[None, :] + row.to(tl.int64)[:, None] * inner
    low = tl.load(first, mask=here, other=0.0).to(tl.float32)
    high = tl.load(first + half * inner, mask=there, other=0.0).to(tl.float32)
    least = tl.minimum(_least(low, here), _least(high, there)) + 0.0  # never -0
    most = -tl.minimum(_least(-low, here), _least(-high, there))
    sixteen: tl.constexpr = x.dtype.element_ty
    scale = rounded(tl.math.div_rn(most - least, 15.0), sixteen)
    scale = tl.where(scale >= 7.888609052210118e-31, scale, 0.0)
    inverse = tl.where(scale > 0, tl.math.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    codes = _codes(low, least, inverse) | (tl.where(there, _codes(high, least, inverse), 0) << 4)
    raise_flag(flag, (tl.min(finite(low).to(tl.int32), 0) & tl.min(finite(high).to(tl.int32), 0)) == 0)
    tl.store(zeros + column, least.to(sixteen), mask=valid)
    tl.store(zeros + columns + column, scale.to(sixteen), mask=valid)
    into = packed + (group * (half * inner) + lane)[None, :] + row.to(tl.int64)[:, None] * inner
    tl.store(into, codes.to(tl.uint8), mask=here)


@triton.jit  # type: ignore[misc]
def dequantise_kernel(
    x: tl.tensor,
    zeros: tl.tensor,
    packed: tl.tensor,
    flag: tl.tensor,
    columns: tl.tensor,
    inner: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    half: tl.constexpr = (width + 1) // 2
    column = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    valid = column < columns
    group, lane = column // inner, column % inner
    row = tl.arange(0, triton.next_power_of_2(half))
    here = (row < half)[:, None] & valid[None, :]
    there = (row < width - half)[:, None] & valid[None, :]
    source = packed + (group * (half * inner) + lane)[None, :] + row.to(tl.int64)[:, None] * inner
    codes = tl.load(source, mask=here, other=0).to(tl.int32)
    zero = tl.load(zeros + column, mask=valid, other=0.0).to(tl.float32)
    scale = tl.load(zeros + columns + column, mask=valid, other=0.0).to(tl.float32)
    raise_flag(flag, (finite(zero) == 0) | _no_scale(scale))
    zero, scale = zero[None, :], scale[None, :]
    sixteen: tl.constexpr = x.dtype.element_ty
    low = clamped((codes & 15).to(tl.float32) * scale + zero, sixteen)
    high = clamped((codes >> 4).to(tl.float32) * scale + zero, sixteen)
    first = x + (group * (width * inner) + lane)[None, :] + row.to(tl.int64)[:, None] * inner
    tl.store(first, low.to(sixteen), mask=here)
    tl.store(first + half * inner, high.to(sixteen), mask=there)


@triton.jit  # type: ignore[misc]
def _no_scale(scale: tl.tensor) -> tl.tensor:
    """Whether the scale is beyond the reference's `LARGEST_SCALE`, less than 0 or NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits < 0) & (scale != 0.0)) | (bits > 0x7A800000)


@triton.jit  # type: ignore[misc]
def _least(x: tl.tensor, valid: tl.tensor) -> tl.tensor:
    return tl.min(tl.where(valid, x, float("inf")), 0)


@triton.jit  # type: ignore[misc]
def _codes(x: tl.tensor, zero: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    return nearby(tl.minimum((x - zero[None, :]) * inverse[None, :], 15.0)).to(tl.int32)
