"""The engines that a node can run. A new one is added here, and nowhere else (docs/extending.md)."""

from __future__ import annotations

from typing import Final

from .backend import EngineBackend
from .emulated.backend import EMULATED
from .vllm_program.backend import VLLM

BACKENDS: Final = {backend.name: backend for backend in (VLLM, EMULATED)}


def find_backend(name: str) -> EngineBackend:
    """The engine of that name. Raises ValueError."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise ValueError(f"engine: {name!r} is none; take one of {', '.join(BACKENDS)}") from None
