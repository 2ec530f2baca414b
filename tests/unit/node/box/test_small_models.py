"""What a box holds of a model whose every byte can be counted: bounds are hit exactly."""

from typing import Any

import pytest
from msgspec import structs

from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node.box.batch_limits import BatchLimits
from p2pserve.node.box.errors import NodeError
from p2pserve.node.box.fitting import (
    CUDA_SEES,
    Room,
    can_share,
    choose_step_tokens,
    count_kv_tokens,
    count_layers_that_fit,
    default_tp,
    find_longest_that_fits,
    gpu_working_bytes,
    measure_kv_room,
    measure_room,
)
from p2pserve.node.box.hardware import GPU_SHARE, Gpu, Hardware
from p2pserve.node.box.shares import Share, choose_limits, share_of
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.settings import BoxEngineSettings, FittingSettings

MIB, GIB = 1 << 20, 1 << 30
SHAPE = ModelShape(name="s", layers=4, hidden=64, heads=8, kv_heads=2, head_dim=8, intermediate=96, vocabulary=1000)
LAYERS, EMBEDDINGS, HEAD = (1000, 5000, 1000, 1000), 100, 2000
MODEL = ModelInfo(
    service="s",
    shape=SHAPE,
    max_model_len=5000,
    weights=WeightSizes(layers=LAYERS, embeddings=EMBEDDINGS, head=HEAD, float_bytes=2),
)
WHOLE = sum(LAYERS) + EMBEDDINGS + HEAD
TOKEN = 2 * 2 * 8 * 2
"""Bytes of KV in a layer: keys and values of two heads of 8 numbers of two bytes."""


def room(memory_bytes: int, *, kv: int | None = None, float_bytes: int = 0) -> Room:
    return Room(memory_bytes=memory_bytes, float_bytes=float_bytes, kv_cache_bytes=kv)


def box(*gib: float, memory_gib: float = 100.0, name: str = "unknown") -> Hardware:
    gpus = tuple(Gpu(name=name, memory_gib=each, uuid=str(number)) for number, each in enumerate(gib))
    return Hardware(cores=4, memory_gib=memory_gib, processor="x", gpus=gpus)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tps"),
    [(8, 2, [1, 2, 4, 8]), (6, 3, [1, 3, 6]), (12, 4, [1, 2, 4, 12]), (5, 5, [1, 5]), (8, 1, [1, 2, 4, 8])],
)
def test_workers_share_whole_heads_or_copies_of_one(heads: int, kv_heads: int, tps: list[int]) -> None:
    model = structs.replace(MODEL, shape=structs.replace(SHAPE, heads=heads, kv_heads=kv_heads))
    assert [tp for tp in range(1, 25) if can_share(model, tp)] == tps


@pytest.mark.parametrize(("gpus", "tp"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (9, 8)])
def test_as_many_gpus_as_can_share_a_layer_do(gpus: int, tp: int) -> None:
    assert default_tp(box(*[24.0] * gpus), MODEL) == tp


@pytest.mark.parametrize(
    ("layers", "fits"),
    # wherever they are in the model: the second layer is the large one, the last has the head with it
    [(4, WHOLE), (3, 5000 + 1000 + 1000 + HEAD), (2, 1000 + 5000 + EMBEDDINGS), (1, 5000)],
)
@pytest.mark.parametrize("kv", [None, 0, 300])
def test_as_many_layers_fit_as_do_anywhere_with_their_kv(layers: int, fits: int, kv: int | None) -> None:
    needed = fits + (10 * layers * TOKEN if kv is None else kv)
    assert count_layers_that_fit(MODEL, room(needed, kv=kv), tp=1, max_model_len=10) == layers
    assert count_layers_that_fit(MODEL, room(needed - 1, kv=kv), tp=1, max_model_len=10) == layers - 1


def test_layers_have_room_for_a_request_of_the_length_asked_for_and_no_longer_than_the_model() -> None:
    for length, tokens in ((None, 5000), (5001, 5000), (4999, 4999)):
        enough = WHOLE + tokens * 4 * TOKEN
        assert count_layers_that_fit(MODEL, room(enough), tp=1, max_model_len=length) == 4
        assert count_layers_that_fit(MODEL, room(enough - 1), tp=1, max_model_len=length) == 3
    # four workers share two heads: each head is there twice
    assert count_layers_that_fit(MODEL, room(WHOLE + 2 * 10 * 4 * TOKEN), tp=4, max_model_len=10) == 4
    assert count_layers_that_fit(MODEL, room(WHOLE + 2 * 10 * 4 * TOKEN - 1), tp=4, max_model_len=10) == 3


