"""Which files and bytes of a model a stage needs, and what is said of broken weights."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from p2pserve.node.models import StageLayers, WeightSizes, open_model
from p2pserve.node.models.checkpoint import INDEX_FILE, part_of, stage_files

from .model_files import CONFIG, SHARDS, make, make_sharded, refusal, tensors


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
    return {path.name: names for path, names in stage_files(folder, StageLayers(first, last, 4), tied=tied)}


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
            StageLayers(first, last, 4)


def test_a_local_model_has_nothing_to_fetch(tmp_path: Path) -> None:
    model = open_model(str(make_sharded(tmp_path / "a", SHARDS)))
    assert model.fetch() == model.fetch(1, 3) == model.folder
    with pytest.raises(ValueError, match="not a part of"):
        model.fetch(2, 9)


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
