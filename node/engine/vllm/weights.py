"""vLLM's model loader for a stage: reads the tensors that the stage holds, and no others.

A stage's folder need not have the other shards (vLLM's own loader insists on all that the index names). Files are
mapped, so of a shard that is shared with another stage only the pages of the tensors named here are read.

Without pipeline parallelism this is vLLM's default loader. Either tells how far it is (`telling_weights`). Importing
this module registers the load format, which must have happened before vLLM checks its arguments, in each process that
loads weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import safe_open
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ...models import StageLayers
from ...models.checkpoint import INDEX_FILE, read_index, stage_files

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

LOAD_FORMAT = "p2pserve"

T = TypeVar("T")


Tell = Callable[[int, int], None]
"""Hears which file of the weights is read now, the first being 1, and of how many; then (0, 0): all of them are."""

_tell: ContextVar[Tell | None] = ContextVar("tell_weights", default=None)


@contextmanager
def telling_weights(tell: Tell) -> Iterator[None]:
    """`tell` hears how far the weights are that this thread loads in the body, also with vLLM's own loader. A process
    that is forked in the body has a `tell` of its own."""
    original = DefaultModelLoader.get_all_weights

    def get_all_weights(
        loader: DefaultModelLoader, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        yield from told(original(loader, model_config, model), _files_of(Path(model_config.model)))

    token = _tell.set(tell)
    DefaultModelLoader.get_all_weights = get_all_weights  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DefaultModelLoader.get_all_weights = original  # type: ignore[method-assign]
        _tell.reset(token)


def told(weights: Iterable[tuple[str, T]], files: Mapping[str, str]) -> Iterator[tuple[str, T]]:
    """The same tensors, while the listener of this thread is told of each new one of `files`, by a tensor's name."""
    tell = _tell.get()
    if tell is None:
        yield from weights
        return
    total, begun = len(set(files.values())) or 1, set[str]()
    for name, tensor in weights:
        file = files.get(name, "")
        if file not in begun and (file or not begun):
            begun.add(file)
            tell(min(len(begun), total), total)
        yield name, tensor
    tell(0, 0)


def _files_of(folder: Path) -> dict[str, str]:
    """By tensor, as the folder's index has it; empty without one."""
    try:
        return read_index(folder / INDEX_FILE)
    except (OSError, ValueError):
        return {}


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
        folder, layers = Path(model_config.model), StageLayers(first, last, total)
        files = {name: path.name for path, names in stage_files(folder, layers, tied=tied) for name in names}
        yield from told(stage_tensors(folder, layers, tied=tied), files)


def stage_tensors(folder: Path, layers: StageLayers, *, tied: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor of a stage. Values are mapped: they are read when the model copies them."""
    for path, names in stage_files(folder, layers, tied=tied):
        with safe_open(path, framework="pt") as shard:
            for name in names:
                yield name, shard.get_tensor(name)
