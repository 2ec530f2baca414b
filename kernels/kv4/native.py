"""`kv4` in C++ (`kv4.cpp`) for tensors of a CPU: the same bytes as the reference makes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ..native import Library, address, is_fp16, section_addresses, threads
from .layout import Kv4Layout, value_groups

_LIBRARY = Library(Path(__file__).with_name("kv4.cpp"))
_LANES = 16
_MOST_CHANNELS = 1024


def available() -> bool:
    """Whether the library is there, or has now been built."""
    return _LIBRARY.get() is not None


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Kv4Layout) -> bool | None:
    """Code `[coded, heads, head_dim]`. False: some are not finite or too large, and it is void."""
    library = _library(layout)
    if library is None:
        return None
    k, v, half, count = k.contiguous(), v.contiguous(), is_fp16(k), threads(k.numel())
    _, _, _, *sections = section_addresses(payload, layout)
    keys = library.kv4_quantise_keys(half, address(k), _key_rows(layout), *sections[:5], count)
    values = library.kv4_quantise_values(half, address(v), *_vectors(layout), *sections[5:], count)
    return bool(keys and values)


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kv4Layout) -> bool | None:
    """Fill contiguous `[coded, heads, head_dim]`. False: no encoder wrote these sections."""
    library = _library(layout)
    if library is None:
        return None
    half, count = is_fp16(k), threads(k.numel())
    _, _, _, *sections = section_addresses(payload, layout)
    keys = library.kv4_dequantise_keys(half, address(k), _key_rows(layout), *sections[:5], count)
    values = library.kv4_dequantise_values(half, address(v), *_vectors(layout), *sections[5:], count)
    return bool(keys and values)


def _library(layout: Kv4Layout) -> ctypes.CDLL | None:
    head_dim = layout.head_dim
    if head_dim % _LANES or head_dim > _MOST_CHANNELS or head_dim // value_groups(head_dim) % 4:
        return None
    return _LIBRARY.get()


def _key_rows(layout: Kv4Layout) -> ctypes.Array[ctypes.c_long]:
    """`KeyRows` of the C++ side."""
    runs = (layout.group_rows, layout.step_rows, layout.code_rows)
    ends = (end for rows in runs for end in (rows.start, rows.stop))
    return (ctypes.c_long * 9)(layout.coded, layout.lead, layout.heads * layout.head_dim, *ends)


def _vectors(layout: Kv4Layout) -> tuple[ctypes.c_long, int, int]:
    return ctypes.c_long(layout.coded * layout.heads), layout.head_dim, value_groups(layout.head_dim)
