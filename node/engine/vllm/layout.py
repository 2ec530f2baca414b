"""Reading and writing vLLM's paged KV cache in canonical form, whatever the attention backend's layout.

Canonical K and V are token-major, `[tokens, kv_heads, head_dim]`, in the dtype that the model computes in. Writing goes
through the backend's own `do_kv_cache_update`. For reading there is no such function: vLLM documents a logical view
`[blocks, heads, block_size, channels]`, which holds on GPUs but not on CPUs, where K and V of a block are packed as the
instruction set likes it. So each cache is calibrated once: numbered values are written into a scratch block with the
backend's own writer, the raw memory is read back and the permutation inverted.

*Kernel blocks.* Kernels that take certain block sizes only are given the cache in smaller blocks than those of the
scheduler's block tables: block `b` of the scheduler is their blocks `[b * n, (b + 1) * n)`, so a position has the same
slot in both.

*8-bit caches* hold `value / scale` in fp8, with scales of K and V for each layer. They are read as `code * scale`,
which written again with the same scales gives the same codes. vLLM's CPU backend does not round values to the nearest
code but towards zero, so that what is a little too small, having been rounded to 16 bits, would become the code below;
values are made a little larger for it.

*Latent attention* (MLA) keeps one vector per token, `[latent | rotary key]`, the same on all tensor-parallel ranks. Its
canonical form has one head; K and V are the halves of `[rotary key | latent]`, so that the rotary key, whose channels
differ most in size, travels as K does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from ..protocol import KvSlice

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Calibration counts in digits below these, which caches hold exactly: those of 8 bits, and all others.
_DIGIT_FP8: Final = 8
_DIGIT: Final = 128
_FP8: Final = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# More than two roundings to bf16 take away (2**-8 each), and less than half the distance of two codes of fp8 (2**-5).
_LIFT: Final = 1 + 2**-6
_BETWEEN_CODES: Final = 1.22  # 1.25 is the nearest code of both 8-bit types, and above it
_FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)


class LayoutError(Exception):
    """The backend's cache layout is none that can be read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What part of a model's KV one worker holds, numbered as in the whole model, and in which form."""

    layers: range
    heads: range
    head_dim: int
    dtype: torch.dtype

    def holds(self, part: KvSlice) -> bool:
        """Whether all of it is here."""
        layers, heads = self.layers, self.heads
        return (
            layers.start <= part.first_layer
            and part.last_layer <= layers.stop
            and heads.start <= part.first_head
            and part.last_head <= heads.stop
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheForm:
    """Common to a worker's layers: `block_size` positions, and the dtype of computation."""

    block_size: int
    dtype: torch.dtype


def kv_heads(model: ModelConfig) -> int:
    """How many the whole model has in canonical form."""
    return 1 if model.use_mla else model.get_total_num_kv_heads()


def head_dim(model: ModelConfig) -> int:
    """Of a key in canonical form."""
    return model.get_head_size() // 2 if model.use_mla else model.get_head_size()


