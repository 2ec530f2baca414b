"""`fp8`: 8-bit floats (e4m3) with power-of-two scales, about 8.1 bits per element. Close to lossless.

This plain torch code is the format; `codec` checks shapes and lengths before it gets here. Input is 16-bit:
fp32 is rounded to bf16 first (to nearest even) and the decoded bf16 values are returned as fp32. Sections
follow each other without padding, little-endian, row-major in the order of their brackets:

    header        u8 version (1) | u8 dtype16 (0 bf16, 1 fp16) | 14 bytes 0
    K zeros       16-bit values  [key_groups, heads, head_dim]
    K exponents   u8             [key_groups, heads, head_dim]
    K codes       e4m3           [tokens, heads, head_dim]
    V codes       e4m3           [tokens, heads, head_dim]
    V exponents   u8             [tokens, heads]

An 8-bit float has an error in proportion to its size. Where a channel of K carries a large constant (Qwen2),
that error is in proportion to the constant and drowns what varies, whatever the scale: per token or per
channel, the logits of such K come out 24 dB worse than those of ordinary K. Therefore K is coded per channel
over the tokens whose positions share `position // 128`, relative to a zero in the middle of them. The
midpoint of minimum and maximum would follow every outlier, a mean depends on the order of its additions; so

    zero = round16((max over runs of their min + min over runs of their max) * 0.5)

where a run is the tokens of the group that share `position // 32` (runs without a token in this block do not
count), and a zero is never -0. V is coded per (token, head), relative to 0. For both, with everything in fp32:

    reach    = max |x - zero|                            that is max(max - zero, zero - min)
    exponent = clamp((bits(reach) + 0x1FFFFF) >> 23, 32, 255)
    code     = e4m3((x - zero) * 2 ** (135 - exponent))  to nearest even, at most 448 in size
    x        = round16(code * 2 ** (exponent - 135) + zero)    for fp16 clamped to +-65504 first

`bits` is the pattern of the fp32 number; the exponent is the least that keeps the largest code at 448, the
end of e4m3. Scaling by powers of two is exact, so nothing is divided and a fused multiply-add changes no bit.
The lower bound 32 keeps subnormal numbers out. e4m3's two bytes for NaN, which no encoder writes, decode as 0.
"""

from __future__ import annotations

import torch

from . import fp8_native
from .accelerate import ready
from .blocks import all_within, has_triton, read_header, require_finite, sixteen_bit, write_header
from .fp8_layout import FP8_HEADER_BYTES, FP8_VERSION, Fp8Layout
from .fp8_reference import UNSOUND, Sections, dequantise, is_sound, quantise, require_sound

__all__ = ["decode", "encode"]


def encode(k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    """The payload of one block. Raises `NonFiniteError` for the first value that is not finite."""
    layout = Fp8Layout(start, *k.shape)
    sixteen = sixteen_bit(k.dtype)
    k16, v16 = k.to(sixteen), v.to(sixteen)
    out = torch.empty(layout.total_bytes, dtype=torch.uint8, device=k.device)
    if not _quantise(k16, v16, out, layout):
        require_finite(k16, "K", start, "fp8", layer)
        require_finite(v16, "V", start, "fp8", layer)
    payload = out.cpu().numpy().data
    write_header(payload, FP8_VERSION, sixteen)
    return payload


def decode(
    data: torch.Tensor, layout: Fp8Layout, *, dtype: torch.dtype, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`data` is a whole payload as bytes, its length already checked against the layout."""
    sixteen = sixteen_bit(dtype)
    read_header(bytes(data[:FP8_HEADER_BYTES].tolist()), "fp8", FP8_VERSION, sixteen, layer)
    k = torch.empty(layout.tokens, layout.heads, layout.head_dim, dtype=sixteen, device=data.device)
    v = torch.empty_like(k)
    native = k.device.type == "cpu" and ready(4 * k.numel())
    if not (native and fp8_native.dequantise(data, layout, k, v)):
        sections = Sections.of(data, layout, sixteen)
        if not bool(is_sound(sections)):
            require_sound(sections, layout, layer)
        _decode_plainly(sections, layout, k, v)
    return k.to(dtype), v.to(dtype)


def _quantise(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: Fp8Layout) -> bool:
    """Write parameters and codes by the fastest way there is. False: there are values that are not finite."""
    native = k.device.type == "cpu" and ready(4 * k.numel())
    sound = fp8_native.quantise(k, v, out, layout) if native else None
    if sound is not None:
        return sound
    into = Sections.of(out, layout, k.dtype)
    if has_triton(k.device):
        from . import triton_fp8

        triton_fp8.quantise(k, v, into, layout)
        return not bool((into.key_exponents == UNSOUND).any() | (into.value_exponents == UNSOUND).any())
    if not bool(all_within(k) & all_within(v)):
        return False
    quantise(k, v, into, layout)
    return True


def _decode_plainly(sections: Sections, layout: Fp8Layout, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fill K and V from sound sections."""
    if has_triton(k.device):
        from . import triton_fp8

        triton_fp8.dequantise(sections, k, v, layout)
        return
    dequantise(sections, k, v, layout)
