"""`kv4` in plain torch; the folder's docstring specifies the format.

No fp32 result depends on the order of additions or on fused multiply-adds: sums are of integers
below 2**24, and a product that is added to something is exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from ..blocks import all_within, clamped, within
from ..errors import PayloadError
from .layout import KEY_GROUP_TOKENS, KEY_SPAN_TOKENS, LARGEST, Kv4Layout, value_groups

CODE_MAX = 15
STEP_MAX = 16
LEAST_VALUE_STEP = 9
PLACE_BIAS = 16  # places of V are signed, stored with this added

# Units are 8-bit floats without sign, 6 bits of exponent and 2 of mantissa: the top bits of an fp32 number from
# 2**-40 on.
_UNIT_SHIFT = 21
_UNIT_BASE = (127 - 40) << 2
_UNIT_ROUND = (1 << _UNIT_SHIFT) - 1

PER_STEP = 1 / 15.125  # of the range of a group: codes are 15 steps apart, and clipping the ends a little errs less
NUDGES = (-9 / 32, -3 / 32, 3 / 32, 9 / 32)  # of a step: how far candidates for a grid lie off the centred one
MIDDLE_FINENESS = 32.0  # sums of the ends are rounded to this fraction of a unit,
FINENESS = 128.0  # and values to this fraction of a step


class Keys(NamedTuple):
    """Whole spans of K, coded. `n` channels over all heads."""

    bases: torch.Tensor  # 16-bit [spans, n]
    units: torch.Tensor  # u8 [spans, n]
    zeros: torch.Tensor  # u8 [spans * 8, n]
    steps: torch.Tensor  # u8 [spans * 4, n], two groups in a byte
    codes: torch.Tensor  # u8 [spans * 128, n], two tokens in a byte


class Values(NamedTuple):
    """`n` rotated and coded vectors of V, one per token and head, side by side as channels of K."""

    units: torch.Tensor  # u8 [n]
    grids: torch.Tensor  # u8 [groups, n]
    codes: torch.Tensor  # u8 [groups * half, n], two channels in a byte


class Kv4Sections(NamedTuple):
    """The sections of one payload, in order, as typed and shaped tensors over its memory."""

    header: torch.Tensor
    exempt_keys: torch.Tensor
    exempt_values: torch.Tensor
    key_bases: torch.Tensor
    key_units: torch.Tensor
    key_zeros: torch.Tensor
    key_steps: torch.Tensor
    key_codes: torch.Tensor
    value_units: torch.Tensor
    value_grids: torch.Tensor
    value_codes: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor, layout: Kv4Layout, sixteen: torch.dtype) -> Kv4Sections:
        """Exempt `[e, heads, head_dim]`, K `[rows, heads * head_dim]`, V `[rows, coded * heads]`."""
        parts = torch.split_with_sizes(data, layout.section_bytes)
        exempt = (layout.exempt, layout.heads, layout.head_dim)
        row, vectors = layout.heads * layout.head_dim, max(1, layout.coded * layout.heads)
        header, exempt_k, exempt_v, bases = parts[:4]
        units, zeros, steps, codes = (part.view(-1, row) for part in parts[4:8])
        value_grids, value_codes = (part.view(-1, vectors) for part in parts[9:])
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
            value_grids,
            value_codes,
        )

    @property
    def keys(self) -> Keys:
        """What is stored of K: rows out of those of whole spans."""
        return Keys(self.key_bases, self.key_units, self.key_zeros, self.key_steps, self.key_codes)

    @property
    def values(self) -> Values:
        return Values(self.value_units, self.value_grids, self.value_codes)


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Kv4Layout) -> bool:
    """Code `[coded, heads, head_dim]` 16-bit values. False: some are not finite or too large."""
    if not (bool(all_within(k, LARGEST)) and bool(all_within(v, LARGEST))):
        return False
    into = Kv4Sections.of(payload, layout, k.dtype)
    keys = quantise_keys(whole_spans(k.reshape(layout.coded, -1), layout))
    for section, whole, rows in zip(into.keys, keys, stored_rows(layout), strict=True):
        section.copy_(whole[rows])
    for section, values in zip(into.values, quantise_values(v.reshape(-1, layout.head_dim)), strict=True):
        section.copy_(values)
    return True


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kv4Layout) -> bool:
    """Write the `[coded, heads, head_dim]` 16-bit values. False: no encoder wrote these sections."""
    sections = Kv4Sections.of(payload, layout, k.dtype)
    decoded = dequantise_keys(stored_keys(sections, layout))
    k.copy_(clamped(decoded[layout.lead : layout.lead + layout.coded], k.dtype).view(k.shape))
    v.copy_(clamped(dequantise_values(sections.values, layout.head_dim), v.dtype).view(v.shape))
    return bool(all_within(sections.key_bases, LARGEST))


def quantise_keys(k: torch.Tensor) -> Keys:
    """Code `[spans * 256, n]` 16-bit values."""
    groups = KEY_SPAN_TOKENS // KEY_GROUP_TOKENS
    x = k.to(torch.float32).view(-1, groups, KEY_GROUP_TOKENS, k.shape[1])
    lowest, highest = x.aminmax(dim=2)
    base = lowest.amin(1, keepdim=True) + 0.0  # of -0 and 0, which is least depends on their order
    units = unit_codes(highest.amax(1, keepdim=True) - base, -8)
    zeros, steps, codes = _code(x, (lowest, highest), base, unit_of(units), _KEY_GRIDS)
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
    coded = _code(x, x.aminmax(dim=2), torch.zeros_like(unit), unit, _VALUE_GRIDS)
    places, steps, codes = (part.squeeze(0) for part in coded)
    grids = steps - LEAST_VALUE_STEP + 8 * (places + PLACE_BIAS)
    return Values(units.to(torch.uint8), grids.to(torch.uint8), pack(even(codes)).flatten(0, 1))


def dequantise_values(values: Values, head_dim: int) -> torch.Tensor:
    """fp32 `[n, head_dim]`."""
    groups, n = values.grids.shape
    steps = (values.grids & 7).to(torch.float32) + LEAST_VALUE_STEP
    zeros = _value_zeros((values.grids >> 3).to(torch.float32) - PLACE_BIAS, steps)
    codes = unpack(values.codes.view(groups, -1, n))[:, : head_dim // groups]
    integers = codes * steps.unsqueeze(1) + zeros.unsqueeze(1)
    rotated = (integers.view(head_dim, n).t() @ hadamard(head_dim)).to(torch.bfloat16).to(torch.float32)
    return rotated * unit_of(values.units).unsqueeze(1)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2.0 ** exponent, for int32 that give normal fp32 numbers; exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def unit_of(codes: torch.Tensor) -> torch.Tensor:
    """What the 8-bit codes of units stand for, in fp32."""
    return ((codes.to(torch.int32) + _UNIT_BASE) << _UNIT_SHIFT).view(torch.float32)


@cache
def hadamard(head_dim: int) -> torch.Tensor:
    """Sylvester's matrix (of 1 and -1) for each run of channels rotated together, 0 elsewhere."""
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


