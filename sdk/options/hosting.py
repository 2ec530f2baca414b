"""What a box's owner says of the models that it may be given, as it is given to `join`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from ...coordinator.services.catalogue import find_name_fault
from ...node.settings import HostingSettings
from ..errors import UsageError

_OF_A_MODEL = {"served_model_name": "--served-model-name is", "vllm_options": "options of vLLM are"}


def read_hosting(arguments: SimpleNamespace) -> HostingSettings | None:
    """None for a box with a model of its own. Downloads go to --models-dir from here on. Raises UsageError."""
    only, excluded = tuple(arguments.only), tuple(arguments.excluded)
    several = arguments.max_services if getattr(arguments, "max_services", 1) > 1 else None
    given = {
        "max-services": several,
        "only": only,
        "not": excluded,
        "models-dir": arguments.models_dir,
        "max-disk-gib": arguments.max_disk_gib,
    }
    if arguments.model is not None:
        for option, value in given.items():
            if value not in ((), None):
                raise UsageError(f"{option}: it is for a box that takes what it is given; leave it or --model out")
        return None
    for name, what in _OF_A_MODEL.items():
        if getattr(arguments, name):
            raise UsageError(f"model: {what} for one model; say which with --model")
    for option, names in (("only", only), ("not", excluded)):
        for name in names:
            if fault := find_name_fault(name):
                raise UsageError(f"{option}: {fault}")
    both = sorted({*only}.intersection(excluded))
    if both:
        raise UsageError(f"not: {both[0]} is also what --only names")
    models_dir = _open_folder(arguments.models_dir) if arguments.models_dir is not None else None
    return HostingSettings(
        only=only,
        excluded=excluded,
        models_dir=models_dir,
        max_disk_gib=arguments.max_disk_gib,
    )


def _open_folder(given: Path) -> Path:
    """The folder, made where there is none. The hub's library reads the variable when it is first used."""
    folder = given.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"models-dir: {given} cannot be made: {error.strerror}") from error
    os.environ["HF_HUB_CACHE"] = str(folder)
    return folder
