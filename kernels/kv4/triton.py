"""`kv4` for GPUs: the same bytes as the reference makes.

K: one program per span of 256 tokens and 64 channels, read once for base and unit and again, from
the caches, to be coded. V: the Hadamard rotation is a product of fp16 whole-number matrices on the
tensor cores, exact in fp32; wide heads go in slabs of channels with one small matrix, twice: for
the vector's unit, then for the codes."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..triton_bits import clamped, nearby, power, raise_flag, rounded
from .layout import Kv4Layout, value_groups
from .reference import Kv4Sections, hadamard

CHANNELS = 64
_MOST_AT_ONCE = 128
"""Channels of V: 256 would spill registers."""

_LAUNCH = {"enable_fp_fusion": False}
"""V also without pipelining: it would keep three copies of the matrix in shared memory."""

_VARYING = ["coded", "lead", "code_first", "code_stop"]
"""What differs from block to block: Triton would compile anew for multiples of 16, others, and 1."""


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Kv4Layout, flag: torch.Tensor) -> None:
    """Code `[coded, heads, head_dim]` 16-bit values."""
    into = Kv4Sections.of(payload, layout, k.dtype)
    keys = (*into.keys, flag)
    row = layout.heads * layout.head_dim
    grid = (layout.spans, triton.cdiv(row, CHANNELS))
    quantise_keys_kernel[grid](k.contiguous(), keys, *_key_rows(layout), row, CHANNELS, num_warps=1, **_LAUNCH)
    values = (*into.values, flag)
    programs, plan = _value_plan(layout, k.device)
    quantise_values_kernel[programs](v.contiguous(), values, *plan, num_stages=1, **_LAUNCH)


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kv4Layout, flag: torch.Tensor) -> None:
    """Write the `[coded, heads, head_dim]` 16-bit values; `k` and `v` must be contiguous."""
    sections = Kv4Sections.of(payload, layout, k.dtype)
    keys = (*sections.keys, flag)
    row = layout.heads * layout.head_dim
    grid = (layout.spans, triton.cdiv(row, CHANNELS))
    dequantise_keys_kernel[grid](k, keys, *_key_rows(layout), row, CHANNELS, num_warps=1, **_LAUNCH)
    values = tuple(sections.values)
    programs, plan = _value_plan(layout, k.device)
    dequantise_values_kernel[programs](v, values, *plan, num_stages=1, **_LAUNCH)


def _key_rows(layout: Kv4Layout) -> tuple[int, int, int, int]:
    """Coded tokens, lead, and the half-open range of rows of codes that are stored."""
    return layout.coded, layout.lead, layout.code_rows.start, layout.code_rows.stop


@cache
def value_shape(head_dim: int) -> tuple[tl.constexpr, ...]:
    """How vectors of V are cut into slabs of whole groups that are rotated and coded at once.

    A slab is the whole vector up to 128 channels, padded; of wider ones a run of channels rotated
    together, or 128 of it; a single group where groups lie across the runs (no multiple of 32).

    head_dim; channels of a group; groups of a slab; these and half a group padded to powers of two;
    side of the matrix; a run's channels as a power of two; vectors of a tile."""
    groups, together = value_groups(head_dim), head_dim & -head_dim
    width = head_dim // groups
    half = max(8, int(triton.next_power_of_2((width + 1) // 2)))
    if 2 * half * int(triton.next_power_of_2(groups)) <= _MOST_AT_ONCE:
        taken, side = groups, head_dim
    elif together % width == 0:
        side = min(together, _MOST_AT_ONCE)
        taken = side // width
    else:
        taken = 1
        side = together * max(-(-(at + width) // together) - at // together for at in range(0, head_dim, width))
    padded = int(triton.next_power_of_2(taken))
    side = max(16, int(triton.next_power_of_2(side)))
    vectors = min(32, 8192 // (2 * padded * half))
    numbers = (head_dim, width, taken, padded, half, side, together.bit_length() - 1, vectors)
    return tuple(tl.constexpr(number) for number in numbers)


def _value_plan(layout: Kv4Layout, device: torch.device) -> tuple[tuple[int], tuple[object, ...]]:
    """Grid, and the arguments from the matrix on. Programs take several tiles once they fill a GPU."""
    head_dim, vectors = layout.head_dim, layout.coded * layout.heads
    tiles = 8 if vectors >= 65536 else 1
    shape = value_shape(head_dim)
    matrix = _hadamard_on(device, head_dim)
    return (triton.cdiv(vectors, shape[-1].value * tiles),), (matrix, vectors, shape, tiles)


@cache
def _hadamard_on(device: torch.device, head_dim: int) -> torch.Tensor:
    """Kept. The first call waits for the copy, so that any stream may read it."""
    return small_hadamard(head_dim).to(device)


def small_hadamard(head_dim: int) -> torch.Tensor:
    """fp16 `[side, side]`: Hadamard matrices of runs along the diagonal, or the corner of one."""
    side, together = value_shape(head_dim)[5].value, head_dim & -head_dim
    runs = side // together | 1  # an odd number of them, so that no more channels are rotated together
    return hadamard(runs * together)[:side, :side].to(torch.float16).contiguous()


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[misc]
def quantise_keys_kernel(
    x: tl.tensor,
    into: tl.tensor,
    coded: tl.tensor,
    lead: tl.tensor,
    code_first: tl.tensor,
    code_stop: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
) -> None:
    bases, units, zeros, steps, codes, flag = into
    group_first, group_stop = lead // 32, (lead + coded + 31) // 32
    step_first, step_stop = group_first // 2, (group_stop + 1) // 2
    span = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    begin = span * 256 - lead
    low = tl.full((block,), float("inf"), tl.float32)
    high = -low
    largest = tl.zeros((block,), tl.int32)
    for group in range(8):
        first, second = _tokens(x, begin + group * 32, coded, width, channel, inside)
        low = tl.minimum(low, tl.minimum(tl.min(first, 0), tl.min(second, 0)))
        high = tl.maximum(high, tl.maximum(tl.max(first, 0), tl.max(second, 0)))
        largest = tl.maximum(largest, tl.maximum(_largest(first), _largest(second)))
    low += 0.0  # never -0
    raise_flag(flag, largest > 0x4E800000)
    unit_code = _unit_code(high - low, -8)
    unit = _unit(unit_code)
    at = span.to(tl.int64) * width + channel
    tl.store(bases + at, low.to(x.dtype.element_ty), mask=inside)
    tl.store(units + at, unit_code.to(tl.uint8), mask=inside)
    row = tl.arange(0, 16)
    for pair in range(4):
        nibbles = tl.zeros((block,), tl.int32)
        for odd in tl.static_range(2):
            group = pair * 2 + odd
            first, second = _tokens(x, begin + group * 32, coded, width, channel, inside)
            lowest = tl.minimum(tl.min(first, 0), tl.min(second, 0))
            highest = tl.maximum(tl.max(first, 0), tl.max(second, 0))
            step, middle = _step_and_middle(lowest, highest, low, unit, 1.0)
            place = _place(middle, step, 0, False)
            factor = (tl.math.div_rn(1.0, step * unit) * 128.0)[None, :]
            start = (place * unit + low)[None, :]
            first, second = nearby((first - start) * factor), nearby((second - start) * factor)
            start, shift = place, tl.zeros_like(place)
            smallest = tl.sum(_squares(first, shift[None, :]), 0) + tl.sum(_squares(second, shift[None, :]), 0)
            for candidate in range(1, 4):
                other = _place(middle, step, candidate, False)
                moved = nearby((other - start) * tl.math.div_rn(128.0, step))
                squares = tl.sum(_squares(first, moved[None, :]), 0) + tl.sum(_squares(second, moved[None, :]), 0)
                place = tl.where(squares < smallest, other, place)
                shift = tl.where(squares < smallest, moved, shift)
                smallest = tl.minimum(squares, smallest)
            packed = _code(first, shift[None, :]) | (_code(second, shift[None, :]) << 4)
            nibbles |= (step.to(tl.int32) - 1) << (4 * odd)
            line = span * 8 + group
            kept = inside & _between(channel, line, group_first, group_stop)
            tl.store(zeros + (line - group_first).to(tl.int64) * width + channel, place.to(tl.uint8), mask=kept)
            lines = line * 16 + row
            here = ((lines >= code_first) & (lines < code_stop))[:, None] & inside[None, :]
            there = (lines - code_first).to(tl.int64)[:, None] * width + channel[None, :]
            tl.store(codes + there, packed.to(tl.uint8), mask=here)
        line = span * 4 + pair
        kept = inside & _between(channel, line, step_first, step_stop)
        tl.store(steps + (line - step_first).to(tl.int64) * width + channel, nibbles.to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=_VARYING)  # type: ignore[misc]
def dequantise_keys_kernel(
    x: tl.tensor,
    stored: tl.tensor,
    coded: tl.tensor,
    lead: tl.tensor,
    code_first: tl.tensor,
    code_stop: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
) -> None:
    bases, units, zeros, steps, codes, flag = stored
    group_first, group_stop = lead // 32, (lead + coded + 31) // 32
    step_first = group_first // 2
    span = tl.program_id(0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < width
    at = span.to(tl.int64) * width + channel
    base = tl.load(bases + at, mask=inside, other=0.0).to(tl.float32)
    raise_flag(flag, (base.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x4E800000)
    unit = _unit(tl.load(units + at, mask=inside, other=0).to(tl.int32))
    row = tl.arange(0, 16)
    sixteen: tl.constexpr = x.dtype.element_ty
    for group in range(8):
        line = span * 8 + group
        kept = inside & _between(channel, line, group_first, group_stop)
        zero = tl.load(zeros + (line - group_first).to(tl.int64) * width + channel, mask=kept, other=0)
        # The steps of two groups share a byte. A pair cut by the block's edge is stored as a whole.
        pair = (span * 4 + group // 2 - step_first).to(tl.int64)
        nibbles = tl.load(steps + pair * width + channel, mask=kept, other=0).to(tl.int32)
        step = ((nibbles >> (4 * (group % 2))) & 15) + 1
        origin = (zero.to(tl.float32) * unit + base)[None, :]
        factor = (step.to(tl.float32) * unit)[None, :]
        lines = line * 16 + row
        here = ((lines >= code_first) & (lines < code_stop))[:, None] & inside[None, :]
        there = (lines - code_first).to(tl.int64)[:, None] * width + channel[None, :]
        packed = tl.load(codes + there, mask=here, other=0).to(tl.int32)
        for half in tl.static_range(2):
            token = span * 256 - lead + group * 32 + half * 16 + row
            to = ((token >= 0) & (token < coded))[:, None] & inside[None, :]
            values = clamped(((packed >> (4 * half)) & 15).to(tl.float32) * factor + origin, sixteen)
            tl.store(x + token.to(tl.int64)[:, None] * width + channel[None, :], values.to(sixteen), mask=to)


@triton.jit  # type: ignore[misc]
def quantise_values_kernel(
    x: tl.tensor, into: tl.tensor, matrix: tl.tensor, vectors: tl.tensor, shape: tl.constexpr, tiles: tl.constexpr
) -> None:
    units, grids, codes, flag = into
    width: tl.constexpr = shape[0]
    slabs: tl.constexpr = width // (shape[1] * shape[2])
    block: tl.constexpr = shape[7]
    part: tl.constexpr = 128 if width > 128 else shape[5]
    for tile in range(tiles):
        column = (tl.program_id(0).to(tl.int64) * tiles + tile) * block + tl.arange(0, block)
        valid = column < vectors
        reach = tl.zeros((block,), tl.int32)
        for start in range(0, width, part):
            reach = tl.maximum(reach, _largest(_vectors(x, column, valid, start, width, part)))
        raise_flag(flag, reach > 0x4E800000)
        exponent = tl.minimum(tl.maximum(reach >> 23, 64), 157)
        first = _rotated(x, matrix, column, valid, exponent, 0, shape)
        most = tl.max(tl.abs(first), 0)
        for slab in range(1, slabs):
            y = _rotated(x, matrix, column, valid, exponent, slab, shape)
            most = tl.maximum(most, tl.max(tl.abs(y), 0))
        shift = exponent - 134 - shape[6]
        unit_code = _unit_code(most, shift - 7)
        unit = (_unit(unit_code) * power(-shift))[None, :]
        tl.store(units + column, unit_code.to(tl.uint8), mask=valid)
        for slab in range(slabs):  # several are rotated anew: they would not fit into registers
            y = first if slabs == 1 else _rotated(x, matrix, column, valid, exponent, slab, shape)
            _code_values(y, (grids, codes), vectors, column, valid, unit, slab, shape)


@triton.jit  # type: ignore[misc]
def _rotated(
    x: tl.tensor,
    matrix: tl.tensor,
    column: tl.tensor,
    valid: tl.tensor,
    exponent: tl.tensor,
    slab: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """A rotated slab: lines (group, half, channel of the half), each padded, by vectors. Padding is
    0 or repeats a channel, so that it does not change the largest |y|."""
    width: tl.constexpr = shape[0]
    group: tl.constexpr = shape[1]
    taken: tl.constexpr = shape[2]
    high: tl.constexpr = shape[4]
    side: tl.constexpr = shape[5]
    together: tl.constexpr = 2 ** shape[6]
    lines: tl.constexpr = shape[3] * 2 * high
    part: tl.constexpr = min(side, 128, 16384 // lines)
    line = tl.arange(0, lines)
    if group != 2 * high:
        line = line // (2 * high) * group + line // high % 2 * ((group + 1) // 2) + line % high
        line = tl.minimum(line, group * taken - 1)
    first = slab * (group * taken)
    line += first % min(together, side)
    begin = first // together * together
    y = tl.zeros((lines, shape[7]), tl.float32)
    for start in range(0, side, part):
        signs = tl.load(matrix + line[:, None] * side + (start + tl.arange(0, part))[None, :])
        factor = power(134 - exponent)[None, :]
        whole = nearby(_vectors(x, column, valid, begin + start, width, part) * factor)
        # Runs longer than the matrix: their parts are added with its signs first, and rotated once.
        for other in range(1, together // side):
            values = _vectors(x, column, valid, begin + other * side, width, part)
            whole += nearby(values * factor) * sign(slab, other)
        y = tl.dot(signs, whole.to(tl.float16), y)
    return rounded(y, tl.bfloat16)


@triton.jit  # type: ignore[misc]
def sign(line: tl.tensor, column: tl.tensor) -> tl.tensor:
    """1 or -1: Sylvester's matrix in this line and this column, the latter below 8.

    The matrix of a longer run is that of 128 times these signs: parts are added with them, exact in
    fp16 (at most 2048), then rotated."""
    return 1.0 - 2.0 * ((0x96 >> (line & column)) & 1)


@triton.jit  # type: ignore[misc]
def _code_values(
    y: tl.tensor,
    into: tl.tensor,
    vectors: tl.tensor,
    column: tl.tensor,
    valid: tl.tensor,
    unit: tl.tensor,
    slab: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Write grids and codes of what `_rotated` gave."""
    grids, codes = into
    width: tl.constexpr = shape[1]
    taken: tl.constexpr = shape[2]
    many: tl.constexpr = shape[3]
    high: tl.constexpr = shape[4]
    half: tl.constexpr = (width + 1) // 2
    group = tl.arange(0, many)
    side = tl.arange(0, 2)[None, :, None, None]
    lane = tl.arange(0, high)
    real = (group < taken)[:, None, None, None] & (lane < half)[None, None, :, None]
    real = real & (side * half + lane[None, None, :, None] < width)
    y = tl.reshape(y, (many, 2, high, shape[7]))
    lowest = tl.min(tl.min(tl.where(real, y, float("inf")), 2), 1)
    highest = tl.max(tl.max(tl.where(real, y, float("-inf")), 2), 1)
    there = (group < taken)[:, None]
    lowest, highest = tl.where(there, lowest, 0.0), tl.where(there, highest, 0.0)
    step, middle = _step_and_middle(lowest, highest, 0.0, unit, 9.0)
    place = _place(middle, step, 0, True)
    start = _value_zero(place, step)
    factor = tl.math.div_rn(1.0, step * unit) * 128.0
    # From here on in 1/128 step: whole numbers, so that sums of squares are exact in any order.
    y = nearby((y - (start * unit)[:, None, None, :]) * factor[:, None, None, :])
    shift = tl.zeros_like(place)
    smallest = tl.sum(tl.sum(tl.where(real, _squares(y, shift[:, None, None, :]), 0.0), 2), 1)
    for candidate in range(1, 4):
        other = _place(middle, step, candidate, True)
        moved = nearby((_value_zero(other, step) - start) * tl.math.div_rn(128.0, step))
        squares = tl.sum(tl.sum(tl.where(real, _squares(y, moved[:, None, None, :]), 0.0), 2), 1)
        place = tl.where(squares < smallest, other, place)
        shift = tl.where(squares < smallest, moved, shift)
        smallest = tl.minimum(squares, smallest)
    code = tl.where(real, _code(y, shift[:, None, None, :]), 0)
    packed = tl.sum(code << (4 * side), 1)
    group += slab * taken
    grid = step - 9.0 + (place + 16.0) * 8.0
    tl.store(grids + group[:, None] * vectors + column[None, :], grid.to(tl.uint8), mask=there & valid[None, :])
    to = (group[:, None] * half + lane[None, :])[:, :, None] * vectors + column[None, None, :]
    mask = (there & (lane < half)[None, :])[:, :, None] & valid[None, None, :]
    tl.store(codes + to, packed.to(tl.uint8), mask=mask)


@triton.jit  # type: ignore[misc]
def dequantise_values_kernel(
    x: tl.tensor, stored: tl.tensor, matrix: tl.tensor, vectors: tl.tensor, shape: tl.constexpr, tiles: tl.constexpr
) -> None:
    units, grids, codes = stored
    width: tl.constexpr = shape[0]
    side: tl.constexpr = shape[5]
    together: tl.constexpr = 2 ** shape[6]
    block: tl.constexpr = shape[7]
    part: tl.constexpr = min(side, 128)
    line = tl.arange(0, part)
    sixteen: tl.constexpr = x.dtype.element_ty
    for tile in range(tiles):
        column = (tl.program_id(0).to(tl.int64) * tiles + tile) * block + tl.arange(0, block)
        valid = column < vectors
        unit = _unit(tl.load(units + column, mask=valid, other=0).to(tl.int32))[None, :]
        for slab in range((width + part - 1) // part):
            channel = slab * part + line
            begin = slab * part // together * together
            whole = _whole((grids, codes), vectors, column, valid, begin + line, shape)
            for other in range(1, together // part):
                values = _whole((grids, codes), vectors, column, valid, begin + other * part + line, shape)
                whole += values * sign(slab, other)
            signs = tl.load(matrix + line[None, :] * side + line[:, None])
            y = clamped(rounded(tl.dot(signs, whole.to(tl.float16)), tl.bfloat16) * unit, sixteen)
            mask = (channel < width)[:, None] & valid[None, :]
            tl.store(x + column[None, :] * width + channel[:, None], y.to(sixteen), mask=mask)


@triton.jit  # type: ignore[misc]
def _whole(
    stored: tl.tensor,
    vectors: tl.tensor,
    column: tl.tensor,
    valid: tl.tensor,
    channel: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """The whole numbers that the codes of some rotated channels stand for, 0 beyond the last one."""
    grids, codes = stored
    half: tl.constexpr = (shape[1] + 1) // 2
    group, inside = channel // shape[1], channel % shape[1]
    here, at = (channel < shape[0])[:, None] & valid[None, :], column[None, :]
    packed = tl.load(codes + (group * half + inside % half)[:, None] * vectors + at, mask=here, other=0).to(tl.int32)
    grid = tl.load(grids + group[:, None] * vectors + at, mask=here, other=0).to(tl.int32)
    step = (grid & 7) + 9
    zero = (((grid >> 3) - 16) * (17 - step) - step * 15) >> 1
    whole = zero + step * ((packed >> (4 * (inside // half))[:, None]) & 15)
    return tl.where(here, whole, 0).to(tl.float32)


@triton.jit  # type: ignore[misc]
def _tokens(
    x: tl.tensor, begin: tl.tensor, coded: tl.tensor, width: tl.tensor, channel: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """The halves `[16, channels]` of a group; the nearest coded token stands for a missing one."""
    row = tl.arange(0, 16)
    first = tl.minimum(tl.maximum(begin + row, 0), coded - 1).to(tl.int64)
    second = tl.minimum(tl.maximum(begin + 16 + row, 0), coded - 1).to(tl.int64)
    one = tl.load(x + first[:, None] * width + channel[None, :], mask=inside[None, :], other=0.0)
    two = tl.load(x + second[:, None] * width + channel[None, :], mask=inside[None, :], other=0.0)
    return one.to(tl.float32), two.to(tl.float32)


@triton.jit  # type: ignore[misc]
def _between(like: tl.tensor, row: tl.tensor, first: tl.tensor, stop: tl.tensor) -> tl.tensor:
    rows = row + tl.zeros_like(like)
    return (rows >= first) & (rows < stop)


@triton.jit  # type: ignore[misc]
def _vectors(
    x: tl.tensor,
    column: tl.tensor,
    valid: tl.tensor,
    start: tl.tensor,
    width: tl.constexpr,
    part: tl.constexpr,
) -> tl.tensor:
    """Channels from `start` on of some vectors, as `[part, vectors]`."""
    channel = start + tl.arange(0, part)
    mask = (channel < width)[:, None] & valid[None, :]
    return tl.load(x + column[None, :] * width + channel[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[misc]
def _largest(x: tl.tensor) -> tl.tensor:
    """The bits of the largest |x| over the first axis; NaN counts as larger than all else."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit  # type: ignore[misc]
def _unit_code(reach: tl.tensor, shift: tl.tensor) -> tl.tensor:
    code = ((reach.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 21) + 4 * shift - 348
    return tl.minimum(tl.maximum(code, 0), 255)


@triton.jit  # type: ignore[misc]
def _unit(code: tl.tensor) -> tl.tensor:
    return ((code + 348) << 21).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[misc]
def _step_and_middle(
    lowest: tl.tensor, highest: tl.tensor, base: tl.tensor, unit: tl.tensor, least: tl.constexpr
) -> tl.tensor:
    """Steps, at least so many units, and middles of groups between `lowest` and `highest`."""
    per_unit = tl.math.div_rn(1.0, unit)
    step = nearby((highest - lowest) * per_unit * 0.06611569970846176)
    middle = nearby(((lowest - base) + (highest - base)) * per_unit * 32.0) * 0.015625
    return tl.minimum(tl.maximum(step, least), 16.0), middle


@triton.jit  # type: ignore[misc]
def _place(middle: tl.tensor, step: tl.tensor, candidate: tl.tensor, values: tl.constexpr) -> tl.tensor:
    """The place of one of the four candidates for a grid of K or of V."""
    near = middle + step * (candidate * 0.1875 - 0.28125)
    if values:
        near = nearby(near * tl.math.div_rn(2.0, 17.0 - step))
        return tl.minimum(tl.maximum(near, -16.0), 15.0)
    else:
        return tl.minimum(tl.maximum(nearby(near - step * 7.5), 0.0), 255.0)


@triton.jit  # type: ignore[misc]
def _value_zero(place: tl.tensor, step: tl.tensor) -> tl.tensor:
    """What code 0 of a grid of V stands for."""
    return tl.floor((place * (17.0 - step) - step * 15.0) * 0.5)


@triton.jit  # type: ignore[misc]
def _squares(fine: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Squared distances to the nearest step, in 1/128 step, on a grid that lies so much further on."""
    off = fine - shift
    off = off - nearby(off * 0.0078125) * 128.0
    return off * off


@triton.jit  # type: ignore[misc]
def _code(fine: tl.tensor, shift: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(((fine - shift).to(tl.int32) + 64) >> 7, 0), 15)