class _Grids(NamedTuple):
    """The grids a group may have, in units. A place is what is stored of a grid beside its step:
    `place(middles, steps)` is the nearest, `zero(places, steps)` what code 0 stands for."""

    least_step: int
    place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    zero: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _key_place(middles: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    return (middles - steps * (CODE_MAX / 2)).round().clamp(0, 255)


def _value_place(middles: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    return (middles * (2 / (STEP_MAX + 1 - steps))).round().clamp(-PLACE_BIAS, PLACE_BIAS - 1)


def _value_zeros(places: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The wider a grid, the closer its places: a vector reaches 128 units to either side."""
    return ((places * (STEP_MAX + 1 - steps) - steps * CODE_MAX) * 0.5).floor()


_KEY_GRIDS = _Grids(1, _key_place, lambda places, _: places)
_VALUE_GRIDS = _Grids(LEAST_VALUE_STEP, _value_place, _value_zeros)


def _code(
    x: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor], base: torch.Tensor, unit: torch.Tensor, grids: _Grids
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places, steps, codes in fp32 of `[spans, groups, length, n]`; base, unit `[spans, 1, n]`."""
    lowest, highest = ends
    per_unit = 1.0 / unit
    steps = torch.round((highest - lowest) * per_unit * PER_STEP).clamp(grids.least_step, STEP_MAX)
    # Rounded, so that all that follows is exact.
    both = torch.round(((lowest - base) + (highest - base)) * per_unit * MIDDLE_FINENESS)
    middles = both * (0.5 / MIDDLE_FINENESS)
    places, *others = (grids.place(middles + steps * nudge, steps) for nudge in NUDGES)
    first = grids.zero(places, steps)
    factor = (1.0 / (steps * unit)) * FINENESS
    # Where the values lie on the first grid, in 1/128 step: whole numbers, so the sums are exact in any order.
    fine = ((x - (first * unit + base).unsqueeze(2)) * factor.unsqueeze(2)).round_()
    shifts = torch.zeros_like(first)
    least = _squares(fine, shifts)
    for place in others:
        shift = ((grids.zero(place, steps) - first) * (FINENESS / steps)).round()
        error = _squares(fine, shift)
        better = error < least
        places, shifts = torch.where(better, place, places), torch.where(better, shift, shifts)
        least = torch.minimum(error, least)
    codes = ((fine - shifts.unsqueeze(2) + FINENESS / 2) * (1 / FINENESS)).floor_().clamp_(0, CODE_MAX)
    return places, steps, codes


def _squares(fine: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Sum over a group of squared distances to a grid shifted by so much, clipping ignored."""
    moved = fine - shifts.unsqueeze(2)
    return (moved - (moved * (1 / FINENESS)).round_() * FINENESS).square_().sum(2)


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
    """`[spans * 256, n]` of the coded `[coded, n]`; the nearest token stands for a missing one."""
    tokens = torch.arange(layout.spans * KEY_SPAN_TOKENS, device=k.device) - layout.lead
    return k[tokens.clamp_(0, layout.coded - 1)]


def stored_rows(layout: Kv4Layout) -> tuple[slice, ...]:
    """Which rows of `Keys` of whole spans are stored."""
    spans = slice(0, layout.spans)
    return spans, spans, layout.group_rows, layout.step_rows, layout.code_rows


def stored_keys(sections: Kv4Sections, layout: Kv4Layout) -> Keys:
    """`Keys` of whole spans, with zeros where nothing is stored."""
    groups = layout.spans * KEY_SPAN_TOKENS // KEY_GROUP_TOKENS
    counts = (layout.spans, layout.spans, groups, groups // 2, groups * KEY_GROUP_TOKENS // 2)
    return Keys(*map(_placed, sections.keys, stored_rows(layout), counts))


def _placed(part: torch.Tensor, rows: slice, count: int) -> torch.Tensor:
    """`part` as those rows out of `count`."""
    whole = part.new_zeros(count, part.shape[1])
    whole[rows] = part
    return whole


def require_sound(payload: torch.Tensor, dtype: torch.dtype, layout: Kv4Layout, layer: int) -> None:
    """Raise `PayloadError` for the first parameter or 16-bit value that no encoder writes."""
    sections = Kv4Sections.of(payload, layout, dtype)
    first = layout.start + layout.exempt
    bases = sections.key_bases.view(-1, layout.heads, layout.head_dim)
    for name, values, positions in (
        ("K", sections.exempt_keys, range(layout.start, first)),
        ("V", sections.exempt_values, range(layout.start, first)),
        ("K", bases, [max(first, first - layout.lead + span * KEY_SPAN_TOKENS) for span in range(layout.spans)]),
    ):
        sound = within(values, LARGEST)
        if bool(sound.all()):
            continue
        row, head, channel = (int(i) for i in (~sound).nonzero()[0])
        where = f"position {positions[row]}, head {head}, channel {channel}"
        found = float(values[row, head, channel])
        raise PayloadError(f"layer {layer}: {name} has a parameter {found} at {where}; the kv4 payload is corrupt")
