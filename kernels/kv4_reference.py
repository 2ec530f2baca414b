"""The steps of `kv4` in plain torch; `codec` specifies, bit for bit, the format that they produce.

Everything is fp32 arithmetic whose result depends neither on the order of additions nor on whether a product
and a sum are fused: sums are of integers below 2**24, and a product that is added to something is exact.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from .blocks import within
from .errors import PayloadError
from .format import KEY_GROUP_TOKENS, KEY_SPAN_TOKENS, SMALL_HEAD_CHANNELS, Kv4Layout, value_groups

__all__ = [
    "LARGEST",
    "Sections",
    "dequantise_keys",
    "dequantise_values",
    "hadamard",
    "power_of_two",
    "quantise_keys",
    "quantise_values",
    "require_sound",
    "unit_of",
]

LARGEST = 2.0**30
"""Bound on |x|: up to here every unit is within the range of its 8 bits."""

CODE_MAX = 15
STEP_MAX = 16
ZERO_BIAS = 128  # zeros of V are signed, stored with this added
VALUE_REACH = 256  # |integers| up to here are exact in bf16, so any matrix product of them is exact too

# Units are 8-bit floats without sign, 6 bits of exponent and 2 of mantissa: the top bits of an fp32 number from
# 2**-40 on.
_UNIT_SHIFT = 21
_UNIT_BASE = (127 - 40) << 2
_UNIT_ROUND = (1 << _UNIT_SHIFT) - 1

PER_STEP = 1 / 15.0  # the range of a group
NUDGE = 0.1875  # of a step: how far the two candidates for a zero lie off the centred one
FINENESS = 32.0  # errors are compared in this fraction of a step

# Small heads: code 8 of a group of V stands for a multiple of 4 units, and steps are 9 to 16 units.
_CENTRE_UNITS = 4
_CENTRE_BIAS = 16
_CENTRE_CODE = 8
_LEAST_SMALL_STEP = 9

Range = tuple[int, int]


class Keys(NamedTuple):
    """Whole spans of K, coded. `n` channels over all heads."""

    bases: torch.Tensor  # 16-bit [spans, n]
    units: torch.Tensor  # u8 [spans, n]
    zeros: torch.Tensor  # u8 [spans * 8, n]
    steps: torch.Tensor  # u8 [spans * 4, n], two groups in a byte
    codes: torch.Tensor  # u8 [spans * 128, n], two tokens in a byte


class Values(NamedTuple):
    """`n` vectors of V, one per token and head, rotated and coded; vectors lie side by side, as channels of K do."""

    units: torch.Tensor  # u8 [n]
    zeros: torch.Tensor  # u8 [groups, n]
    steps: torch.Tensor  # u8 [groups / 2, n], two groups in a byte; [0, n] for small heads, where they are in the zeros
    codes: torch.Tensor  # u8 [groups * half, n], two channels in a byte


class Sections(NamedTuple):
    """The parts of one payload, in order, as tensors of their own type and shape over its memory."""

    header: torch.Tensor
    exempt_keys: torch.Tensor
    exempt_values: torch.Tensor
    key_bases: torch.Tensor
    key_units: torch.Tensor
    key_zeros: torch.Tensor
    key_steps: torch.Tensor
    key_codes: torch.Tensor
    value_units: torch.Tensor
    value_zeros: torch.Tensor
    value_steps: torch.Tensor
    value_codes: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor, layout: Kv4Layout, sixteen: torch.dtype) -> Sections:
        """Exempt values `[e, heads, head_dim]`, K `[rows, heads * head_dim]`, V `[rows, coded * heads]`."""
        parts = torch.split_with_sizes(data, layout.section_bytes)
        exempt = (layout.exempt, layout.heads, layout.head_dim)
        row, vectors = layout.heads * layout.head_dim, max(1, layout.coded * layout.heads)
        header, exempt_k, exempt_v, bases = parts[:4]
        units, zeros, steps, codes = (part.view(-1, row) for part in parts[4:8])
        value_zeros, value_steps, value_codes = (part.view(-1, vectors) for part in parts[9:])
        return cls(
            header,
            exempt_k.view(sixteen).view(exempt),
            exempt_v.view(sixteen).view(exempt),
            bases.view(sixteen).view(-1, row),
            units,
            zeros,
            steps,
            codes,
            parts[8],
            value_zeros,
            value_steps,
            value_codes,
        )

    @property
    def keys(self) -> Keys:
        """What is stored of K: rows out of those of whole spans."""
        return Keys(self.key_bases, self.key_units, self.key_zeros, self.key_steps, self.key_codes)

    @property
    def values(self) -> Values:
        return Values(self.value_units, self.value_zeros, self.value_steps, self.value_codes)


def quantise_keys(k: torch.Tensor) -> Keys:
    """Code `[spans * 256, n]` 16-bit values."""
    groups = KEY_SPAN_TOKENS // KEY_GROUP_TOKENS
    x = k.to(torch.float32).view(-1, groups, KEY_GROUP_TOKENS, k.shape[1])
    lowest, highest = x.aminmax(dim=2)
    base = lowest.amin(1, keepdim=True) + 0.0  # of -0 and 0, which is least depends on their order
    units = unit_codes(highest.amax(1, keepdim=True) - base, -8)
    zeros, steps, codes = _code(x, (lowest, highest), base, unit_of(units), (0, 255))
    return Keys(
        base.squeeze(1).to(k.dtype),
        units.squeeze(1).to(torch.uint8),
        zeros.to(torch.uint8).flatten(0, 1),
        pack((steps - 1).unflatten(1, (-1, 2))).flatten(0, 2),
        pack(codes).flatten(0, 2),
    )


def dequantise_keys(keys: Keys) -> torch.Tensor:
    """fp32 `[spans * 256, n]`."""
    spans, n = keys.units.shape
    unit = unit_of(keys.units).unsqueeze(1)
    zeros = keys.zeros.to(torch.float32).view(spans, -1, n)
    steps = unpack(keys.steps.view(spans, -1, 1, n)).flatten(1, 2) + 1
    codes = unpack(keys.codes.view(spans, -1, KEY_GROUP_TOKENS // 2, n))
    zero = zeros * unit + keys.bases.to(torch.float32).unsqueeze(1)
    return (codes * (steps * unit).unsqueeze(2) + zero.unsqueeze(2)).flatten(0, 2)


def quantise_values(v: torch.Tensor) -> Values:
    """Code `[n, head_dim]` 16-bit values."""
    n, head_dim = v.shape
    x = v.to(torch.float32)
    exponent = (x.abs().amax(1).view(torch.int32) >> 23).clamp(min=64)
    integers = torch.round(x * power_of_two(134 - exponent).unsqueeze(1))
    rotated = (hadamard(head_dim) @ integers.t()).to(torch.bfloat16).to(torch.float32)
    shift = exponent - 134 - rotated_together(head_dim).bit_length() + 1
    units = unit_codes(rotated.abs().amax(0), shift - 7)
    unit = (unit_of(units) * power_of_two(-shift)).view(1, 1, n)
    x = rotated.view(1, value_groups(head_dim), -1, n)
    zero_range = None if head_dim < SMALL_HEAD_CHANNELS else (-ZERO_BIAS, 127)
    coded = _code(x, x.aminmax(dim=2), torch.zeros_like(unit), unit, zero_range)
    zeros, steps, codes = (part.squeeze(0) for part in coded)
    if zero_range:
        grids, pairs = zeros + ZERO_BIAS, pack(even(steps - 1).unflatten(0, (-1, 2))).flatten(0, 1)
    else:
        centres = (zeros + _CENTRE_CODE * steps) / _CENTRE_UNITS + _CENTRE_BIAS
        grids, pairs = steps - _LEAST_SMALL_STEP + 8 * centres, zeros.new_empty(0, n, dtype=torch.uint8)
    return Values(units.to(torch.uint8), grids.to(torch.uint8), pairs, pack(even(codes)).flatten(0, 1))


def dequantise_values(values: Values, head_dim: int) -> torch.Tensor:
    """fp32 `[n, head_dim]`."""
    groups, n = values.zeros.shape
    zeros, steps = value_grids(values, head_dim)
    codes = unpack(values.codes.view(groups, -1, n))[:, : head_dim // groups]
    integers = codes * steps.unsqueeze(1) + zeros.unsqueeze(1)
    rotated = (integers.view(head_dim, n).t() @ hadamard(head_dim)).to(torch.bfloat16).to(torch.float32)
    return rotated * unit_of(values.units).unsqueeze(1)


def value_grids(values: Values, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 zeros and steps `[groups, n]`, in units."""
    stored = values.zeros.to(torch.float32)
    if head_dim >= SMALL_HEAD_CHANNELS:
        return stored - ZERO_BIAS, unpack(values.steps.unsqueeze(1)).flatten(0, 1)[: stored.shape[0]] + 1
    steps = (values.zeros & 7) + float(_LEAST_SMALL_STEP)
    centres = (values.zeros >> 3).to(torch.float32) - _CENTRE_BIAS
    return centres * _CENTRE_UNITS - steps * _CENTRE_CODE, steps


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2.0 ** exponent, for int32 that give normal fp32 numbers; exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def unit_of(codes: torch.Tensor) -> torch.Tensor:
    """What the 8-bit codes of units stand for, in fp32."""
    return ((codes.to(torch.int32) + _UNIT_BASE) << _UNIT_SHIFT).view(torch.float32)


