"""What `fp8` and `kivi4` do alike: headers, 16-bit values, and the errors about them."""

from __future__ import annotations

import struct
from functools import cache
from importlib.util import find_spec

import torch

from .errors import NonFiniteError, PayloadError
from .format import WireDtype

__all__ = [
    "LARGEST",
    "all_within",
    "clamped",
    "has_triton",
    "read_header",
    "require_finite",
    "sixteen_bit",
    "within",
    "write_header",
]

LARGEST = 2.0**120
"""Bound on |x|: up to here neither a range (2 |x|) nor anything decoded leaves fp32 or bf16."""

# version, 16-bit dtype, reserved
_HEADER = struct.Struct("<BBHIQ")


def sixteen_bit(dtype: torch.dtype) -> torch.dtype:
    """What the codec works on: fp16 stays, bf16 stays, fp32 is rounded to bf16."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def write_header(payload: memoryview, version: int, sixteen: torch.dtype) -> None:
    number = WireDtype.FP16.wire if sixteen == torch.float16 else WireDtype.BF16.wire
    _HEADER.pack_into(payload, 0, version, number, 0, 0, 0)


def read_header(header: bytes, codec: str, version: int, sixteen: torch.dtype, layer: int) -> None:
    """Refuse a header that this build did not write for this dtype."""
    found, number, *reserved = _HEADER.unpack(header)
    expected = WireDtype.FP16.wire if sixteen == torch.float16 else WireDtype.BF16.wire
    if found != version:
        raise PayloadError(f"layer {layer}: {codec} version {found}; this build reads version {version}")
    if number != expected:
        raise PayloadError(f"layer {layer}: {codec} payload of dtype {number}, expected {expected} (0 bf16, 1 fp16)")
    if any(reserved):
        raise PayloadError(f"layer {layer}: the {codec} header is corrupt (reserved bytes are not 0)")


def all_within(x: torch.Tensor) -> torch.Tensor:
    """Whether all values are at most `LARGEST` in size, NaN being larger, as a bool on their device."""
    return within(x).all()


def within(x: torch.Tensor, largest: float = LARGEST) -> torch.Tensor:
    """Which values are finite and at most `largest` in size.

    torch compares fp16 with a number rounded to fp16: infinity, and with it infinity, would not exceed 2**120.
    """
    return x.abs() <= min(largest, torch.finfo(x.dtype).max)


def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels can run there."""
    return device.type == "cuda" and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def require_finite(x: torch.Tensor, name: str, start: int, codec: str, layer: int, largest: float = LARGEST) -> None:
    """Raise for the first value of `[tokens, heads, head_dim]` that no codec can quantise."""
    sound = within(x, largest)
    if bool(sound.all()):
        return
    token, head, channel = (int(i) for i in (~sound).nonzero()[0])
    where = f"position {start + token}, head {head}, channel {channel}"
    value = float(x[token, head, channel])
    bound = f"2**{largest.hex().partition('p+')[2]}"
    raise NonFiniteError(f"layer {layer}: {name} is {value} at {where}; {codec} needs finite values of at most {bound}")


def clamped(values: torch.Tensor, sixteen: torch.dtype) -> torch.Tensor:
    """fp32 values rounded to the 16-bit dtype.

    The largest value of a group may come back half a step larger, which fp16 could not hold.
    """
    if sixteen == torch.float16:
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    return values.to(sixteen)
