"""Models: every way a folder can be none is one line, what a stage needs is known, and no two share a name."""

import json
import os
import shutil
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from p2pserve.coordinator.costs.model_shape import ModelShape, ModelShapeError, shape_of_config
from p2pserve.node.models import (
    DownloadProgress,
    LayerRange,
    ModelError,
    ModelInfo,
    ProgressLine,
    TerminalProgress,
    WeightSizes,
    open_model,
)
from p2pserve.node.models.checkpoint import INDEX_FILE, part_of, stage_files
from p2pserve.node.models.families import check_architecture
from p2pserve.node.models.info import kv_windows

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


def tensors(*, layers: int = 4, fill: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    """Weights in 16 bit: 20 bytes of embeddings, 8 + 2 * layer of each layer, 6 of the norm and 20 of the head."""
    made = {"model.embed_tokens.weight": np.full((5, 2), fill, np.float16)}
    for layer in range(layers):
        made[f"model.layers.{layer}.mlp.weight"] = np.full((4 + layer,), fill, np.float16)
    return made | {
        "model.norm.weight": np.full(3, fill, np.float16),
        "lm_head.weight": np.full((5, 2), fill, np.float16),
    }


def make(
    folder: Path, *, config: object = CONFIG, weights: bytes | None = None, leave_out: str = "", layers: int = 4
) -> Path:
    folder.mkdir()
    text = config if isinstance(config, str) else json.dumps(config)
    for name, content in {
        "config.json": text.encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": weights if weights is not None else save(tensors(layers=layers)),
    }.items():
        if name != leave_out:
            (folder / name).write_bytes(content)
    return folder


def make_sharded(folder: Path, shards: Mapping[str, list[str]]) -> Path:
    """A folder whose tensors lie in these files, with an index."""
    make(folder, leave_out="model.safetensors")
    every = tensors()
    for file, names in shards.items():
        (folder / file).write_bytes(save({name: every[name] for name in names}))
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return folder


SHARDS = {
    "a.safetensors": ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight"],
    "b.safetensors": ["model.layers.2.mlp.weight"],
    "c.safetensors": ["model.layers.3.mlp.weight", "model.norm.weight", "lm_head.weight"],
}


def refusal(name: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(str(name))
    text = str(caught.value)
    assert text.startswith("model ")
    assert "\n" not in text
    return text


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name != key}


def test_a_model_is_described(tmp_path: Path) -> None:
    model = open_model(str(make(tmp_path / "tiny")))
    info = model.info
    assert (info.name, info.layers, info.shape.hidden, info.kv_heads, info.head_dim) == ("tiny", 4, 128, 2, 32)
    assert (info.shape.vocabulary, info.max_model_len) == (4096, 512)
    assert info.service.startswith("tiny-")
    assert model.folder == tmp_path / "tiny"


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


# ---- fingerprints -----------------------------------------------------------------------------------------


def service(folder: Path) -> str:
    return open_model(str(folder)).info.service


def test_a_copy_of_a_model_is_the_same_service(tmp_path: Path) -> None:
    first = make(tmp_path / "tiny")
    (tmp_path / "other").mkdir()
    copy = shutil.copytree(first, tmp_path / "other" / "tiny")
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


def test_another_tokenizer_is_another_service(tmp_path: Path) -> None:
    folder = make(tmp_path / "tiny")
    before = service(folder)
    (folder / "tokenizer.json").write_bytes(b'{"a": 1}')
    assert service(folder) != before


# ---- refused models ---------------------------------------------------------------------------------------


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


# ---- KV ---------------------------------------------------------------------------------------------------


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


# ---- what a stage needs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("transformer.wte.weight", "embeddings"),
        ("wpe.weight", "embeddings"),
        ("model.layers.12.self_attn.q_proj.weight", 12),
        ("model.layers.3.mlp.experts.7.up_proj.weight", 3),
        ("model.layers.3.self_attn.k_norm.weight", 3),
        ("transformer.h.0.ln_1.bias", 0),
        ("h.5.attn.c_attn.weight", 5),
        ("model.norm.weight", "head"),
        ("transformer.ln_f.weight", "head"),
        ("lm_head.weight", "head"),
        ("model.rotary_emb.inv_freq", "shared"),
    ],
)
def test_parts_are_told_apart_by_name(tensor: str, part: object) -> None:
    assert part_of(tensor) == part


def test_sizes_of_parts(tmp_path: Path) -> None:
    weights = open_model(str(make(tmp_path / "a"))).info.weights
    assert weights == WeightSizes(layers=(8, 10, 12, 14), embeddings=20, head=26, float_bytes=2)
    assert weights.of_stage(0, 4) == 20 + 8 + 10 + 12 + 14 + 26
    assert weights.of_stage(0, 1) == 28
    assert weights.of_stage(1, 3) == 22
    assert weights.of_stage(3, 4) == 40
    assert weights.of_stage(1, 3, float_bytes=4) == 44
    for first, last in ((-1, 2), (2, 2), (3, 5)):
        with pytest.raises(ValueError, match="not a part of"):
            weights.of_stage(first, last)


def test_quantised_weights_stay_as_they_are(tmp_path: Path) -> None:
    packed = {name: array.view(np.uint8) for name, array in tensors().items()}
    weights = open_model(str(make(tmp_path / "a", weights=save(packed)))).info.weights
    assert weights.float_bytes == 0
    assert weights.of_stage(0, 4, float_bytes=4) == weights.of_stage(0, 4)


