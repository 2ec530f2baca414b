"""How much of a model a box takes: by its memory, its GPUs, and what its owner allows."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Phase, Replica, Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.services.catalogue import CatalogueEntry, ServiceCatalogue
from p2pserve.node.box.errors import NodeError
from p2pserve.node.box.fitting import Room, count_layers_that_fit, default_tp, measure_room
from p2pserve.node.box.hardware import CPU_KV_CACHE_MIB, Gpu, Hardware
from p2pserve.node.box.shares import count_layers_beside, share_of
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.replica.hosting import describe_sharing, describe_wait, step_limit
from p2pserve.node.settings import BoxEngineSettings

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20


def model(
    *layers: int,
    embeddings: int = 0,
    head: int = 0,
    tied: bool = False,
    heads: int = 0,
    kv_heads: int = 4,
    longest: int = 1024,
) -> ModelInfo:
    """A model with layers of so many MiB in 16 bit, whose KV takes 2 KiB a token and layer per KV head of 4."""
    sizes = WeightSizes(
        layers=tuple(size * MIB for size in layers),
        embeddings=embeddings * MIB,
        head=head * MIB,
        float_bytes=2,
        tied=tied,
    )
    return ModelInfo(
        service="m-1",
        shape=ModelShape(
            name="m",
            layers=len(layers),
            hidden=1,
            heads=heads or kv_heads,
            kv_heads=kv_heads,
            head_dim=128,
            intermediate=1,
            vocabulary=1,
        ),
        max_model_len=longest,
        weights=sizes,
    )


def room(mib: float, *, kv_mib: int | None = 0, float_bytes: int = 0) -> Room:
    return Room(int(mib * MIB), float_bytes, None if kv_mib is None else kv_mib * MIB)


def box(*gpus_gib: float, memory_gib: float = 64.0) -> Hardware:
    gpus = tuple(Gpu(name="g", memory_gib=size, uuid=str(i)) for i, size in enumerate(gpus_gib))
    return Hardware(cores=4, memory_gib=memory_gib, processor="x", gpus=gpus)


@pytest.mark.parametrize(
    ("sizes", "memory", "expected"),
    [
        (model(10, 10, 10, 10), room(40), 4),
        (model(10, 10, 10, 10), room(39), 3),
        (model(10, 10, 10, 10), room(9), 0),
        (model(10, 10, 10, 10, embeddings=15), room(40), 2),  # wherever its stage comes to lie
        (model(10, 10, 10, 10, embeddings=5, head=20), room(40), 2),
        (model(10, 10, 10, 10, embeddings=15, tied=True), room(55), 4),  # once, when all layers are here
        (model(10, 10, 10, 10, embeddings=15, tied=True), room(54), 3),
        (model(1, 30, 1, 1), room(31), 2),  # layers 1 and 2 with the large one between them would be 32
        (model(10, 10, 10, 10), room(60, kv_mib=20), 4),
        (model(10, 10, 10, 10), room(59, kv_mib=20), 3),
        (model(10, 10, 10, 10), room(48, kv_mib=None), 4),  # 1024 tokens, 2 MiB in each layer
        (model(10, 10, 10, 10), room(47, kv_mib=None), 3),
        (model(10, 10, 10, 10), room(80, float_bytes=4), 4),  # twice the size in float32
        (model(10, 10, 10, 10), room(79, float_bytes=4), 3),
    ],
)
def test_as_many_layers_as_there_is_memory_for(sizes: ModelInfo, memory: Room, expected: int) -> None:
    assert count_layers_that_fit(sizes, memory, tp=1, max_model_len=None) == expected


def test_a_shorter_context_leaves_more_room() -> None:
    sizes = model(10, 10, 10, 10, longest=8192)
    assert count_layers_that_fit(sizes, room(48, kv_mib=None), tp=1, max_model_len=None) == 1
    assert count_layers_that_fit(sizes, room(48, kv_mib=None), tp=1, max_model_len=1024) == 4
    assert count_layers_that_fit(sizes, room(48, kv_mib=None), tp=1, max_model_len=1 << 20) == 1


def test_workers_beyond_the_kv_heads_hold_copies() -> None:
    assert count_layers_that_fit(model(10, 10, 10, 10), room(48, kv_mib=None), tp=4, max_model_len=None) == 4
    assert (
        count_layers_that_fit(model(10, 10, 10, 10), room(48, kv_mib=None), tp=8, max_model_len=None) == 3
    )  # 14 MiB each


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 300), st.integers(0, 40), st.booleans())
def test_what_fits_does_so_at_every_place(sizes: list[int], memory: int, ends: int, tied: bool) -> None:
    found = model(*sizes, embeddings=ends, head=ends, tied=tied)
    layers = count_layers_that_fit(found, room(memory), tp=1, max_model_len=None)
    for first in range(len(sizes) - layers + 1):
        assert layers == 0 or found.weights.of_stage(first, first + layers) <= memory * MIB
    if layers < len(sizes):
        worst = max(found.weights.of_stage(i, i + layers + 1) for i in range(len(sizes) - layers))
        assert worst > memory * MIB


def test_memory_is_that_of_the_gpus_in_use_or_of_the_box_and_at_most_what_is_allowed() -> None:
    def available(hardware: Hardware, memory_gib: float | None = None, tp: int = 1, working_bytes: int = 0) -> float:
        settings = BoxEngineSettings(memory_gib=memory_gib)
        return measure_room(hardware, settings, tp=tp, working_bytes=working_bytes).memory_bytes / GIB

    assert available(box(80.0, 80.0), working_bytes=3 * GIB // 2) == pytest.approx(80 * 0.98 * 0.92 - 1.5)
    assert available(box(80.0, 80.0), tp=2, working_bytes=GIB) == pytest.approx(2 * (80 * 0.98 * 0.92 - 1))
    assert available(box()) == pytest.approx(64 * 0.9)
    assert available(box(), memory_gib=3.0) == pytest.approx(3.0)
    assert available(box(24.0), memory_gib=100.0) == pytest.approx(24 * 0.98 * 0.92)
    assert available(box(1.0), working_bytes=GIB) == 0.0
    cpu = measure_room(box(), BoxEngineSettings(), tp=1)
    assert (cpu.float_bytes, cpu.kv_cache_bytes) == (4, CPU_KV_CACHE_MIB * MIB)
    gpu = measure_room(box(24.0), BoxEngineSettings(), tp=1)
    assert (gpu.float_bytes, gpu.kv_cache_bytes) == (0, None)
    half = measure_room(box(), BoxEngineSettings(dtype="bfloat16", kv_cache_mib=64), tp=1)
    assert (half.float_bytes, half.kv_cache_bytes) == (2, 64 * MIB)


@pytest.mark.parametrize(
    ("gpus", "heads", "kv_heads", "expected"),
    [
        *((0, 32, 8, 1), (1, 32, 8, 1), (2, 32, 8, 2), (3, 32, 8, 2), (8, 32, 8, 8), (8, 16, 2, 8), (6, 32, 4, 4)),
        *((3, 128, 1, 2), (3, 12, 1, 3), (8, 28, 4, 4)),  # latent attention has one KV head, which all may hold
    ],
)
def test_as_many_gpus_share_a_layer_as_can_do_so_evenly(gpus: int, heads: int, kv_heads: int, expected: int) -> None:
    assert default_tp(box(*[24.0] * gpus), model(1, heads=heads, kv_heads=kv_heads)) == expected


TWENTY = model(*[1000] * 20)  # 20 GB, nearly


def test_a_box_serves_alone_when_it_can_and_takes_a_share_when_it_cannot() -> None:
    def taken(sizes: ModelInfo, hardware: Hardware, **knobs: Any) -> tuple[int, int]:
        share = share_of(sizes, hardware, BoxEngineSettings(**knobs))
        return share.layers, share.tp

    assert taken(TWENTY, box(24.0), max_model_len=16) == (20, 1)
    assert taken(TWENTY, box(13.0, 13.0), max_model_len=16) == (20, 2)
    assert taken(TWENTY, box(13.0), max_model_len=16) == (10, 1)
    assert taken(TWENTY, box(8.0, 8.0), max_model_len=16) == (12, 2)
    assert taken(TWENTY, box(8.0, 8.0), max_model_len=16, tp=1) == (6, 1)
    assert taken(model(*[10] * 4), box(), memory_gib=0.31) == (3, 1)
    assert taken(model(*[10] * 4), box(), tp=2) == (4, 2)


@pytest.mark.parametrize(
    ("sizes", "hardware", "knobs"),
    [
        (model(*[10] * 4), box(), BoxEngineSettings(memory_gib=0.31)),
        (model(*[10] * 4, embeddings=5, head=20), box(), BoxEngineSettings(memory_gib=0.33)),
        (TWENTY, box(), BoxEngineSettings(memory_gib=10.0, max_model_len=64)),
    ],
)
def test_a_box_knows_what_it_lacks(sizes: ModelInfo, hardware: Hardware, knobs: BoxEngineSettings) -> None:
    share = share_of(sizes, hardware, knobs)
    assert 0 < share.layers < sizes.layers
    assert knobs.memory_gib is not None
    lacking = share.lacking_bytes / GIB
    assert lacking > 0
    enough = share_of(sizes, hardware, replace(knobs, memory_gib=knobs.memory_gib + lacking))
    assert (enough.layers, enough.lacking_bytes) == (sizes.layers, 0)
    short = share_of(sizes, hardware, replace(knobs, memory_gib=knobs.memory_gib + lacking - 0.002))
    assert short.layers < sizes.layers


def test_and_says_so() -> None:
    share = share_of(model(*[10] * 4), box(), BoxEngineSettings(memory_gib=0.31))
    assert describe_wait(replace(share, lacking_bytes=int(1.24 * GIB)), 4) == (
        "has 3 of 4 layers, needs another box or 1.2 GiB more"
    )
    assert describe_wait(replace(share, lacking_bytes=MIB // 2), 4) == (
        "has 3 of 4 layers, needs another box or 1 MiB more"
    )


@pytest.mark.parametrize(
    ("hardware", "knobs", "said"),
    [
        (box(24.0, 24.0, 24.0), BoxEngineSettings(tp=3), "cannot share the 4 heads and 4 KV heads"),
        (box(24.0), BoxEngineSettings(tp=2), "more than the 1 GPU"),
        (box(2.0), BoxEngineSettings(), "not one of its 20 layers"),
        (box(), BoxEngineSettings(memory_gib=0.1), "^memory-gib: in 0.1 GiB not one of the 20 layers"),
        (box(), BoxEngineSettings(kv_cache_mib=1 << 24), "^kv-cache-mib: 16777216 MiB are more than this box has"),
        (
            box(24.0),
            BoxEngineSettings(max_requests=300, max_batched_tokens=256),
            "max-requests: 300 are more than the 256",
        ),
        (box(), BoxEngineSettings(max_requests=513), "max-requests: 513 are more than the 512"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(hardware: Hardware, knobs: BoxEngineSettings, said: str) -> None:
    with pytest.raises(NodeError, match=said) as caught:
        share_of(TWENTY, hardware, knobs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("phase", "own", "tokens"),
    [
        (Phase.MIXED, "a", 768),
        (Phase.DECODE, "a", 768),
        (Phase.PREFILL, "a", 0),  # nothing is decoded there
        (Phase.MIXED, "b", 0),  # the head makes the batches
    ],
)
def test_the_plan_limits_the_steps_of_a_head_whose_replica_decodes(phase: Phase, own: str, tokens: int) -> None:
    stages = tuple(Stage(peer=peer, tp=1, first_layer=i, last_layer=i + 1) for i, peer in enumerate("ab"))
    replica = Replica(id="a", phase=phase, stages=stages, step_tokens=768)
    assert step_limit(replica, PeerId(own)) == tokens
    assert step_limit(None, PeerId(own)) == 0


@pytest.mark.parametrize(
    ("hardware", "knobs", "beside"),
    [
        (box(80.0), {}, 0),  # the first engine takes all of the GPU for its cache
        (box(80.0), {"memory_gib": 60.0}, 0),  # and so it does of what its owner leaves it
        (box(80.0), {"kv_cache_mib": 1024}, 20),
        (box(40.0), {"kv_cache_mib": 1024}, 12),
        (box(80.0), {"kv_cache_mib": 1024, "memory_gib": 32.0}, 10),
        (box(24.0), {"kv_cache_mib": 1024}, 0),
        (box(48.0, 48.0), {"kv_cache_mib": 1024}, 20),
        (box(memory_gib=128.0), {}, 20),  # a CPU's cache has a size, and its weights are float32
        (box(memory_gib=72.0), {}, 12),
    ],
)
def test_what_an_engine_leaves_of_the_memory_is_for_another(
    hardware: Hardware, knobs: dict[str, Any], beside: int
) -> None:
    settings = BoxEngineSettings(**knobs)
    serving = Stage(peer="a", tp=max(1, len(hardware.gpus)), first_layer=0, last_layer=20)
    found = count_layers_beside(TWENTY, hardware, settings, serving)
    assert found == beside
    half = msgspec.structs.replace(serving, last_layer=10)
    assert count_layers_beside(TWENTY, hardware, settings, half) >= beside


@pytest.mark.parametrize(
    ("entry", "lengths"),
    [
        (CatalogueEntry(name="chat", model="m", prompt_tokens=300, output_tokens=20), (300, 20)),
        (CatalogueEntry(name="chat", model="m", prompt_tokens=300), None),
        (CatalogueEntry(name="code", model="other", prompt_tokens=300, output_tokens=20), None),
    ],
)
def test_an_engine_that_shares_its_process_begins_with_the_lengths_that_the_catalogue_knows(
    entry: CatalogueEntry, lengths: tuple[int, int] | None
) -> None:
    info = msgspec.structs.replace(model(1), service="m")
    told = describe_sharing(info, ServiceCatalogue(version=1, entries=(entry,)))
    assert (told.service, told.lengths) == ("m", lengths)
