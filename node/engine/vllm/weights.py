"""vLLM's model loader for a stage: reads the tensors that the stage holds, and no others.

A stage's folder need not have the other shards (vLLM's own loader insists on all that the index names). Files are
mapped, so of a shard that is shared with another stage only the pages of the tensors named here are read.

Without pipeline parallelism this is vLLM's default loader. Importing this module registers the load format, which must
have happened before vLLM checks its arguments, in each process that loads weights.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ...models import StageLayers
from ...models.checkpoint import stage_files

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

LOAD_FORMAT = "p2pserve"


@register_model_loader(LOAD_FORMAT)
class StageLoader(DefaultModelLoader):
    """Everything but the choice of tensors is the default loader's: quantised weights, checks, other file formats."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The tensors of this process's stage, by name. Raises ValueError, OSError for a folder that lacks some."""
        stages = get_pp_group()
        if stages.world_size == 1:
            yield from super().get_all_weights(model_config, model)
            return
        config = model_config.hf_text_config
        total = model_config.get_total_num_hidden_layers()
        first, last = get_pp_indices(total, stages.rank_in_group, stages.world_size)
        tied = getattr(config, "tie_word_embeddings", False) is True
        yield from stage_tensors(Path(model_config.model), StageLayers(first, last, total), tied=tied)


def stage_tensors(folder: Path, layers: StageLayers, *, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor of a stage. Values are mapped: they are read when the model copies them."""
    for path, names in stage_files(folder, layers, tied=tied):
        with safe_open(path, framework="pt") as shard:
            for name in names:
                yield name, shard.get_tensor(name)