class _KeysAndValues:
    """What a token's place in a plain cache holds: each head's key and value."""

    def __init__(self, layer: Any, cache: torch.Tensor) -> None:
        self._layer = layer
        self._cache = cache
        self.head_dim = cache.shape[3] // 2

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of an 8-bit cache, for K and V: one number, or one for each head `[heads, 1]`."""
        return _scale(self._layer, "_k_scale"), _scale(self._layer, "_v_scale")

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Call the backend's writer."""
        self._layer.impl.do_kv_cache_update(self._layer, k, v, self._cache, slots)

    def join(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As the logical view holds them `[tokens, heads, channels]`."""
        return torch.cat((k, v), -1)

    def split(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reverse of `join`."""
        return places[..., : self.head_dim], places[..., self.head_dim :]


class _Latent:
    """What a token's place in a cache of latent attention holds; the methods are those of `_KeysAndValues`."""

    def __init__(self, layer: Any, cache: torch.Tensor) -> None:
        self._layer = layer
        self._cache = cache.squeeze(1)  # the writer is given it without the one head
        self._rank = int(layer.kv_lora_rank)
        self._rotary = cache.shape[3] - self._rank
        self.head_dim = cache.shape[3] // 2

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One for both, since both are parts of the same vector."""
        scale = _scale(self._layer, "_k_scale")
        return scale, scale

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Call the backend's writer, which takes the latent and the rotary key apart."""
        layer, places = self._layer, self.join(k, v)
        latent, rotary = places[:, 0, : self._rank], places[..., self._rank :]
        scale, _ = self.scales()
        layer.impl.do_kv_cache_update(latent, rotary, self._cache, slots, layer.kv_cache_dtype, scale)

    def join(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As the logical view holds them `[tokens, 1, channels]`."""
        whole = torch.cat((k, v), -1)
        return torch.cat((whole[..., self._rotary :], whole[..., : self._rotary]), -1)

    def split(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reverse of `join`."""
        whole = torch.cat((places[..., self._rank :], places[..., : self._rank]), -1)
        return whole[..., : self.head_dim], whole[..., self.head_dim :]


class LayerCache:
    """One attention layer's paged KV cache. `block_size` and `blocks` are the scheduler's, `dtype` is that of K and V;
    `order`: where K and V lie in a kernel block's memory, None where the logical view says it.

    Args:
        name: vLLM's name of the layer.
        layer: the attention module, which owns the backend's writer (`layer.impl`).
        cache: the paged tensor `[blocks, heads, block_size, channels]`, in blocks of the kernel.
        index: global index of the layer in the model.
        form: the block size of the scheduler and the dtype of the model.
    """

    def __init__(self, name: str, layer: Any, cache: torch.Tensor, index: int, form: CacheForm) -> None:
        if cache.ndim != 4 or cache.shape[3] % 2:
            raise LayoutError(f"layer {name}: a KV cache of shape {tuple(cache.shape)} is not supported")
        self.name = name
        self.index = index
        kernel_blocks, self.heads, self._kernel_block, _ = cache.shape
        if form.block_size % self._kernel_block:
            raise LayoutError(
                f"layer {name}: blocks of {form.block_size} positions cannot be cut into the {self._kernel_block} that "
                "the attention kernel takes; take another block size"
            )
        self._parts = form.block_size // self._kernel_block
        self.block_size = form.block_size
        self.blocks = kernel_blocks // self._parts
        self._fp8 = _fp8_of(name, layer, cache)
        self.dtype = cache.dtype if self._fp8 is None else form.dtype
        # Bytes, since few operations know the 8-bit types.
        self._cache = cache if self._fp8 is None else cache.view(torch.uint8)
        content_of = partial(_Latent if hasattr(layer, "kv_lora_rank") else _KeysAndValues, layer)
        self._content = content_of(cache)
        self.head_dim = self._content.head_dim
        self._lift = 1.0 if self._fp8 is None else _LIFT
        # Like a block of the cache, since in those other engines may have KV.
        strides, kind, device = cache.stride(), cache.dtype, cache.device
        self._scratch = torch.empty_strided((1, *cache.shape[1:]), strides, dtype=kind, device=device).zero_()
        self._scratch_content = content_of(self._scratch)
        self.order = self._calibrate()
        self._lift = self._needed_lift()
        del self._scratch, self._scratch_content

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store canonical `k` and `v` `[tokens, heads, head_dim]` at `slots` `[tokens]` (int64)."""
        self._write(self._content, slots, k, v)

    def _write(self, content: _KeysAndValues | _Latent, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        device, dtype = self._cache.device, self.dtype
        if self._lift != 1.0:
            k, v = k * self._lift, v * self._lift
        content.write(slots.to(device), k.to(device, dtype), v.to(device, dtype))

    def read(self, block_ids: list[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of canonical K and V for the positions `[first, last)` of a block table."""
        size = self._kernel_block
        low, high = first // size, -(-last // size)
        blocks = self._cache.index_select(0, self._kernel_block_ids(block_ids, low, high).to(self._cache.device))
        wanted = slice(first - low * size, last - low * size)
        if self.order is None:
            places = blocks.transpose(1, 2).reshape(-1, self.heads, 2 * self.head_dim)
            k, v = self._content.split(places[wanted])
        else:
            flat = blocks.reshape(high - low, -1)
            k, v = (flat.index_select(1, order).view(-1, self.heads, self.head_dim)[wanted] for order in self.order)
        return self._unscaled(k, v)

    def read_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of canonical K and V at `slots` `[tokens]`, which are on the cache's device: nothing waits."""
        blocks, rows = slots // self._kernel_block, slots % self._kernel_block
        if self.order is None:
            k, v = self._content.split(self._cache[blocks, :, rows])
        else:
            flat = self._cache.reshape(self._cache.shape[0], -1)
            orders = (order.view(self._kernel_block, -1)[rows] for order in self.order)
            k, v = (flat[blocks[:, None], order].view(-1, self.heads, self.head_dim) for order in orders)
        return self._unscaled(k, v)

    def slots(self, block_ids: list[int], first: int, last: int) -> torch.Tensor:
        """Slot of each position in `[first, last)` `[tokens]`, int64, on the cache's device."""
        positions = torch.arange(first, last)
        table = torch.tensor(block_ids, dtype=torch.int64)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots.to(self._cache.device)

    def _kernel_block_ids(self, block_ids: list[int], low: int, high: int) -> torch.Tensor:
        """The kernel's blocks `[low, high)` of a request, by number in the cache."""
        parts = self._parts
        table = torch.tensor(block_ids[low // parts : -(-high // parts)], dtype=torch.int64)
        if parts == 1:
            return table
        each = (table[:, None] * parts + torch.arange(parts)).flatten()
        return each[low % parts : low % parts + high - low]

    def _unscaled(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was read, as the model computes with it."""
        if self._fp8 is None:
            return k.contiguous(), v.contiguous()
        scaled = zip((k, v), self._content.scales(), strict=True)
        k, v = (codes.contiguous().view(self._fp8).to(torch.float32) * scale for codes, scale in scaled)
        return k.to(self.dtype), v.to(self.dtype)

    def _calibrate(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gather indices of K and V within a kernel block's raw memory; None when the logical view
        holds."""
        shape = (2, self._kernel_block, self.heads, self.head_dim)
        numbers = torch.arange(2 * self._kernel_block * self.heads * self.head_dim).view(shape)
        codes = self._written(numbers)
        if not torch.equal(codes.sort().values, numbers.flatten()):
            raise LayoutError(
                f"layer {self.name}: the attention backend does not store each K and V value exactly once; "
                "KV transfer is not possible with it"
            )
        logical = self._content.join(*numbers).transpose(0, 1)
        if torch.equal(codes, logical.flatten()):
            return None
        place = torch.empty_like(codes)
        place[codes] = torch.arange(len(codes))
        to_k, to_v = place.to(self._cache.device).chunk(2)
        return to_k, to_v

    def _written(self, numbers: torch.Tensor) -> torch.Tensor:
        """What is where in a kernel block's raw memory after `numbers` `[K and V, tokens, heads, head_dim]` were
        written, digit by digit."""
        base = _DIGIT if self._fp8 is None else _DIGIT_FP8
        found = torch.zeros(numbers.numel(), dtype=torch.int64)
        weight = 1
        while weight < numbers.numel():
            found += self._stored(numbers // weight % base).round().to(torch.int64) * weight
            weight *= base
        return found

    def _needed_lift(self) -> float:
        """What values are to be multiplied with before they are written."""
        self._lift = 1.0
        if self._fp8 is None:
            return 1.0
        codes = torch.full((2, self._kernel_block, self.heads, self.head_dim), _BETWEEN_CODES)
        return 1.0 if (self._stored(codes) > _BETWEEN_CODES).all() else _LIFT

    def _stored(self, codes: torch.Tensor) -> torch.Tensor:
        """Write values that are to be these codes `[K and V, tokens, heads, head_dim]` into the scratch block, and
        return its raw memory, flat, in float32."""
        k, v = codes.to(torch.float32)
        if self._fp8 is not None:
            scale_k, scale_v = (scale.cpu() for scale in self._content.scales())
            k, v = k * scale_k, v * scale_v
        self._write(self._scratch_content, torch.arange(self._kernel_block), k, v)
        raw = self._scratch[0].clone().flatten().cpu()
        return (raw if self._fp8 is None else raw.view(self._fp8)).to(torch.float32)


def _fp8_of(name: str, layer: Any, cache: torch.Tensor) -> torch.dtype | None:
    """The 8-bit type of a cache's values; None for those that are stored as they are. Raises LayoutError."""
    if cache.dtype in _FLOATS:
        return None
    stored = str(layer.kv_cache_dtype)
    if stored not in _FP8 or cache.dtype.itemsize != 1:
        raise LayoutError(
            f"layer {name}: KV stored as {stored} ({cache.dtype}) cannot be transferred; take a model whose KV cache "
            "is of 16 bits or fp8"
        )
    return _FP8[stored]


def _scale(layer: Any, name: str) -> torch.Tensor:
    """One of vLLM's scales of a layer, as it is to be multiplied with `[tokens, heads, head_dim]`."""
    scale: torch.Tensor = getattr(layer, name)
    return scale if scale.numel() == 1 else scale.view(-1, 1)
