"""Reading and writing vLLM's paged KV cache in canonical form, whatever the attention backend's layout.

Canonical K and V are token-major, `[tokens, kv_heads, head_dim]`. Writing goes through the backend's own
`do_kv_cache_update`. For reading there is no such function: vLLM documents a logical view `[blocks, heads,
block_size, 2 * head_dim]`, which holds on GPUs but not on CPUs, where K and V of a block are packed as the
instruction set likes it. So a packer calibrates itself once per layer: it writes numbered values into a
scratch block with the backend's own writer, reads the raw memory back and inverts the permutation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .protocol import Slice

_DIGIT = 128  # 0..127 are exact in bf16, fp16 and fp32


class LayoutError(Exception):
    """The backend's cache layout is none that can be read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What part of a model's KV one worker holds, numbered as in the whole model, and in which form."""

    layers: range
    heads: range
    head_dim: int
    dtype: torch.dtype

    def holds(self, part: Slice) -> bool:
        """Whether all of it is here."""
        layers, heads = self.layers, self.heads
        return (
            layers.start <= part.first_layer
            and part.last_layer <= layers.stop
            and heads.start <= part.first_head
            and part.last_head <= heads.stop
        )


class LayerCache:
    """One attention layer's paged KV cache.

    Args:
        name: vLLM's name of the layer.
        layer: the attention module, which owns the backend's writer (`layer.impl`).
        cache: the paged tensor `[blocks, heads, block_size, 2 * head_dim]`.
        index: global index of the layer in the model.
    """

    def __init__(self, name: str, layer: Any, cache: torch.Tensor, index: int) -> None:
        if cache.ndim != 4 or cache.shape[3] % 2:
            raise LayoutError(f"layer {name}: a KV cache of shape {tuple(cache.shape)} is not supported")
        self.name = name
        self.index = index
        self._layer = layer
        self._cache = cache
        self.blocks, self.heads, self.block_size, channels = cache.shape
        self.head_dim = channels // 2
        self._order = self._calibrate()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values in the cache."""
        return self._cache.dtype

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store canonical `k` and `v` `[tokens, heads, head_dim]` at `slots` `[tokens]` (int64)."""
        device, dtype = self._cache.device, self._cache.dtype
        self._layer.impl.do_kv_cache_update(
            self._layer, k.to(device, dtype), v.to(device, dtype), self._cache, slots.to(device)
        )

    def read(self, block_ids: list[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of canonical K and V for the positions `[first, last)` of a block table."""
        low = first // self.block_size
        high = -(-last // self.block_size)
        ids = torch.tensor(block_ids[low:high], device=self._cache.device)
        blocks = self._cache.index_select(0, ids)
        if self._order is None:
            tokens = blocks.transpose(1, 2).reshape(-1, self.heads, 2 * self.head_dim)
            tokens = tokens[first - low * self.block_size : last - low * self.block_size]
            return tokens[..., : self.head_dim].contiguous(), tokens[..., self.head_dim :].contiguous()
        flat = blocks.reshape(len(ids), -1)
        parts = []
        for order in self._order:
            values = flat.index_select(1, order).view(-1, self.heads, self.head_dim)
            parts.append(values[first - low * self.block_size : last - low * self.block_size].contiguous())
        return parts[0], parts[1]

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of canonical K and V at `slots` `[tokens]`, which are on the cache's device: nothing waits."""
        blocks, rows = slots // self.block_size, slots % self.block_size
        if self._order is None:
            values = self._cache[blocks, :, rows]
            return values[..., : self.head_dim].contiguous(), values[..., self.head_dim :].contiguous()
        flat = self._cache.reshape(self.blocks, -1)
        k, v = (
            flat[blocks[:, None], order.view(self.block_size, -1)[rows]].view(-1, self.heads, self.head_dim)
            for order in self._order
        )
        return k, v

    def slots(self, block_ids: list[int], first: int, last: int) -> torch.Tensor:
        """Slot of each position in `[first, last)` `[tokens]`, int64, on the cache's device."""
        positions = torch.arange(first, last)
        table = torch.tensor(block_ids, dtype=torch.int64)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots.to(self._cache.device)

    def _calibrate(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gather indices of K and V within a block's raw memory; None when the logical view holds.

        Uses the last block, which nothing holds while the caches are being registered.
        """
        size = self.block_size * self.heads * self.head_dim
        block = self.blocks - 1
        slots = torch.arange(block * self.block_size, (block + 1) * self.block_size)
        codes = torch.zeros(2 * size, dtype=torch.int64)
        numbers = torch.arange(2 * size)
        digits = 1
        while _DIGIT**digits < 2 * size:
            digits += 1
        for digit in range(digits):
            shown = ((numbers // _DIGIT**digit) % _DIGIT).to(torch.float32)
            k, v = shown.view(2, self.block_size, self.heads, self.head_dim)
            self.write(slots, k, v)
            raw = self._cache[block].reshape(-1).to("cpu", torch.float32).round().to(torch.int64)
            codes += raw * _DIGIT**digit
        self._cache[block].zero_()
        if not torch.equal(codes.sort().values, numbers):
            raise LayoutError(
                f"layer {self.name}: the attention backend does not store each K and V value exactly once; "
                "KV hand-off is not possible with it"
            )
        # The logical view, flattened as it is read above, numbers K before V within each token and head.
        logical = numbers.view(2, self.block_size, self.heads, self.head_dim).permute(2, 1, 0, 3)
        if torch.equal(codes, logical.reshape(-1)):
            return None
        place = torch.empty_like(codes)
        place[codes] = numbers
        place = place.to(self._cache.device)
        return place[:size], place[size:]
