"""Encode and decode a block of keys and values. This plain torch code *is* the format: faster paths must
match it.

A block is `k` and `v` of shape `[tokens, heads, head_dim]`, token positions `[start, start + tokens)` of a
prompt. All numbers are little-endian; arrays are row-major in the order of their brackets.

**raw**: `k` then `v`, their bytes as they lie in memory. Bit-exact, NaN payloads included; nothing is
inspected.

**kv4** (4 bit, at most 4.5 bits per element with everything). It is defined on 16-bit values: fp32 input is rounded
to bf16 first (to nearest even) and the decoded bf16 values are returned as fp32. Values are at most 2**30 in
size. `e` tokens travel in 16 bit: those at prompt positions 0..3, or all of the block if fewer than 4 others
are left; `n` tokens are coded. Sections follow each other without padding; `h` is heads * head_dim channels,
`r` is n * heads vectors (heads varying fastest):

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

*Spans and groups of K* are the coded tokens whose positions share `position // 256` and `position // 32`. The
sections hold what lies in this block: its spans, its groups, the pairs (of even and odd `position // 32`)
with a group in this block, and of each group's 16 rows of codes those that hold a coded token (where a group
begins before position 16 of its 32 and ends after it, all 16). Where such a row or pair has a part that is
missing, the part is what the nearest coded token of the block, repeated, would give.

*Groups of V* are runs of `g` rotated channels, as many equal ones of at least 32 as head_dim has (80: two of
40; below 64: one); `half` is g / 2 rounded up, and an odd group leaves its last high nibble 0.

*Units* are 8-bit floats without sign, `unit(c)` the fp32 number with the bits `(c + 348) << 21`: 2**-40 to
1.75 * 2**23 in quarters of a binade. `least_unit(x, s)`, the least one of at least `x * 2**s`, has the code
`clamp(((bits(x) + 0x1FFFFF) >> 21) + 4 * s - 348, 0, 255)`. Why so: an absolute grid of 64 binades serves all
that fp16 holds and all of bf16 that attention computes with, and what a head decodes to depends on no other.

*Grids*, alike for K and V. A group of values x has a `zero` and a `step` that are whole numbers of a unit: x is
`base + unit * (zero + step * code)`, base 0 for V. What is stored beside the step is a `place`: of K the zero itself,
0 to 255, with steps of 1 to 16, stored less 1; of V a number from -16 to 15, with steps of 9 to 16, for

    zero = floor((place * (17 - step) - step * 15) / 2)

With everything in fp32, each operation rounded once to nearest even, `round` to the nearest whole number, ties to
even, and `lo`, `hi` the least and the largest x of the group, the encoder takes

    step    = clamp(round(((hi - lo) * (1 / unit)) * (1 / 15.125)), 1 or 9, 16)
    middle  = round((((lo - base) + (hi - base)) * (1 / unit)) * 32) * (1 / 64)
    near    = middle + step * (-9, -3, 3, 9) / 32                  four candidates, each with
    place   = clamp(round(near - step * 7.5), 0, 255)              of K
            = clamp(round(near * (2 / (17 - step))), -16, 15)      of V
    fine    = round((x - (base + first zero * unit)) * ((1 / (step * unit)) * 128))
    shift   = round((zero - first zero) * (128 / step))
    off     = (fine - shift) - 128 * round((fine - shift) / 128)
    code    = clamp(floor((fine - shift + 64) / 128), 0, 15)

where 1 / unit, 1 / (step * unit), 2 / (17 - step) and 128 / step are rounded quotients, 1 / 15.125 is the fp32 number
nearest to it, and the first zero is that of the first candidate. The candidate with the least sum of off ** 2 over the
group is taken, the first of equals. Missing tokens of a group of K count as the nearest coded one of the block. Why so:
where a grid lies among so few values is worth 0.5 dB, and candidates cost little, as one `fine` serves them all; steps
that clip the ends a little err less on average. 256 units across a span are fine enough for zeros, and 16 steps enough
where the widest groups dominate the error. Whatever is summed is a whole number below 2**24, and whatever is added to
a product makes that product exact or is rounded before, so neither the order of additions nor fused multiply-adds
change a bit.

*K* is coded as it is: base the least value of the span (and never -0), unit `least_unit(max - base, -8)`. Decoding:
`(base + zero * unit) + code * (step * unit)`, rounded to the 16-bit dtype (fp16: clamped to +-65504 first).

*V* is rotated. Let `b` be the largest power of two that divides head_dim, `a` the largest |x| of the vector
and `p = max(bits(a) >> 23, 64)` its exponent. Then `q = round(v * 2**(134 - p))`, whole numbers of at most 256;
`y` is the Sylvester-Hadamard matrix times q for each run of b channels, an exact sum that is then rounded to
bf16; the unit's code is `least_unit(max |y|, p - 134 - log2(b) - 7)`, and the unit in which y is coded is
`unit * 2**(134 - p) * b`. Decoding: the whole numbers `zero + step * code`, at most 132, are multiplied by the same
matrix, rounded to bf16, multiplied by `unit` (in fp32) and rounded as K is. All the factors of these products are
exact in bf16, so an fp32 product, a bf16 matrix unit and butterflies agree.

*Grids of V* fit into 8 bits because a vector reaches 128 units to either side: the wider a group, the less room there
is to move its grid, and the less of it `place` covers. Groups much narrower than their vector, which shorter steps
would serve, add little to its error; a group of zeros is 0 exactly. Beside 8 bits of zero and 4 of step this saves 1/8
bit per element of V and costs it 0.1 to 0.2 dB, at most 1.3 dB where few channels are far larger than the others.

**fp8**, **kivi4**: see the modules of these names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn, Protocol

import torch

from . import fp8, kivi4, kv4
from .blocks import require_finite, sixteen_bit
from .errors import CodecError, NonFiniteError, PayloadError, TensorError
from .format import FORMAT_VERSION, Codec, WireDtype, codec_from_wire, dtype_from_wire, payload_bytes
from .soundness import SOUND, Soundness, on_device

__all__ = [
    "FORMAT_VERSION",
    "Codec",
    "CodecError",
    "Soundness",
    "WireDtype",
    "codec_from_wire",
    "decode",
    "decode_into",
    "dtype_from_wire",
    "encode",
    "encode_into",
    "torch_dtype",
    "warm_up",
    "wire_dtype",
]

_TORCH = {WireDtype.BF16: torch.bfloat16, WireDtype.FP16: torch.float16, WireDtype.FP32: torch.float32}
_WIRE = {dtype: wire for wire, dtype in _TORCH.items()}


_WARM_UP_TOKENS = (256, 257, 258, 260, 264)
"""Triton compiles anew where sections begin at multiples of 16 bytes and where they do not.

