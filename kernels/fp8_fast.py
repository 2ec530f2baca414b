"""`fp8` as functions that a compiler turns into vector code. Same bytes as `fp8`, which says what they mean.

They allocate what they return and take no decisions that depend on data. Zeros are rounded to 16 bit in so many
integer operations, since a compiler may keep the unrounded fp32 instead. Values are not: inductor moves the bits of
every element through memory to look at them, so its own conversion to 8-bit floats is the faster one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .accelerate import Accelerated, Function, Outputs
from .blocks import LARGEST, all_within
from .fp8_layout import FP8_GROUP_TOKENS, FP8_RUN_TOKENS, Fp8Layout
from .fp8_reference import BIAS, EXPONENT_RANGE, UNSOUND, Sections, dequantise_keys, quantise_keys
from .kivi4_fast import Call, rounded

__all__ = ["compiled", "dequantise", "power", "quantise"]


def compiled(function: Function, *tensors: torch.Tensor) -> Outputs | None:
    """Call the compiled version of a function below. None: there is none yet."""
    return _COMPILED[function](*tensors)


def quantise(k: torch.Tensor, v: torch.Tensor, into: Sections, layout: Fp8Layout, call: Call = compiled) -> bool | None:
    """As `fp8_reference.quantise`, for any values. None: nothing is compiled yet.

    False: there are values that are not finite, and the sections are void. Groups of K that the block's ends cut go
    to the reference.
    """
    finite = True
    for part in _parts(layout):
        given = k[part.tokens]
        if part.whole:
            groups = given.reshape(part.layout.key_groups, FP8_GROUP_TOKENS, -1)
            found = call(key_parameters, groups)
            coded = found and call(key_codes, groups, found[0], found[2])
            if not found or not coded:
                return None
            zeros, exponents, packed = found[0], found[1], coded[0].view(torch.uint8)
            finite = finite and not bool((exponents == UNSOUND).any())
        else:
            finite = finite and bool(all_within(given))
            zeros, exponents, packed = quantise_keys(given, part.layout)
        into.key_zeros[part.groups].copy_(zeros.view(-1, layout.heads, layout.head_dim))
        into.key_exponents[part.groups].copy_(exponents.view(-1, layout.heads, layout.head_dim))
        into.key_codes[part.tokens].copy_(packed.view(given.shape))
    rows = v.reshape(-1, layout.head_dim)
    found = call(value_parameters, rows)
    coded = found and call(value_codes, rows, found[1])
    if not found or not coded:
        return None
    into.value_exponents.copy_(found[0].view(into.value_exponents.shape))
    into.value_codes.copy_(coded[0].view(torch.uint8).view(v.shape))
    return finite and not bool((found[0] == UNSOUND).any())


def dequantise(
    sections: Sections, k: torch.Tensor, v: torch.Tensor, layout: Fp8Layout, call: Call = compiled
) -> bool | None:
    """As `fp8_reference.dequantise`. None: nothing is compiled yet, and what was written is void."""
    for part in _parts(layout):
        zeros, exponents = sections.key_zeros[part.groups], sections.key_exponents[part.groups]
        packed = sections.key_codes[part.tokens]
        if part.whole:
            groups = packed.view(torch.float8_e4m3fn).view(part.layout.key_groups, FP8_GROUP_TOKENS, -1)
            factors = power(exponents.to(torch.int32) - BIAS)
            shape = (part.layout.key_groups, -1)
            found = call(key_values, groups, zeros.view(shape), factors.view(shape))
            if not found:
                return None
            k[part.tokens].copy_(found[0].view(packed.shape))
        else:
            k[part.tokens].copy_(dequantise_keys(zeros, exponents, packed, part.layout))
    rows = sections.value_codes.view(torch.float8_e4m3fn).view(-1, layout.head_dim)
    factors = power(sections.value_exponents.to(torch.int32) - BIAS).view(-1)
    found = call(half_values if v.dtype == torch.float16 else bfloat_values, rows, factors)
    if not found:
        return None
    v.copy_(found[0].view(v.shape))
    return True


class _Part(NamedTuple):
    """A run of tokens that is whole groups, or less than one group of which the rest is in another block."""

    layout: Fp8Layout
    tokens: slice
    groups: slice
    whole: bool


def _parts(layout: Fp8Layout) -> Iterator[_Part]:
    first = min(layout.tokens, -layout.start % FP8_GROUP_TOKENS)
    last = first + (layout.tokens - first) // FP8_GROUP_TOKENS * FP8_GROUP_TOKENS
    group = 0
    for begin, end, whole in ((0, first, False), (first, last, True), (last, layout.tokens, False)):
        if begin < end:
            part = Fp8Layout(layout.start + begin, end - begin, layout.heads, layout.head_dim)
            yield _Part(part, slice(begin, end), slice(group, group + part.key_groups), whole)
            group += part.key_groups


def key_parameters(groups: torch.Tensor) -> Outputs:
    """Zeros in 16 bit, exponents and fp32 factors 2 ** (135 - exponent) of `[many, 128, channels]` 16-bit values.

    An exponent is `UNSOUND` where its group has a value that is not finite or too large.
    """
    runs = groups.view(groups.shape[0], -1, FP8_RUN_TOKENS, groups.shape[2]).to(torch.float32)
    lowest, highest = runs.amin(2), runs.amax(2)
    low, high = lowest.amin(1), highest.amax(1)
    middle = (lowest.amax(1) + highest.amin(1)) * 0.5
    size = rounded(middle.abs(), groups.dtype)
    zero = torch.where(middle < 0, -size, size)
    exponent = _exponents(torch.maximum(high - zero, zero - low))
    sound = (low >= -LARGEST) & (high <= LARGEST)
    return zero.to(groups.dtype), torch.where(sound, exponent, UNSOUND).to(torch.uint8), power(BIAS - exponent)


def value_parameters(rows: torch.Tensor) -> Outputs:
    """Exponents and factors of `[many, head_dim]` 16-bit values; `UNSOUND` as for keys."""
    reach = rows.to(torch.float32).abs().amax(1)
    exponent = _exponents(reach)
    return torch.where(reach <= LARGEST, exponent, UNSOUND).to(torch.uint8), power(BIAS - exponent)


def key_codes(groups: torch.Tensor, zeros: torch.Tensor, factors: torch.Tensor) -> Outputs:
    """e4m3 numbers of `[many, 128, channels]` 16-bit values less their zeros."""
    centred = groups.to(torch.float32) - zeros.to(torch.float32).unsqueeze(1)
    return ((centred * factors.unsqueeze(1)).to(torch.float8_e4m3fn),)


def value_codes(rows: torch.Tensor, factors: torch.Tensor) -> Outputs:
    """e4m3 numbers of `[many, head_dim]` 16-bit values."""
    return ((rows.to(torch.float32) * factors.unsqueeze(1)).to(torch.float8_e4m3fn),)


def key_values(packed: torch.Tensor, zeros: torch.Tensor, factors: torch.Tensor) -> Outputs:
    """16-bit values `[many, 128, channels]` of e4m3 numbers; fp32 factors 2 ** (exponent - 135)."""
    wide = _numbers(packed) * factors.unsqueeze(1) + zeros.to(torch.float32).unsqueeze(1)
    return ((wide.clamp(-65504.0, 65504.0) if zeros.dtype == torch.float16 else wide).to(zeros.dtype),)


def half_values(packed: torch.Tensor, factors: torch.Tensor) -> Outputs:
    """fp16 values `[many, head_dim]` of e4m3 numbers."""
    return ((_numbers(packed) * factors.unsqueeze(1)).clamp(-65504.0, 65504.0).to(torch.float16),)


def bfloat_values(packed: torch.Tensor, factors: torch.Tensor) -> Outputs:
    """bf16 values `[many, head_dim]` of e4m3 numbers."""
    return ((_numbers(packed) * factors.unsqueeze(1)).to(torch.bfloat16),)


def power(exponent: torch.Tensor) -> torch.Tensor:
    """2.0 ** exponent, for int32 that give normal fp32 numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


def _exponents(reach: torch.Tensor) -> torch.Tensor:
    return ((reach.view(torch.int32) + 0x1FFFFF) >> 23).clamp(*EXPONENT_RANGE)


def _numbers(packed: torch.Tensor) -> torch.Tensor:
    number = packed.to(torch.float32)
    return torch.where(number == number, number, 0.0)


_COMPILED = {
    key_parameters: Accelerated("fp8 parameters of K", key_parameters, varies=(0,)),
    value_parameters: Accelerated("fp8 parameters of V", value_parameters, varies=(0,)),
    key_codes: Accelerated("fp8 codes of K", key_codes, varies=(0, 0, 0)),
    value_codes: Accelerated("fp8 codes of V", value_codes, varies=(0, 0)),
    key_values: Accelerated("fp8 values of K", key_values, varies=(0, 0, 0)),
    half_values: Accelerated("fp8 fp16 values of V", half_values, varies=(0, 0)),
    bfloat_values: Accelerated("fp8 bf16 values of V", bfloat_values, varies=(0, 0)),
}
