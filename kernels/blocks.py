"""Shared by the codecs: headers, 16-bit values, errors about them."""

from __future__ import annotations

import struct
from functools import cache
from importlib.util import find_spec

import torch

from .errors import NonFiniteError, PayloadError
from .format import LARGEST, Codec, WireDtype

# version, 16-bit dtype, reserved
_HEADER = struct.Struct("<BBHIQ")


def sixteen_bit(dtype: torch.dtype) -> torch.dtype:
    """What the codec works on: fp16 stays, bf16 stays, fp32 is rounded to bf16."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


@cache
def header(version: int, sixteen: torch.dtype, device: torch.device) -> torch.Tensor:
    """The header of a payload, as bytes on that device: kept, not to be written to. The first call
    on a GPU waits for it, so that any stream may read it."""
    number = WireDtype.FP16.wire if sixteen == torch.float16 else WireDtype.BF16.wire
    return torch.tensor(list(_HEADER.pack(version, number, 0, 0, 0)), dtype=torch.uint8).to(device)


def read_header(header: bytes, codec: Codec, sixteen: torch.dtype, layer: int) -> None:
    """Refuse a header that this build did not write for this dtype."""
    found, number, *reserved = _HEADER.unpack(header)
    expected = WireDtype.FP16.wire if sixteen == torch.float16 else WireDtype.BF16.wire
    if found != codec.version:
        raise PayloadError(f"layer {layer}: {codec} version {found}; this build reads version {codec.version}")
    if number != expected:
        raise PayloadError(f"layer {layer}: {codec} payload of dtype {number}, expected {expected} (0 bf16, 1 fp16)")
    if any(reserved):
        raise PayloadError(f"layer {layer}: the {codec} header is corrupt (reserved bytes are not 0)")


def all_within(x: torch.Tensor, largest: float = LARGEST) -> torch.Tensor:
    """Whether all values are finite and at most `largest` in size: a bool on their device."""
    return within(x, largest).all()


def within(x: torch.Tensor, largest: float = LARGEST) -> torch.Tensor:
    """Which values are finite and at most `largest` in size. In fp16, torch rounds 2**120 to
    infinity, so infinity needs a check of its own."""
    return x.abs() <= min(largest, torch.finfo(x.dtype).max)


def known(unsound: torch.Tensor) -> bool | torch.Tensor:
    """Not 0 where something is unsound: a bool if it lies in host memory; on a GPU a tensor, as
    asking would wait."""
    return bool(unsound) if unsound.device.type == "cpu" else unsound


def new_flag(device: torch.device) -> torch.Tensor:
    """int32 `[1]`, 0 until a kernel writes 1 because something is unsound."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels can run there."""
    return device.type == "cuda" and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def require_finite(x: torch.Tensor, name: str, start: int, codec: Codec, layer: int) -> None:
    """Raise for the first value of `[tokens, heads, head_dim]` that the codec cannot quantise."""
    sound = within(x, codec.largest)
    if bool(sound.all()):
        return
    token, head, channel = (int(i) for i in (~sound).nonzero()[0])
    where = f"position {start + token}, head {head}, channel {channel}"
    value = float(x[token, head, channel])
    bound = f"2**{codec.largest.hex().partition('p+')[2]}"
    raise NonFiniteError(f"layer {layer}: {name} is {value} at {where}; {codec} needs finite values of at most {bound}")


def clamped(values: torch.Tensor, sixteen: torch.dtype) -> torch.Tensor:
    """fp32 values rounded to the 16-bit dtype; clamped, as a group's largest may come back half a
    step larger."""
    if sixteen == torch.float16:
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    return values.to(sixteen)