Which do depends on how often 2 divides the tokens: for 264 the codes of V of 288 channels do, its grids do not.
"""
_WARM_UP_VECTORS = 65536
"""From so many on, a program of `kv4` takes several tiles of vectors."""


class _SixteenBit(Protocol):
    """A codec of 16-bit values: the modules `kv4`, `fp8` and `kivi4`."""

    LARGEST: float

    def encode(self, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, start: int) -> bool | torch.Tensor: ...
    def decode(self, data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> bool | torch.Tensor: ...
    def require_sound(self, data: torch.Tensor, like: torch.Tensor, start: int, layer: int) -> None: ...


_SIXTEEN_BIT: Mapping[Codec, _SixteenBit] = {Codec.KV4: kv4, Codec.FP8: fp8, Codec.KIVI4: kivi4}


def torch_dtype(dtype: WireDtype) -> torch.dtype:
    return _TORCH[dtype]


def wire_dtype(dtype: torch.dtype) -> WireDtype:
    try:
        return _WIRE[dtype]
    except KeyError:
        raise TensorError(f"dtype {dtype} is not supported; use bfloat16, float16 or float32") from None


def encode(codec: Codec | str, k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    """The payload of one block. `k` and `v` are read, never kept; the result owns its memory. Waits for their device.

    Raises `NonFiniteError` for the first value that the codec cannot quantise.
    """
    codec = _known(codec, layer)
    out = torch.empty(_payload_bytes(codec, k, v, start, layer), dtype=torch.uint8, device=k.device)
    _encode_into(codec, k, v, out, start, layer).raise_if_unsound()
    return out.cpu().numpy().data


def encode_into(
    codec: Codec | str, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, start: int, layer: int
) -> Soundness:
    """Write the payload of one block to `out`: contiguous bytes on the device of `k` and `v`, `payload_bytes` of them.

    On a GPU this only puts work on the current stream, so the payload is there when the stream has got there. It is
    void if its soundness, when asked, raises (`NonFiniteError` for the first value that cannot be quantised); until
    then `k` and `v` must stay as they are.
    """
    codec = _known(codec, layer)
    _check_bytes(codec, out, _payload_bytes(codec, k, v, start, layer), k, start, layer)
    return _encode_into(codec, k, v, out, start, layer)


def decode(
    codec: Codec | str,
    payload: bytes | bytearray | memoryview | torch.Tensor,
    *,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    start: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(k, v)` of shape `[tokens, heads, head_dim]` in memory of their own. `dtype` must be the one that
    was encoded. A payload that is a tensor of bytes is decoded on its device, and waited for.
    """
    data = payload if isinstance(payload, torch.Tensor) else _as_tensor(payload)
    codec = _known(codec, layer)
    # The length before anything is made for it: numbers of a lying frame may ask for any amount of memory.
    expected = payload_bytes(codec, wire_dtype(dtype), start=start, tokens=tokens, heads=heads, head_dim=head_dim)
    _check_length(codec, data, expected, (tokens, heads, head_dim, dtype), start, layer)
    k, v = (torch.empty(tokens, heads, head_dim, dtype=dtype, device=data.device) for _ in range(2))
    _decode_into(codec, data, k, v, start, layer).raise_if_unsound()
    return k, v


