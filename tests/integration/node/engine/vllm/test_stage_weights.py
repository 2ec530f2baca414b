"""The loader of a stage reads its own tensors and no others, and makes the same model of them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

from p2pserve.node.box.start_checks import IN_16_BITS
from p2pserve.node.engine.vllm import weights
from p2pserve.node.models import StageLayers
from p2pserve.node.models.checkpoint import stage_files

pytestmark = pytest.mark.beside

LAYERS = 6


@dataclass(frozen=True)
class Stages:
    """As much of vLLM's pipeline group as the loader looks at."""

    rank_in_group: int
    world_size: int


@dataclass(frozen=True)
class Config:
    """As much of vLLM's model configuration."""

    model: str
    revision: None = None
    hf_text_config: object = None

    def get_total_num_hidden_layers(self) -> int:
        return LAYERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in many small shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("sharded")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(path, max_shard_size="150KB")
    assert len(list(path.glob("*.safetensors"))) >= LAYERS
    return path


def everything(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def read(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stage: int, partition: str, hf_text_config: object = None
) -> dict[str, torch.Tensor]:
    """What the loader gives to the model of this stage."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    monkeypatch.setattr(weights, "get_pp_group", lambda: Stages(stage, partition.count(",") + 1))
    loader: Any = get_model_loader(LoadConfig(load_format=weights.LOAD_FORMAT))
    config = Config(str(folder), hf_text_config=hf_text_config)
    found = list(loader.get_all_weights(config, torch.nn.Module()))
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize("partition", ["2,4", "5,1", "1,3,2"])
def test_every_tensor_is_read_by_one_stage(monkeypatch: pytest.MonkeyPatch, folder: Path, partition: str) -> None:
    every = everything(folder)
    sizes = [int(size) for size in partition.split(",")]
    together: dict[str, torch.Tensor] = {}
    for stage, size in enumerate(sizes):
        own = read(monkeypatch, folder, stage, partition)
        ends = {0: ["model.embed_tokens.weight"], len(sizes) - 1: ["model.norm.weight", "lm_head.weight"]}
        first = sum(sizes[:stage])
        layers = [n for n in every if any(n.startswith(f"model.layers.{i}.") for i in range(first, first + size))]
        assert set(own) == {*layers, *ends.get(stage, [])}
        assert not own.keys() & together.keys()
        together |= own
    assert together.keys() == every.keys()
    assert all(torch.equal(tensor, every[name]) for name, tensor in together.items())


def test_one_stage_is_the_default_loader(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert read(monkeypatch, folder, 0, "6").keys() == everything(folder).keys()


@pytest.mark.parametrize(("stage", "partition"), [(0, "6"), (1, "2,4")])
def test_each_file_is_told_of_when_it_is_begun(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stage: int, partition: str
) -> None:
    told: list[tuple[int, int]] = []
    with weights.telling_weights(lambda file, files: told.append((file, files))):
        own = read(monkeypatch, folder, stage, partition)
    every = {file.name: load_file(file).keys() for file in folder.glob("*.safetensors")}
    files = sum(bool(names & own.keys()) for names in every.values())
    assert files > 1
    assert told == [*((number + 1, files) for number in range(files)), (0, 0)]
    read(monkeypatch, folder, stage, partition)
    assert told[-1] == (0, 0)
    assert len(told) == files + 1  # nobody listens any more


def test_of_a_single_file_it_is_told_that_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"one": torch.ones(2), "two": torch.ones(2)}, tmp_path / "model.safetensors")
    told: list[tuple[int, int]] = []
    with weights.telling_weights(lambda file, files: told.append((file, files))):
        assert len(read(monkeypatch, tmp_path, 0, "6")) == 2
    assert told == [(1, 1), (0, 0)]


def test_weights_that_are_refused_in_float32_are_those_that_vllm_refuses() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    known = IN_16_BITS & set(QUANTIZATION_METHODS)
    assert known >= {"awq", "gptq", "fp8"}
    for method in known:
        config: Any = get_quantization_config(method)
        assert torch.float32 not in config.get_supported_act_dtypes()


def test_tied_embeddings_are_read_at_both_ends(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    @dataclass(frozen=True)
    class Tied:
        tie_word_embeddings: bool = True

    for stage, embeds in enumerate((True, False, True)):
        own = read(monkeypatch, folder, stage, "1,3,2", Tied())
        assert ("model.embed_tokens.weight" in own) is embeds


def test_shards_of_other_stages_need_not_be_there(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    needed = {path.name for path, _ in stage_files(part, StageLayers(2, 4, LAYERS), tied=False)}
    for file in part.glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    whole = read(monkeypatch, folder, 1, "2,2,2")
    assert read(monkeypatch, part, 1, "2,2,2").keys() == whole.keys()
    with pytest.raises(FileNotFoundError):
        read(monkeypatch, part, 0, "2,2,2")


def test_only_the_pages_of_a_stage_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of one file that all stages share: what is mapped and not asked for costs no memory."""
    from safetensors.torch import save_file

    tensors = {f"model.layers.{layer}.mlp.weight": torch.ones(4 << 20) for layer in range(LAYERS)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    before = resident()
    own = read(monkeypatch, tmp_path, 1, "2,1,3")
    assert set(own) == {"model.layers.2.mlp.weight"}
    assert sum(float(tensor.sum()) for tensor in own.values()) == 4 << 20
    assert resident() - before < 32 << 20  # of 96 MiB; the tensor has 16


def resident() -> int:
    """Bytes of files that are mapped into this process and in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssFile in /proc/self/status")
