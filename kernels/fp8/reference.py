"""`fp8` in plain torch; the folder's docstring specifies the format."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..blocks import all_within, clamped, within
from ..errors import PayloadError
from .layout import GROUP_TOKENS, RUN_TOKENS, Fp8Layout

BIAS = 135
"""Exponent bytes are those of fp32 (127) for a largest code of 2**8."""

EXPONENT_RANGE = (32, 250)
"""What an encoder writes; a reach of at most 2 * `LARGEST` stays below the upper end."""

_INFINITY = float("inf")


class Fp8Sections(NamedTuple):
    """The sections of one payload, in order, as typed and shaped tensors over its memory."""

    header: torch.Tensor
    key_zeros: torch.Tensor
    key_exponents: torch.Tensor
    key_codes: torch.Tensor
    value_codes: torch.Tensor
    value_exponents: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor, layout: Fp8Layout, sixteen: torch.dtype) -> Fp8Sections:
        header, zeros, keys, key_codes, value_codes, values = torch.split_with_sizes(data, layout.section_bytes)
        groups = (layout.key_groups, layout.heads, layout.head_dim)
        shape = (layout.tokens, layout.heads, layout.head_dim)
        return cls(
            header,
            zeros.view(sixteen).view(groups),
            keys.view(groups),
            key_codes.view(shape),
            value_codes.view(shape),
            values.view(shape[:2]),
        )


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Fp8Layout) -> bool:
    """Fill parameters and codes from `[tokens, heads, head_dim]`. False: some are not finite."""
    if not (bool(all_within(k)) and bool(all_within(v))):
        return False
    into = Fp8Sections.of(payload, layout, k.dtype)
    zeros, exponents, codes = _quantise_keys(k, layout)
    into.key_zeros.copy_(zeros)
    into.key_exponents.copy_(exponents)
    into.key_codes.copy_(codes)
    reach = v.to(torch.float32).abs().amax(-1)
    exponents = _exponents(reach)
    into.value_exponents.copy_(exponents)
    into.value_codes.copy_(_codes(v.to(torch.float32), exponents.unsqueeze(-1)))
    return True


def _quantise_keys(k: torch.Tensor, layout: Fp8Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros, exponents and codes of finite K."""
    lowest = _runs(k, _INFINITY, layout).amin(2).to(torch.float32)
    highest = _runs(k, -_INFINITY, layout).amax(2).to(torch.float32)
    inner_low = torch.where(lowest == _INFINITY, -_INFINITY, lowest).amax(1)
    inner_high = torch.where(highest == -_INFINITY, _INFINITY, highest).amin(1)
    zeros = ((inner_low + inner_high) * 0.5).to(k.dtype) + 0.0  # never -0
    wide = zeros.to(torch.float32)
    exponents = _exponents(torch.maximum(highest.amax(1) - wide, wide - lowest.amin(1)))
    group = _group_of_token(layout, k.device)
    return zeros, exponents, _codes(k.to(torch.float32) - wide[group], exponents[group])


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Fp8Layout) -> bool:
    """Write the `[tokens, heads, head_dim]` 16-bit values. False: no encoder wrote these sections."""
    sections = Fp8Sections.of(payload, layout, k.dtype)
    k.copy_(_dequantise_keys(sections.key_zeros, sections.key_exponents, sections.key_codes, layout))
    v.copy_(clamped(_values(sections.value_codes, sections.value_exponents.unsqueeze(-1)), v.dtype))
    return bool(all_within(sections.key_zeros)) and all(
        bool(_in_range(exponents).all()) for exponents in (sections.key_exponents, sections.value_exponents)
    )


def _dequantise_keys(
    zeros: torch.Tensor, exponents: torch.Tensor, codes: torch.Tensor, layout: Fp8Layout
) -> torch.Tensor:
    """The 16-bit values of K."""
    group = _group_of_token(layout, codes.device)
    return clamped(_values(codes, exponents[group]) + zeros.to(torch.float32)[group], zeros.dtype)


def require_sound(payload: torch.Tensor, dtype: torch.dtype, layout: Fp8Layout, layer: int) -> None:
    """Raise `PayloadError` for the first parameter that no encoder writes."""
    sections = Fp8Sections.of(payload, layout, dtype)
    zeros = sections.key_zeros.to(torch.float32)
    first = layout.start - layout.lead
    groups = [max(layout.start, first + group * GROUP_TOKENS) for group in range(layout.key_groups)]
    tokens = range(layout.start, layout.start + layout.tokens)
    for name, what, values, sound, positions in (
        ("K", "zero", zeros, within(zeros), groups),
        ("K", "exponent", sections.key_exponents, _in_range(sections.key_exponents), groups),
        ("V", "exponent", sections.value_exponents, _in_range(sections.value_exponents), tokens),
    ):
        if bool(sound.all()):
            continue
        row, head, *channel = (int(i) for i in (~sound).nonzero()[0])
        where = f"position {positions[row]}, head {head}" + "".join(f", channel {index}" for index in channel)
        found = values[(row, head, *channel)].item()
        raise PayloadError(f"layer {layer}: {name} has the {what} {found} at {where}; the fp8 payload is corrupt")


def _runs(k: torch.Tensor, missing: float, layout: Fp8Layout) -> torch.Tensor:
    """`[key_groups, runs, 32, heads, head_dim]`, cut by position; `missing` fills the ends."""
    tail = layout.key_groups * GROUP_TOKENS - layout.lead - layout.tokens
    filled = pad(k, (0, 0, 0, 0, layout.lead, tail), value=missing)
    return filled.view(layout.key_groups, -1, RUN_TOKENS, *k.shape[1:])


def _group_of_token(layout: Fp8Layout, device: torch.device) -> torch.Tensor:
    return torch.arange(layout.lead, layout.lead + layout.tokens, device=device) // GROUP_TOKENS


def _exponents(reach: torch.Tensor) -> torch.Tensor:
    """The bytes that stand for the scales of groups which reach that far from their zeros."""
    return ((reach.view(torch.int32) + 0x1FFFFF) >> 23).clamp(EXPONENT_RANGE[0], 255).to(torch.uint8)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2.0 ** exponent, for int32 that give normal fp32 numbers; exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def _codes(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    return (x * _power(BIAS - exponents.to(torch.int32))).to(torch.float8_e4m3fn).view(torch.uint8)


def _values(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).to(torch.float32)
    numbers = torch.where(numbers == numbers, numbers, 0.0)
    return numbers[codes.to(torch.int64)] * _power(exponents.to(torch.int32) - BIAS)


def _in_range(exponents: torch.Tensor) -> torch.Tensor:
    lowest, highest = EXPONENT_RANGE
    return (exponents >= lowest) & (exponents <= highest)
