"""The 4-bit codec over whole payloads; `codec` specifies the format, `kv4_reference` is it in plain torch."""

from __future__ import annotations

import torch

from . import kv4_native
from . import kv4_reference as reference
from .accelerate import ready
from .blocks import clamped, has_triton, read_header, require_finite, sixteen_bit, within, write_header
from .format import FORMAT_VERSION, Kv4Layout, kv4_layout
from .kv4_reference import LARGEST, Sections

__all__ = ["LARGEST", "decode", "encode"]


def encode(k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    """The payload of one block. Raises `NonFiniteError` for the first value that is not finite or too large."""
    layout = kv4_layout(start, *k.shape)
    sixteen = sixteen_bit(k.dtype)
    k16, v16 = k.to(sixteen), v.to(sixteen)
    out = torch.empty(layout.total_bytes, dtype=torch.uint8, device=k.device)
    sections = Sections.of(out, layout, sixteen)
    exempt, sound = layout.exempt, True
    if exempt:
        sections.exempt_keys.copy_(k16[:exempt])
        sections.exempt_values.copy_(v16[:exempt])
        sound = _exempt_within(sections)
    if sound and layout.coded:
        sound = _quantise(k16[exempt:], v16[exempt:], sections, layout)
    if not sound:
        require_finite(k16, "K", start, "kv4", layer, LARGEST)
        require_finite(v16, "V", start, "kv4", layer, LARGEST)
    payload = out.cpu().numpy().data
    write_header(payload, FORMAT_VERSION, sixteen)
    return payload


def decode(
    data: torch.Tensor, layout: Kv4Layout, *, dtype: torch.dtype, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`data` is a whole payload as bytes, its length already checked against the layout; the result is beside it."""
    sixteen, exempt = sixteen_bit(dtype), layout.exempt
    sections = Sections.of(data, layout, sixteen)
    read_header(bytes(sections.header.tolist()), "kv4", FORMAT_VERSION, sixteen, layer)
    shape = (layout.tokens, layout.heads, layout.head_dim)
    k, v = (torch.empty(shape, dtype=sixteen, device=data.device) for _ in range(2))
    if not _decode_natively(sections, layout, k[exempt:], v[exempt:]):
        reference.require_sound(sections, layout, layer)
        _decode_plainly(sections, layout, k[exempt:], v[exempt:])
    if exempt:
        k[:exempt], v[:exempt] = sections.exempt_keys, sections.exempt_values
    return k.to(dtype), v.to(dtype)


def _quantise(k: torch.Tensor, v: torch.Tensor, into: Sections, layout: Kv4Layout) -> bool:
    """Fill the sections by the fastest way there is. False: there are values not finite or too large."""
    if has_triton(k.device):
        from . import triton_kv4

        return bool(triton_kv4.quantise(k, v, into, layout))
    if k.device.type == "cpu" and ready(2 * (k.numel() + v.numel())):
        sound = kv4_native.quantise(k, v, into, layout)
        if sound is not None:
            return sound
    if not (_within(k) and _within(v)):
        return False
    keys = reference.quantise_keys(reference.whole_spans(k.reshape(layout.coded, -1), layout))
    for section, part, rows in zip(into.keys, keys, reference.stored_rows(layout), strict=True):
        section.copy_(part[rows])
    values = reference.quantise_values(v.reshape(-1, layout.head_dim))
    for section, part in zip(into.values, values, strict=True):
        section.copy_(part)
    return True


def _within(x: torch.Tensor) -> bool:
    """Whether all values are within the bounds, NaN being outside."""
    return bool(within(x, LARGEST).all())


def _exempt_within(sections: Sections) -> bool:
    return _within(sections.exempt_keys) and _within(sections.exempt_values)


def _decode_natively(sections: Sections, layout: Kv4Layout, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Fill the coded tokens of K and V. False: there is no such library yet, or something is wrong with the payload."""
    if not layout.coded or k.device.type != "cpu" or not ready(2 * (k.numel() + v.numel())):
        return False
    if layout.exempt and not _exempt_within(sections):
        return False
    return kv4_native.dequantise(sections, k, v, layout) or False


def _decode_plainly(sections: Sections, layout: Kv4Layout, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fill the coded tokens of K and V."""
    if not layout.coded:
        return
    if has_triton(k.device):
        from . import triton_kv4

        triton_kv4.dequantise(sections, k, v, layout)
        return
    decoded = reference.dequantise_keys(reference.stored_keys(sections, layout))
    k.copy_(clamped(decoded[layout.lead : layout.lead + layout.coded], k.dtype).view(k.shape))
    v.copy_(clamped(reference.dequantise_values(sections.values, layout.head_dim), v.dtype).view(v.shape))
