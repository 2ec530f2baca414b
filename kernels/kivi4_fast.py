"""`kivi4` as functions that a compiler turns into vector code. Same bytes as `kivi4`, which says what they mean.

They allocate what they return and take no decisions that depend on data. Three rules make the compiled bytes
those of the reference: what is rounded to 16 bit is rounded in so many integer operations, since a compiler may
keep the unrounded fp32 instead; divisions happen once per group, in a call of their own, not where they would be
repeated for every element; minima come from comparisons, which are faster than those that pass NaN on, and a sum
over the group finds NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .accelerate import Accelerated, Function, Outputs
from .blocks import LARGEST
from .kivi4_layout import KIVI4_GROUP
from .kivi4_reference import CODE_MAX, SMALLEST_SCALE, Sections

__all__ = ["codes", "compiled", "dequantise", "parameters", "plainly", "quantise", "rounded", "values"]

Take = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Call = Callable[..., Outputs | None]


def plainly(function: Function, *tensors: torch.Tensor) -> Outputs | None:
    """Call a function as it is, not compiled."""
    return function(*tensors)


def compiled(function: Function, *tensors: torch.Tensor) -> Outputs | None:
    """Call the compiled version of a function below. None: there is none yet."""
    return _COMPILED[function](*tensors)


def quantise(k: torch.Tensor, v: torch.Tensor, into: Sections, call: Call = compiled) -> bool | None:
    """As `kivi4_reference.quantise`, for any values. None: nothing is compiled yet.

    False: there are values that are not finite, and the sections are void. Groups of V must be of even width.
    """
    finite = True
    for groups, zeros, scales, packed in (
        (k.reshape(into.key_zeros.shape[0], KIVI4_GROUP, -1), into.key_zeros, into.key_scales, into.key_codes),
        (v.reshape(into.value_zeros.numel(), -1, 1), into.value_zeros, into.value_scales, into.value_codes),
    ):
        found = call(parameters, groups)
        coded = found and call(codes, groups, found[0], found[2])
        if not found or not coded:
            return None
        zeros.copy_(found[0].view(zeros.shape))
        scales.copy_(found[1].view(scales.shape))
        packed.copy_(coded[0].view(packed.shape))
        finite = finite and math.isfinite(float(found[2].sum()))
    return finite


def dequantise(sections: Sections, call: Call = compiled) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The 16-bit values of K and V, in this order in memory of their own. None: nothing is compiled yet."""
    groups, rows = sections.key_zeros.shape[0], sections.value_zeros.numel()
    found = []
    for packed, zeros, scales in (
        (sections.key_codes.view(groups, KIVI4_GROUP // 2, -1), sections.key_zeros, sections.key_scales),
        (sections.value_codes.view(rows, -1, 1), sections.value_zeros, sections.value_scales),
    ):
        shape = (packed.shape[0], packed.shape[2])
        decoded = call(values, packed, zeros.view(shape), scales.view(shape))
        if not decoded:
            return None
        found.append(decoded[0].view(-1, sections.key_zeros.shape[1], sections.key_zeros.shape[2]))
    return found[0], found[1]


def parameters(groups: torch.Tensor) -> Outputs:
    """Zeros and scales in 16 bit, and fp32 reciprocals of the scales, of `[many, group, channels]` 16-bit values.

    A reciprocal is NaN where its group has a value that is not finite or too large.
    """
    parts = [groups[:, i].to(torch.float32) for i in range(groups.shape[1])]
    lowest = _tree(parts, lambda a, b: torch.where(a < b, a, b))
    highest = _tree(parts, lambda a, b: torch.where(a > b, a, b))
    total = _tree(parts, torch.add)
    scale = rounded((highest - lowest) / CODE_MAX, groups.dtype)
    scale = torch.where(scale >= SMALLEST_SCALE, scale, 0.0)
    sound = (lowest >= -LARGEST) & (highest <= LARGEST) & (total == total)
    inverse = torch.where(sound, torch.where(scale > 0, 1.0 / scale, 0.0), float("nan"))
    return lowest.to(groups.dtype), scale.to(groups.dtype), inverse


def codes(groups: torch.Tensor, zeros: torch.Tensor, inverse: torch.Tensor) -> Outputs:
    """Packed codes `[many, group / 2, channels]`."""
    half = groups.shape[1] // 2
    zero, factor = zeros.to(torch.float32).unsqueeze(1), inverse.unsqueeze(1)

    def code(x: torch.Tensor) -> torch.Tensor:
        steps = (x.to(torch.float32) - zero) * factor
        return torch.round(torch.where(steps < CODE_MAX, steps, CODE_MAX))

    return ((code(groups[:, :half]) + 16 * code(groups[:, half:])).to(torch.uint8),)


def values(packed: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Outputs:
    """The 16-bit values `[many, group, channels]` of packed codes."""
    zero, scale = zeros.to(torch.float32).unsqueeze(1), scales.to(torch.float32).unsqueeze(1)
    both = packed.to(torch.float32)
    high = torch.floor(both * (1 / 16))

    def value(code: torch.Tensor) -> torch.Tensor:
        wide = code * scale + zero
        return (wide.clamp(-65504.0, 65504.0) if zeros.dtype == torch.float16 else wide).to(zeros.dtype)

    return (torch.cat((value(both - 16 * high), value(high)), 1),)


def rounded(x: torch.Tensor, sixteen: torch.dtype) -> torch.Tensor:
    """fp32 numbers >= 0 that stand in the 16-bit dtype: `x` to nearest even, as fp32."""
    bits = x.view(torch.int32)
    if sixteen == torch.bfloat16:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    normal = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).view(torch.float32)
    return torch.where(x < 2.0**-14, (x + 0.5) - 0.5, normal)


def _tree(parts: list[torch.Tensor], take: Take) -> torch.Tensor:
    while len(parts) > 1:
        paired = [take(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = paired + parts[len(paired) * 2 :]
    return parts[0]


_COMPILED = {
    parameters: Accelerated("kivi4 parameters", parameters, varies=(0,)),
    codes: Accelerated("kivi4 codes", codes, varies=(0, 0, 0)),
    values: Accelerated("kivi4 values", values, varies=(0, 0, 0)),
}