def decode_into(
    codec: Codec | str, payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int
) -> Soundness:
    """Fill `k` and `v`, contiguous and `[tokens, heads, head_dim]`, from a payload of contiguous bytes on their device.

    A wrong length raises `PayloadError` at once. On a GPU this only puts work on the current stream; what is in `k`
    and `v` then must not be used before the soundness was asked, which raises `PayloadError` where the payload is
    corrupt. Until then the payload must stay as it is.
    """
    codec = _known(codec, layer)
    _check_bytes(codec, payload, _payload_bytes(codec, k, v, start, layer), k, start, layer)
    for name, tensor in (("K", k), ("V", v)):
        if not tensor.is_contiguous():
            raise TensorError(f"layer {layer}: {name} to decode into is not contiguous")
    return _decode_into(codec, payload, k, v, start, layer)


def warm_up(codec: Codec | str, *, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile what a GPU needs for blocks of any length of such heads, and make its constants: some seconds.

    Without it the first transfers do that.
    """
    codec = _known(codec, 0)
    for tokens in (*_WARM_UP_TOKENS, -(-_WARM_UP_VECTORS // heads)):
        k, v = (torch.zeros(tokens, heads, head_dim, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty(_payload_bytes(codec, k, v, 256, 0), dtype=torch.uint8, device=device)
        _encode_into(codec, k, v, out, 256, 0).raise_if_unsound()
        _decode_into(codec, out, k, v, 256, 0).raise_if_unsound()


def _encode_into(
    codec: Codec, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, start: int, layer: int
) -> Soundness:
    if codec is Codec.RAW:
        halves = out.view(k.dtype).view(2, *k.shape)
        halves[0].copy_(k, non_blocking=True)
        halves[1].copy_(v, non_blocking=True)
        return SOUND
    coder, sixteen = _SIXTEEN_BIT[codec], sixteen_bit(k.dtype)
    with on_device(k.device):
        keys, values = k.to(sixteen), v.to(sixteen)
        unsound = coder.encode(keys, values, out, start)

        def explain() -> NoReturn:
            require_finite(keys, "K", start, codec.value, layer, coder.LARGEST)
            require_finite(values, "V", start, codec.value, layer, coder.LARGEST)
            lost = "K or V had a value that was not finite or too large, and has been overwritten since"
            raise NonFiniteError(f"layer {layer}: {lost}; the {codec.value} payload is void")

        return Soundness.of(unsound, explain)


def _decode_into(
    codec: Codec, data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, layer: int
) -> Soundness:
    if codec is Codec.RAW:
        for into, half in zip((k, v), data.chunk(2), strict=True):
            into.view(torch.uint8).view(-1).copy_(half, non_blocking=True)  # as bytes, at whatever address they are
        return SOUND
    coder, sixteen = _SIXTEEN_BIT[codec], sixteen_bit(k.dtype)
    with on_device(k.device):
        keys, values = (x if x.dtype == sixteen else torch.empty_like(x, dtype=sixteen) for x in (k, v))
        unsound = coder.decode(data, keys, values, start)
        if k.dtype != sixteen:
            k.copy_(keys)
            v.copy_(values)

        def explain() -> NoReturn:
            coder.require_sound(data, keys, start, layer)
            raise PayloadError(f"layer {layer}: the {codec.value} payload was corrupt, and has been overwritten since")

        return Soundness.of(unsound, explain)


def _as_tensor(payload: bytes | bytearray | memoryview) -> torch.Tensor:
    """The bytes of a payload. Copied if read-only, or if at an odd address."""
    view = memoryview(payload).cast("B")
    if not view.readonly and view.nbytes:
        data = torch.frombuffer(view, dtype=torch.uint8)
        if data.data_ptr() % 2 == 0:
            return data
    data = torch.empty(view.nbytes, dtype=torch.uint8)
    data.numpy().data[:] = view
    return data


def _known(codec: Codec | str, layer: int) -> Codec:
    try:
        return Codec(codec)
    except ValueError:
        names = ", ".join(known.value for known in Codec)
        raise CodecError(f"layer {layer}: codec {codec!r} is unknown; known are {names}") from None


def _payload_bytes(codec: Codec, k: torch.Tensor, v: torch.Tensor, start: int, layer: int) -> int:
    """The length of the payload of two tensors, once they are found to be a block."""
    for name, tensor in (("K", k), ("V", v)):
        if tensor.dim() != 3:
            shape = list(tensor.shape)
            raise TensorError(f"layer {layer}: {name} is {shape}; expected [tokens, kv_heads, head_dim]")
        if math.prod(tensor.shape) == 0:
            raise TensorError(f"layer {layer}: {name} is empty, shape {tuple(tensor.shape)}")
    if k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
        shapes = f"K is {list(k.shape)} {k.dtype} on {k.device}, V is {list(v.shape)} {v.dtype} on {v.device}"
        raise TensorError(f"layer {layer}: {shapes}; they must agree")
    tokens, heads, head_dim = k.shape
    return payload_bytes(codec, wire_dtype(k.dtype), start=start, tokens=tokens, heads=heads, head_dim=head_dim)


def _check_bytes(codec: Codec, data: torch.Tensor, expected: int, k: torch.Tensor, start: int, layer: int) -> None:
    """Refuse what cannot be the memory of a payload of a block like `k`."""
    if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.device != k.device:
        found = f"{data.dtype} {list(data.shape)} on {data.device}"
        raise TensorError(f"layer {layer}: the payload's tensor is {found}; expected contiguous bytes on {k.device}")
    if data.storage_offset() % 16:
        at = f"byte {data.storage_offset()} of its storage"
        raise TensorError(f"layer {layer}: the payload's tensor begins at {at}; expected a multiple of 16")
    _check_length(codec, data, expected, (*k.shape, k.dtype), start, layer)


def _check_length(
    codec: Codec,
    data: torch.Tensor,
    expected: int,
    block: tuple[int, int, int, torch.dtype],
    start: int,
    layer: int,
) -> None:
    if data.numel() != expected:
        tokens, heads, head_dim, dtype = block
        raise PayloadError(
            f"layer {layer}: {codec.value} of {tokens} x {heads} x {head_dim} {wire_dtype(dtype).value} values from "
            f"position {start} has {expected} bytes, this one has {data.numel()}"
        )
