"""`kivi4` in C++ (`csrc/kivi4.cpp`) for tensors of a CPU: the same bytes as `kivi4_reference`.

Both functions work on a whole payload, since making `Sections` of it takes a tenth of their time, and each returns None
where there is no such library (yet), or for heads that it does not take.
"""

from __future__ import annotations

from ctypes import c_long, c_void_p
from itertools import accumulate

import torch

from .kivi4_layout import Kivi4Layout
from .native import Library, address, threads

__all__ = ["available", "dequantise", "quantise"]

_LIBRARY = Library("kivi4.cpp")
_MOST_CHANNELS = 1024


def available() -> bool:
    """Whether the library is there, or has now been built."""
    return _LIBRARY.get() is not None


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Kivi4Layout) -> bool | None:
    """Fill parameters and codes in a payload from its `[coded, heads, head_dim]` 16-bit values in whole groups.

    False: there are values that are not finite or too large, and what was written is void.
    """
    library = _LIBRARY.get()
    if library is None or layout.head_dim > _MOST_CHANNELS:
        return None
    k, v = k.contiguous(), v.contiguous()
    half, workers = int(k.dtype == torch.float16), threads(k.numel())
    keys, values = _parts(payload, layout)
    sound = library.kivi4_quantise_keys(half, address(k), *_key_shape(layout), *keys, workers)
    return bool(library.kivi4_quantise_values(half, address(v), *_value_shape(layout), *values, workers) and sound)


def dequantise(payload: torch.Tensor, layout: Kivi4Layout, k: torch.Tensor, v: torch.Tensor) -> bool | None:
    """Write the `[coded, heads, head_dim]` 16-bit values in whole groups of a payload, both contiguous.

    False: there are parameters that no encoder writes, and the values are void.
    """
    library = _LIBRARY.get()
    if library is None or layout.head_dim > _MOST_CHANNELS:
        return None
    half, workers = int(k.dtype == torch.float16), threads(k.numel())
    keys, values = _parts(payload, layout)
    sound = library.kivi4_dequantise_keys(half, *_key_shape(layout), *keys, address(k), workers)
    return bool(library.kivi4_dequantise_values(half, *_value_shape(layout), *values, address(v), workers) and sound)


def _parts(payload: torch.Tensor, layout: Kivi4Layout) -> tuple[tuple[c_void_p, ...], tuple[c_void_p, ...]]:
    """Where zeros, scales and codes of K and those of V begin."""
    at = [c_void_p(start) for start in accumulate(layout.section_bytes, initial=payload.data_ptr())]
    _, _, _, key_zeros, key_scales, value_zeros, value_scales, key_codes, value_codes, _ = at
    return (key_zeros, key_scales, key_codes), (value_zeros, value_scales, value_codes)


def _key_shape(layout: Kivi4Layout) -> tuple[c_long, c_long]:
    """Groups of tokens, channels of all heads."""
    return c_long(layout.key_groups), c_long(layout.heads * layout.head_dim)


def _value_shape(layout: Kivi4Layout) -> tuple[c_long, int]:
    """Groups of V, and channels in each."""
    return c_long(layout.coded * layout.heads * layout.value_groups), layout.head_dim // layout.value_groups