@cache
def hadamard(head_dim: int) -> torch.Tensor:
    """Sylvester's matrix (of 1 and -1) for each run of channels that are rotated together, 0 elsewhere."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < rotated_together(head_dim):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    blocks: torch.Tensor = torch.block_diag(*[matrix] * (head_dim // matrix.shape[0]))
    return blocks


def rotated_together(head_dim: int) -> int:
    return head_dim & -head_dim


def unit_codes(reach: torch.Tensor, shift: torch.Tensor | int) -> torch.Tensor:
    """The least units of at least `reach * 2 ** shift`, as int32."""
    bits = (reach.view(torch.int32) + _UNIT_ROUND) >> _UNIT_SHIFT
    return (bits + 4 * shift - _UNIT_BASE).clamp(0, 255)


def _code(
    x: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    base: torch.Tensor,
    unit: torch.Tensor,
    zero_range: Range | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros, steps and codes, as fp32, of `x` `[spans, groups, length, n]`; base and unit are `[spans, 1, n]`.

    Without a range of zeros, those and the steps are of a small head.
    """
    lowest, highest = ends
    per_unit = 1.0 / unit
    wanted = (highest - lowest) * per_unit * PER_STEP
    steps = torch.round(wanted).clamp(1 if zero_range else _LEAST_SMALL_STEP, STEP_MAX)
    # Rounded, so that all that follows is exact.
    both = torch.round(((lowest - base) + (highest - base)) * per_unit * FINENESS) * (0.5 / FINENESS)
    if zero_range:
        centred = both - steps * (CODE_MAX / 2)
        nudge = steps * NUDGE
        low, high = ((centred + sign * nudge).round().clamp(*zero_range) for sign in (-1, 1))
    else:
        centred = both + wanted * 0.5  # code 8 lies half a step above the middle of the codes
        half = _CENTRE_UNITS / 2
        found = ((centred + sign * half) / _CENTRE_UNITS for sign in (-1, 1))
        centres = (centre.round().clamp(-_CENTRE_BIAS, _CENTRE_BIAS - 1) * _CENTRE_UNITS for centre in found)
        low, high = (centre - steps * _CENTRE_CODE for centre in centres)
    per_step = 1.0 / (steps * unit)
    first = low * unit + base
    # How far the values lie off the lower grid and off the upper one, in 1/32 step: whole numbers, so the sums are
    # exact in any order. Clipping is left out of it.
    fine = ((x - first.unsqueeze(2)) * (per_step * FINENESS).unsqueeze(2)).round_()
    off = fine - (fine * (1 / FINENESS)).round_() * FINENESS
    shifted = off - ((high - low) * (FINENESS / steps)).round_().unsqueeze(2)
    shifted = torch.where(shifted < -FINENESS / 2, shifted + FINENESS, shifted)
    zeros = torch.where(shifted.square().sum(2) < off.square().sum(2), high, low)
    codes = ((x - (zeros * unit + base).unsqueeze(2)) * per_step.unsqueeze(2)).round_().clamp_(0, CODE_MAX)
    return zeros, steps, codes


