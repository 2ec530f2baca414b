"""vLLM as a record. Its functions import it when they are called: the agent does without torch and vLLM."""

from __future__ import annotations

import os
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
    from .preload import preload

    return preload()


def _run(config: EngineConfig, sockets: AgentSockets) -> int:
    from .process import run_engine

    return run_engine(config, sockets)


def _share(turns: ProcessTurns) -> MakeProgram:
    from .shared import VllmSharing

    return VllmSharing(turns)


def _inspect(name: str, hardware: Hardware, knobs: BoxEngineSettings) -> ServedModel:
    from ....coordinator.planning.model.kv_quality import resolve_kv_cache_dtype
    from ...box.shares import share_of
    from ...box.start_checks import require_dtype, require_engine, require_shared_memory
    from ...models import open_model
    from ...models.opening import quantisation_of
    from ...models.text import TextModel

    require_engine(hardware, os.environ)
    model = open_model(name)
    require_dtype(name, quantisation_of(model.folder, name), knobs.dtype, hardware)
    model.keep_kv_as(resolve_kv_cache_dtype(knobs.kv_cache_dtype, model.info.shape))
    share = share_of(model.info, hardware, knobs)
    require_shared_memory(hardware, share.tp)
    return ServedModel(model=model, text=TextModel(model.folder), share=share)


async def _self_test(server: EngineStarter) -> None:
    from ..trials.selftest import require_known_to_work

    await require_known_to_work(server)


VLLM: Final = EngineBackend(
    name="vllm",
    environment={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in our process
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_CPU_CI_ENV": "1",
        "HF_HUB_OFFLINE": "1",  # the agent has fetched the model
        "TRANSFORMERS_OFFLINE": "1",
    },
    preload=_preload,
    run=_run,
    share=_share,
    hardware=lambda box, knobs: box,
    inspect=_inspect,
    self_test=_self_test,
)
