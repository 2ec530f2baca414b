"""The emulated engine as a record: real network and scheduling, modelled GPU time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..backend import EngineBackend, ServedModel

if TYPE_CHECKING:
    from ...box.hardware import Hardware
    from ...settings import BoxEngineSettings
    from ..agent_side.engine_link import EngineStarter
    from ..process import AgentSockets
    from ..protocol import EngineConfig
    from ..sharing.process import MakeProgram
    from ..sharing.turns import ProcessTurns


def _preload() -> str:
    from . import process  # noqa: F401  (imported for the children)

    return ""


def _run(config: EngineConfig, sockets: AgentSockets) -> int:
    from .process import run_emulated_engine

    return run_emulated_engine(config, sockets)


def _share(turns: ProcessTurns) -> MakeProgram:
    from .shared import EmulatedSharing

    return EmulatedSharing(turns)


def _hardware(box: Hardware, knobs: BoxEngineSettings) -> Hardware:
    from .model import emulated_hardware, parse_cards

    return emulated_hardware(parse_cards(knobs.emulate or "", knobs.emulate_specs), box)


def _inspect(name: str, hardware: Hardware, knobs: BoxEngineSettings) -> ServedModel:
    from .model import inspect_model

    return inspect_model(name, hardware, knobs)


async def _trust(server: EngineStarter) -> None:
    """Nothing of somebody else's is in it."""


EMULATED: Final = EngineBackend(
    name="emulated",
    environment={},
    preload=_preload,
    run=_run,
    share=_share,
    hardware=_hardware,
    inspect=_inspect,
    self_test=_trust,
)
