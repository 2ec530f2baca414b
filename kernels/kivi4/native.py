"""`kivi4` in C++ (`kivi4.cpp`) for tensors of a CPU: the same bytes as the reference makes."""

from __future__ import annotations

from ctypes import CDLL, c_long
from pathlib import Path

import torch

from ..native import Library, address, is_fp16, section_addresses, threads
from .layout import Kivi4Layout

_LIBRARY = Library(Path(__file__).with_name("kivi4.cpp"))
_MOST_CHANNELS = 1024


def available() -> bool:
    """Whether the library is there, or has now been built."""
    return _LIBRARY.get() is not None


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Kivi4Layout) -> bool | None:
    """Fill parameters and codes from `[coded, heads, head_dim]` in whole groups. False: not finite
    or too large, and void."""
    library = _library(layout)
    if library is None:
        return None
    k, v, half, count = k.contiguous(), v.contiguous(), is_fp16(k), threads(k.numel())
    zeros, scales, value_zeros, value_scales, codes, value_codes = section_addresses(payload, layout)[3:]
    sound = library.kivi4_quantise_keys(half, address(k), *_key_shape(layout), zeros, scales, codes, count)
    values = (half, address(v), *_value_shape(layout), value_zeros, value_scales, value_codes, count)
    return bool(library.kivi4_quantise_values(*values) and sound)


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Kivi4Layout) -> bool | None:
    """Write the `[coded, heads, head_dim]` values in whole groups. False: no encoder writes it;
    void."""
    library = _library(layout)
    if library is None:
        return None
    half, count = is_fp16(k), threads(k.numel())
    zeros, scales, value_zeros, value_scales, codes, value_codes = section_addresses(payload, layout)[3:]
    sound = library.kivi4_dequantise_keys(half, *_key_shape(layout), zeros, scales, codes, address(k), count)
    values = (half, *_value_shape(layout), value_zeros, value_scales, value_codes, address(v), count)
    return bool(library.kivi4_dequantise_values(*values) and sound)


def _library(layout: Kivi4Layout) -> CDLL | None:
    return _LIBRARY.get() if layout.head_dim <= _MOST_CHANNELS else None


def _key_shape(layout: Kivi4Layout) -> tuple[c_long, c_long]:
    """Groups of tokens, channels of all heads."""
    return c_long(layout.key_groups), c_long(layout.heads * layout.head_dim)


def _value_shape(layout: Kivi4Layout) -> tuple[c_long, int]:
    """Groups of V, and channels in each."""
    return c_long(layout.coded * layout.heads * layout.value_groups), layout.head_dim // layout.value_groups
