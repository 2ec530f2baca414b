"""The 4-bit codec over whole payloads; `codec` specifies the format, `kv4_reference` is it in plain torch."""

from __future__ import annotations

import torch

from . import kv4_native
from . import kv4_reference as reference
from .accelerate import ready
from .blocks import clamped, has_triton, header, known, new_flag, read_header, within
from .format import FORMAT_VERSION, Kv4Layout, kv4_layout
from .kv4_reference import LARGEST, Sections

__all__ = ["LARGEST", "decode", "encode", "require_sound"]


def encode(k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, start: int) -> bool | torch.Tensor:
    """Write the payload of 16-bit values to `out`. Whether some are not finite or too large, as `known` says."""
    layout = kv4_layout(start, *k.shape)
    into = Sections.of(out, layout, k.dtype)
    into.header.copy_(header(FORMAT_VERSION, k.dtype, k.device))
    exempt = layout.exempt
    unsound: bool | torch.Tensor = False
    if exempt:
        into.exempt_keys.copy_(k[:exempt])
        into.exempt_values.copy_(v[:exempt])
        unsound = _exempt_unsound(into)
    if layout.coded:
        unsound = unsound | _quantise(k[exempt:], v[exempt:], into, layout)
    return unsound


def decode(data: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> bool | torch.Tensor:
    """Fill 16-bit `k` and `v`, both contiguous, from a whole payload. Whether it is corrupt, as `known` says."""
    layout = kv4_layout(start, *k.shape)
    sections = Sections.of(data, layout, k.dtype)
    unsound = known((sections.header != header(FORMAT_VERSION, k.dtype, k.device)).any())
    exempt = layout.exempt
    if exempt:
        k[:exempt], v[:exempt] = sections.exempt_keys, sections.exempt_values
        unsound = unsound | _exempt_unsound(sections)
    if layout.coded:
        unsound = unsound | _dequantise(sections, k[exempt:], v[exempt:], layout)
    return unsound


def require_sound(data: torch.Tensor, like: torch.Tensor, start: int, layer: int) -> None:
    """Raise `PayloadError` for what is wrong with the payload of a block of this shape and dtype, if anything."""
    layout = kv4_layout(start, *like.shape)
    sections = Sections.of(data, layout, like.dtype)
    read_header(bytes(sections.header.tolist()), "kv4", FORMAT_VERSION, like.dtype, layer)
    reference.require_sound(sections, layout, layer)


def _quantise(k: torch.Tensor, v: torch.Tensor, into: Sections, layout: Kv4Layout) -> bool | torch.Tensor:
    """Fill the sections by the fastest way there is. Whether there are values not finite or too large."""
    if has_triton(k.device):
        from . import triton_kv4

        flag = new_flag(k.device)
        triton_kv4.quantise(k, v, into, layout, flag)
        return flag
    if k.device.type == "cpu" and ready(2 * (k.numel() + v.numel())):
        sound = kv4_native.quantise(k, v, into, layout)
        if sound is not None:
            return not sound
    if not (_within(k) and _within(v)):
        return True
    keys = reference.quantise_keys(reference.whole_spans(k.reshape(layout.coded, -1), layout))
    for section, part, rows in zip(into.keys, keys, reference.stored_rows(layout), strict=True):
        section.copy_(part[rows])
    values = reference.quantise_values(v.reshape(-1, layout.head_dim))
    for section, part in zip(into.values, values, strict=True):
        section.copy_(part)
    return False


def _within(x: torch.Tensor) -> bool:
    """Whether all values are within the bounds, NaN being outside."""
    return bool(within(x, LARGEST).all())


def _exempt_unsound(sections: Sections) -> bool | torch.Tensor:
    keys, values = (within(part, LARGEST).all() for part in (sections.exempt_keys, sections.exempt_values))
    return known(~(keys & values))


def _dequantise(sections: Sections, k: torch.Tensor, v: torch.Tensor, layout: Kv4Layout) -> bool | torch.Tensor:
    """Fill the coded tokens of K and V by the fastest way there is. Whether no encoder wrote these sections."""
    if has_triton(k.device):
        from . import triton_kv4

        flag = new_flag(k.device)
        triton_kv4.dequantise(sections, k, v, layout, flag)
        return flag
    if k.device.type == "cpu" and ready(2 * (k.numel() + v.numel())):
        sound = kv4_native.dequantise(sections, k, v, layout)
        if sound is not None:
            return not sound
    decoded = reference.dequantise_keys(reference.stored_keys(sections, layout))
    k.copy_(clamped(decoded[layout.lead : layout.lead + layout.coded], k.dtype).view(k.shape))
    v.copy_(clamped(reference.dequantise_values(sections.values, layout.head_dim), v.dtype).view(v.shape))
    return not _within(sections.key_bases)
