"""What dimensions say of a model's size, with a model small enough to be counted by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pserve.coordinator.costs.model_shape import MODELS, ModelShape, ModelShapeError, model_shape, shape_of_config

TINY = ModelShape(name="tiny", layers=3, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocabulary=10)
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128,
    "intermediate_size": 320, "vocab_size": 1000,
}  # fmt: skip


def change(**fields: Any) -> ModelShape:
    return msgspec.structs.replace(TINY, **fields)


def config(**fields: Any) -> ModelShape:
    return shape_of_config({**CONFIG, **fields}, "m")


def test_parameters_by_hand() -> None:
    # queries and output: 4 x 4 each; keys and values: 4 x 2 each; three matrices of 4 x 8
    assert TINY.attention_parameters == 16 + 16 + 8 + 8
    assert TINY.mlp_parameters == 96
    assert TINY.layer_parameters == TINY.active_layer_parameters == 144
    assert TINY.embedding_parameters == TINY.head_parameters == 40
    assert TINY.parameters == 3 * 144 + 80
    assert TINY.weight_bytes == 2 * 512
    assert TINY.layer_weight_bytes == 288


def test_tied_embeddings_are_stored_once() -> None:
    tied = change(tied_embeddings=True)
    assert tied.parameters == 3 * 144 + 40
    assert tied.head_parameters == 40  # and multiplied with all the same


def test_of_experts_all_are_stored_and_some_are_used() -> None:
    mixture = change(experts=4, active_experts=2)
    assert mixture.layer_parameters == 48 + 4 * 96
    assert mixture.active_layer_parameters == 48 + 2 * 96


def test_projections_that_are_given_count_instead_of_heads() -> None:
    assert change(projections=7).attention_parameters == 7


def test_kv_and_activations_are_in_16_bit_whatever_the_weights_are() -> None:
    for dtype_bytes in (1, 2, 4):
        shape = change(dtype_bytes=dtype_bytes)
        assert shape.weight_bytes == 512 * dtype_bytes
        assert shape.kv_bytes_per_token_layer == 2 * 1 * 2 * 2
        assert shape.kv_bytes_per_token == 3 * 8
        assert shape.activation_bytes_per_token == 2 * 4


def test_in_8_bits_kv_takes_half_in_memory_and_as_much_for_codecs() -> None:
    kept = TINY.with_kv_cache_dtype("fp8")
    assert TINY.with_kv_cache_dtype("fp8_e5m2") == kept
    assert TINY.with_kv_cache_dtype("auto") == TINY == kept.with_kv_value_bytes(2)
    assert (kept.kv_bytes_per_token_layer, kept.kv_bytes_per_token) == (4, 12)
    assert kept.raw_kv_bytes_per_token_layer == TINY.raw_kv_bytes_per_token_layer == TINY.kv_bytes_per_token_layer
    assert kept.weight_bytes == TINY.weight_bytes


@pytest.mark.parametrize(
    ("first", "last", "tied", "ends"),
    [
        (False, False, False, 0),
        (True, False, False, 40),
        (False, True, False, 40),
        (True, True, False, 80),
        (True, True, True, 40),
        (True, False, True, 40),
        (False, True, True, 40),  # another stage has the other copy
    ],
)
def test_the_ends_of_a_model_hold_its_embedding_and_its_head(first: bool, last: bool, tied: bool, ends: int) -> None:
    shape = change(tied_embeddings=tied)
    assert shape.stage_weight_bytes(2, first=first, last=last) == 2 * 288 + 2 * ends


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *(({field: 0}, rf"model\.{field} of tiny is 0") for field in ("layers", "hidden", "head_dim", "intermediate")),
        *(({field: 0}, rf"model\.{field} of tiny is 0") for field in ("vocabulary", "experts", "kv_heads")),
        ({"heads": 3, "kv_heads": 2}, "heads of tiny is 3, no multiple of 2 KV heads"),
        ({"active_experts": 0}, "active_experts of tiny"),
        ({"active_experts": 2}, "between 1 and 1"),
        ({"dtype_bytes": 3}, "dtype_bytes of tiny is 3"),
        ({"windowed_layers": 1}, "windowed_layers of tiny"),  # and no window
        ({"windowed_layers": 4, "window": 9}, "windowed_layers of tiny"),
        ({"windowed_layers": -1, "window": 9}, "windowed_layers of tiny"),
    ],
)
def test_dimensions_that_no_model_has(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ModelShapeError, match=words):
        ModelShape(**{**msgspec.structs.asdict(TINY), **fields})


def test_the_bounds_of_dimensions_are_allowed() -> None:
    assert change(windowed_layers=3, window=1).windowed_layers == 3
    assert change(experts=4, active_experts=4).active_experts == 4


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-7b", 6.7), ("llama2-13b", 13.0), ("llama-30b", 32.5), ("llama2-70b", 69.0), ("llama3-8b", 8.0),
     ("qwen2-7b", 7.6), ("opt-66b", 65.7), ("bloom-176b", 176.2)],
)  # fmt: skip
def test_known_models_have_the_size_in_their_name(name: str, billions: float) -> None:
    assert model_shape(name.upper()).parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert MODELS[name].name == name


def test_an_unknown_model_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ModelShapeError, match=r"'llama-8t' is not known: .*llama3-8b"):
        model_shape("llama-8t")


def test_a_configuration_with_what_is_usual_left_out() -> None:
    shape = config()
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim) == (4, 128, 4, 2, 32)
    assert (shape.intermediate, shape.vocabulary, shape.mlp_matrices, shape.tied_embeddings) == (320, 1000, 3, False)
    assert (shape.experts, shape.active_experts, shape.window, shape.windowed_layers, shape.projections) == (
        1, 1, 0, 0, 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        ({"head_dim": 64}, {"head_dim": 64}),
        ({"intermediate_size": None}, {"intermediate": 512}),
        ({"model_type": "opt"}, {"mlp_matrices": 2, "tied_embeddings": True}),
        ({"model_type": "opt", "tie_word_embeddings": False}, {"mlp_matrices": 2, "tied_embeddings": False}),
        ({"tie_word_embeddings": True}, {"mlp_matrices": 3, "tied_embeddings": True}),
        ({"multi_query": True}, {"kv_heads": 1}),
        ({"multi_query": True, "new_decoder_architecture": True}, {"kv_heads": 2}),
        ({"num_experts_per_tok": 2}, {"experts": 1, "active_experts": 1}),
        ({"num_local_experts": 8}, {"experts": 8, "active_experts": 1}),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, {"experts": 8, "active_experts": 2}),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
         {"experts": 9, "active_experts": 3}),
        ({"n_shared_experts": 1}, {"experts": 1, "active_experts": 1}),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, {"intermediate": 32}),
        ({"sliding_window": 64}, {"window": 64, "windowed_layers": 4}),
        ({"sliding_window": 64, "use_sliding_window": False}, {"window": 0, "windowed_layers": 0}),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
         {"window": 64, "windowed_layers": 2}),
        ({"layer_types": ["sliding_attention"] * 4}, {"window": 0, "windowed_layers": 0}),
    ],
)  # fmt: skip
def test_what_a_configuration_may_say_besides(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = config(**fields)
    assert {field: getattr(shape, field) for field in expected} == expected


LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}


def test_latent_attention_by_hand() -> None:
    shape = config(**LATENT)
    assert (shape.kv_heads, shape.head_dim) == (1, 12)  # 24 elements a token, as a key and a value of 12
    kv = 128 * (16 + 8) + 16 * 4 * (12 + 10)
    assert shape.projections == 128 * 4 * 20 + kv + 4 * 10 * 128
    low_rank = config(**LATENT, q_lora_rank=32)
    assert low_rank.projections == 32 * 128 + 32 * 4 * 20 + kv + 4 * 10 * 128


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": None}, "config of m has no vocab_size"),
        ({"hidden_size": None}, "has no hidden_size or n_embd or d_model"),
        ({"hidden_size": "128"}, "hidden_size is '128', not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        ({"num_attention_heads": 0}, "of m is 0"),
        ({**LATENT, "v_head_dim": None}, "has no v_head_dim"),
    ],
)
def test_a_configuration_that_does_not_do_names_the_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelShapeError, match=words):
        config(**fields)