def test_the_longest_request_is_the_models_own_or_a_multiple_below_it() -> None:
    """vLLM keeps 128 tokens back."""

    def longest(tokens: int, less: int = 0) -> int:
        return find_longest_that_fits(MODEL, room(WHOLE + tokens * 4 * TOKEN - less), tp=1)

    assert [longest(5128), longest(5128, 1), longest(4224), longest(4224, 1)] == [5000, 4096, 4096, 2048]
    assert [longest(2176), longest(2176, 1), longest(0)] == [2048, 0, 0]


def test_room_for_kv_is_what_the_heaviest_layers_leave() -> None:
    assert measure_kv_room(MODEL, room(6100 + 7), 2) == 7  # the first two, with the embeddings
    assert measure_kv_room(MODEL, room(5000 + 7), 1) == 7
    assert count_kv_tokens(MODEL, room(6100 + 3 * 2 * TOKEN), 2, tp=1) == 3
    # in four bytes a number, weights and KV take twice as much
    assert count_kv_tokens(MODEL, room(2 * 6100 + 3 * 2 * 2 * TOKEN, float_bytes=4), 2, tp=1) == 3


def test_kv_in_8_bits_takes_a_byte_a_number_whatever_the_engine_computes_in() -> None:
    kept = structs.replace(MODEL, shape=SHAPE.with_kv_cache_dtype("fp8"))
    assert count_kv_tokens(kept, room(6100 + 3 * 2 * TOKEN), 2, tp=1) == 6
    assert count_kv_tokens(kept, room(2 * 6100 + 3 * 2 * TOKEN, float_bytes=4), 2, tp=1) == 6


