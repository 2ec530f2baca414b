"""`fp8`: 8-bit floats (e4m3) with power-of-two scales, about 8.1 bits per element. Close to
lossless.

The plain torch code in `reference` is the format. Input is 16-bit: fp32 is rounded to bf16 first
(to nearest even) and the decoded bf16 values are returned as fp32. Sections follow each other
without padding, little-endian, row-major in the order of their brackets:

    header        u8 version (1) | u8 dtype16 (0 bf16, 1 fp16) | 14 bytes 0
    K zeros       16-bit values  [key_groups, heads, head_dim]
    K exponents   u8             [key_groups, heads, head_dim]
    K codes       e4m3           [tokens, heads, head_dim]
    V codes       e4m3           [tokens, heads, head_dim]
    V exponents   u8             [tokens, heads]

An 8-bit float has an error in proportion to its size. Where a channel of K carries a large
constant (Qwen2), that error is in proportion to the constant and drowns what varies, whatever the
scale: per token or per channel, the logits of such K come out 24 dB worse than those of ordinary
K. Therefore K is coded per channel over the tokens whose positions share `position // 128`,
relative to a zero in the middle of them. The midpoint of minimum and maximum would follow every
outlier, a mean depends on the order of its additions; so

    zero = round16((max over runs of their min + min over runs of their max) * 0.5)

where a run is the tokens of the group that share `position // 32` (runs without a token in this
block do not count), and a zero is never -0. V is coded per (token, head), relative to 0. For both,
with everything in fp32:

    reach    = max |x - zero|                            that is max(max - zero, zero - min)
    exponent = clamp((bits(reach) + 0x1FFFFF) >> 23, 32, 255)
    code     = e4m3((x - zero) * 2 ** (135 - exponent))  to nearest even, at most 448 in size
    x        = round16(code * 2 ** (exponent - 135) + zero)    for fp16 clamped to +-65504 first

`bits` is the pattern of the fp32 number; the exponent is the least that keeps the largest code at
448, the end of e4m3. Scaling by powers of two is exact, so nothing is divided and a fused
multiply-add changes no bit. The lower bound 32 keeps subnormal numbers out. e4m3's two bytes for
NaN, which no encoder writes, decode as 0.
"""

from __future__ import annotations

from ..format import Codec, lazy_module
from .layout import Fp8Layout

__all__ = ["FP8"]


FP8 = Codec(
    name="fp8",
    wire=2,
    bits=8.1,
    version=1,
    layout=Fp8Layout,
    reference=lazy_module(__name__, "reference"),
    native=lazy_module(__name__, "native"),
    triton=lazy_module(__name__, "triton"),
)
