"""What is written into a paged KV cache is read again: in every layout that vLLM lays caches out in, through the code
of its backends. Their CUDA kernels are stood in for by what they are to do with the views that they are given."""

from collections.abc import Callable
from itertools import pairwise
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl
from vllm.v1.attention.backends import cpu_attn, flash_attn, flex_attention, triton_attn
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from p2pserve.kernels.dev.kept_formats import round_to_nearest, round_towards_zero
from p2pserve.node.engine.vllm.layout import CacheForm, LayerCache, LayoutError, head_dim, kv_heads

LAYERS, BLOCKS, BLOCK, HEADS, HEAD_DIM = 3, 6, 32, 3, 8
RANK, ROTARY = 20, 4  # of latent attention
DTYPE = torch.bfloat16
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TABLE = [4, 1, 3]  # of one request
RANGES = ((0, 96), (0, 1), (31, 33), (5, 27), (17, 96), (32, 64), (40, 41), (16, 81))
LAYER_OUTERMOST = (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)


# ---- stand-ins --------------------------------------------------------------------------------------------


def stored(values: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """Values `[tokens, heads, head_dim]` as a cache of this type holds them."""
    if kv_cache_dtype == "auto":
        return values
    kind = FP8[kv_cache_dtype]
    most = torch.finfo(kind).max
    scale = scale if scale.numel() == 1 else scale[:, None]
    return (values.to(torch.float32) / scale).clamp(-most, most).to(kind).view(torch.uint8)


def kept(values: torch.Tensor, scale: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """What an 8-bit cache makes of values."""
    codes = stored(values, scale, kv_cache_dtype).view(FP8[kv_cache_dtype]).to(torch.float32)
    return (codes * (scale if scale.numel() == 1 else scale[:, None])).to(values.dtype)


def scatter(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Into `[blocks, block_size, ...]`."""
    places = cache if values.dtype == cache.dtype else cache.view(torch.uint8)
    places[slots // cache.shape[1], slots % cache.shape[1]] = values


def reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor,
    kv_cache_dtype: str, k_scale: torch.Tensor, v_scale: torch.Tensor,
) -> None:  # fmt: skip
    scatter(key_cache, slots, stored(key, k_scale, kv_cache_dtype))
    scatter(value_cache, slots, stored(value, v_scale, kv_cache_dtype))


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, *, kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:  # fmt: skip
    scatter(kv_cache, slots, stored(torch.cat((kv_c, k_pe), -1), scale, kv_cache_dtype))


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", reshape_and_cache_flash, raising=False)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", reshape_and_cache_flash)
    monkeypatch.setattr(torch.ops._C_cache_ops, "reshape_and_cache_flash", reshape_and_cache_flash, raising=False)
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", concat_and_cache_mla)


WRITERS: dict[str, Callable[..., None]] = {
    "flash": flash_attn.FlashAttentionImpl.do_kv_cache_update,
    "triton": triton_attn.TritonAttentionImpl.do_kv_cache_update,
    "flex": flex_attention.FlexAttentionImpl.do_kv_cache_update,  # FlashInfer's does the same
}


def plain_layer(writer: Callable[..., None], kv_cache_dtype: str = "auto", **more: Any) -> Any:
    """What of an attention layer the writer looks at."""
    impl = SimpleNamespace(
        attn_type=AttentionType.DECODER,
        head_size=HEAD_DIM,
        kv_cache_dtype=kv_cache_dtype,
        fp8_dtype=FP8.get(kv_cache_dtype),
        _is_per_token_head_quant=False,
    )
    impl.do_kv_cache_update = MethodType(writer, impl)
    scales = {"_k_scale": torch.tensor(0.037), "_v_scale": torch.tensor(1.7)}
    return SimpleNamespace(impl=impl, kv_cache_dtype=kv_cache_dtype, **scales | more)


def latent_layer(writer: Callable[..., None], kv_cache_dtype: str = "auto") -> Any:
    impl = SimpleNamespace()
    impl.do_kv_cache_update = MethodType(writer, impl)
    return SimpleNamespace(impl=impl, kv_cache_dtype=kv_cache_dtype, kv_lora_rank=RANK, _k_scale=torch.tensor(0.21))


def views_of(spec: AttentionSpec, layout: KVCacheLayout, kernel_block: int | None = None) -> list[torch.Tensor]:
    """The caches of some layers as vLLM allocates them."""
    raw = torch.zeros(LAYERS * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    tensor = KVCacheTensor(
        size=len(raw), layers=[f"layers.{i}" for i in range(LAYERS)], layer_stride=layer_stride,
        block_stride=block_stride,
    )  # fmt: skip
    return create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block)


def plain_spec(dtype: torch.dtype = DTYPE, block: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=dtype)


def open_cache(layer: Any, cache: torch.Tensor, dtype: torch.dtype = DTYPE) -> LayerCache:
    return LayerCache("layers.1.attn", layer, cache, 1, CacheForm(block_size=BLOCK, dtype=dtype))


def some(cache: LayerCache, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    k, v = torch.randn(2, tokens, cache.heads, cache.head_dim).to(cache.dtype)
    return k, v


def check_odd_ranges(cache: LayerCache, expected: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
    """Write a prompt in pieces of odd lengths, read it in others; `expected`: what the cache makes of values."""
    k, v = some(cache, len(TABLE) * BLOCK)
    for first, last in pairwise((0, 5, 31, 34, 64, 95, 96)):
        cache.write(cache.slots(TABLE, first, last), k[first:last], v[first:last])
    for first, last in RANGES:
        got_k, got_v = cache.read(TABLE, first, last)
        assert torch.equal(got_k, expected(k[first:last])), (first, last)
        assert torch.equal(got_v, expected(v[first:last])), (first, last)
        assert got_k.is_contiguous()
        assert got_k.dtype == got_v.dtype == cache.dtype
        by_slots = cache.read_slots(cache.slots(TABLE, first, last))
        assert torch.equal(by_slots[0], got_k)
        assert torch.equal(by_slots[1], got_v)
        assert by_slots[0].is_contiguous()


# ---- plain attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_layout_is_read_as_it_was_written(writer: str, layout: KVCacheLayout) -> None:
    views = views_of(plain_spec(), layout)
    before = [view.clone() for view in views]
    cache = open_cache(plain_layer(WRITERS[writer]), views[1])
    assert (cache.blocks, cache.block_size, cache.heads, cache.head_dim) == (BLOCKS, BLOCK, HEADS, HEAD_DIM)
    check_odd_ranges(cache)
    others = [block for block in range(BLOCKS) if block not in TABLE]
    assert torch.equal(views[1][others], before[1][others])  # the scratch block too
    assert all(torch.equal(views[other], before[other]) for other in (0, 2))


@pytest.mark.parametrize("kernel_block", [8, 16])
@pytest.mark.parametrize("layout", LAYER_OUTERMOST, ids=lambda layout: layout.name)
def test_blocks_of_the_kernel_may_be_smaller_than_those_of_the_scheduler(
    layout: KVCacheLayout, kernel_block: int
) -> None:
    views = views_of(plain_spec(), layout, kernel_block)
    assert views[1].shape[0] == BLOCKS * BLOCK // kernel_block
    cache = open_cache(plain_layer(WRITERS["flash"]), views[1])
    assert (cache.blocks, cache.block_size) == (BLOCKS, BLOCK)
    check_odd_ranges(cache)
    # vLLM's own writing goes by slots of the scheduler's blocks, and a caller's tables are the scheduler's.
    assert cache.slots(TABLE, 33, 34).tolist() == [TABLE[1] * BLOCK + 1]


def test_blocks_that_the_kernel_does_not_divide_are_refused() -> None:
    (view, *_) = views_of(plain_spec(block=48), KVCacheLayout.LBNHC)
    with pytest.raises(LayoutError, match="blocks of 32 positions cannot be cut into the 48"):
        open_cache(plain_layer(WRITERS["flash"]), view)


@pytest.mark.parametrize("shape", [(2, BLOCKS, BLOCK, HEADS, HEAD_DIM), (BLOCKS, HEADS, BLOCK, 5), (BLOCKS, 64)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=r"shape \(.*\) is not supported"):
        open_cache(plain_layer(WRITERS["flash"]), torch.zeros(shape, dtype=DTYPE))


def test_a_backend_that_does_not_keep_every_value_is_refused() -> None:
    def keys_only(
        self: object, layer: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: Any
    ) -> None:
        scatter(cache.transpose(1, 2)[..., :HEAD_DIM], slots, k)

    with pytest.raises(LayoutError, match="does not store each K and V value exactly once"):
        open_cache(plain_layer(keys_only), torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD_DIM, dtype=DTYPE))


# ---- caches of 8 bits -------------------------------------------------------------------------------------


def numbers(cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """The codes of a cache as numbers: zero has two codes."""
    return cache.view(FP8[kv_cache_dtype]).to(torch.float32)


@pytest.mark.parametrize("kv_cache_dtype", FP8)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("per_head", [False, True], ids=["scale", "scale per head"])
def test_fp8_is_read_in_the_dtype_of_the_model(writer: str, kv_cache_dtype: str, per_head: bool) -> None:
    scales = {"_k_scale": torch.tensor([0.02, 0.5, 3.0]), "_v_scale": torch.tensor([7.0, 0.11, 0.003])}
    layer = plain_layer(WRITERS[writer], kv_cache_dtype, **scales if per_head else {})
    views = views_of(plain_spec(torch.uint8), KVCacheLayout.LBNHC)
    cache = open_cache(layer, views[0])
    assert cache.dtype == DTYPE
    k, v = some(cache, 75)
    cache.write(cache.slots(TABLE, 3, 78), k, v)
    read = cache.read(TABLE, 3, 78)
    for values, scale, got in ((k, layer._k_scale, read[0]), (v, layer._v_scale, read[1])):
        assert torch.equal(got, kept(values, scale, kv_cache_dtype))
    # Transferred to another cache with the same scales, each code is what it was.
    other = open_cache(layer, views[2])
    other.write(other.slots(TABLE, 3, 78), *read)
    assert torch.equal(views[0], views[2])
    assert views[0].any()


def test_fp8_of_any_code_comes_through() -> None:
    """Subnormal ones and the largest too, for scales between which there are ten powers of ten."""
    layer = plain_layer(WRITERS["flash"], "fp8")
    view = views_of(plain_spec(torch.uint8), KVCacheLayout.LBHNC)[0]
    cache = open_cache(layer, view)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(torch.float8_e4m3fn).to(torch.float32).isfinite()]
    view.view(torch.uint8)[2] = codes.repeat(7)[: view[2].numel()].view(view[2].shape)
    for scale in (1e-5, 3e-3, 1.0, 0.7, 1e5):
        layer._k_scale, layer._v_scale = torch.tensor(scale), torch.tensor(scale)
        cache.write(cache.slots([5], 0, BLOCK), *cache.read([2], 0, BLOCK))
        assert torch.equal(numbers(view[5], "fp8"), numbers(view[2], "fp8"))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("writer", ["flash", "triton"])
def test_kv_goes_from_16_bits_to_8_and_back(writer: str, kv_cache_dtype: str) -> None:
    """With scales of 1, as where the model's files have none: to the nearest code, and from there to the same value."""
    sixteen_bit, (eight_bit, *_) = (
        views_of(plain_spec(), KVCacheLayout.LBNHC),
        views_of(plain_spec(torch.uint8), KVCacheLayout.LBNHC),
    )
    wide, wide_again = (open_cache(plain_layer(WRITERS[writer]), view) for view in sixteen_bit[:2])
    ones = {"_k_scale": torch.tensor(1.0), "_v_scale": torch.tensor(1.0)}
    narrow = open_cache(plain_layer(WRITERS[writer], kv_cache_dtype, **ones), eight_bit)
    assert (wide.dtype, narrow.dtype) == (DTYPE, DTYPE)
    k, v = some(wide, len(TABLE) * BLOCK)
    for cache, other in ((wide, narrow), (narrow, wide_again)):
        if cache is wide:
            wide.write(wide.slots(TABLE, 0, len(k)), k, v)
        other.write(other.slots(TABLE, 0, len(k)), *cache.read(TABLE, 0, len(k)))
    for got, values in zip(wide_again.read(TABLE, 0, len(k)), (k, v), strict=True):
        assert torch.equal(got, round_to_nearest(FP8[kv_cache_dtype], values))


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "nvfp4", "turboquant_k8v4"])
def test_other_formats_of_fewer_bits_are_refused_by_name(kv_cache_dtype: str) -> None:
    view = views_of(plain_spec(torch.uint8), KVCacheLayout.LBNHC)[0]
    with pytest.raises(LayoutError, match=f"KV stored as {kv_cache_dtype} .* cannot be transferred"):
        open_cache(plain_layer(WRITERS["flash"], kv_cache_dtype), view)


# ---- latent attention -------------------------------------------------------------------------------------


def latent_spec(dtype: torch.dtype = DTYPE) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROTARY, dtype=dtype)


