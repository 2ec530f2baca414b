"""`kivi4`: KIVI's 4-bit quantisation as published (Liu et al. 2024, group 32), for comparison with `kv4`.

This plain torch code is the format; `codec` checks shapes and lengths before it gets here. Input is 16-bit:
fp32 is rounded to bf16 first (to nearest even) and the decoded bf16 values are returned as fp32. Sections
follow each other without padding, little-endian, row-major in the order of their brackets:

    header       u8 version (1) | u8 dtype16 (0 bf16, 1 fp16) | 14 bytes 0
    residual K   16-bit values  [residual, heads, head_dim]
    residual V   16-bit values  [residual, heads, head_dim]
    K zeros      16-bit values  [key_groups, heads, head_dim]
    K scales     16-bit values  [key_groups, heads, head_dim]
    V zeros      16-bit values  [coded, heads, value_groups]
    V scales     16-bit values  [coded, heads, value_groups]
    K codes      u4             [key_groups, 16, heads, head_dim]    byte i: token i low, token i + 16 high
    V codes      u4             [coded, heads, value_groups, half]   byte i: channel i low, i + half high

*Groups.* K per channel over the 32 tokens whose positions share `position // 32`. V per (token, head) over
32 channels; where 32 does not divide head_dim, over the most equal groups of at least 32 channels (80: two of
40; a head of fewer than 64 channels: one). `half` is half a group, rounded up; an odd group leaves its last
high nibble 0.

*Residual.* KIVI keeps the tokens behind the last whole group in 16 bit until enough of them have come. A
transfer in blocks has no later: what does not fill a group *within its block* travels in 16 bit, K and V
alike. These are the tokens before the first multiple of 32 and after the last, first the former, then the
latter. Blocks cut at multiples of 32 therefore decode to what the whole prompt would decode to.

*Parameters* have the block's own 16-bit dtype: fp16 as published, bf16 for bf16 values, whose range fp16 does
not have. `zero = min` (0 for -0), which is one of the values and hence exact. With all of this in fp32,

    scale = round16((max - min) / 15)       0 if that is below 2**-100
    code  = clamp(round_half_even((x - zero) * (1 / scale)), 0, 15)      0 where scale is 0
    x     = round16(code * scale + zero)    for fp16 clamped to +-65504 first

Division, subtraction and product are each rounded once, to nearest even. `code * scale` is exact in fp32, so
a fused multiply-add changes no bit. A constant group has scale 0 and comes back exact (the published code
divides by zero there); the bound 2**-100 keeps the reciprocal finite and subnormal numbers out.
"""

from __future__ import annotations

import torch

from . import kivi4_native
from . import kivi4_reference as reference
from .accelerate import ready
from .blocks import LARGEST, all_within, has_triton, header, known, new_flag, read_header
from .kivi4_layout import KIVI4_HEADER_BYTES, KIVI4_VERSION, Kivi4Layout
from .kivi4_reference import Sections

__all__ = ["LARGEST", "decode", "encode", "require_sound"]


def encode(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, start: int) -> bool | torch.Tensor:
    """Write the payload of 16-bit values to `out`. Whether some are not finite or too large, as `known` says."""
    layout = Kivi4Layout(start, *k.shape)
    out[:KIVI4_HEADER_BYTES].copy_(header(KIVI4_VERSION, k.dtype, k.device))
    unsound = _keep_residual(k, v, out, layout)
    if layout.coded:
        coded = slice(layout.lead, layout.lead + layout.coded)
        unsound = unsound | _quantise(k[coded], v[coded], out, layout)
    return unsound


def decode(data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> bool | torch.Tensor:
    """Fill 16-bit `k` and `v`, both contiguous, from a whole payload. Whether it is corrupt, as `known` says."""
    layout = Kivi4Layout(start, *k.shape)
    unsound = known((data[:KIVI4_HEADER_BYTES] != header(KIVI4_VERSION, k.dtype, k.device)).any())
    unsound = unsound | _return_residual(data, k, v, layout)
    if layout.coded:
        coded = slice(layout.lead, layout.lead + layout.coded)
        unsound = unsound | _dequantise(data, k[coded], v[coded], layout)
    return unsound


def require_sound(data: torch.Tensor, like: torch.Tensor, start: int, layer: int) -> None:
    """Raise `PayloadError` for what is wrong with the payload of a block of this shape and dtype, if anything."""
    read_header(bytes(data[:KIVI4_HEADER_BYTES].tolist()), "kivi4", KIVI4_VERSION, like.dtype, layer)
    layout = Kivi4Layout(start, *like.shape)
    reference.require_sound(Sections.of(data, layout, like.dtype), layout, layer)


def _keep_residual(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: Kivi4Layout) -> bool | torch.Tensor:
    """Write the tokens outside whole groups. Whether there are values not finite or too large."""
    if not layout.residual:
        return False
    into = Sections.of(out, layout, k.dtype)
    lead, behind = layout.lead, layout.lead + layout.coded
    for given, kept in ((k, into.key_residual), (v, into.value_residual)):
        kept[:lead].copy_(given[:lead])
        kept[lead:].copy_(given[behind:])
    return _residual_unsound(into)


def _return_residual(data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kivi4Layout) -> bool | torch.Tensor:
    """Fill the tokens outside whole groups. Whether there are values that no encoder writes."""
    if not layout.residual:
        return False
    sections = Sections.of(data, layout, k.dtype)
    lead, behind = layout.lead, layout.lead + layout.coded
    for into, kept in ((k, sections.key_residual), (v, sections.value_residual)):
        into[:lead].copy_(kept[:lead])
        into[behind:].copy_(kept[lead:])
    return _residual_unsound(sections)


def _residual_unsound(sections: Sections) -> bool | torch.Tensor:
    return known(~(all_within(sections.key_residual) & all_within(sections.value_residual)))


def _quantise(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: Kivi4Layout) -> bool | torch.Tensor:
    """Write the tokens in whole groups by the fastest way there is. Whether there are values that are not finite."""
    if k.device.type == "cpu" and ready(4 * k.numel()):
        sound = kivi4_native.quantise(k, v, out, layout)
        if sound is not None:
            return not sound
    into = Sections.of(out, layout, k.dtype)
    if has_triton(k.device):
        from . import triton_kivi4

        flag = new_flag(k.device)
        triton_kivi4.quantise(k, v, into, flag)
        return flag
    reference.quantise(k, v, into)
    return not bool(all_within(k) & all_within(v))


def _dequantise(data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kivi4Layout) -> bool | torch.Tensor:
    """Fill the tokens in whole groups by the fastest way there is. Whether there are parameters no encoder writes."""
    if k.device.type == "cpu" and ready(4 * k.numel()):
        sound = kivi4_native.dequantise(data, layout, k, v)
        if sound is not None:
            return not sound
    sections = Sections.of(data, layout, k.dtype)
    if has_triton(k.device):
        from . import triton_kivi4

        flag = new_flag(k.device)
        triton_kivi4.dequantise(sections, k, v, flag)
        return flag
    reference.dequantise(sections, k, v)
    return not bool(reference.is_sound(sections))
