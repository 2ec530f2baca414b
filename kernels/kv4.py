"""The 4-bit codec over whole payloads; `codec` specifies the format, `kv4_reference` is it in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from . import kv4_native
from . import kv4_reference as reference
from .accelerate import ready
from .blocks import clamped, has_triton, read_header, require_finite, sixteen_bit, within, write_header
from .format import FORMAT_VERSION, KEY_SPAN_TOKENS, Kv4Layout
from .kv4_reference import LARGEST, Keys, Sections, Values

__all__ = ["LARGEST", "decode", "encode"]


def encode(k: torch.Tensor, v: torch.Tensor, *, start: int, layer: int) -> memoryview:
    """The payload of one block. Raises `NonFiniteError` for the first value that is not finite or too large."""
    layout = Kv4Layout(start, *k.shape)
    sixteen = sixteen_bit(k.dtype)
    k16, v16 = k.to(sixteen), v.to(sixteen)
    out = torch.empty(layout.total_bytes, dtype=torch.uint8, device=k.device)
    sections = Sections.of(out, layout, sixteen)
    exempt = layout.exempt
    sections.exempt_keys.copy_(k16[:exempt])
    sections.exempt_values.copy_(v16[:exempt])
    sound = _within(sections.exempt_keys) and _within(sections.exempt_values)
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
    sixteen = sixteen_bit(dtype)
    sections = Sections.of(data, layout, sixteen)
    read_header(bytes(sections.header.tolist()), "kv4", FORMAT_VERSION, sixteen, layer)
    shape = (layout.tokens, layout.heads, layout.head_dim)
    k, v = (torch.empty(shape, dtype=sixteen, device=data.device) for _ in range(2))
    fast = data.device.type == "cpu" and layout.coded and ready(4 * math.prod(shape))
    if not (fast and _decode_natively(sections, layout, k[layout.exempt :], v[layout.exempt :])):
        reference.require_sound(sections, layout, layer)
        _decode_plainly(sections, layout, k[layout.exempt :], v[layout.exempt :])
    k[: layout.exempt], v[: layout.exempt] = sections.exempt_keys, sections.exempt_values
    return k.to(dtype), v.to(dtype)


def _quantise(k: torch.Tensor, v: torch.Tensor, into: Sections, layout: Kv4Layout) -> bool:
    """Fill the sections by the fastest way there is. False: there are values not finite or too large."""
    if has_triton(k.device):
        from . import triton_kv4

        return bool(triton_kv4.quantise(k, v, into, layout))
    native = k.device.type == "cpu" and ready(2 * (k.numel() + v.numel()))
    channels = k.reshape(layout.coded, -1)
    for spans in reference.key_pieces(layout):
        piece = reference.piece_of_keys(channels, layout, *spans)
        rows = reference.key_rows(layout, *spans)
        here = _key_rows_of(into, rows)
        whole = all(part.shape[0] == count for part, count in zip(here, _key_counts(*spans), strict=True))
        found = kv4_native.quantise_keys(piece, here if whole else None) if native else None
        keys, sound = found or (reference.quantise_keys(piece), _within(piece))
        if not sound:
            return False
        if keys is not here:
            for section, part, (_, of) in zip(here, keys, rows, strict=True):
                section.copy_(part[of])
    vectors, stored = v.reshape(-1, layout.head_dim), _values_of(into)
    coded = kv4_native.quantise_values(vectors, stored) if native else None
    values, sound = coded or (reference.quantise_values(vectors), _within(vectors))
    if values is not stored:
        for section, part in zip(stored, values, strict=True):
            section.copy_(part)
    return sound


def _within(x: torch.Tensor) -> bool:
    """Whether all values are within the bounds, NaN being outside."""
    return bool(within(x, LARGEST).all())


def _values_of(sections: Sections) -> Values:
    return Values(sections.value_units, sections.value_zeros, sections.value_steps, sections.value_codes)


def _decode_natively(sections: Sections, layout: Kv4Layout, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Fill the coded tokens of K and V. False: there is no such library yet, or something is wrong with the payload."""
    if not (_within(sections.exempt_keys) and _within(sections.exempt_values)):
        return False
    channels = k.view(layout.coded, -1)
    for spans, piece in _pieces(sections, layout):
        here = _tokens_of(channels, layout, *spans)
        whole = here.shape[0] == (spans[1] - spans[0]) * KEY_SPAN_TOKENS
        found = kv4_native.dequantise_keys(piece, here if whole else None)
        if found is None or not found[1]:
            return False
        if not whole:
            here.copy_(_of_block(found[0], layout, *spans))
    values = kv4_native.dequantise_values(_values_of(sections), v.view(-1, layout.head_dim))
    return values is not None and values


def _decode_plainly(sections: Sections, layout: Kv4Layout, k: torch.Tensor, v: torch.Tensor) -> None:
    """Fill the coded tokens of K and V."""
    if not layout.coded:
        return
    if has_triton(k.device):
        from . import triton_kv4

        triton_kv4.dequantise(sections, k, v, layout)
        return
    channels = k.view(layout.coded, -1)
    for spans, piece in _pieces(sections, layout):
        decoded = clamped(reference.dequantise_keys(piece), k.dtype)
        _tokens_of(channels, layout, *spans).copy_(_of_block(decoded, layout, *spans))
    v.copy_(clamped(reference.dequantise_values(_values_of(sections), layout.head_dim), v.dtype).view(v.shape))


def _key_rows_of(sections: Sections, rows: tuple[tuple[slice, slice], ...]) -> Keys:
    """Where some spans of K are stored."""
    stored = (sections.key_bases, sections.key_units, sections.key_zeros, sections.key_steps, sections.key_codes)
    return Keys(*(section[to] for section, (to, _) in zip(stored, rows, strict=True)))


def _key_counts(first: int, last: int) -> tuple[int, ...]:
    """Rows that whole spans take in the sections of K."""
    return tuple((last - first) * each for each in reference.ROWS_PER_SPAN)


def _pieces(sections: Sections, layout: Kv4Layout) -> Iterator[tuple[tuple[int, int], Keys]]:
    """Runs of whole spans, and what is stored of K for them."""
    for spans in reference.key_pieces(layout):
        rows = reference.key_rows(layout, *spans)
        parts = zip(_key_rows_of(sections, rows), rows, _key_counts(*spans), strict=True)
        yield spans, Keys(*(_placed(part, of, count) for part, (_, of), count in parts))


def _block_range(layout: Kv4Layout, first: int, last: int) -> tuple[int, int]:
    """The tokens of some whole spans that are coded in this block, counted from the first span of the block."""
    begin, end = (span * KEY_SPAN_TOKENS for span in (first, last))
    return max(begin, layout.lead), min(end, layout.lead + layout.coded)


def _tokens_of(channels: torch.Tensor, layout: Kv4Layout, first: int, last: int) -> torch.Tensor:
    """Those tokens in the block `[coded, n]`."""
    begin, end = _block_range(layout, first, last)
    return channels[begin - layout.lead : end - layout.lead]


def _of_block(decoded: torch.Tensor, layout: Kv4Layout, first: int, last: int) -> torch.Tensor:
    """Those tokens among those of the whole spans."""
    begin, end = _block_range(layout, first, last)
    return decoded[begin - first * KEY_SPAN_TOKENS : end - first * KEY_SPAN_TOKENS]


def _placed(part: torch.Tensor, rows: slice, count: int) -> torch.Tensor:
    """The rows where a whole piece would have them, in a tensor of `count` rows."""
    if part.shape[0] == count:
        return part
    whole = part.new_zeros(count, *part.shape[1:])
    whole[rows] = part
    return whole
