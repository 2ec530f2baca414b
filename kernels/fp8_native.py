"""`fp8` in C++ (`csrc/fp8.cpp`) for tensors of a CPU: the same bytes as `fp8_reference`.

Both functions work on a whole payload, since making `Sections` of it takes a tenth of their time, and each returns None
where there is no such library (yet).
"""

from __future__ import annotations

from ctypes import c_long, c_void_p
from itertools import accumulate

import torch

from .fp8_layout import Fp8Layout
from .native import Library, address, threads

__all__ = ["available", "dequantise", "quantise"]

_LIBRARY = Library("fp8.cpp")


def available() -> bool:
    """Whether the library is there, or has now been built."""
    return _LIBRARY.get() is not None


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Fp8Layout) -> bool | None:
    """Fill parameters and codes in a payload from its `[tokens, heads, head_dim]` 16-bit values.

    False: there are values that are not finite or too large, and what was written is void.
    """
    library = _LIBRARY.get()
    if library is None:
        return None
    k, v = k.contiguous(), v.contiguous()
    half, workers = int(k.dtype == torch.float16), threads(k.numel())
    keys, values = _parts(payload, layout)
    sound = library.fp8_quantise_keys(half, address(k), *_key_shape(layout), *keys, workers)
    return bool(library.fp8_quantise_values(half, address(v), *_value_shape(layout), *values, workers) and sound)


def dequantise(payload: torch.Tensor, layout: Fp8Layout, k: torch.Tensor, v: torch.Tensor) -> bool | None:
    """Write the `[tokens, heads, head_dim]` 16-bit values of a payload, both contiguous.

    False: there are parameters that no encoder writes, and the values are void.
    """
    library = _LIBRARY.get()
    if library is None:
        return None
    half, workers = int(k.dtype == torch.float16), threads(k.numel())
    keys, values = _parts(payload, layout)
    sound = library.fp8_dequantise_keys(half, *_key_shape(layout), *keys, address(k), workers)
    return bool(library.fp8_dequantise_values(half, *_value_shape(layout), *values, address(v), workers) and sound)


def _parts(payload: torch.Tensor, layout: Fp8Layout) -> tuple[tuple[c_void_p, ...], tuple[c_void_p, ...]]:
    """Where zeros, exponents and codes of K and exponents and codes of V begin."""
    at = [c_void_p(start) for start in accumulate(layout.section_bytes, initial=payload.data_ptr())]
    _, key_zeros, key_exponents, key_codes, value_codes, value_exponents, _ = at
    return (key_zeros, key_exponents, key_codes), (value_exponents, value_codes)


def _key_shape(layout: Fp8Layout) -> tuple[c_long, c_long, c_long]:
    """How far into its group the first token lies, tokens, channels of all heads."""
    return c_long(layout.lead), c_long(layout.tokens), c_long(layout.heads * layout.head_dim)


def _value_shape(layout: Fp8Layout) -> tuple[c_long, int]:
    """Vectors and their channels."""
    return c_long(layout.tokens * layout.heads), layout.head_dim
