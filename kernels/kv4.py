"""The 4-bit codec, step by step; `codec` specifies the format that these steps produce."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch

from .errors import NonFiniteError, PayloadError
from .format import FORMAT_VERSION, KEY_GROUP_TOKENS, KV4_HEADER_BYTES, Kv4Layout, WireDtype, value_groups

__all__ = ["decode", "encode", "expand_scales", "hadamard", "round_scales"]

# version, 16-bit dtype, key_top, value_top, reserved
_HEADER = struct.Struct("<BBhhH")
assert _HEADER.size == KV4_HEADER_BYTES

LARGEST = 2.0**120
"""Bound on |x|: up to here neither a range (2 |x|) nor a rotation (sqrt(head_dim) |x|) nor a rounded-up
step leaves fp32.
"""

LARGEST_DECODED = 2.0**122
"""What decoding such values can give at most, with room for half a step. Infinity and NaN lie beyond."""

# The smallest `top` keeps the smallest scale, 31 binades below, a normal fp32 number: devices differ on
# subnormal ones.
_TOP_RANGE = (-95, 126)
_BINADES = 31
_CODE_MAX = 15


class _Sections(NamedTuple):
    """The parts of one payload, in order, as bytes."""

    header: torch.Tensor
    exempt_keys: torch.Tensor
    exempt_values: torch.Tensor
    key_zeros: torch.Tensor
    value_zeros: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    key_codes: torch.Tensor
    value_codes: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor, layout: Kv4Layout) -> _Sections:
        return cls(*torch.split_with_sizes(data, layout.section_bytes))


def encode(k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    layout = Kv4Layout(start, *k.shape)
    sixteen = torch.float16 if k.dtype == torch.float16 else torch.bfloat16
    k16, v16 = k.to(sixteen), v.to(sixteen)
    for name, given in (("K", k16), ("V", v16)):
        _check_values(given, name, layout, layer)
    out = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=k.device)
    sections = _Sections.of(out, layout)
    exempt = layout.exempt
    sections.exempt_keys.copy_(_bytes_of(k16[:exempt]))
    sections.exempt_values.copy_(_bytes_of(v16[:exempt]))
    key_top = value_top = _TOP_RANGE[0]
    if layout.coded:
        key_top = _code_keys(k16[exempt:], layout, sections)
        value_top = _code_values(v16[exempt:], sections)
    payload = out.cpu().numpy().data
    number = WireDtype.FP16.wire if sixteen == torch.float16 else WireDtype.BF16.wire
    _HEADER.pack_into(payload, 0, FORMAT_VERSION, number, key_top, value_top, 0)
    return payload


def decode(
    data: torch.Tensor, layout: Kv4Layout, *, dtype: torch.dtype, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`data` is a whole payload as bytes, its length already checked against the layout."""
    sixteen = torch.float16 if dtype == torch.float16 else torch.bfloat16
    sections = _Sections.of(data, layout)
    key_top, value_top = _read_header(sections.header, sixteen, layer)
    exempt, shape = layout.exempt, (layout.heads, layout.head_dim)
    k = torch.empty(layout.tokens, *shape, dtype=dtype)
    v = torch.empty_like(k)
    _store(sections.exempt_keys.view(sixteen).view(exempt, *shape), k[:exempt], "K", layer)
    _store(sections.exempt_values.view(sixteen).view(exempt, *shape), v[:exempt], "V", layer)
    if layout.coded:
        _store(_decode_keys(sections, layout, sixteen, key_top), k[exempt:], "K", layer)
        _store(_decode_values(sections, layout, sixteen, value_top), v[exempt:], "V", layer)
    return k, v


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last axis by blocks of its largest power-of-two factor. Orthonormal, its own inverse.

    Butterflies rather than a matrix product: the order of the additions is part of the format, and only
    this way is it fixed.
    """
    width = x.shape[-1]
    block = width & -width
    # Scaled before the additions, so that nothing on the way is larger than the result can be. With the
    # rotated axis in front every butterfly adds long contiguous rows.
    rows = torch.mul(x.reshape(-1, block).t(), 1.0 / math.sqrt(block), out=_floats(x, block))
    spare = torch.empty_like(rows)
    distance = 1
    while distance < block:
        pairs = rows.view(block // (2 * distance), 2, -1)
        sums = spare.view(pairs.shape)
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        rows, spare = spare, rows
        distance *= 2
    return rows.t().reshape(x.shape)


def round_scales(wanted: torch.Tensor) -> tuple[torch.Tensor, int]:
    """8-bit codes of the smallest representable scales >= `wanted`, and the tensor's top exponent. 0 stays
    0.
    """
    fraction, exponent = torch.frexp(wanted)
    mantissa = torch.ceil((fraction * 2 - 1) * 8).to(torch.int32)
    exponent = exponent - 1 + mantissa // 8
    mantissa = mantissa % 8
    used = wanted > 0
    lowest = _TOP_RANGE[0]
    top = max(lowest, int(torch.where(used, exponent, lowest).max()))
    codes = (exponent - (top - _BINADES)) * 8 + mantissa
    # Whatever lies below the grid takes its smallest step: too wide for that group, and still nothing
    # beside the largest.
    codes = torch.where(used, codes.clamp(1, 255), 0)
    return codes.to(torch.uint8), top


def expand_scales(codes: torch.Tensor, top: int) -> torch.Tensor:
    """The fp32 scales of 8-bit codes, exactly; 0 for code 0."""
    steps = torch.arange(256, dtype=torch.int32, device=codes.device)
    table = torch.ldexp(1 + (steps % 8).to(torch.float32) / 8, steps // 8 + (top - _BINADES))
    table[0] = 0
    return table[codes.to(torch.int64)]


def _code_keys(k: torch.Tensor, layout: Kv4Layout, into: _Sections) -> int:
    groups = _by_position(k.to(torch.float32), layout)
    zeros, highest = groups.aminmax(dim=1)
    scales, top = round_scales((highest - zeros) / _CODE_MAX)
    codes = _round_codes(groups, zeros.unsqueeze(1), expand_scales(scales, top).unsqueeze(1))
    coded = codes.view(-1, *k.shape[1:])[layout.lead : layout.lead + layout.coded]
    into.key_zeros.copy_(_bytes_of(zeros.to(k.dtype)))
    into.key_scales.copy_(scales.view(-1))
    into.key_codes.copy_(_pack(coded))
    return top


def _decode_keys(sections: _Sections, layout: Kv4Layout, sixteen: torch.dtype, top: int) -> torch.Tensor:
    shape = (layout.key_groups, layout.heads, layout.head_dim)
    zeros = sections.key_zeros.view(sixteen).view(shape).to(torch.float32)
    scales = expand_scales(sections.key_scales.view(shape), top)
    codes = _unpack(sections.key_codes, (layout.coded, *shape[1:]))
    group = torch.arange(layout.lead, layout.lead + layout.coded) // KEY_GROUP_TOKENS
    return codes.to(torch.float32).mul_(scales[group]).add_(zeros[group])


def _by_position(k: torch.Tensor, layout: Kv4Layout) -> torch.Tensor:
    """`[groups, 64, heads, head_dim]`, cut at multiples of 64 positions; repeated edge rows fill the ends.

    A repeated row changes neither the minimum nor the maximum of its group.
    """
    tail = layout.key_groups * KEY_GROUP_TOKENS - layout.lead - layout.coded
    if layout.lead or tail:
        k = torch.cat((k[:1].expand(layout.lead, -1, -1), k, k[-1:].expand(tail, -1, -1)))
    return k.view(layout.key_groups, KEY_GROUP_TOKENS, layout.heads, layout.head_dim)


def _code_values(v: torch.Tensor, into: _Sections) -> int:
    tokens, heads, head_dim = v.shape
    rotated = hadamard(v).view(tokens, heads, value_groups(head_dim), -1)
    lowest, highest = rotated.aminmax(dim=-1)
    zeros = _bf16_at_most(lowest)
    constant = (v == v[..., :1]).all(dim=-1, keepdim=True)
    wanted = (highest - zeros.to(torch.float32)) / _CODE_MAX
    scales, top = round_scales(wanted.masked_fill_(constant, 0))
    # 0 is taken: it says "constant before the rotation".
    scales = scales.clamp_(min=1).masked_fill_(constant, 0)
    steps = expand_scales(scales, top)
    codes = _round_codes(rotated, zeros.to(torch.float32).unsqueeze(-1), steps.unsqueeze(-1))
    zero_bits = torch.where(constant, v[..., :1].view(torch.int16), zeros.view(torch.int16))
    into.value_zeros.copy_(_bytes_of(zero_bits))
    into.value_scales.copy_(scales.view(-1))
    into.value_codes.copy_(_pack(codes.masked_fill_(constant.unsqueeze(-1), 0)))
    return top


def _decode_values(sections: _Sections, layout: Kv4Layout, sixteen: torch.dtype, top: int) -> torch.Tensor:
    shape = (layout.coded, layout.heads, layout.head_dim)
    groups = (*shape[:2], value_groups(layout.head_dim), 1)
    zero_bits = sections.value_zeros.view(torch.int16).view(groups)
    scale_codes = sections.value_scales.view(groups)
    constant = scale_codes == 0
    # What stands under a constant group is not bf16; 0 keeps it out of the rotation of its head.
    zeros = torch.where(constant, 0.0, zero_bits.view(torch.bfloat16).to(torch.float32))
    rotated = _unpack(sections.value_codes, shape).view(*groups[:3], -1).to(torch.float32)
    values = hadamard(rotated.mul_(expand_scales(scale_codes, top)).add_(zeros).view(shape))
    if bool(constant.any()):
        plain = zero_bits.view(sixteen).to(torch.float32)
        values = torch.where(constant, plain, values.view(rotated.shape)).view(shape)
    return values


def _store(values: torch.Tensor, into: torch.Tensor, name: str, layer: int) -> None:
    """Round to the 16-bit dtype and widen to the caller's. No encoder makes a value beyond the bound."""
    if not values.numel():
        return
    lowest, highest = (float(bound) for bound in values.aminmax())
    if not (lowest >= -LARGEST_DECODED and highest <= LARGEST_DECODED):
        raise PayloadError(f"layer {layer}: {name} decodes to {lowest}..{highest}; the payload is corrupt")
    if into.dtype == torch.float16:
        # The largest value of a group may come back half a step larger, which fp16 could not hold.
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    into.copy_(values.to(torch.bfloat16) if into.dtype == torch.float32 else values)


