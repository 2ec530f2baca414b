"""Encode and decode a block of keys and values. This plain torch code *is* the format: faster paths must
match it.

A block is `k` and `v` of shape `[tokens, heads, head_dim]`, token positions `[start, start + tokens)` of a
prompt. All numbers are little-endian; arrays are row-major in the order of their brackets.

**raw**: `k` then `v`, their bytes as they lie in memory. Bit-exact, NaN payloads included; nothing is
inspected.

**kv4** (4 bit, about 4.4 bits per element with everything). It is defined on 16-bit values: fp32 input is
rounded to bf16 first (to nearest even) and the decoded bf16 values are returned as fp32. `n` tokens are
coded in 4 bit, the `e` tokens at prompt positions 0..3 are not. Sections follow each other without padding:

    header       u8 version (1) | u8 dtype16 (0 bf16, 1 fp16) | i16 key_top | i16 value_top | u16 0
    exempt K, V  16-bit values  [e, heads, head_dim] each
    K zeros      16-bit values  [key_groups, heads, head_dim]      a group's smallest value
    V zeros      16-bit values  [n, heads, value_groups]           see below
    K scales     u8             [key_groups, heads, head_dim]
    V scales     u8             [n, heads, value_groups]
    K codes      u4             [n, heads, head_dim]               even index in the low half of a byte
    V codes      u4             [n, heads, head_dim]               an odd end leaves the last high half 0

*Scales* are 8-bit floats without sign, 5 bits of exponent and 3 of mantissa, under the header's `top`, the
exponent of the largest scale in this tensor: `scale(c) = (1 + (c & 7) / 8) * 2 ** (top + (c >> 3) - 31)`,
and 0 says "constant". Why so: the ratio between the channels of one layer reaches 2**10 (Qwen2), the ratio
between models far more, so an absolute 8-bit grid is either coarse or overflows, and a grid relative to the
group's zero fails where the zero is 0. 31 binades below the largest scale reach past what 16-bit inputs can
hold beside it. The price of 3 bits of mantissa, rounded up so that nothing is clipped, is a step 4 % too
wide on average (0.4 dB). Products `code * scale` are exact in fp32, so a fused multiply-add changes no bit.

*K* is coded as it is, per channel over the tokens whose positions share `position // 64`; the runs at the
ends of a block may be shorter. `zero = min`, `scale = ceil8((max - min) / 15)`, `code = round_half_even((k
- zero) / scale)`.

*V* is rotated first: each run of `b` channels, `b` the largest power of two that divides head_dim, is
multiplied by `1 / sqrt(b)` (in fp32) and then by the Sylvester-Hadamard matrix, as butterflies `(a + b, a -
b)` over distances 1, 2, 4, ... . Groups are 128 channels, or the whole head when 128 does not divide
head_dim: never across heads, so that a shard of heads decodes to the same values as all of them. `zero` is
the minimum rounded down to bf16 (a rotated fp16 value may exceed fp16), then as for K, except that the
smallest scale is code 1. Decoding rotates again; the transform is its own inverse. Scale code 0 says that
the *unrotated* channels of the group are all equal to `zero`, which then has the block's own 16-bit dtype:
a constant row stays exact.
"""

from __future__ import annotations

import math

import torch

from . import kv4
from .errors import CodecError, PayloadError, TensorError
from .format import (
    FORMAT_VERSION,
    Codec,
    Kv4Layout,
    WireDtype,
    codec_from_wire,
    dtype_from_wire,
    payload_bytes,
)

__all__ = [
    "FORMAT_VERSION",
    "Codec",
    "CodecError",
    "WireDtype",
    "codec_from_wire",
    "decode",
    "dtype_from_wire",
    "encode",
    "torch_dtype",
    "wire_dtype",
]

_TORCH = {WireDtype.BF16: torch.bfloat16, WireDtype.FP16: torch.float16, WireDtype.FP32: torch.float32}
_WIRE = {dtype: wire for wire, dtype in _TORCH.items()}


def torch_dtype(dtype: WireDtype) -> torch.dtype:
    return _TORCH[dtype]


def wire_dtype(dtype: torch.dtype) -> WireDtype:
    try:
        return _WIRE[dtype]
    except KeyError:
        raise TensorError(f"dtype {dtype} is not supported; use bfloat16, float16 or float32") from None


def encode(codec: Codec | str, k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    """The payload of one block. `k` and `v` are read, never kept; the result owns its memory."""
    codec = _known(codec, layer)
    wire = _check_tensors(k, v, layer)
    if codec is Codec.KV4:
        return kv4.encode(k, v, start=start, layer=layer)
    out = torch.empty(
        payload_bytes(codec, wire, start=start, tokens=k.shape[0], heads=k.shape[1], head_dim=k.shape[2]),
        dtype=torch.uint8,
    )
    halves = out.view(k.dtype).view(2, *k.shape)
    halves[0].copy_(k)
    halves[1].copy_(v)
    return out.numpy().data


def decode(
    codec: Codec | str,
    payload: bytes | bytearray | memoryview,
    *,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    start: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(k, v)` of shape `[tokens, heads, head_dim]` in memory of their own. `dtype` must be the one that
    was encoded.
    """
    codec = _known(codec, layer)
    wire = wire_dtype(dtype)
    expected = payload_bytes(codec, wire, start=start, tokens=tokens, heads=heads, head_dim=head_dim)
    view = memoryview(payload).cast("B")
    if view.nbytes != expected:
        raise PayloadError(
            f"layer {layer}: {codec.value} of {tokens} x {heads} x {head_dim} {wire.value} values from "
            f"position {start} has {expected} bytes, this one has {view.nbytes}"
        )
    # One copy into memory that torch owns: network buffers are read-only and need not be aligned.
    data = torch.empty(expected, dtype=torch.uint8)
    data.numpy().data[:] = view
    if codec is Codec.KV4:
        return kv4.decode(data, Kv4Layout(start, tokens, heads, head_dim), dtype=dtype, layer=layer)
    halves = data.view(dtype).view(2, tokens, heads, head_dim)
    return halves[0], halves[1]


def _known(codec: Codec | str, layer: int) -> Codec:
    try:
        return Codec(codec)
    except ValueError:
        names = ", ".join(known.value for known in Codec)
        raise CodecError(f"layer {layer}: codec {codec!r} is unknown; known are {names}") from None


def _check_tensors(k: torch.Tensor, v: torch.Tensor, layer: int) -> WireDtype:
    for name, tensor in (("K", k), ("V", v)):
        if tensor.dim() != 3:
            shape = list(tensor.shape)
            raise TensorError(f"layer {layer}: {name} is {shape}; expected [tokens, kv_heads, head_dim]")
        if math.prod(tensor.shape) == 0:
            raise TensorError(f"layer {layer}: {name} is empty, shape {tuple(tensor.shape)}")
    if k.shape != v.shape or k.dtype != v.dtype:
        shapes = f"K is {list(k.shape)} {k.dtype}, V is {list(v.shape)} {v.dtype}"
        raise TensorError(f"layer {layer}: {shapes}; they must agree")
    return wire_dtype(k.dtype)
