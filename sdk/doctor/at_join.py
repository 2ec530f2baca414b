"""What `join` looks at by itself: the checks of `doctor` that it does not make anyway, while it joins."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...node.box.errors import NodeError
from ...node.box.hardware import probe
from ...node.box.prerequisites import inspect_box
from . import checks, probing
from .checks import Diagnosis, Fitness


def examine_box(home: Path, tp: int | None, *, has_engine: bool) -> Iterator[Diagnosis]:
    """Whether this box is fit, as far as a joining node does not find out itself."""
    try:
        hardware = probe()
    except NodeError as error:
        yield checks.fail("gpu", str(error))
        return
    if has_engine:
        gpus = max(1, len(hardware.gpus))
        yield checks.check_gpus(hardware, inspect_box())
        yield checks.check_shared_memory(hardware, tp or gpus, probing.free_shared_memory())
    folder = probing.nearest_folder(home)
    yield checks.check_disk(shutil.disk_usage(folder).free, 0, str(folder))
    yield checks.check_memory(hardware, probing.available_memory(), None)


def describe_unfit(found: Iterable[Diagnosis]) -> list[str]:
    """A line for each check that did not end well."""
    return [f"{each.check}: {each.found}; {each.fix}" for each in found if each.fitness is not Fitness.OK]
