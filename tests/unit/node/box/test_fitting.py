"""What rented GPUs hold of the models that people ask for, as tables to be checked with pencil and paper."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from p2pserve.coordinator.costs.model_shape import ModelShape, shape_of_config
from p2pserve.node.box.batch_limits import BatchLimits
from p2pserve.node.box.errors import NodeError, NodeUsageError
from p2pserve.node.box.fitting import (
    CUDA_SEES,
    LEAST_MODEL_LEN,
    MANY_REQUESTS,
    Room,
    choose_requests,
    choose_step_tokens,
    count_kv_tokens,
    find_longest_that_fits,
    gpu_working_bytes,
    measure_kv_room,
    measure_room,
)
from p2pserve.node.box.hardware import GPU_SHARE, Gpu, Hardware
from p2pserve.node.box.shares import share_of
from p2pserve.node.engine.backend import ServedModel
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.replica.hosting import describe_kv_quality, describe_length, engine_configs
from p2pserve.node.settings import BoxEngineSettings, FittingSettings

GIB = 1 << 30

# As in the models' config.json; weights in bfloat16.
LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
QWEN = {"num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {**LLAMA, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336},
    "Qwen2.5-14B": {**QWEN, "num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 13824},
    "Qwen2.5-32B": {**QWEN, "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648},
    "Llama-3.1-70B": {
        **LLAMA, "num_attention_heads": 64, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
    },
}  # fmt: skip
CARDS = {24: "NVIDIA GeForce RTX 4090", 48: "NVIDIA RTX A6000", 80: "NVIDIA A100-SXM4-80GB"}


def known_model(name: str) -> ModelInfo:
    shape = shape_of_config(CONFIGS[name], name)
    return ModelInfo(
        service=name,
        shape=shape,
        max_model_len=CONFIGS[name]["max_position_embeddings"],
        weights=WeightSizes(
            layers=(shape.layer_weight_bytes,) * shape.layers,
            embeddings=2 * shape.embedding_parameters,
            head=2 * shape.head_parameters,
            float_bytes=2,
        ),
    )


def box_of(count: int, name: str, memory_gib: float) -> Hardware:
    gpus = tuple(Gpu(name=name, memory_gib=memory_gib, uuid=str(i)) for i in range(count))
    return Hardware(cores=16, memory_gib=128.0, processor="x", gpus=gpus)


def box_with(count: int, gib: int) -> Hardware:
    return box_of(count, CARDS[gib], float(gib))


@pytest.mark.parametrize(
    ("name", "whole_gib", "layer_gib", "table_gib", "kv_kib"),
    [  # 8.03, 14.8, 32.8 and 70.6 billion weights of two bytes; KV of a token: layers x 2 x 8 heads x 128 x 2 bytes
        ("Llama-3.1-8B", 14.96, 0.406, 0.98, 128),
        ("Qwen2.5-14B", 27.51, 0.513, 1.45, 192),
        ("Qwen2.5-32B", 61.03, 0.908, 1.45, 256),
        ("Llama-3.1-70B", 131.41, 1.594, 1.96, 320),
    ],
)
def test_weights_and_kv_are_as_one_works_them_out(
    name: str, whole_gib: float, layer_gib: float, table_gib: float, kv_kib: int
) -> None:
    model = known_model(name)
    assert model.weights.of_stage(0, model.layers) / GIB == pytest.approx(whole_gib, abs=0.01)
    assert model.weights.layers[0] / GIB == pytest.approx(layer_gib, abs=0.001)
    assert model.weights.embeddings / GIB == pytest.approx(table_gib, abs=0.01)
    assert model.kv_bytes(1, 0, model.layers, 2) == kv_kib << 10


WHOLE = None  # the model's own length

TABLE = [
    # Of 24 GiB, CUDA sees 23.5 and the engine takes 21.6; 2.1 of them to work with leave 4.6 beside the 8B: 37,600
    # tokens of 128 KiB. Where a model does not fit, a stage of it has room for 16,384 tokens: for the 14B that is
    # (21.6 - 2.4 - 1.45) / (0.513 + 0.0625) = 30.9 layers beside one of its two tables of 1.45 GiB.
    #                                GPUs: 1              2              4
    ("Llama-3.1-8B", 24, ((32, 36_864), (32, WHOLE), (32, WHOLE))),
    ("Llama-3.1-8B", 48, ((32, WHOLE), (32, WHOLE), (32, WHOLE))),
    ("Llama-3.1-8B", 80, ((32, WHOLE), (32, WHOLE), (32, WHOLE))),
    ("Qwen2.5-14B", 24, ((30, WHOLE), (48, WHOLE), (48, WHOLE))),
    ("Qwen2.5-14B", 48, ((48, WHOLE), (48, WHOLE), (48, WHOLE))),
    ("Qwen2.5-14B", 80, ((48, WHOLE), (48, WHOLE), (48, WHOLE))),
    ("Qwen2.5-32B", 24, ((17, WHOLE), (37, WHOLE), (64, WHOLE))),
    ("Qwen2.5-32B", 48, ((40, WHOLE), (64, WHOLE), (64, WHOLE))),
    ("Qwen2.5-32B", 80, ((64, WHOLE), (64, WHOLE), (64, WHOLE))),
    ("Llama-3.1-70B", 24, ((10, WHOLE), (21, WHOLE), (44, WHOLE))),
    # 4 x (43.3 - 2.6) - 131.4 = 31.2 GiB, and 2 x (72.1 - 2.7) - 131.4 = 7.4: tokens of 320 KiB.
    ("Llama-3.1-70B", 48, ((23, WHOLE), (47, WHOLE), (80, 100_352))),
    ("Llama-3.1-70B", 80, ((40, WHOLE), (80, 22_528), (80, WHOLE))),
]


@pytest.mark.parametrize(
    ("name", "gib", "tp", "layers", "longest"),
    [(name, gib, tp, *cell) for name, gib, row in TABLE for tp, cell in zip((1, 2, 4), row, strict=True)],
)
def test_layers_and_lengths_that_fit(name: str, gib: int, tp: int, layers: int, longest: int | None) -> None:
    model = known_model(name)
    share = share_of(model, box_with(tp, gib), BoxEngineSettings(tp=tp))
    assert (share.layers, share.limits.max_model_len) == (layers, longest)
    assert share.kv_cache_mib is None  # what the engine finds free
    if layers < model.layers:
        return
    # What vLLM takes off its share of each GPU, and the KV of one request, whose heads are shared.
    most = BatchLimits(
        max_model_len=None, max_batched_tokens=share.limits.max_batched_tokens, max_requests=MANY_REQUESTS
    )
    fixed = model.weights.of_stage(0, layers) / tp + gpu_working_bytes(model.shape, most, tp=tp)
    needed = fixed + model.kv_bytes(longest or model.max_model_len, 0, layers, 2) / tp
    assert needed <= gib * GIB * CUDA_SEES * GPU_SHARE


def test_a_length_that_the_owner_wants_fits_or_makes_the_box_a_stage() -> None:
    model, box = known_model("Llama-3.1-8B"), box_with(1, 24)
    # (19.55 - 0.98) / (0.406 + 0.25) = 28.3 layers for 65,536 tokens, and half of a gibibyte for twice as many
    for wanted, layers in ((4096, 32), (36_864, 32), (65_536, 28), (131_072, 20)):
        share = share_of(model, box, BoxEngineSettings(max_model_len=wanted))
        assert (share.layers, share.limits.max_model_len) == (layers, wanted)


def test_a_length_beyond_the_models_own_is_refused_before_anything_starts() -> None:
    model, box = known_model("Llama-3.1-8B"), box_with(1, 24)
    with pytest.raises(NodeUsageError, match="max-model-len: 131073 tokens are more than the 131072 that"):
        share_of(model, box, BoxEngineSettings(max_model_len=131_073))


def test_a_box_with_room_for_too_little_is_a_stage() -> None:
    model = known_model("Llama-3.1-8B")
    lengths = []
    for tenth in range(180, 241):  # of a gibibyte
        share = share_of(model, box_of(1, "unknown", tenth / 10), BoxEngineSettings())
        alone = share.layers == model.layers
        lengths.append((share.limits.max_model_len or model.max_model_len) if alone else 0)
    assert sorted(set(lengths)) == list(range(0, 36_864 + 1, LEAST_MODEL_LEN))
    assert sorted(lengths) == lengths


def test_an_owner_who_gives_less_memory_is_given_a_cache_of_that_size() -> None:
    model, box = known_model("Llama-3.1-8B"), box_with(1, 48)
    share = share_of(model, box, BoxEngineSettings(memory_gib=18.0))
    assert share.kv_cache_mib == int((18.0 - 14.957) * 1024)
    assert share.limits.max_model_len == 24_576  # 3,115 MiB are 24,920 tokens
    assert share_of(model, box, BoxEngineSettings(kv_cache_mib=1040)).limits.max_model_len == 8192  # and a block
    assert share_of(model, box, BoxEngineSettings(kv_cache_mib=1039)).limits.max_model_len == 6144


def test_layers_that_look_back_through_a_window_need_less() -> None:
    model = known_model("Qwen2.5-14B")
    windowed = ModelInfo(
        service="w",
        shape=model.shape,
        max_model_len=model.max_model_len,
        weights=model.weights,
        windows=(512,) * model.layers,  # vLLM keeps room for all tokens as soon as one layer looks at all
    )
    room = measure_room(box_with(1, 48), BoxEngineSettings(memory_gib=27.7), tp=1)
    assert measure_kv_room(model, room, model.layers) // (192 << 10) == 1038  # not even the least length
    assert find_longest_that_fits(model, room, tp=1) == 0
    assert find_longest_that_fits(windowed, room, tp=1) == model.max_model_len == 32_768


def test_a_shortened_length_is_said_and_may_be_shortened_further() -> None:
    model, box = known_model("Llama-3.1-8B"), box_with(1, 24)

    def offer(hardware: Hardware, knobs: BoxEngineSettings) -> ServedModel:
        found: Any = type("Found", (), {"info": model, "folder": "/model"})()
        return ServedModel(model=found, text=None, share=share_of(model, hardware, knobs))  # type: ignore[arg-type]

    def started(hardware: Hardware, knobs: BoxEngineSettings) -> tuple[int | None, bool, str | None]:
        made = offer(hardware, knobs)
        config = engine_configs(made, hardware, knobs, log=None, codec="raw").most  # type: ignore[arg-type]
        return config.max_model_len, config.shorten_to_fit, describe_length(made, knobs)

    said = "Llama-3.1-8B: 36,864 of 131,072 tokens fit on this box; --max-model-len says otherwise"
    assert started(box, BoxEngineSettings()) == (36_864, True, said)
    assert started(box_with(1, 80), BoxEngineSettings()) == (None, True, None)
    assert started(box, BoxEngineSettings(max_model_len=4096)) == (4096, False, None)
    cpu = replace_gpus(box)
    assert started(cpu, BoxEngineSettings(max_model_len=2048)) == (2048, False, None)
    assert started(cpu, BoxEngineSettings(kv_cache_mib=64 * 1024)) == (None, False, None)  # 256 KiB a token in float32
    assert started(cpu, BoxEngineSettings(kv_cache_mib=1056))[:2] == (4096, True)


def test_kv_in_8_bits_leaves_room_for_longer_requests_and_is_said_where_nobody_knows_its_quality() -> None:
    model, box, knobs = known_model("Llama-3.1-8B"), box_with(1, 24), BoxEngineSettings(kv_cache_dtype="fp8")
    info = structs.replace(model, shape=model.shape.with_kv_cache_dtype("fp8"))
    found: Any = type("Found", (), {"info": info, "folder": "/model"})()
    made = ServedModel(model=found, text=None, share=share_of(info, box, knobs))  # type: ignore[arg-type]
    configs = engine_configs(made, box, knobs, log=None, codec="raw")  # type: ignore[arg-type]
    assert configs.most.kv_cache_dtype == configs.of_stage(8).kv_cache_dtype == "fp8"
    assert made.share.limits.max_model_len == 73_728  # of 36,864 in 16 bits
    assert describe_kv_quality(made, BoxEngineSettings()) is None
    chosen = replace(knobs, kv_cache_dtype="choose")
    assert engine_configs(made, box, chosen, log=None, codec="raw").most.kv_cache_dtype == "auto"  # type: ignore[arg-type]
    assert describe_kv_quality(made, chosen) is None
    assert describe_kv_quality(made, knobs) == (
        "Llama-3.1-8B: what KV in fp8 costs in quality is not known; --kv-cache-dtype auto leaves it as it is"
    )


def test_a_box_that_holds_the_model_takes_more_and_longer_requests_as_a_stage() -> None:
    model, box, knobs = known_model("Llama-3.1-8B"), box_with(1, 24), BoxEngineSettings()
    found: Any = type("Found", (), {"info": model, "folder": "/model"})()
    made = ServedModel(model=found, text=None, share=share_of(model, box, knobs))  # type: ignore[arg-type]
    configs = engine_configs(made, box, knobs, log=None, codec="raw")  # type: ignore[arg-type]
    stage = configs.of_stage(model.layers // 2)
    assert configs.most.max_model_len == 36_864
    assert (stage.max_model_len, stage.shorten_to_fit) == (None, True)
    assert stage.max_requests > configs.most.max_requests
    assert configs.of_stage(model.layers).max_requests == configs.most.max_requests
    owners = BoxEngineSettings(max_model_len=4096, max_requests=8)
    as_wanted = engine_configs(made, box, owners, log=None, codec="raw").of_stage(16)  # type: ignore[arg-type]
    assert (as_wanted.max_model_len, as_wanted.max_requests, as_wanted.shorten_to_fit) == (4096, 8, False)


def replace_gpus(box: Hardware) -> Hardware:
    return Hardware(cores=box.cores, memory_gib=box.memory_gib, processor=box.processor)


@pytest.mark.parametrize(
    ("card", "gib", "tp", "name", "tokens"),
    [  # a full step takes 0.1 s at most: 0.72 of 989 TFLOP/s compute 5,100 tokens of the 8B in that time
        ("NVIDIA GeForce RTX 4090", 24, 1, "Llama-3.1-8B", 2048),
        ("NVIDIA A100-SXM4-80GB", 80, 1, "Llama-3.1-8B", 2048),
        ("NVIDIA H100 80GB HBM3", 79.6, 1, "Llama-3.1-8B", 4096),
        ("NVIDIA H100 80GB HBM3", 79.6, 1, "Qwen2.5-14B", 2048),
        ("NVIDIA H100 80GB HBM3", 79.6, 8, "Llama-3.1-70B", 4096),
        ("NVIDIA L4", 22.5, 1, "Llama-3.1-8B", 2048),  # slower, but no plan wants more of it
        ("a card of next year", 96, 1, "Llama-3.1-8B", 8192),
        ("a card of next year", 24, 1, "Llama-3.1-8B", 2048),
    ],
)
def test_the_budget_of_a_step_is_what_the_cards_compute_in_time(
    card: str, gib: float, tp: int, name: str, tokens: int
) -> None:
    assert choose_step_tokens(box_of(tp, card, gib), known_model(name).shape, tp=tp) == tokens


def test_without_a_gpu_steps_and_requests_are_as_they_were() -> None:
    model = ModelInfo(
        service="s",
        shape=ModelShape(
            name="s", layers=2, hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=64, vocabulary=100
        ),
        max_model_len=512,
        weights=WeightSizes(layers=(1000, 1000), embeddings=1000, head=0, float_bytes=2),
    )
    cpu = Hardware(cores=4, memory_gib=64.0, processor="x")
    assert share_of(model, cpu, BoxEngineSettings()).limits == BatchLimits(
        max_model_len=None, max_batched_tokens=512, max_requests=64
    )


@pytest.mark.parametrize(
    ("kv_tokens", "requests"), [(0, 64), (37_600, 64), (131_071, 64), (131_072, 128), (262_144, 256), (10**7, 256)]
)
def test_as_many_requests_at_once_as_kv_is_there_for(kv_tokens: int, requests: int) -> None:
    assert choose_requests(kv_tokens) == requests


def test_what_the_owner_says_counts() -> None:
    model, box = known_model("Llama-3.1-8B"), box_with(1, 80)
    assert share_of(model, box, BoxEngineSettings()).limits.max_requests == 256
    knobs = BoxEngineSettings(max_requests=1000, max_batched_tokens=3000)
    assert share_of(model, box, knobs).limits == BatchLimits(
        max_model_len=None, max_batched_tokens=3000, max_requests=1000
    )
    few = share_of(model, box, replace(knobs, max_requests=None, max_batched_tokens=100)).limits
    assert few.max_requests == 100  # each takes a token of a step


def test_unequal_gpus_hold_as_much_as_the_smallest() -> None:
    cards = tuple(Gpu(name="x", memory_gib=gib, uuid=str(gib)) for gib in (48.0, 24.0))
    box = Hardware(cores=16, memory_gib=128.0, processor="x", gpus=cards)
    rooms = [measure_room(box, BoxEngineSettings(), tp=tp) for tp in (1, 2)]
    assert [room.memory_bytes for room in rooms] == pytest.approx([48 * GIB * CUDA_SEES * GPU_SHARE] * 2, abs=2)


def test_room_for_kv_is_what_weights_leave_and_never_negative() -> None:
    model = known_model("Llama-3.1-8B")
    whole = model.weights.of_stage(0, model.layers)

    def room(memory_bytes: int, kv_cache_bytes: int | None = None) -> Room:
        return Room(memory_bytes=memory_bytes, float_bytes=0, kv_cache_bytes=kv_cache_bytes)

    token = 128 << 10
    assert measure_kv_room(model, room(whole - 1), model.layers) == 0
    assert measure_kv_room(model, room(whole + 5), model.layers) == 5
    assert count_kv_tokens(model, room(whole + 3 * token), model.layers, tp=1) == 3
    assert count_kv_tokens(model, room(whole + 4 * token - 1), model.layers, tp=1) == 3
    assert count_kv_tokens(model, room(whole + 4 * token), model.layers, tp=16) == 2  # two workers hold each head
    assert measure_kv_room(model, room(whole + token, token), model.layers) == token
    assert measure_kv_room(model, room(whole + token - 1, token), model.layers) == 0  # the owner's cache does not fit


def test_kv_of_quantised_weights_takes_two_bytes_a_value() -> None:
    model = known_model("Llama-3.1-8B")
    packed = structs.replace(model, weights=structs.replace(model.weights, float_bytes=0))
    room = Room(memory_bytes=model.weights.of_stage(0, model.layers) + (1 << 20), float_bytes=0, kv_cache_bytes=None)
    assert count_kv_tokens(packed, room, model.layers, tp=1) == 8


def test_owners_limits_of_a_step_count_and_contradictions_are_refused() -> None:
    model, box = known_model("Llama-3.1-8B"), box_with(1, 24)
    few = share_of(model, box, BoxEngineSettings(max_batched_tokens=32)).limits
    assert (few.max_batched_tokens, few.max_requests) == (32, 32)  # a request that decodes takes a token
    exact = share_of(model, box, BoxEngineSettings(max_batched_tokens=32, max_requests=32)).limits
    assert exact.max_requests == 32
    with pytest.raises(NodeUsageError, match="max-requests: 33 are more than the 32 tokens"):
        share_of(model, box, BoxEngineSettings(max_batched_tokens=32, max_requests=33))
    assert share_of(model, box, BoxEngineSettings(max_model_len=131_072)).limits.max_model_len == 131_072
    with pytest.raises(NodeUsageError, match="tp: 3 workers cannot share"):
        share_of(model, box_with(4, 24), BoxEngineSettings(tp=3))
    with pytest.raises(NodeUsageError, match="tp: 4 is more than the 2 GPUs"):
        share_of(model, box_with(2, 24), BoxEngineSettings(tp=4))
    with pytest.raises(NodeError, match=r"memory-gib: in 0.5 GiB not one of the 32 layers"):
        share_of(model, box, BoxEngineSettings(memory_gib=0.5))


def test_what_is_kept_back_and_how_long_steps_take_are_settings() -> None:
    model, box, cpu = known_model("Llama-3.1-8B"), box_with(1, 24), replace_gpus(box_with(1, 24))
    half = measure_room(cpu, BoxEngineSettings(fitting=FittingSettings(cpu_share=0.5)), tp=1)
    assert half.memory_bytes == 64 * GIB
    most = BatchLimits(max_model_len=None, max_batched_tokens=1, max_requests=1)
    more, less = (
        gpu_working_bytes(model.shape, most, tp=1, fitting=FittingSettings(gpu_fixed_bytes=n)) for n in (9, 2)
    )
    assert more - less == 7
    steps = [choose_step_tokens(box, model.shape, tp=1, fitting=FittingSettings(step_s=s)) for s in (1e-6, 1e3)]
    assert steps == [2048, 8192]
    assert choose_requests(70_000, FittingSettings(tokens_per_request=500)) == 128
    stage = known_model("Qwen2.5-14B")
    short = share_of(stage, box, BoxEngineSettings(fitting=FittingSettings(stage_model_len=2048)))
    assert share_of(stage, box, BoxEngineSettings()).layers < short.layers < stage.layers