def even(x: torch.Tensor) -> torch.Tensor:
    """With a row of zeros behind an odd number of them (in dimension -2)."""
    return torch.nn.functional.pad(x, (0, 0, 0, x.shape[-2] % 2))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Bytes out of the first half (low) and the second half (high) of dimension -2."""
    low, high = codes.chunk(2, dim=-2)
    return (low + 16 * high).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """fp32 codes: the low halves of the bytes along dimension -2, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-2).to(torch.float32)


def whole_spans(k: torch.Tensor, layout: Kv4Layout) -> torch.Tensor:
    """`[spans * 256, n]` of the coded tokens `[coded, n]`; the nearest token stands for each missing one."""
    tokens = torch.arange(layout.spans * KEY_SPAN_TOKENS, device=k.device) - layout.lead
    return k[tokens.clamp_(0, layout.coded - 1)]


def stored_rows(layout: Kv4Layout) -> tuple[slice, ...]:
    """Which rows of `Keys` of whole spans are stored."""
    spans = slice(0, layout.spans)
    return spans, spans, layout.group_rows, layout.step_rows, layout.code_rows


def stored_keys(sections: Sections, layout: Kv4Layout) -> Keys:
    """`Keys` of whole spans, with zeros where nothing is stored."""
    groups = layout.spans * KEY_SPAN_TOKENS // KEY_GROUP_TOKENS
    counts = (layout.spans, layout.spans, groups, groups // 2, groups * KEY_GROUP_TOKENS // 2)
    return Keys(*map(_placed, sections.keys, stored_rows(layout), counts))


def _placed(part: torch.Tensor, rows: slice, count: int) -> torch.Tensor:
    """`part` as those rows out of `count`."""
    whole = part.new_zeros(count, part.shape[1])
    whole[rows] = part
    return whole


def require_sound(sections: Sections, layout: Kv4Layout, layer: int) -> None:
    """Raise `PayloadError` for the first parameter or 16-bit value that no encoder writes."""
    heads, head_dim = layout.heads, layout.head_dim
    at = _first(within(sections.exempt_keys, LARGEST))
    if at is not None:
        raise _corrupt("K", float(sections.exempt_keys[at]), (layout.start + at[0], *at[1:]), layer)
    at = _first(within(sections.exempt_values, LARGEST))
    if at is not None:
        raise _corrupt("V", float(sections.exempt_values[at]), (layout.start + at[0], *at[1:]), layer)
    at = _first(within(sections.key_bases, LARGEST).view(-1, heads, head_dim))
    first = layout.start + layout.exempt
    if at is not None:
        position = max(first, first - layout.lead + at[0] * KEY_SPAN_TOKENS)
        raise _corrupt("K", float(sections.key_bases[at[0], at[1] * head_dim + at[2]]), (position, *at[1:]), layer)
    ends = value_ends(sections, head_dim)
    at = _first(ends <= VALUE_REACH)
    if at is not None:
        channel = at[0] * (head_dim // value_groups(head_dim))
        where = (first + at[1] // heads, at[1] % heads, channel)
        raise _corrupt("V", float(ends[at]), where, layer)


def value_ends(sections: Sections, head_dim: int) -> torch.Tensor:
    """What code 15 stands for in each group of V `[groups, n]`, in units; more than 256 no encoder writes."""
    zeros, steps = value_grids(sections.values, head_dim)
    return zeros + steps * CODE_MAX


def _first(sound: torch.Tensor) -> tuple[int, ...] | None:
    if bool(sound.all()):
        return None
    return tuple(int(i) for i in (~sound).nonzero()[0])


def _corrupt(name: str, value: float, where: tuple[int, ...], layer: int) -> PayloadError:
    position, head, channel = where
    text = f"a parameter {value} at position {position}, head {head}, channel {channel}"
    return PayloadError(f"layer {layer}: {name} has {text}; the kv4 payload is corrupt")
