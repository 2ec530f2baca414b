"""An engine as the rest of a node sees it: one record. `backends` lists them; nobody else asks which one it is.

    agent           hardware, inspect  -> ServedModel -> EngineConfig
    fork server     preload, once
    engine process  run, in a fork of the server
    agent           self_test, before the first engine of a fork server serves

The agent and every fork server load the records of all engines. So this module and those of the records import no
engine; their functions import what they need when they are called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from pathlib import Path

    from ..box.hardware import Hardware
    from ..box.shares import Share
    from ..models import ModelInfo, Report
    from ..models.text import TextModel
    from ..settings import BoxEngineSettings
    from .agent_side.engine_link import EngineStarter
    from .process import AgentSockets
    from .protocol import EngineConfig
    from .sharing.process import ShareProcess


class ModelFiles(Protocol):
    """A model that has been checked. `folder` has its configuration and tokenizer."""

    @property
    def info(self) -> ModelInfo:
        """What planner, gateway and engine must know of it."""

    @property
    def folder(self) -> Path:
        """Where its files are, or will be."""

    def fetch(self, first: int = 0, last: int | None = None, report: Report | None = None) -> Path:
        """Have what an engine needs of the layers `[first, last)` on this box and return the folder; blocks."""

    def count_missing(self, layers: int) -> int:
        """Bytes of the first `layers` layers that `fetch` would fetch."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model a box can serve, its tokenizer, and how much fits. `options`: this backend's."""

    model: ModelFiles
    text: TextModel
    share: Share
    options: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBackend:
    """One kind of engine.

    Args:
        name: as in `EngineConfig.backend` and in `--engine`.
        environment: what its fork server must find in its environment before anything is imported.
        preload: in the fork server: import what each of its engines would, and return the version of what was
            imported ("" for none). It may start no thread. Raises ImportError.
        share: what the engines of one process have in common that take turns (`sharing.process`); None: they
            cannot have any.
        run: in an engine process, on its only thread: serve the agent until told to stop; returns the exit status.
            `process.serve_agent` does what all engines share.
        hardware: the box as it is advertised, from the one that was found. Raises GpuError.
        inspect: look at the model by its name, and how much of it fits on this hardware; blocks. Raises ModelError,
            NodeError or GpuError, each with one line for the user.
        self_test: return if engines of this fork server can be trusted. Raises EngineStartError.
    """

    name: str
    environment: Mapping[str, str]
    preload: Callable[[], str]
    run: Callable[[EngineConfig, AgentSockets], int]
    hardware: Callable[[Hardware, BoxEngineSettings], Hardware]
    inspect: Callable[[str, Hardware, BoxEngineSettings], ServedModel]
    self_test: Callable[[EngineStarter], Awaitable[None]]
    share: ShareProcess | None = None
