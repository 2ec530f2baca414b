"""`kivi4`: KIVI's 4-bit quantisation as published (Liu et al. 2024, group 32), for comparison with
`kv4`.

The plain torch code in `reference` is the format. Input is 16-bit: fp32 is rounded to bf16 first
(to nearest even) and the decoded bf16 values are returned as fp32. Sections follow each other
without padding, little-endian, row-major in the order of their brackets:

    header       u8 version (1) | u8 dtype16 (0 bf16, 1 fp16) | 14 bytes 0
    residual K   16-bit values  [residual, heads, head_dim]
    residual V   16-bit values  [residual, heads, head_dim]
    K zeros      16-bit values  [key_groups, heads, head_dim]
    K scales     16-bit values  [key_groups, heads, head_dim]
    V zeros      16-bit values  [coded, heads, value_groups]
    V scales     16-bit values  [coded, heads, value_groups]
    K codes      u4             [key_groups, 16, heads, head_dim]    byte i: token i low, token i + 16 high
    V codes      u4             [coded, heads, value_groups, half]   byte i: channel i low, i + half high

*Groups.* K per channel over the 32 tokens whose positions share `position // 32`. V per (token,
head) over 32 channels; where 32 does not divide head_dim, over the most equal groups of at least
32 channels (80: two of 40; a head of fewer than 64 channels: one). `half` is half a group, rounded
up; an odd group leaves its last high nibble 0.

*Residual.* KIVI keeps the tokens behind the last whole group in 16 bit until enough of them have
come. A transfer in blocks has no later: what does not fill a group *within its block* travels in
16 bit, K and V alike. These are the tokens before the first multiple of 32 and after the last,
first the former, then the latter. Blocks cut at multiples of 32 therefore decode to what the whole
prompt would decode to.

*Parameters* have the block's own 16-bit dtype: fp16 as published, bf16 for bf16 values, whose
range fp16 does not have. `zero = min` (0 for -0), which is one of the values and hence exact. With
all of this in fp32,

    scale = round16((max - min) / 15)       0 if that is below 2**-100
    code  = clamp(round_half_even((x - zero) * (1 / scale)), 0, 15)      0 where scale is 0
    x     = round16(code * scale + zero)    for fp16 clamped to +-65504 first

Division, subtraction and product are each rounded once, to nearest even. `code * scale` is exact
in fp32, so a fused multiply-add changes no bit. A constant group has scale 0 and comes back exact
(the published code divides by zero there); the bound 2**-100 keeps the reciprocal finite and
subnormal numbers out.
"""

from __future__ import annotations

from ..format import Codec, lazy_module
from .layout import Kivi4Layout

__all__ = ["KIVI4"]


KIVI4 = Codec(
    name="kivi4",
    wire=3,
    bits=5.2,
    version=1,
    layout=Kivi4Layout,
    reference=lazy_module(__name__, "reference"),
    native=lazy_module(__name__, "native"),
    triton=lazy_module(__name__, "triton"),
)
