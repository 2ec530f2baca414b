"""A whole payload of 16-bit values: header, tokens that travel in 16 bit, and the quantised ones,
which go by the fastest path there is; all write the same bytes."""

from __future__ import annotations

import torch

from .accelerate import count_coded
from .blocks import all_within, has_triton, header, known, new_flag, read_header
from .format import HEADER_BYTES, BlockLayout, Codec, ReferencePath

Unsound = bool | torch.Tensor
"""Whether something is unsound: known at once, or one number on the device (`blocks.known`)."""


def encode(codec: Codec, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layout: BlockLayout) -> Unsound:
    """Write the payload of 16-bit values to `out`. Whether some are not finite or too large."""
    out[:HEADER_BYTES].copy_(header(codec.version, k.dtype, k.device))
    quantised = layout.quantised
    unsound: Unsound = False
    plain = _plain(out, layout, k.dtype)
    if plain is not None:
        for values, kept in zip((k, v), plain, strict=True):
            kept[: quantised.start].copy_(values[: quantised.start])
            kept[quantised.start :].copy_(values[quantised.stop :])
        unsound = _beyond(plain, codec.largest)
    if quantised.stop > quantised.start:
        unsound = unsound | _quantise(codec, k[quantised], v[quantised], out, layout)
    return unsound


def decode(codec: Codec, data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout) -> Unsound:
    """Fill 16-bit `k` and `v`, both contiguous, from a whole payload. Whether it is corrupt."""
    unsound = known((data[:HEADER_BYTES] != header(codec.version, k.dtype, k.device)).any())
    quantised = layout.quantised
    plain = _plain(data, layout, k.dtype)
    if plain is not None:
        for values, kept in zip((k, v), plain, strict=True):
            values[: quantised.start].copy_(kept[: quantised.start])
            values[quantised.stop :].copy_(kept[quantised.start :])
        unsound = unsound | _beyond(plain, codec.largest)
    if quantised.stop > quantised.start:
        unsound = unsound | _dequantise(codec, data, k[quantised], v[quantised], layout)
    return unsound


def require_sound(codec: Codec, data: torch.Tensor, dtype: torch.dtype, layout: BlockLayout, layer: int) -> None:
    """Raise `PayloadError` for what is wrong with a payload of this 16-bit dtype, if anything."""
    read_header(bytes(data[:HEADER_BYTES].tolist()), codec, dtype, layer)
    _reference(codec).require_sound(data, dtype, layout, layer)


def _plain(payload: torch.Tensor, layout: BlockLayout, sixteen: torch.dtype) -> tuple[torch.Tensor, ...] | None:
    """K and V of the tokens that are not quantised, `[tokens, heads, head_dim]`, if any."""
    count = layout.tokens - (layout.quantised.stop - layout.quantised.start)
    if not count:
        return None
    size = 2 * count * layout.heads * layout.head_dim
    starts = (HEADER_BYTES, HEADER_BYTES + size)
    shape = (count, layout.heads, layout.head_dim)
    return tuple(payload[start : start + size].view(sixteen).view(shape) for start in starts)


def _beyond(tensors: tuple[torch.Tensor, ...], largest: float) -> Unsound:
    """Whether there are values that are not finite or too large."""
    keys, values = (all_within(x, largest) for x in tensors)
    return known(~(keys & values))


def _quantise(codec: Codec, k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: BlockLayout) -> Unsound:
    if codec.triton is not None and has_triton(k.device):
        flag = new_flag(k.device)
        codec.triton().quantise(k, v, payload, layout, flag)
        return flag
    if codec.native is not None and k.device.type == "cpu":
        count_coded(4 * k.numel())
        sound = codec.native().quantise(k, v, payload, layout)
        if sound is not None:
            return not sound
    return not _reference(codec).quantise(k, v, payload, layout)


def _dequantise(codec: Codec, payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: BlockLayout) -> Unsound:
    if codec.triton is not None and has_triton(k.device):
        flag = new_flag(k.device)
        codec.triton().dequantise(payload, k, v, layout, flag)
        return flag
    if codec.native is not None and k.device.type == "cpu":
        count_coded(4 * k.numel())
        sound = codec.native().dequantise(payload, k, v, layout)
        if sound is not None:
            return not sound
    return not _reference(codec).dequantise(payload, k, v, layout)


def _reference(codec: Codec) -> ReferencePath:
    assert codec.reference is not None, f"{codec} carries the bytes as they are"
    return codec.reference()