@pytest.mark.parametrize("say_so", [True, False])
def test_tied_embeddings_are_needed_at_both_ends(tmp_path: Path, say_so: bool) -> None:
    kept = {name: array for name, array in tensors().items() if say_so or name != "lm_head.weight"}
    config = {**CONFIG, "tie_word_embeddings": True} if say_so else CONFIG
    weights = open_model(str(make(tmp_path / "a", weights=save(kept), config=config))).info.weights
    assert weights.tied
    assert weights.of_stage(3, 4) == 14 + weights.head + 20
    assert weights.of_stage(0, 4) == sum(weights.layers) + weights.head + 20  # once, where both ends are one


def names_of(folder: Path, first: int, last: int, *, tied: bool = False) -> dict[str, tuple[str, ...]]:
    return {path.name: names for path, names in stage_files(folder, LayerRange(first, last, 4), tied=tied)}


def test_a_stage_needs_only_the_files_with_its_tensors(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "a", SHARDS)
    assert names_of(folder, 0, 4) == {file: tuple(sorted(names)) for file, names in SHARDS.items()}
    assert names_of(folder, 1, 3) == {
        "a.safetensors": ("model.layers.1.mlp.weight",),
        "b.safetensors": ("model.layers.2.mlp.weight",),
    }
    assert names_of(folder, 2, 3) == {"b.safetensors": ("model.layers.2.mlp.weight",)}
    assert set(names_of(folder, 3, 4)) == {"c.safetensors"}
    assert names_of(folder, 3, 4, tied=True)["a.safetensors"] == ("model.embed_tokens.weight",)


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    assert names_of(folder, 0, 1) == {"model.safetensors": ("model.embed_tokens.weight", "model.layers.0.mlp.weight")}


def test_layers_that_are_not_there() -> None:
    for first, last in ((-1, 2), (2, 2), (3, 5)):
        with pytest.raises(ValueError, match="not a part of"):
            LayerRange(first, last, 4)


def test_a_local_model_has_nothing_to_fetch(tmp_path: Path) -> None:
    model = open_model(str(make_sharded(tmp_path / "a", SHARDS)))
    assert model.fetch() == model.fetch(1, 3) == model.folder
    with pytest.raises(ValueError, match="not a part of"):
        model.fetch(2, 9)


# ---- broken weights ---------------------------------------------------------------------------------------


def test_a_shard_that_the_index_names_is_missing(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "a", SHARDS)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"weight_map": {"x": 5}}', "cannot be read"),
        ('{"weight_map": {}}', "names None"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "no safetensors file beside it"),
        ('{"weight_map": {"x": "a.bin"}}', "no safetensors file beside it"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: str, said: str) -> None:
    folder = make(tmp_path / "a")
    (folder / INDEX_FILE).write_text(index)
    assert said in refusal(folder)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (b"", "is no safetensors file"),
        (b"w" * 100, "is no safetensors file"),
        (b"\x08" + b"\0" * 7 + b'{"a": 5}', "cannot be read"),
        (b"\x08" + b"\0" * 7 + b"{......}", "cannot be read"),
        (save(tensors())[:-1], "and its header speaks of"),
        (save(tensors()) + b"x", "and its header speaks of"),
        (save({"model.norm.weight": np.zeros(3)}), "there are no weights of layer 0"),
    ],
)
def test_weights_that_are_none(tmp_path: Path, weights: bytes, said: str) -> None:
    assert said in refusal(make(tmp_path / "a", weights=weights))


# ---- progress ---------------------------------------------------------------------------------------------


def progress(done: int, total: int = 10_000_000) -> DownloadProgress:
    return DownloadProgress(done_bytes=done, total_bytes=total, file="m.safetensors")


def test_lines_come_at_an_interval_and_at_the_end() -> None:
    line = ProgressLine(10.0)
    assert line.line(progress(2_000_000), 100.0) == "m.safetensors: 2.0 MB of 10.0 MB (20 %)"
    assert line.line(progress(3_000_000), 109.9) is None
    assert line.line(progress(4_000_000), 110.0) == "m.safetensors: 4.0 MB of 10.0 MB (40 %), 200.0 kB/s, 30 s left"
    assert line.line(progress(9_000_000), 119.0) is None
    assert line.line(progress(10_000_000), 119.0) == "m.safetensors: 10.0 MB of 10.0 MB (100 %), 421.1 kB/s"
    assert line.line(progress(10_000_000), 200.0) is None


def test_a_hundred_percent_is_all() -> None:
    assert progress(9_999_999).percent == 99
    assert progress(0, 0).percent == 100


class Stream(StringIO):
    """A text stream that says whether it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("terminal", "written"),
    [
        (True, "\r\x1b[Km.safetensors: 1 B of 2 B (50 %)\r\x1b[Km.safetensors: 2 B of 2 B (100 %), 1 B/s\n"),
        (False, "m.safetensors: 1 B of 2 B (50 %)\nm.safetensors: 2 B of 2 B (100 %), 1 B/s\n"),
    ],
)
def test_a_terminal_shows_one_line(terminal: bool, written: str) -> None:
    stream = Stream(terminal=terminal)
    times = iter([0.0, 0.1, 1.0])
    show = TerminalProgress(stream, lambda: next(times))
    for done in (1, 1, 2):
        show(progress(done, 2))
    assert stream.getvalue() == written


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
