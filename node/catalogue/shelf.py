"""The models of the catalogue on one box: whether it can host them, and having their files here. All of it blocks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final, final

from ...bootstrap import NetworkError
from ...coordinator.costs.gpus import GpuError
from ...coordinator.services.catalogue import CatalogueEntry
from ...coordinator.services.hosting import HostedModel
from ..box.errors import NodeError
from ..box.fitting import measure_room
from ..box.hardware import Hardware
from ..engine.agent_side.engine_link import EngineError
from ..engine.backend import EngineBackend, ServedModel
from ..models import ModelError, Report
from ..settings import BoxEngineSettings, NodeSettings

CANNOT: Final = (ModelError, NodeError, GpuError, EngineError, NetworkError, OSError)
"""What a model that this box cannot host is told by."""

MAX_FAULT: Final = 300  # characters


class NotHosted(NodeError):
    """This box cannot host a model of the catalogue; says in one line why."""


@final
class ModelShelf:
    """One per box. `folder`: where models are looked for before a hub is asked, and downloads are kept, if its owner
    says so."""

    def __init__(self, backend: EngineBackend, hardware: Hardware, settings: NodeSettings) -> None:
        hosting = settings.hosting
        assert hosting is not None, "a box that hosts what it is given"
        self._backend = backend
        self._hardware = hardware
        self._engine = settings.engine
        self._hosting = hosting
        self.beside = settings.beside
        self.room_bytes = measure_shared_room(hardware, settings.engine, len(settings.beside))
        self._float_bytes = measure_room(hardware, settings.engine, tp=1).float_bytes

    def __repr__(self) -> str:
        return f"<ModelShelf {self._hosting}>"

    def find_refusal(self, name: str) -> str:
        """Why this box's owner does not let it host an entry, for people; "" where it may be."""
        only, excluded = self._hosting.only, self._hosting.excluded
        if name in excluded:
            return "its owner has said --not for it"
        return f"its owner has said --only {', '.join(only)}" if only and name not in only else ""

    def examine(self, entry: CatalogueEntry) -> HostedModel:
        """What this box can do of an entry. From a hub it fetches all but the weights."""
        refusal = self.find_refusal(entry.name)
        if refusal:
            return HostedModel(fault=refusal)
        try:
            served = self._inspect(entry)
            info, fits = served.model.info, served.share.layers
            return HostedModel(
                fits=min(fits, info.layers),
                layers=info.layers,
                weight_bytes=info.weights.of_stage(0, info.layers, self._float_bytes),  # as they are in memory
                missing_bytes=self._check_disk(served),
                shape=info.shape,
            )
        except CANNOT as error:
            return HostedModel(fault=describe_fault(error))

    def fetch(self, entry: CatalogueEntry, report: Report) -> ServedModel:
        """The model, with all files of what fits here. `report` may raise to end it. Raises what CANNOT names."""
        served = self._inspect(entry)
        self._check_disk(served)
        served.model.fetch(0, served.share.layers, report)
        return served

    def _inspect(self, entry: CatalogueEntry) -> ServedModel:
        served = self._backend.inspect(self._locate(entry), self._hardware, self._engine)
        info = served.model.info
        if entry.model_name not in (info.name, info.service):  # nobody would find it under the entry's name
            raise NotHosted(f"model: {entry.model} is called {info.name} here; give the folder's own path, not a link")
        return served

    def _locate(self, entry: CatalogueEntry) -> str:
        """Where the model is: the folder of the entry, or one of its name where this box has its models."""
        own = self._hosting.models_dir / entry.model_name if self._hosting.models_dir is not None else None
        if own is not None and "/" not in entry.model_name and (own / "config.json").is_file():
            return str(own)
        return entry.model

    def _check_disk(self, served: ServedModel) -> int:
        """Bytes that are to be fetched. Raises NotHosted where the owner allows less."""
        missing = served.model.count_missing(served.share.layers)
        most = self._hosting.max_disk_gib
        if missing and most is not None:
            used = measure_disk(find_cache(self._hosting.models_dir))
            if used + missing > most * (1 << 30):
                raise NotHosted(
                    f"max-disk-gib: {missing / (1 << 30):.1f} GiB are to be fetched beside the {used / (1 << 30):.1f} "
                    f"that are used, and {most:g} are allowed"
                )
        return missing


def measure_shared_room(hardware: Hardware, engine: BoxEngineSettings, nodes: int) -> int:
    """Bytes for the weights of all engines that share a process, beside the KV pool of all; 0 for one alone. `engine`:
    of one of so many nodes, each with the whole pool and its part of what is left of the box's memory."""
    if nodes < 2:
        return 0
    kv_gib = (engine.kv_cache_mib or 0) / 1024
    limit_gib = None if engine.memory_gib is None else kv_gib + nodes * max(0.0, engine.memory_gib - kv_gib)
    whole = replace(engine, memory_gib=limit_gib)
    room = measure_room(hardware, whole, tp=1, working_bytes=nodes * engine.fitting.gpu_fixed_bytes)
    return max(0, room.memory_bytes - (room.kv_cache_bytes or 0))


def describe_fault(error: BaseException) -> str:
    """One line for everybody."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:MAX_FAULT]


def find_cache(models_dir: Path | None) -> Path:
    """Where downloads are kept."""
    if models_dir is not None:
        return models_dir
    from huggingface_hub import constants  # half a second, which boxes that fetch nothing need not pay

    return Path(constants.HF_HUB_CACHE)


def measure_disk(folder: Path) -> int:
    """Bytes that the files in a folder take, each once; 0 where there is none."""
    sizes: dict[tuple[int, int], int] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                found = Path(where, name).lstat()
            except OSError:
                continue  # it has just been taken away
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())
