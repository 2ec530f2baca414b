"""Models: every way a folder can be none is one line, and no two share a name."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save

from p2pserve.node.models import BUNDLED_MODELS, ModelError, open_model
from p2pserve.node.models.families import check_architecture

from .model_files import CONFIG, make, refusal, tensors, without


def test_a_model_is_described(tmp_path: Path) -> None:
    model = open_model(str(make(tmp_path / "tiny")))
    info = model.info
    assert (info.name, info.layers, info.shape.hidden, info.kv_heads, info.head_dim) == ("tiny", 4, 128, 2, 32)
    assert (info.shape.vocabulary, info.max_model_len) == (4096, 512)
    assert info.service.startswith("model-")
    assert model.folder == tmp_path / "tiny"


def test_the_models_that_ship_with_this_are_asked_for_by_name() -> None:
    opened = {name: open_model(name) for name in ("bundled", "bundled-prose")}
    assert {name: model.folder for name, model in opened.items()} == BUNDLED_MODELS
    assert [model.info.name for model in opened.values()] == ["bundled", "bundled-prose"]
    assert [model.info.layers for model in opened.values()] == [8, 6]
    assert len({model.info.service for model in opened.values()}) == 2
    assert "neither `bundled` nor `bundled-prose`" in refusal("bundled_prose")


@pytest.mark.parametrize(
    ("quantised", "size"),
    [
        (None, 2),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"kv_cache_scheme": None}, 2),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, 1),
        ({"quantization": {"kv_cache_quant_algo": None}}, 2),
    ],
)
def test_what_its_files_say_of_kv_counts_and_then_what_the_owner_says(
    tmp_path: Path, quantised: dict[str, Any] | None, size: int
) -> None:
    model = open_model(str(make(tmp_path / "m", config={**CONFIG, "quantization_config": quantised})))
    service = model.info.service
    assert model.info.shape.kv_value_bytes == size
    model.keep_kv_as("auto")
    assert model.info.shape.kv_value_bytes == size
    model.keep_kv_as("fp8")
    assert (model.info.shape.kv_value_bytes, model.info.service) == (1, service)


def test_a_link_and_a_relative_path_are_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "tiny")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert open_model("link").info == open_model("./tiny").info == open_model(str(folder)).info


def test_config_without_optional_fields(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    info = open_model(
        str(make(tmp_path / "a", config={**config, "head_dim": 64, "max_position_embeddings": None}))
    ).info
    assert (info.kv_heads, info.head_dim, info.max_model_len) == (4, 64, 2048)


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing-folder-of-mine", "missing", "a/b/c", ""])
def test_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no such folder" in refusal(name)


def test_a_home_of_nobody() -> None:
    assert "no such folder" in refusal("~nobody-of-that-name/model")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "this is a file" in refusal(file)


@pytest.mark.parametrize(
    ("leave_out", "said"),
    [
        ("config.json", "no config.json in"),
        ("tokenizer.json", "no tokenizer.json in"),
        ("model.safetensors", "no *.safetensors weights in"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, leave_out: str, said: str) -> None:
    assert said in refusal(make(tmp_path / "a", leave_out=leave_out))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") + "{}", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "is not a JSON object"),
        (without("architectures"), "not a causal language model (architectures: none named)"),
        ({**CONFIG, "architectures": ["BertModel"]}, "not a causal language model (architectures: BertModel)"),
        ({**CONFIG, "architectures": "LlamaForCausalLM"}, "not a causal language model"),
        ({**CONFIG, "architectures": 5}, "not a causal language model"),
        (without("num_hidden_layers"), "lacks or garbles 'num_hidden_layers'"),
        (without("vocab_size"), "config of a has no vocab_size"),
        ({**CONFIG, "hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
        ({**CONFIG, "hidden_size": None}, "config of a has no hidden_size"),
        ({**CONFIG, "num_hidden_layers": 0}, "lacks or garbles 0 layers"),
        ({**CONFIG, "num_attention_heads": 0, "num_key_value_heads": 1}, "model.heads of a is 0"),
        ({**CONFIG, "num_hidden_layers": 5}, "there are no weights of layer 4 in its safetensors files"),
        (json.dumps(CONFIG).replace("4096", "Infinity"), "vocab_size is inf, not a whole number"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, config: object, said: str) -> None:
    assert said in refusal(make(tmp_path / "a", config=config))


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", leave_out="config.json")
    (folder / "config.json").mkdir()
    assert "cannot be read" in refusal(folder)


def test_a_link_to_weights_that_are_gone(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", leave_out="model.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "model.safetensors is missing" in refusal(folder)


def service(folder: Path) -> str:
    return open_model(str(folder)).info.service


def test_a_copy_of_a_model_is_the_same_service_whatever_its_folder_is_called(tmp_path: Path) -> None:
    first = make(tmp_path / "tiny")
    (tmp_path / "other").mkdir()
    copy = shutil.copytree(first, tmp_path / "other" / "of-my-own")
    os.utime(copy / "model.safetensors", (1, 1))
    assert service(first) == service(copy)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": save(tensors(fill=1.0))},
        {"weights": save(tensors(layers=5))},
        {"config": {**CONFIG, "rope_theta": 1.0}},
    ],
)
def test_other_weights_are_another_service(tmp_path: Path, changed: dict[str, Any]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert service(make(tmp_path / "a" / "tiny")) != service(make(tmp_path / "b" / "tiny", **changed))


@pytest.mark.parametrize(
    ("kind", "family"), [("qwen3", "qwen3"), ("Odd Kind/../x", "oddkind..x"), ("", "model"), (None, "model")]
)
def test_a_service_begins_with_the_family_of_its_model(tmp_path: Path, kind: str | None, family: str) -> None:
    config = {key: value for key, value in {**CONFIG, "model_type": kind}.items() if value is not None}
    assert service(make(tmp_path / "tiny", config=config)).rpartition("-")[0] == family


def test_another_tokenizer_is_another_service(tmp_path: Path) -> None:
    folder = make(tmp_path / "tiny")
    before = service(folder)
    (folder / "tokenizer.json").write_bytes(b'{"a": 1}')
    assert service(folder) != before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "state-space or hybrid model (state_size)"),
        ({"architectures": ["FalconMambaForCausalLM"]}, "(FalconMambaForCausalLM)"),
        ({"architectures": ["JambaForCausalLM"], "mamba_d_state": 16}, "(mamba_d_state)"),
        ({"architectures": ["FalconH1ForCausalLM"]}, "(FalconH1ForCausalLM)"),
        ({"layer_types": ["mamba", "attention"]}, "(layer_types: mamba)"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "(layer_types: linear_attention)"),
        ({"layer_types": [["odd"]]}, "(layer_types: ['odd'])"),
        ({"linear_conv_kernel_dim": 4}, "(linear_conv_kernel_dim)"),
        ({"kv_lora_rank": 512, "model_type": "minicpm3"}, "(kv_lora_rank) of another kind than DeepSeek's (model_type"),
        ({"kv_lora_rank": 512, "model_type": "deepseek_v32", "index_topk": 2048}, "sparse attention (index_topk)"),
        ({"model_type": "deepseek_v4", "compress_ratios": [4]}, "sparse attention (compress_ratios)"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "a multimodal model (Gemma3ForConditionalGeneration)"),
        ({"architectures": ["DeepseekVLV2ForCausalLM"], "vision_config": {}}, "a multimodal model (vision_config)"),
        ({"architectures": ["BertModel"]}, "not a causal language model (architectures: BertModel)"),
        ({"architectures": None}, "not a causal language model (architectures: none named)"),
        ({"block_configs": [{}]}, "different shapes (block_configs)"),
        ({"head_dim": 192, "v_head_dim": 128}, "different shapes (v_head_dim)"),
        ({"num_kv_shared_layers": 15}, "use the keys and values of others (num_kv_shared_layers)"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "it keeps keys and values as nvfp4"),
        ({"quantization_config": {"quantization": {"kv_cache_quant_algo": "NVFP4"}}}, "as nvfp4"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}}, "as float4"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}, "as int8"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_its_configuration(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_architecture({**CONFIG, **changed}, "m")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"kv_lora_rank": 512, "model_type": "deepseek_v3", "v_head_dim": 128, "head_dim": 64},
        {"head_dim": 128, "v_head_dim": 128, "num_kv_shared_layers": 0},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}},
        {"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
        {"quantization_config": {"kv_cache_scheme": None, "kv_cache_quant_algo": None}},
        {"kv_lora_rank": None, "state_size": None},
        {"layer_types": ["sliding_attention", "full_attention", "chunked_attention"]},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8},
        {"architectures": ["GPT2LMHeadModel"]},
    ],
)
def test_attention_is_not_refused(changed: dict[str, Any]) -> None:
    check_architecture({**CONFIG, **changed}, "m")