@pytest.mark.parametrize(("tp", "share"), [(1, 3 * 96), (2, 3 * 96 // 2), (5, 57)])
def test_what_a_gpu_needs_to_work_with_adds_up(tp: int, share: int) -> None:
    limits = BatchLimits(max_model_len=None, max_batched_tokens=10, max_requests=7)
    fitting = FittingSettings(gpu_fixed_bytes=999)
    expected = 999 + 4 * 12 * MIB + 10 * (4 * 64 + share) * 2 + 7 * 1000 * 24
    assert gpu_working_bytes(SHAPE, limits, tp=tp, fitting=fitting) == expected


@pytest.mark.parametrize(
    ("hardware", "knobs", "gib", "float_bytes", "kv_mib"),
    [
        (box(), {}, 90.0, 4, 256),
        (box(), {"dtype": "bfloat16", "kv_cache_mib": 77}, 90.0, 2, 77),
        (box(), {"memory_gib": 89.0}, 89.0, 4, 256),
        (box(), {"memory_gib": 91.0, "dtype": "float32"}, 90.0, 4, 256),
        (box(20.0), {}, 20.0 * CUDA_SEES * GPU_SHARE - 1.0, 0, None),
        (box(20.0), {"kv_cache_mib": 5, "dtype": "float16"}, 20.0 * CUDA_SEES * GPU_SHARE - 1.0, 2, 5),
        (box(20.0), {"memory_gib": 3.0, "dtype": "float32"}, 3.0, 4, None),
        (box(1.0), {}, 0.0, 0, None),  # less than the GiB that it needs to work with
    ],
)
def test_a_box_offers_what_its_memory_and_its_owner_leave(
    hardware: Hardware, knobs: dict[str, Any], gib: float, float_bytes: int, kv_mib: int | None
) -> None:
    found = measure_room(hardware, BoxEngineSettings(**knobs), tp=1, working_bytes=GIB)
    assert found.memory_bytes == int(gib * GIB)
    assert found.float_bytes == float_bytes
    assert found.kv_cache_bytes == (None if kv_mib is None else kv_mib * MIB)


@pytest.mark.parametrize(("tp", "least"), [(1, 20.0), (2, 10.0), (3, 10.0)])
def test_gpus_that_share_layers_hold_as_much_as_the_least_of_them(tp: int, least: float) -> None:
    found = measure_room(box(20.0, 10.0, 40.0), BoxEngineSettings(), tp=tp, working_bytes=GIB // 2)
    assert found.memory_bytes == pytest.approx(tp * (least * CUDA_SEES * GPU_SHARE - 0.5) * GIB, abs=2)


@pytest.mark.parametrize(("gib", "tokens"), [(69.9, 2048), (70.0, 8192)])
def test_cards_that_nobody_knows_compute_by_their_memory(gib: float, tokens: int) -> None:
    assert choose_step_tokens(box(gib), SHAPE, tp=1) == tokens
    assert choose_step_tokens(box(), SHAPE, tp=1) == 512


@pytest.mark.parametrize(
    ("knobs", "limits"),
    [
        ({}, (77, 512, 64)),
        ({"max_batched_tokens": 100}, (77, 100, 64)),
        ({"max_batched_tokens": 10}, (77, 10, 10)),
        ({"max_requests": 5}, (77, 512, 5)),
        ({"max_requests": 512}, (77, 512, 512)),
        ({"max_model_len": 9}, (9, 512, 64)),
    ],
)
def test_limits_are_the_owners_or_the_devices(knobs: dict[str, int], limits: tuple[int, int, int]) -> None:
    found = choose_limits(BoxEngineSettings(**knobs), 512, 64, 77)  # type: ignore[arg-type]
    assert (found.max_model_len, found.max_batched_tokens, found.max_requests) == limits


FLOAT32 = 2 * WHOLE
"""On a CPU, where numbers take four bytes."""


def cpu_share(memory_bytes: int, **knobs: Any) -> Share:
    settings = BoxEngineSettings(fitting=FittingSettings(cpu_share=1.0, stage_model_len=100), **knobs)
    return share_of(MODEL, box(memory_gib=memory_bytes / GIB), settings)


def test_a_box_takes_all_layers_with_requests_as_long_as_fit_or_else_some_layers() -> None:
    cache = 4  # MiB: 2^22 bytes are 8,192 tokens of 4 x 128 bytes
    whole = cpu_share(FLOAT32 + cache * MIB, kv_cache_mib=cache)
    assert whole == Share(4, 1, BatchLimits(max_model_len=None, max_batched_tokens=512, max_requests=64), cache)
    short = cpu_share(FLOAT32 + 2 * MIB, kv_cache_mib=2)  # 4,096 tokens, of which 128 are kept back
    assert (short.layers, short.limits.max_model_len) == (4, 2048)
    stage = cpu_share(FLOAT32 + 1 * MIB, kv_cache_mib=1)  # 2,048 tokens: too little for that length
    assert (stage.layers, stage.limits.max_model_len) == (4, None)
    fewer = cpu_share(FLOAT32 + 2 * MIB - 1, kv_cache_mib=2)
    assert (fewer.layers, fewer.limits.max_model_len) == (3, None)
    asked = cpu_share(FLOAT32 + 1 * MIB, kv_cache_mib=1, max_model_len=300)
    assert (asked.layers, asked.limits.max_model_len) == (4, 300)
    one = cpu_share(2 * 5000 + MIB, kv_cache_mib=1)
    assert one.layers == 1
    with pytest.raises(NodeError, match="model s: not one of its 4 layers fits"):
        cpu_share(2 * 5000 + MIB - 1, kv_cache_mib=1)


@pytest.mark.parametrize(
    ("knobs", "cache"),
    [({}, None), ({"kv_cache_mib": 9}, 9), ({"memory_gib": 2.0}, 2047), ({"memory_gib": 2.0, "kv_cache_mib": 9}, 9)],
)
def test_a_gpus_cache_is_given_only_where_its_owner_limits_the_memory(knobs: dict[str, Any], cache: int | None) -> None:
    """Two GiB less some kilobytes of weights, in whole MiB."""
    found = share_of(MODEL, box(24.0), BoxEngineSettings(**knobs))
    assert (found.layers, found.kv_cache_mib) == (4, cache)
    assert found.limits.max_model_len is None


def test_a_gpu_serves_as_many_requests_as_its_kv_is_enough_for() -> None:
    """256 MiB are 2^20 tokens of 4 x 64 bytes: a thousand requests, and no more than 256 at once; 32 MiB, 128."""
    for mib, requests in ((256, 256), (32, 128), (16, 64)):
        found = share_of(MODEL, box(24.0), BoxEngineSettings(kv_cache_mib=mib))
        assert found.limits.max_requests == requests
