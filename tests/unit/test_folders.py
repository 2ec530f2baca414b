"""The rules of folders: which may import which inside a room, how many modules one holds, how long a file of tests is.

Each rule has a list of what does not keep it yet. A list may only shrink: an entry that is not in use fails.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .test_rooms import MAX_FILE, ROOMS, Module, imports, read

# Folder -> its folders from the lowest to the highest: each imports itself and those before it. Modules beside these
# folders are below or above them, as the test of circles allows. `dev` is imported by the launchers beside it alone.
FOLDER_FLOORS: dict[str, tuple[str, ...]] = {
    "bootstrap": ("trust", "streams", "members", "dev"),
    "coordinator": ("costs", "planning", "regrouping", "repair", "renting", "requests", "dev"),
    "coordinator/planning": ("model", "lower", "upper"),
    "kvtransport": ("wire", "probing", "routing", "link", "dev"),
    "node": (
        "models",
        "box",
        "web",
        "engine",
        "observing",
        "admin",
        "dashboard",
        "requests",
        "http",
        "links",
        "replica",
        "api",
        "dev",
    ),
    "node/engine": ("vllm", "transfers", "kv", "pipeline", "emulated", "trials", "vllm_program", "gpucheck", "dev"),
    "sdk": ("options", "explaining", "actions", "simulating", "seeing", "demo", "chaos", "live", "rent", "commands"),
    "sims": ("engine", "policies", "results", "splitwise", "experiments", "wan"),
    "sims/wan": ("kv",),
}

FLOOR_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("node/engine/api/mounts.py", "node/admin"): "the API process, which engine/ runs, is where pages are served",
    ("node/engine/api/mounts.py", "node/dashboard"): "the same",
}
"""(module, folder above it that it imports) -> why."""

MAX_MODULES = 15

CROWDED: dict[str, int] = {}
"""Folder -> its modules: tests that follow one folder of the source, and have to be grouped as it is."""

LONG_TESTS: dict[str, int] = {}
"""File of tests -> its lines."""


def folder_floors(module: Module) -> Iterator[tuple[str, str]]:
    """What a module imports from a folder above its own in its room: its path and that folder."""
    for _, target, own in imports(module):
        if not own:
            continue
        for outer, order in FOLDER_FLOORS.items():
            prefix = tuple(outer.split("/"))
            depth = len(prefix)
            if module.parts[:depth] != prefix or target[:depth] != prefix or len(target) <= depth:
                continue
            here, there = module.parts[depth] if len(module.parts) > depth else "", target[depth]
            if there == "dev" and here != "dev" and not is_launcher(module):
                yield module.path, f"{outer}/dev"
            elif here in order and there in order and order.index(there) > order.index(here):
                yield module.path, f"{outer}/{there}"


def is_launcher(module: Module) -> bool:
    """Whether it only starts what is in the folder `dev`, so that the command keeps its name."""
    return (
        re.search(r"from \.+dev\.", module.text) is not None
        and "__main__" in module.text
        and module.text.count("\n") < 12
    )


def crowded(files: Iterable[str]) -> dict[str, int]:
    """Folders of more modules than one can take in, with how many; their __init__.py does not count."""
    counts = Counter(str(Path(file).parent) for file in files if Path(file).name != "__init__.py")
    return {folder: count for folder, count in counts.items() if count > MAX_MODULES}


def test_folders_import_those_below_them() -> None:
    found = {complaint for module in ROOMS for complaint in folder_floors(module)}
    new = [f"{path} must not import {folder}" for path, folder in sorted(found - FLOOR_EXCEPTIONS.keys())]
    assert not new, "\n".join(new)
    assert FLOOR_EXCEPTIONS.keys() <= found, "these are kept now: take them off the list"


def test_no_folder_is_crowded() -> None:
    found = crowded(module.path for module in [*ROOMS, *read("tests")])
    assert {folder: count for folder, count in found.items() if count > CROWDED.get(folder, MAX_MODULES)} == {}
    assert CROWDED.keys() <= found.keys(), "these are small enough now: take them off the list"


def test_a_file_of_tests_is_short() -> None:
    found = {module.path: module.text.count("\n") for module in read("tests")}
    assert [path for path, lines in found.items() if lines > LONG_TESTS.get(path, MAX_FILE)] == []
    assert [path for path in LONG_TESTS if found.get(path, 0) <= MAX_FILE] == [], "take them off the list"


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("kvtransport/wire/a.py", "from ..link.b import x", "kvtransport/link"),
        ("kvtransport/wire/a.py", "from ..link import b", "kvtransport/link"),
        ("coordinator/planning/lower/a.py", "from ..upper.b import x", "coordinator/planning/upper"),
        ("node/agent.py", "from .dev.bench import x", "node/dev"),
    ],
)
def test_an_import_from_above_is_found(path: str, text: str, expected: str) -> None:
    assert list(folder_floors(Module(path, text))) == [(path, expected)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kvtransport/link/a.py", "from ..wire.b import x"),
        ("kvtransport/wire/a.py", "from .b import x"),
        ("node/bench.py", "from .dev.bench import main\n\nif __name__ == '__main__':\n    main()"),
    ],
)
def test_an_import_from_below_is_let_pass(path: str, text: str) -> None:
    assert list(folder_floors(Module(path, text))) == []


def test_too_many_modules_are_found() -> None:
    assert crowded(f"node/m{number}.py" for number in range(16)) == {"node": 16}
    assert crowded(["node/__init__.py", *(f"node/m{number}.py" for number in range(15))]) == {}
