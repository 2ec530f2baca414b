"""`kv4`: 4-bit codes with two levels of parameters, at most 4.5 bits per element with everything.

It is defined on 16-bit values: fp32 input is rounded to bf16 first (to nearest even) and the
decoded bf16 values are returned as fp32. Values are at most 2**30 in size. `e` tokens travel in 16
bit: those at prompt positions 0..3, or all of the block if fewer than 4 others are left; `n`
tokens are coded. Sections follow each other without padding; `h` is heads * head_dim channels, `r`
is n * heads vectors (heads varying fastest):

    header       u8 version (3) | u8 dtype16 (0 bf16, 1 fp16) | 14 bytes 0
    exempt K, V  16-bit values  [e, heads, head_dim] each
    K bases      16-bit values  [spans, h]
    K units      u8             [spans, h]
    K zeros      u8             [groups, h]
    K steps      u4             [pairs of groups, h]          even group low, odd group high
    K codes      u4             [groups, 16, h]               byte i: token i low, token i + 16 high
    V units      u8             [r]
    V grids      u8             [value_groups, r]             step - 9 + 8 * (place + 16)
    V codes      u4             [value_groups, half, r]       byte i: channel i low, i + half high

*Spans and groups of K* are the coded tokens whose positions share `position // 256` and `position
// 32`. The sections hold what lies in this block: its spans, its groups, the pairs (of even and
odd `position // 32`) with a group in this block, and of each group's 16 rows of codes those that
hold a coded token (where a group begins before position 16 of its 32 and ends after it, all 16).
Where such a row or pair has a part that is missing, the part is what the nearest coded token of
the block, repeated, would give.

*Groups of V* are runs of `g` rotated channels, as many equal ones of at least 32 as head_dim has
(80: two of 40; below 64: one); `half` is g / 2 rounded up, and an odd group leaves its last high
nibble 0.

*Units* are 8-bit floats without sign, `unit(c)` the fp32 number with the bits `(c + 348) << 21`:
2**-40 to 1.75 * 2**23 in quarters of a binade. `least_unit(x, s)`, the least one of at least `x *
2**s`, has the code `clamp(((bits(x) + 0x1FFFFF) >> 21) + 4 * s - 348, 0, 255)`. Why so: an
absolute grid of 64 binades serves all that fp16 holds and all of bf16 that attention computes
with, and what a head decodes to depends on no other.

*Grids*, alike for K and V. A group of values x has a `zero` and a `step` that are whole numbers of
a unit: x is `base + unit * (zero + step * code)`, base 0 for V. What is stored beside the step is
a `place`: of K the zero itself, 0 to 255, with steps of 1 to 16, stored less 1; of V a number from
-16 to 15, with steps of 9 to 16, for

    zero = floor((place * (17 - step) - step * 15) / 2)

With everything in fp32, each operation rounded once to nearest even, `round` to the nearest whole
number, ties to even, and `lo`, `hi` the least and the largest x of the group, the encoder takes

    step    = clamp(round(((hi - lo) * (1 / unit)) * (1 / 15.125)), 1 or 9, 16)
    middle  = round((((lo - base) + (hi - base)) * (1 / unit)) * 32) * (1 / 64)
    near    = middle + step * (-9, -3, 3, 9) / 32                  four candidates, each with
    place   = clamp(round(near - step * 7.5), 0, 255)              of K
            = clamp(round(near * (2 / (17 - step))), -16, 15)      of V
    fine    = round((x - (base + first zero * unit)) * ((1 / (step * unit)) * 128))
    shift   = round((zero - first zero) * (128 / step))
    off     = (fine - shift) - 128 * round((fine - shift) / 128)
    code    = clamp(floor((fine - shift + 64) / 128), 0, 15)

where 1 / unit, 1 / (step * unit), 2 / (17 - step) and 128 / step are rounded quotients, 1 / 15.125
is the fp32 number nearest to it, and the first zero is that of the first candidate. The candidate
with the least sum of off ** 2 over the group is taken, the first of equals. Missing tokens of a
group of K count as the nearest coded one of the block. Why so: where a grid lies among so few
values is worth 0.5 dB, and candidates cost little, as one `fine` serves them all; steps that clip
the ends a little err less on average. 256 units across a span are fine enough for zeros, and 16
steps enough where the widest groups dominate the error. Whatever is summed is a whole number below
2**24, and whatever is added to a product makes that product exact or is rounded before, so neither
the order of additions nor fused multiply-adds change a bit.

*K* is coded as it is: base the least value of the span (and never -0), unit `least_unit(max -
base, -8)`. Decoding: `(base + zero * unit) + code * (step * unit)`, rounded to the 16-bit dtype
(fp16: clamped to +-65504 first).

*V* is rotated. Let `b` be the largest power of two that divides head_dim, `a` the largest |x| of
the vector and `p = max(bits(a) >> 23, 64)` its exponent. Then `q = round(v * 2**(134 - p))`, whole
numbers of at most 256; `y` is the Sylvester-Hadamard matrix times q for each run of b channels, an
exact sum that is then rounded to bf16; the unit's code is `least_unit(max |y|, p - 134 - log2(b) -
7)`, and the unit in which y is coded is `unit * 2**(134 - p) * b`. Decoding: the whole numbers
`zero + step * code`, at most 132, are multiplied by the same matrix, rounded to bf16, multiplied
by `unit` (in fp32) and rounded as K is. All the factors of these products are exact in bf16, so an
fp32 product, a bf16 matrix unit and butterflies agree.

*Grids of V* fit into 8 bits because a vector reaches 128 units to either side: the wider a group,
the less room there is to move its grid, and the less of it `place` covers. Groups much narrower
than their vector, which shorter steps would serve, add little to its error; a group of zeros is 0
exactly. Beside 8 bits of zero and 4 of step this saves 1/8 bit per element of V and costs it 0.1
to 0.2 dB, at most 1.3 dB where few channels are far larger than the others.
"""

from __future__ import annotations

from ..format import Codec, lazy_module
from .layout import LARGEST, Kv4Layout

__all__ = ["KV4"]


KV4 = Codec(
    name="kv4",
    wire=1,
    bits=4.5,
    version=3,
    layout=Kv4Layout,
    largest=LARGEST,
    reference=lazy_module(__name__, "reference"),
    native=lazy_module(__name__, "native"),
    triton=lazy_module(__name__, "triton"),
)
