"""The sizes of a model and of its KV."""

from pathlib import Path
from typing import Any

import pytest

from p2pserve.coordinator.costs.model_shape import ModelShape, ModelShapeError, shape_of_config
from p2pserve.node.models import ModelInfo, WeightSizes, open_model
from p2pserve.node.models.info import kv_windows

from .model_files import CONFIG, make


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, ()),
        ({"sliding_window": 8}, ()),  # it is not said for which layers
        ({"sliding_window": 8, "model_type": "mistral"}, (8, 8, 8, 8)),
        ({"sliding_window": None, "model_type": "mistral"}, ()),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, (8, 0, 8, 0)),
        ({"sliding_window": 8, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 4}, ()),
        ({"attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}, (16, 16, 16, 0)),
    ],
)
def test_windows_of_layers(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert kv_windows(config, 4) == windows


def test_kv_of_a_sequence(tmp_path: Path) -> None:
    alternating = {**CONFIG, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    plain = open_model(str(make(tmp_path / "plain"))).info
    mixed = open_model(str(make(tmp_path / "mixed", config=alternating))).info
    per_position = 2 * 2 * 32 * 2  # K and V, heads, width, 16 bit
    assert plain.kv_bytes(100, 0, 4, 2) == 4 * 100 * per_position
    windowed = open_model(
        str(make(tmp_path / "all", config={**alternating, "layer_types": ["sliding_attention"] * 4}))
    ).info
    assert windowed.kv_bytes(100, 0, 4, 2) == 4 * 8 * per_position
    assert windowed.kv_bytes(5, 1, 3, 2) == 2 * 5 * per_position
    assert mixed.kv_bytes(100, 0, 4, 2) == 4 * 100 * per_position  # in one group, with room for all tokens


def test_other_names_for_the_same_sizes(tmp_path: Path) -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 9}
    info = open_model(str(make(tmp_path / "a", config={**gpt2, "n_positions": 64}))).info
    assert (info.layers, info.shape.hidden, info.kv_heads, info.head_dim, info.max_model_len) == (4, 128, 4, 32, 64)
    one_head = open_model(str(make(tmp_path / "b", config={**gpt2, "multi_query": True}))).info
    assert one_head.kv_heads == 1


def test_an_advert_that_contradicts_itself_is_none() -> None:
    sizes = WeightSizes(layers=(1, 1), embeddings=1, head=1)
    ModelInfo(
        service="s",
        shape=ModelShape(name="s", layers=2, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocabulary=1),
        max_model_len=1,
        weights=sizes,
    )
    with pytest.raises(ValueError, match="weights has 2 layers"):
        ModelInfo(
            service="s",
            shape=ModelShape(
                name="s", layers=3, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocabulary=1
            ),
            max_model_len=1,
            weights=sizes,
        )


def test_the_sizes_of_latent_attention() -> None:
    """Those of DeepSeek-V3."""
    config = {
        "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8,
    }  # fmt: skip
    shape = shape_of_config(config, "m")
    assert (shape.kv_heads, shape.head_dim, shape.kv_bytes_per_token_layer) == (1, 288, 2 * 576)
    assert (shape.experts, shape.active_experts) == (257, 9)
    down = 7168 * 1536 + 7168 * 576
    up = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert shape.attention_parameters == down + up
    straight = shape_of_config({**config, "q_lora_rank": None}, "m")
    assert straight.attention_parameters == down + up - 1536 * (7168 + 128 * 192) + 7168 * 128 * 192
    with pytest.raises(ModelShapeError, match="config of m has no qk_rope_head_dim"):
        shape_of_config({**config, "qk_rope_head_dim": None}, "m")