def _round_codes(x: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # A constant group has scale 0 and x == zero, so any divisor gives code 0.
    steps = (x - zero).div_(torch.where(scale > 0, scale, 1.0))
    return steps.round_().clamp_(0, _CODE_MAX).to(torch.uint8)


def _bf16_at_most(x: torch.Tensor) -> torch.Tensor:
    """Round towards minus infinity: the nearest bf16, or its lower neighbour where that lies above x."""
    near = x.to(torch.bfloat16)
    below = torch.nextafter(near, torch.full_like(near, -math.inf))
    return torch.where(near.to(torch.float32) > x, below, near)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    flat = codes.reshape(-1)
    if flat.numel() % 2 or flat.storage_offset() % 2:  # the view below needs pairs, and even memory
        flat = torch.cat((flat, flat.new_zeros(flat.numel() % 2)))
    pairs = flat.view(torch.int16)  # the even code in the low byte, the odd one in the high byte
    return (pairs | (pairs >> 4)).to(torch.uint8)


def _unpack(packed: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    pairs = packed.to(torch.int16)
    flat = ((pairs | (pairs << 4)) & 0x0F0F).view(torch.uint8)
    return flat[: math.prod(shape)].view(shape)


def _floats(like: torch.Tensor, block: int) -> torch.Tensor:
    return torch.empty(block, like.numel() // block, dtype=torch.float32, device=like.device)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _check_values(x: torch.Tensor, name: str, layout: Kv4Layout, layer: int) -> None:
    lowest, highest = (float(bound) for bound in x.aminmax())
    if lowest >= -LARGEST and highest <= LARGEST:  # false for NaN too, which aminmax passes on
        return
    token, head, channel = (int(i) for i in (~(x.abs() <= LARGEST)).nonzero()[0])
    where = f"position {layout.start + token}, head {head}, channel {channel}"
    value = float(x[token, head, channel])
    raise NonFiniteError(f"layer {layer}: {name} is {value} at {where}; kv4 needs finite values of at most 2**120")


def _read_header(header: torch.Tensor, sixteen: torch.dtype, layer: int) -> tuple[int, int]:
    version, number, key_top, value_top, reserved = _HEADER.unpack(header.numpy().data)
    expected = WireDtype.FP16.wire if sixteen == torch.float16 else WireDtype.BF16.wire
    if version != FORMAT_VERSION:
        raise PayloadError(f"layer {layer}: kv4 version {version}; this build reads version {FORMAT_VERSION}")
    if number != expected:
        text = f"kv4 payload of dtype {number}, expected {expected} (0 bf16, 1 fp16)"
        raise PayloadError(f"layer {layer}: {text}")
    if reserved or not all(_TOP_RANGE[0] <= top <= _TOP_RANGE[1] for top in (key_top, value_top)):
        text = f"exponents {key_top} and {value_top}, reserved {reserved}"
        raise PayloadError(f"layer {layer}: the kv4 header is corrupt ({text})")
    return int(key_top), int(value_top)
