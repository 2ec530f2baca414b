"""`kv4` in C++ (`csrc/kv4.cpp`) for tensors of a CPU. Same bytes as `kv4_reference`, whose functions these stand for.

Each returns None where there is no such library (yet), or for shapes that it does not take.
"""

from __future__ import annotations

import ctypes

import torch

from .format import KEY_GROUP_TOKENS, KEY_SPAN_TOKENS, value_groups
from .kv4_reference import Keys, Values
from .native import Library, address, threads

__all__ = ["available", "dequantise_keys", "dequantise_values", "quantise_keys", "quantise_values"]

_LIBRARY = Library("kv4.cpp")
_LANES = 16
_MOST_CHANNELS = 1024
_GROUPS = KEY_SPAN_TOKENS // KEY_GROUP_TOKENS


def available() -> bool:
    """Whether the library is there, or has now been built."""
    return _LIBRARY.get() is not None


def quantise_keys(k: torch.Tensor, into: Keys | None = None) -> tuple[Keys, bool] | None:
    """`[spans * 256, n]` coded, in memory of its own or in `into`, and whether all values are within bounds."""
    n, library = k.shape[1], _LIBRARY.get()
    if library is None or n % _LANES:
        return None
    k = k.contiguous()
    spans = k.shape[0] // KEY_SPAN_TOKENS
    keys = into or Keys(
        torch.empty(spans, n, dtype=k.dtype),
        _bytes(spans, n),
        _bytes(spans * _GROUPS, n),
        _bytes(spans * _GROUPS // 2, n),
        _bytes(spans * KEY_SPAN_TOKENS // 2, n),
    )
    sound = library.kv4_quantise_keys(
        _is_half(k.dtype), address(k), ctypes.c_long(spans), ctypes.c_long(n), *map(address, keys), threads(k.numel())
    )
    return keys, bool(sound)


def quantise_values(v: torch.Tensor, into: Values | None = None) -> tuple[Values, bool] | None:
    """`[n, head_dim]` coded, in memory of its own or in `into`, and whether all values are within bounds."""
    (n, head_dim), library = v.shape, _LIBRARY.get()
    if library is None or not _takes(head_dim):
        return None
    v = v.contiguous()
    groups = value_groups(head_dim)
    half = (head_dim // groups + 1) // 2
    values = into or Values(
        torch.empty(n, dtype=torch.uint8), _bytes(groups, n), _bytes((groups + 1) // 2, n), _bytes(groups * half, n)
    )
    sound = library.kv4_quantise_values(
        _is_half(v.dtype), address(v), ctypes.c_long(n), head_dim, groups, *map(address, values), threads(v.numel())
    )
    return values, bool(sound)


def dequantise_keys(keys: Keys, into: torch.Tensor | None = None) -> tuple[torch.Tensor, bool] | None:
    """`[spans * 256, n]` in 16 bit, in memory of its own or in `into`, and whether an encoder can have written it."""
    (spans, n), library = keys.units.shape, _LIBRARY.get()
    if library is None or n % _LANES:
        return None
    keys = Keys(*(part.contiguous() for part in keys))
    k = torch.empty(spans * KEY_SPAN_TOKENS, n, dtype=keys.bases.dtype) if into is None else into
    sound = library.kv4_dequantise_keys(
        _is_half(k.dtype), ctypes.c_long(spans), ctypes.c_long(n), *map(address, keys), address(k), threads(k.numel())
    )
    return k, bool(sound)


def dequantise_values(values: Values, into: torch.Tensor) -> bool | None:
    """Fill `[n, head_dim]` in 16 bit. Whether an encoder can have written the values."""
    (groups, n), head_dim, library = values.zeros.shape, into.shape[1], _LIBRARY.get()
    if library is None or not _takes(head_dim):
        return None
    values = Values(*(part.contiguous() for part in values))
    half = _is_half(into.dtype)
    sound = library.kv4_dequantise_values(
        half, ctypes.c_long(n), head_dim, groups, *map(address, values), address(into), threads(into.numel())
    )
    return bool(sound)


def _takes(head_dim: int) -> bool:
    return head_dim % _LANES == 0 and head_dim <= _MOST_CHANNELS


def _bytes(rows: int, n: int) -> torch.Tensor:
    return torch.empty(rows, n, dtype=torch.uint8)


def _is_half(dtype: torch.dtype) -> int:
    return int(dtype == torch.float16)
