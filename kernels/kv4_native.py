"""`kv4` in C++ (`csrc/kv4.cpp`) for tensors of a CPU: the same bytes as `kv4_reference` makes.

Both functions return None where there is no such library (yet), or for shapes that it does not take.
"""

from __future__ import annotations

import ctypes

import torch

from .format import Kv4Layout, value_groups
from .kv4_reference import Sections
from .native import Library, address, threads

__all__ = ["available", "dequantise", "quantise"]

_LIBRARY = Library("kv4.cpp")
_LANES = 16
_MOST_CHANNELS = 1024


def available() -> bool:
    """Whether the library is there, or has now been built."""
    return _LIBRARY.get() is not None


def quantise(k: torch.Tensor, v: torch.Tensor, into: Sections, layout: Kv4Layout) -> bool | None:
    """Code `[coded, heads, head_dim]` 16-bit values. False: some are not finite or too large, the sections void."""
    library = _library(layout)
    if library is None:
        return None
    k, v, half, count = k.contiguous(), v.contiguous(), _is_half(k), threads(k.numel())
    keys = library.kv4_quantise_keys(half, address(k), _key_rows(layout), *map(address, into.keys), count)
    values = library.kv4_quantise_values(half, address(v), *_vectors(layout), *map(address, into.values), count)
    return bool(keys and values)


def dequantise(sections: Sections, k: torch.Tensor, v: torch.Tensor, layout: Kv4Layout) -> bool | None:
    """Fill `[coded, heads, head_dim]` 16-bit values, contiguous ones. False: no encoder wrote these sections."""
    library = _library(layout)
    if library is None:
        return None
    half, count = _is_half(k), threads(k.numel())
    keys = library.kv4_dequantise_keys(half, address(k), _key_rows(layout), *map(address, sections.keys), count)
    values = library.kv4_dequantise_values(half, address(v), *_vectors(layout), *map(address, sections.values), count)
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


def _is_half(x: torch.Tensor) -> int:
    return int(x.dtype == torch.float16)
