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
from .accelerate import ready
from .blocks import all_within, has_triton, read_header, require_finite, sixteen_bit, write_header
from .kivi4_layout import KIVI4_HEADER_BYTES, KIVI4_VERSION, Kivi4Layout
from .kivi4_reference import Sections, dequantise, is_sound, quantise, require_sound

__all__ = ["decode", "encode"]


def encode(k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    """The payload of one block. Raises `NonFiniteError` for the first value that is not finite."""
    layout = Kivi4Layout(start, *k.shape)
    sixteen = sixteen_bit(k.dtype)
    k16, v16 = k.to(sixteen), v.to(sixteen)
    out = torch.empty(layout.total_bytes, dtype=torch.uint8, device=k.device)
    sound = _keep_residual(k16, v16, out, layout)
    if layout.coded:
        coded = slice(layout.lead, layout.lead + layout.coded)
        sound = _quantise(k16[coded], v16[coded], out, layout) and sound
    if not sound:
        require_finite(k16, "K", start, "kivi4", layer)
        require_finite(v16, "V", start, "kivi4", layer)
    payload = out.cpu().numpy().data
    write_header(payload, KIVI4_VERSION, sixteen)
    return payload


def decode(
    data: torch.Tensor, layout: Kivi4Layout, *, dtype: torch.dtype, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`data` is a whole payload as bytes, its length already checked against the layout."""
    sixteen = sixteen_bit(dtype)
    read_header(bytes(data[:KIVI4_HEADER_BYTES].tolist()), "kivi4", KIVI4_VERSION, sixteen, layer)
    k = torch.empty(layout.tokens, layout.heads, layout.head_dim, dtype=sixteen, device=data.device)
    v = torch.empty_like(k)
    if not _decode_natively(data, layout, k, v):
        sections = Sections.of(data, layout, sixteen)
        if not bool(is_sound(sections)):
            require_sound(sections, layout, layer)
        _decode_plainly(sections, layout, k, v)
    return k.to(dtype), v.to(dtype)


def _keep_residual(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: Kivi4Layout) -> bool:
    """Write the tokens outside whole groups. False: there are values that are not finite."""
    if not layout.residual:
        return True
    into = Sections.of(out, layout, k.dtype)
    lead, behind = layout.lead, layout.lead + layout.coded
    for given, kept in ((k, into.key_residual), (v, into.value_residual)):
        kept[:lead].copy_(given[:lead])
        kept[lead:].copy_(given[behind:])
    return bool(all_within(into.key_residual) & all_within(into.value_residual))


def _quantise(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: Kivi4Layout) -> bool:
    """Write the tokens in whole groups by the fastest way there is. False: there are values that are not finite."""
    native = k.device.type == "cpu" and ready(4 * k.numel())
    sound = kivi4_native.quantise(k, v, out, layout) if native else None
    if sound is not None:
        return sound
    into = Sections.of(out, layout, k.dtype)
    if has_triton(k.device):
        from . import triton_kivi4

        triton_kivi4.quantise(k, v, into)
        return not bool(torch.isnan(into.key_scales).any() | torch.isnan(into.value_scales).any())
    quantise(k, v, into)
    return bool(all_within(k) & all_within(v))


def _decode_natively(data: torch.Tensor, layout: Kivi4Layout, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Fill K and V. False: there is no such library yet, or something is wrong with the payload."""
    if k.device.type != "cpu" or not ready(4 * k.numel()):
        return False
    coded = slice(layout.lead, layout.lead + layout.coded)
    if not kivi4_native.dequantise(data, layout, k[coded], v[coded]):
        return False
    if not layout.residual:
        return True
    sections = Sections.of(data, layout, k.dtype)
    _return_residual(sections, layout, k, v)
    return bool(all_within(sections.key_residual) & all_within(sections.value_residual))


def _decode_plainly(sections: Sections, layout: Kivi4Layout, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fill K and V from sound sections."""
    _return_residual(sections, layout, k, v)
    coded = slice(layout.lead, layout.lead + layout.coded)
    if not layout.coded:
        return
    if has_triton(k.device):
        from . import triton_kivi4

        triton_kivi4.dequantise(sections, k[coded], v[coded])
        return
    dequantise(sections, k[coded], v[coded])


def _return_residual(sections: Sections, layout: Kivi4Layout, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fill the tokens outside whole groups."""
    lead, behind = layout.lead, layout.lead + layout.coded
    for into, kept in ((k, sections.key_residual), (v, sections.value_residual)):
        into[:lead].copy_(kept[:lead])
        into[behind:].copy_(kept[lead:])
