"""A box whose GPUs are only modelled, seen by its agent: what it advertises and serves with.
Hardware, engine and service are labelled as emulated."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import msgspec

from ....coordinator.costs.gpus import GpuError, GpuSpec, Specs, gpu_table
from ....coordinator.costs.model_shape import KvChoice, ModelShape, ModelShapeError, model_shape, shape_of_config
from ....coordinator.planning.model.cluster_file import card_link_gbps
from ....coordinator.planning.model.kv_quality import resolve_kv_cache_dtype
from ...box.errors import NodeError, NodeUsageError
from ...box.fitting import can_share, choose_requests, choose_step_tokens, default_tp
from ...box.hardware import Gpu, Hardware
from ...box.shares import Share, choose_limits
from ...models import BUNDLED, BUNDLED_MODELS, ModelError, ModelInfo, Report, WeightSizes, read_json
from ...models.text import TextModel
from ...settings import BoxEngineSettings
from ..backend import ServedModel
from ..protocol import Emulation, Throttling
from .engine import EmulationError, model_capacity

MAX_CARDS: Final = 64
LONGEST: Final = 32768
"""Prompt and answer together, where nothing says what the model was made for."""

_CARDS = re.compile(r"(?:(\d{1,3})\s*[xX*]\s*)?(\S.*)")


@dataclass(frozen=True, slots=True)
class Cards:
    """So many equal GPUs of the table."""

    gpu: GpuSpec
    count: int


@final
@dataclass(frozen=True, slots=True)
class EmulatedModel:
    """A model of which only the dimensions are known. `folder` has the tokenizer."""

    info: ModelInfo
    folder: Path
    emulation: Emulation

    def fetch(self, first: int = 0, last: int | None = None, report: Report | None = None) -> Path:
        """There is nothing to fetch."""
        return self.folder

    def count_missing(self, layers: int) -> int:
        """Nothing is lacking."""
        return 0


def parse_cards(text: str, specs: str = Specs.DENSE) -> Cards:
    """`4xA40`: how many of which GPU, with its figures in one of the table's columns. Raises GpuError."""
    found = _CARDS.fullmatch(text.strip())
    if found is None:
        raise GpuError("emulate: it is empty; write how many of which GPU, like 4xA40")
    count = int(found[1] or 1)
    if not 1 <= count <= MAX_CARDS:
        raise GpuError(f"emulate: {count} GPUs; a box has 1 to {MAX_CARDS}")
    try:
        return Cards(gpu_table().find(found[2], Specs(specs)), count)
    except GpuError as error:
        raise GpuError(f"emulate: {error}; write how many of which GPU, like 4xA40") from None


def emulated_hardware(cards: Cards, box: Hardware) -> Hardware:
    """This box, with those GPUs instead of its own."""
    gpus = tuple(
        Gpu(name=cards.gpu.name, memory_gib=cards.gpu.memory_gib, uuid=f"emulated-{number}")
        for number in range(cards.count)
    )
    return msgspec.structs.replace(box, gpus=gpus, emulated_as=cards.gpu.specs)


def emulated_model(name: str, cards: Cards, kv_cache_dtype: KvChoice = "auto") -> EmulatedModel:
    """A known model by name, or a folder with `config.json`. Raises ModelError."""
    folder = BUNDLED_MODELS.get(name) or Path(name).expanduser()
    try:
        if folder.is_dir():
            config = read_json(folder / "config.json", name)
            shape, longest = shape_of_config(config, folder.resolve().name), _longest(config)
            service = f"{config.get('model_type', 'model')}-emulated-{_digest(config)}"
        else:
            shape, longest = model_shape(name), LONGEST
            service = f"{shape.name}-emulated"
    except ModelShapeError as error:
        raise ModelError(f"emulated {error}") from error
    shape = shape.with_kv_cache_dtype(resolve_kv_cache_dtype(kv_cache_dtype, shape))
    tokenizer = folder if (folder / "tokenizer.json").is_file() else BUNDLED
    vocabulary = min(shape.vocabulary, TextModel(tokenizer).vocabulary)
    emulation = Emulation(model=shape, gpu=cards.gpu, gpu_link_gbps=card_link_gbps(cards.gpu), vocabulary=vocabulary)
    return EmulatedModel(_info(shape, service, longest), tokenizer, emulation)


def inspect_model(name: str, hardware: Hardware, knobs: BoxEngineSettings) -> ServedModel:
    """Find the model and see that the modelled cards hold all of it. Raises ModelError, NodeError or GpuError."""
    model = emulated_model(name, parse_cards(knobs.emulate or "", knobs.emulate_specs), knobs.kv_cache_dtype)
    tp = _choose_tp(hardware, knobs.tp, model.info)
    try:
        capacity, _ = model_capacity(model.emulation, tp=tp, kv_cache_mib=knobs.kv_cache_mib)
    except EmulationError as error:
        raise NodeError(f"emulate: {error}") from error
    tokens = choose_step_tokens(hardware, model.info.shape, tp=tp, fitting=knobs.fitting)
    limits = choose_limits(knobs, tokens, choose_requests(capacity, knobs.fitting))
    return ServedModel(
        model=model,
        text=TextModel(model.folder),
        share=Share(model.info.layers, tp, limits, knobs.kv_cache_mib),
        options=msgspec.to_builtins(
            msgspec.structs.replace(
                model.emulation,
                load_gb_s=knobs.emulate_load_gb_s,
                throttling=_throttling(knobs.emulate_throttle),
            )
        ),
    )


def _throttling(wanted: tuple[float, float] | None) -> Throttling | None:
    return None if wanted is None else Throttling(after_s=wanted[0], factor=wanted[1])


def _choose_tp(hardware: Hardware, wanted: int | None, model: ModelInfo) -> int:
    """GPUs that share each layer: all that can. Raises NodeError."""
    tp = wanted or default_tp(hardware, model)
    if tp > len(hardware.gpus):
        raise NodeUsageError(f"tp: {tp} is more than the {len(hardware.gpus)} emulated GPUs of this box")
    if not can_share(model, tp):
        heads = f"{model.shape.heads} heads and {model.kv_heads} KV heads"
        raise NodeUsageError(f"tp: {tp} GPUs cannot share the {heads} of {model.name} evenly")
    return tp


def _info(shape: ModelShape, service: str, longest: int) -> ModelInfo:
    windowed = shape.windowed_layers
    return ModelInfo(
        service=service,
        shape=shape,
        max_model_len=longest,
        weights=WeightSizes(
            layers=(shape.layer_weight_bytes,) * shape.layers,
            embeddings=shape.embedding_parameters * shape.dtype_bytes,
            head=0 if shape.tied_embeddings else shape.head_parameters * shape.dtype_bytes,
            float_bytes=shape.dtype_bytes,
            tied=shape.tied_embeddings,
        ),
        windows=(shape.window,) * windowed + (0,) * (shape.layers - windowed) if windowed else (),
    )


def _longest(config: dict[str, Any]) -> int:
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) and longest > 0 else LONGEST


def _digest(config: dict[str, Any]) -> str:
    """Tells models of one name apart."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
