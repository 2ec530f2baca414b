"""Finding a model, checking it before anything is started with it, and fetching the part that is needed."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import msgspec

from .checkpoint import Checkpoint, StageLayers, local_checkpoint
from .errors import ModelError
from .families import check_architecture
from .info import ModelInfo, describe, layer_count
from .progress import Report

if TYPE_CHECKING:
    from ...coordinator.costs.model_shape import KvCacheDtype
    from .download import DownloadSettings
    from .hub import Repository

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"
BUNDLED_MODELS = {"bundled": BUNDLED, "bundled-prose": BUNDLED.parent / "bundled_prose"}
"""The folders of the models that ship with this package, by the names that they are asked for by."""


@final
class OpenedModel:
    """A model in Hugging Face format; `folder` has configuration and tokenizer, and weights once
    `fetch` has run."""

    def __init__(
        self, info: ModelInfo, folder: Path, config: dict[str, Any], checkpoint: Checkpoint, source: Repository | None
    ) -> None:
        self.info = info
        self.folder = folder
        self.config = config
        self._checkpoint = checkpoint
        self._source = source

    def __repr__(self) -> str:
        return f"<OpenedModel {self.info.service} in {self.folder}>"

    def fetch(self, first: int = 0, last: int | None = None, report: Report | None = None) -> Path:
        """Have the weights of layers `[first, last)` in `folder`; return it. Blocks while
        downloading.

        `report`, called from its threads, may raise to end it; what came stays. Raises ModelError,
        ValueError."""
        layers = StageLayers(first, self.info.layers if last is None else last, self.info.layers)
        if self._source is not None:
            self._source.fetch_weights(self._checkpoint, layers, report)
        return self.folder

    def keep_kv_as(self, dtype: KvCacheDtype) -> None:
        """From now on `info` is that of an engine that keeps KV so."""
        shape = self.info.shape.with_kv_cache_dtype(dtype)
        self.info = msgspec.structs.replace(self.info, shape=shape)

    def count_missing(self, layers: int) -> int:
        """Bytes of the first `layers` layers that `fetch` would fetch."""
        stage = StageLayers(0, layers, self.info.layers)
        return self._source.count_missing(self._checkpoint, stage) if self._source is not None else 0


def open_model(name: str, downloads: DownloadSettings | None = None) -> OpenedModel:
    """Resolve `name` (a folder, one of `BUNDLED_MODELS`, or a Hugging Face id) and check it. Raises
    ModelError. From a hub (see `hub`) it fetches configuration, tokenizer and weight headers."""
    if name in BUNDLED_MODELS:
        return _open_folder(name, BUNDLED_MODELS[name])
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~ of nobody
        raise ModelError(f"model {name}: no such folder: {error}") from error
    if name and path.is_dir():
        return _open_folder(path.resolve().name, path.resolve())
    if name and path.exists():
        raise ModelError(f"model {name}: this is a file; give the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model {name}: no such folder, neither {' nor '.join(f'`{each}`' for each in BUNDLED_MODELS)}, "
            "not a Hugging Face id of the form owner/name"
        )
    return _open_repository(name, downloads)


def _open_folder(name: str, folder: Path) -> OpenedModel:
    config = _checked_config(name, folder)
    _check_tokenizer(name, folder)
    checkpoint = local_checkpoint(folder, name, tied=_tied(config))
    try:
        # By its weights, not by its folder: the owners of two boxes name their folders as they like.
        service = f"{_family(config)}-{_fingerprint(folder)}"
    except OSError as error:
        raise ModelError(f"model {name}: {error.filename} cannot be read: {error.strerror}") from error
    return _described(name, service, folder, config, checkpoint, None)


def _open_repository(name: str, downloads: DownloadSettings | None) -> OpenedModel:
    from .download import DownloadSettings
    from .hub import find  # the hub's library takes half a second, which a local folder need not pay

    repository = find(name, downloads or DownloadSettings())
    config = _checked_config(name, repository.folder)  # before anything else is fetched
    repository.fetch_small()
    _check_tokenizer(name, repository.folder)
    checkpoint = repository.checkpoint(tied=_tied(config))
    service = f"{Path(name).name}-{repository.commit[:8]}"
    return _described(name, service, repository.folder, config, checkpoint, repository)


def _described(
    name: str, service: str, folder: Path, config: dict[str, Any], checkpoint: Checkpoint, source: Repository | None
) -> OpenedModel:
    layers = layer_count(config, name)
    try:
        weights = checkpoint.weights(layers)
    except ValueError as error:
        raise ModelError(f"model {name}: {error} in its safetensors files") from error
    return OpenedModel(describe(name, service, config, weights, layers), folder, config, checkpoint, source)


def _checked_config(name: str, folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json", name)
    check_architecture(config, name)
    return config


def _check_tokenizer(name: str, folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"model {name}: no tokenizer.json in {folder}; convert the tokenizer to the fast format")


def _tied(config: dict[str, Any]) -> bool:
    return config.get("tie_word_embeddings") is True


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object from a model's folder. Raises ModelError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model {name}: no {path.name} in {path.parent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {name}: {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"model {name}: {path} is not a JSON object")
    return value


def quantisation_of(folder: Path, name: str) -> str:
    """How the weights of a model are quantised, as its configuration calls it; "" where it says nothing of that."""
    said = read_json(folder / "config.json", name).get("quantization_config")
    method = said.get("quant_method") if isinstance(said, dict) else None
    return method if isinstance(method, str) else ""


def _family(config: dict[str, Any]) -> str:
    """What its configuration calls this kind of model, for people: `qwen3`."""
    return re.sub(r"[^a-z0-9_.]", "", str(config.get("model_type", "")).lower())[:32] or "model"


def _fingerprint(folder: Path) -> str:
    """Eight hex digits that differ between models, as KV must not mix: of the configuration and
    each weight file's name, size and first megabyte, which takes no minutes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    digest.update((folder / "tokenizer.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:8]