@pytest.mark.parametrize("kernel_block", [None, 16])
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_a_latent_cache_is_one_head_of_two_halves(layout: KVCacheLayout, kernel_block: int | None) -> None:
    if kernel_block is not None and layout not in LAYER_OUTERMOST:
        kernel_block = None  # vLLM does not cut such blocks
    view = views_of(latent_spec(), layout, kernel_block)[1]
    layer = latent_layer(MLAAttentionImpl.do_kv_cache_update)
    cache = open_cache(layer, view)
    assert (cache.heads, cache.head_dim) == (1, (RANK + ROTARY) // 2)
    check_odd_ranges(cache)


@pytest.mark.parametrize(("latent", "found"), [(False, (8, 128)), (True, (1, 64))])
def test_the_heads_of_a_model(latent: bool, found: tuple[int, int]) -> None:
    model: Any = SimpleNamespace(use_mla=latent, get_total_num_kv_heads=lambda: 8, get_head_size=lambda: 128)
    assert (kv_heads(model), head_dim(model)) == found


def test_the_rotary_key_of_a_latent_cache_travels_with_the_keys() -> None:
    view = views_of(latent_spec(), KVCacheLayout.LBNHC)[0]
    layer = latent_layer(MLAAttentionImpl.do_kv_cache_update)
    cache = open_cache(layer, view)
    latent, rotary = torch.full((40, RANK), 2.0, dtype=DTYPE), torch.full((40, 1, ROTARY), 3.0, dtype=DTYPE)
    layer.impl.do_kv_cache_update(latent, rotary, view.squeeze(1), cache.slots(TABLE, 0, 40), "auto", layer._k_scale)
    k, v = cache.read(TABLE, 0, 40)
    assert (k[..., :ROTARY] == 3).all()
    assert (k[..., ROTARY:] == 2).all()
    assert (v == 2).all()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_a_latent_cache_of_fp8(kv_cache_dtype: str) -> None:
    views = views_of(latent_spec(torch.uint8), KVCacheLayout.LBNHC)
    layer = latent_layer(MLAAttentionImpl.do_kv_cache_update, kv_cache_dtype)
    cache = open_cache(layer, views[0])

    check_odd_ranges(cache, lambda values: kept(values, layer._k_scale, kv_cache_dtype))


def test_the_latent_cache_of_vllms_cpu_backend() -> None:
    view = views_of(latent_spec(torch.float32), KVCacheLayout.LBHNC)[2]
    check_odd_ranges(open_cache(latent_layer(CPUMLAImpl.do_kv_cache_update), view, torch.float32))


# ---- vLLM's CPU backend, with its own kernels -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [32, 80])  # packed for vectors of 32, and of 16
def test_the_packings_of_vllms_cpu_backend(head_dim: int, dtype: torch.dtype) -> None:
    isa = cpu_attn._get_attn_isa(dtype, BLOCK, head_dim)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=head_dim, dtype=dtype)
    view = views_of(spec, KVCacheLayout.LBHNC)[1]
    layer = plain_layer(
        cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update, isa=isa, _k_scale_float=1, _v_scale_float=1
    )
    cache = open_cache(layer, view, dtype)
    assert cache.order is not None  # not the logical view
    check_odd_ranges(cache)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.25, 0.037, 3.3])
