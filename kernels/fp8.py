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
from . import fp8_reference as reference
from .accelerate import ready
from .blocks import LARGEST, all_within, has_triton, header, known, new_flag, read_header
from .fp8_layout import FP8_HEADER_BYTES, FP8_VERSION, Fp8Layout
from .fp8_reference import Sections

__all__ = ["LARGEST", "decode", "encode", "require_sound"]


def encode(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, start: int) -> bool | torch.Tensor:
    """Write the payload of 16-bit values to `out`. Whether some are not finite or too large, as `known` says."""
    layout = Fp8Layout(start, *k.shape)
    out[:FP8_HEADER_BYTES].copy_(header(FP8_VERSION, k.dtype, k.device))
    if k.device.type == "cpu" and ready(4 * k.numel()):
        sound = fp8_native.quantise(k, v, out, layout)
        if sound is not None:
            return not sound
    into = Sections.of(out, layout, k.dtype)
    if has_triton(k.device):
        from . import triton_fp8

        flag = new_flag(k.device)
        triton_fp8.quantise(k, v, into, layout, flag)
        return flag
    if not bool(all_within(k) & all_within(v)):
        return True
    reference.quantise(k, v, into, layout)
    return False


def decode(data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> bool | torch.Tensor:
    """Fill 16-bit `k` and `v`, both contiguous, from a whole payload. Whether it is corrupt, as `known` says."""
    layout = Fp8Layout(start, *k.shape)
    unsound = known((data[:FP8_HEADER_BYTES] != header(FP8_VERSION, k.dtype, k.device)).any())
    return unsound | _dequantise(data, k, v, layout)


def require_sound(data: torch.Tensor, like: torch.Tensor, start: int, layer: int) -> None:
    """Raise `PayloadError` for what is wrong with the payload of a block of this shape and dtype, if anything."""
    read_header(bytes(data[:FP8_HEADER_BYTES].tolist()), "fp8", FP8_VERSION, like.dtype, layer)
    layout = Fp8Layout(start, *like.shape)
    reference.require_sound(Sections.of(data, layout, like.dtype), layout, layer)


def _dequantise(data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Fp8Layout) -> bool | torch.Tensor:
    """Fill K and V by the fastest way there is. Whether there are parameters that no encoder writes."""
    if k.device.type == "cpu" and ready(4 * k.numel()):
        sound = fp8_native.dequantise(data, layout, k, v)
        if sound is not None:
            return not sound
    sections = Sections.of(data, layout, k.dtype)
    if has_triton(k.device):
        from . import triton_fp8

        flag = new_flag(k.device)
        triton_fp8.dequantise(sections, k, v, layout, flag)
        return flag
    reference.dequantise(sections, k, v, layout)
    return not bool(reference.is_sound(sections))
