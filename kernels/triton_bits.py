"""Device functions that the Triton kernels share: roundings in integer bit operations, because
flushing, division, fused multiply-add and conversions differ between GPUs and compilers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[misc]
def rounded(x: tl.tensor, sixteen: tl.constexpr) -> tl.tensor:
    """fp32 numbers that stand in the 16-bit dtype: `x` to nearest even. |x| must not overflow it."""
    bits = x.to(tl.int32, bitcast=True)
    if sixteen == tl.bfloat16:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        normal = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
        # Below 2**-14 fp16 has a fixed step of 2**-24; adding 0.5 leaves fp32 with the same.
        size = tl.abs(x)
        small = (size + 0.5) - 0.5
        return tl.where(size < 0.00006103515625, tl.where(x < 0, -small, small), normal)


@triton.jit  # type: ignore[misc]
def clamped(x: tl.tensor, sixteen: tl.constexpr) -> tl.tensor:
    """`rounded`, for fp16 clamped to its largest values first."""
    if sixteen == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return rounded(x, sixteen)


@triton.jit  # type: ignore[misc]
def nearby(x: tl.tensor) -> tl.tensor:
    """The whole number nearest to |x| < 2**22, ties to even, as fp32. Launch with
    `enable_fp_fusion=False` where `x` is an inexact product."""
    return (x + 12582912.0) - 12582912.0


@triton.jit  # type: ignore[misc]
def finite(x: tl.tensor) -> tl.tensor:
    """Whether |x| is at most 2**120; false for NaN."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) <= 0x7B800000


@triton.jit  # type: ignore[misc]
def raise_flag(flag: tl.tensor, unsound: tl.tensor) -> None:
    """Write 1 to `flag` if any of `unsound` is true."""
    nothing = unsound.to(tl.int32) * 0
    tl.store(flag + nothing, nothing + 1, mask=unsound)


@triton.jit  # type: ignore[misc]
def power(exponent: tl.tensor) -> tl.tensor:
    """2.0 ** exponent for int32 that give normal fp32 numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[misc]
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """The byte of the e4m3 number nearest to |x| <= 448, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the step is 2**-9, which is fp32's at 2**14.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit  # type: ignore[misc]
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """The fp32 number of an e4m3 byte given as int32. The bytes of NaN give 0."""
    size = (code & 0x7F) << 20
    normal = (size + 0x3C000000).to(tl.float32, bitcast=True)
    small = (size + 0x3C800000).to(tl.float32, bitcast=True) - 0.015625
    number = tl.where(size < 0x800000, small, tl.where(size < 0x7F00000, normal, 0.0))
    return tl.where(code >= 0x80, -number, number)
