"""`fp8` in C++ (`fp8.cpp`) for tensors of a CPU: the same bytes as the reference makes."""

from __future__ import annotations

from ctypes import c_long
from pathlib import Path

import torch

from ..native import Library, address, is_fp16, section_addresses, threads
from .layout import Fp8Layout

_LIBRARY = Library(Path(__file__).with_name("fp8.cpp"))


def available() -> bool:
    """Whether the library is there, or has now been built."""
    return _LIBRARY.get() is not None


def quantise(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor, layout: Fp8Layout) -> bool | None:
    """Fill parameters and codes from `[tokens, heads, head_dim]`. False: not finite or too large,
    and void."""
    library = _LIBRARY.get()
    if library is None:
        return None
    k, v, half, count = k.contiguous(), v.contiguous(), is_fp16(k), threads(k.numel())
    _, *keys, value_codes, value_exponents = section_addresses(payload, layout)
    sound = library.fp8_quantise_keys(half, address(k), *_key_shape(layout), *keys, count)
    values = (half, address(v), *_value_shape(layout), value_exponents, value_codes, count)
    return bool(library.fp8_quantise_values(*values) and sound)


def dequantise(payload: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Fp8Layout) -> bool | None:
    """Write the `[tokens, heads, head_dim]` values of a payload. False: no encoder writes it; void."""
    library = _LIBRARY.get()
    if library is None:
        return None
    half, count = is_fp16(k), threads(k.numel())
    _, *keys, value_codes, value_exponents = section_addresses(payload, layout)
    sound = library.fp8_dequantise_keys(half, *_key_shape(layout), *keys, address(k), count)
    values = (half, *_value_shape(layout), value_exponents, value_codes, address(v), count)
    return bool(library.fp8_dequantise_values(*values) and sound)


def _key_shape(layout: Fp8Layout) -> tuple[c_long, c_long, c_long]:
    """How far into its group the first token lies, tokens, channels of all heads."""
    return c_long(layout.lead), c_long(layout.tokens), c_long(layout.heads * layout.head_dim)


def _value_shape(layout: Fp8Layout) -> tuple[c_long, int]:
    """Vectors and their channels."""
    return c_long(layout.tokens * layout.heads), layout.head_dim
