"""`kivi4` in plain torch; the folder's docstring specifies the format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional

from ..blocks import all_within, clamped
from ..errors import PayloadError
from ..format import LARGEST
from .layout import GROUP, Kivi4Layout

CODE_MAX = 15
SMALLEST_SCALE = 2.0**-100
LARGEST_SCALE = 2.0**118
"""No encoder writes more: a range is at most 2 * `LARGEST`."""


class Kivi4Sections(NamedTuple):
    """The sections of one payload, in order, as typed and shaped tensors over its memory."""

    header: torch.Tensor
    key_residual: torch.Tensor
    value_residual: torch.Tensor
    key_zeros: torch.Tensor
    key_scales: torch.Tensor
    value_zeros: torch.Tensor
    value_scales: torch.Tensor
    key_codes: torch.Tensor
    value_codes: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor, layout: Kivi4Layout, sixteen: torch.dtype) -> Kivi4Sections:
        header, *parts, key_codes, value_codes = torch.split_with_sizes(data, layout.section_bytes)
        plain = (layout.residual, layout.heads, layout.head_dim)
        keys = (layout.key_groups, layout.heads, layout.head_dim)
        values = (layout.coded, layout.heads, layout.value_groups)
        shapes = (plain, plain, keys, keys, values, values)
        typed = [part.view(sixteen).view(shape) for part, shape in zip(parts, shapes, strict=True)]
        packed = (
            key_codes.view(layout.key_groups, GROUP // 2, layout.heads, layout.head_dim),
            value_codes.view(*values, layout.value_code_bytes),
        )
        return cls._make((header, *typed, *packed))


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Kivi4Layout) -> bool:
    """Fill parameters and codes from `[coded, heads, head_dim]`. False: some are not finite."""
    if not (bool(all_within(k)) and bool(all_within(v))):
        return False
    into = Kivi4Sections.of(payload, layout, k.dtype)
    groups = k.reshape(-1, GROUP, *k.shape[1:])
    _quantise(groups, 1, into.key_zeros, into.key_scales, into.key_codes)
    rows = v.reshape(*into.value_zeros.shape, -1)
    _quantise(rows, 3, into.value_zeros, into.value_scales, into.value_codes)
    return True


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kivi4Layout) -> bool:
    """Write the `[coded, heads, head_dim]` 16-bit values. False: no encoder wrote these sections."""
    sections = Kivi4Sections.of(payload, layout, k.dtype)
    groups = _dequantise(sections.key_codes, 1, GROUP, sections.key_zeros, sections.key_scales)
    k.copy_(groups.view(k.shape))
    width = v.shape[-1] // sections.value_zeros.shape[-1]
    rows = _dequantise(sections.value_codes, 3, width, sections.value_zeros, sections.value_scales)
    v.copy_(rows.reshape(v.shape))
    return all(bool(_between(values, bounds).all()) for _, _, values, bounds in _checks(sections))


def require_sound(payload: torch.Tensor, dtype: torch.dtype, layout: Kivi4Layout, layer: int) -> None:
    """Raise `PayloadError` for the first residual value or parameter that no encoder writes."""
    sections = Kivi4Sections.of(payload, layout, dtype)
    coded = range(layout.start + layout.lead, layout.start + layout.lead + layout.coded)
    residual = [*range(layout.start, coded.start), *range(coded.stop, layout.start + layout.tokens)]
    for name, what, values, bounds in _checks(sections):
        sound = _between(values, bounds)
        if bool(sound.all()):
            continue
        row, head, index = (int(i) for i in (~sound).nonzero()[0])
        per_value = what == "value"
        positions = residual if per_value else coded[::GROUP] if name == "K" else coded
        last = "channel" if per_value or name == "K" else "group"
        where = f"position {positions[row]}, head {head}, {last} {index}"
        found = float(values[row, head, index])
        raise PayloadError(f"layer {layer}: {name} has the {what} {found} at {where}; the kivi4 payload is corrupt")


def _checks(sections: Kivi4Sections) -> Iterator[tuple[str, str, torch.Tensor, tuple[float, float]]]:
    """Tensor, kind of value, values `[tokens or groups, heads, channels or groups]`, and bounds."""
    size, scale = (-LARGEST, LARGEST), (0.0, LARGEST_SCALE)
    yield "K", "value", sections.key_residual, size
    yield "V", "value", sections.value_residual, size
    yield "K", "zero", sections.key_zeros, size
    yield "K", "scale", sections.key_scales, scale
    yield "V", "zero", sections.value_zeros, size
    yield "V", "scale", sections.value_scales, scale


def _between(values: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    wide = values.to(torch.float32)
    return (wide >= bounds[0]) & (wide <= bounds[1])  # false for NaN too


def _quantise(x: torch.Tensor, axis: int, zeros: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor) -> None:
    """Quantise groups that lie along `axis`."""
    lowest, highest = (bound.to(torch.float32) + 0.0 for bound in x.aminmax(dim=axis))  # never -0
    # A tensor, not a number, as divisor: CUDA multiplies by the reciprocal of a number.
    scale = ((highest - lowest) / torch.full_like(lowest, CODE_MAX)).to(x.dtype)
    scale = torch.where(scale >= SMALLEST_SCALE, scale, 0.0)
    wide = scale.to(torch.float32)
    inverse = torch.where(wide > 0, 1 / wide, 0.0)
    steps = (x.to(torch.float32) - lowest.unsqueeze(axis)) * inverse.unsqueeze(axis)
    codes = steps.round_().clamp_(0, CODE_MAX).to(torch.uint8)
    half = packed.shape[axis]
    low, high = codes.split((half, codes.shape[axis] - half), axis)
    if high.shape[axis] < half:  # only the last axis of V can be odd
        high = torch.nn.functional.pad(high, (0, 1))
    zeros.copy_(lowest)
    scales.copy_(scale)
    packed.copy_(low | (high << 4))


def _dequantise(packed: torch.Tensor, axis: int, width: int, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The 16-bit values of groups of `width` along `axis`."""
    codes = torch.cat((packed & 15, packed >> 4), axis).narrow(axis, 0, width)
    zero, scale = (part.to(torch.float32).unsqueeze(axis) for part in (zeros, scales))
    return clamped(codes.to(torch.float32) * scale + zero, zeros.dtype)