def test_fp8_in_vllms_cpu_backend(dtype: torch.dtype, kv_cache_dtype: str, scale: float) -> None:
    """It rounds towards zero: what was read and is written again stays what it was all the same."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps KV in fp8 only on CPUs with AVX-512")
    isa = cpu_attn._get_attn_isa(dtype, BLOCK, 32, kv_cache_dtype)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=32, dtype=torch.uint8)
    views = views_of(spec, KVCacheLayout.LBHNC)
    scales = {
        "_k_scale_float": scale,
        "_v_scale_float": 1.0,
        "_k_scale": torch.tensor(scale),
        "_v_scale": torch.tensor(1.0),
    }
    layer = plain_layer(cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update, kv_cache_dtype, isa=isa, **scales)
    cache, other = (open_cache(layer, view, dtype) for view in views[:2])
    k, v = some(cache, len(TABLE) * BLOCK)
    layer.impl.do_kv_cache_update(layer, k, v, views[0], cache.slots(TABLE, 0, len(k)))
    step = 2.0**-2 if kv_cache_dtype == "fp8_e5m2" else 2.0**-3
    for first, last in RANGES:
        got_k, got_v = cache.read(TABLE, first, last)
        assert torch.equal(torch.stack(cache.read_slots(cache.slots(TABLE, first, last))), torch.stack((got_k, got_v)))
        assert ((got_k - k[first:last]).abs() <= 1.01 * step * k[first:last].abs().clamp_min(2.0**-6 * scale)).all()
        assert ((got_v - v[first:last]).abs() <= 1.01 * step * v[first:last].abs().clamp_min(2.0**-6)).all()
        # what the quality of KV in 8 bits is measured with, where it stands for these engines
        assert torch.equal(got_v, round_towards_zero(FP8[kv_cache_dtype], v[first:last]))
    other.write(other.slots(TABLE, 0, len(k)), *cache.read(TABLE, 0, len(k)))
    assert torch.equal(numbers(views[0], kv_cache_dtype), numbers(views[1], kv_cache_dtype))
