"""What vLLM is told: of an engine its configuration, from ours and the device's; of a request what is ours alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import psutil

from ....coordinator.prefixes.naming import HASH_ALGORITHM
from .. import protocol
from ..kv.connector import ConnectorSettings, transfer_config
from ..kv.step_work import OpenTransfer, transfer_params
from ..pipeline.stage import pipeline_arguments
from ..process import StartError
from ..vllm.answered import ANSWERED
from ..vllm.capability import capabilities_from_nvml
from ..vllm.device import DeviceKind, choose_setup
from ..vllm.gloo import share_device
from .start_failures import explain_start_failure
from .turn_scheduler import AsyncTurnScheduler, TurnScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

NAMED_ALIKE: Final = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1"}
"""In its events vLLM cuts block hashes to the 64 bits that prefixes go by in the network."""


def build_engine(config: protocol.EngineConfig, switchboard: str) -> Any:
    """Make a vLLM engine with the KV connector in this process. Raises StartError with the first cause."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    try:
        vllm_config = stage_config(config, switchboard)
        if config.shorten_to_fit:
            # As if no length had been given: vLLM then shortens this one to what it finds room for, in all stages.
            vllm_config.model_config.original_max_model_len = -1
        # Set after vLLM has, which spawns on a CPU: worker processes then import for a quarter of a minute what this
        # one has from the fork server. On WSL, vLLM spawns them all the same.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return LLMEngine(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except Exception as error:
        raise StartError(f"vLLM cannot load {config.model}: {explain_start_failure(error)}") from error


def stage_config(config: protocol.EngineConfig, switchboard: str) -> VllmConfig:
    """vLLM's configuration of this engine; for a worker that the head calls, of the same one."""
    arguments = engine_args(config, switchboard)
    with capabilities_from_nvml():
        vllm_config = arguments.create_engine_config()
    # Once more, since vLLM switches it off on CPUs, whatever it was told: there it gains nothing, but works.
    vllm_config.scheduler_config.async_scheduling = arguments.async_scheduling
    return vllm_config


def engine_args(config: protocol.EngineConfig, switchboard: str) -> EngineArgs:
    """What vLLM is told of this engine or stage; sets what it reads from the environment."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = engine_arguments(config)
    buffer_bytes = protocol.transfer_buffer_bytes(config, psutil.virtual_memory().total)
    settings = ConnectorSettings(
        switchboard=switchboard,
        buffer_bytes=buffer_bytes // config.tp,
        codec=config.codec,
        transfers=config.transfers,
    )
    return EngineArgs(**arguments, **_parallel_arguments(config), kv_transfer_config=transfer_config(settings))


def _parallel_arguments(config: protocol.EngineConfig) -> dict[str, Any]:
    """How the workers of this engine find together."""
    if config.tp > 1 and device_kind() == "cpu":
        from torch._dynamo import config as compiler

        # Although told not to compile, vLLM compiles the look-up in a split embedding, at the first request, for
        # seconds.
        compiler.disable = True
    if config.partition:
        environment, arguments = pipeline_arguments(config)
        os.environ.update(environment)
        return arguments
    if config.tp == 1:
        return {"distributed_executor_backend": "uni"}
    return {"tensor_parallel_size": config.tp, "distributed_executor_backend": "mp"}


def engine_arguments(config: protocol.EngineConfig) -> dict[str, Any]:
    """Fields of `EngineArgs` for this model on this device, without those that join the engine with others. Sets what
    vLLM reads from the environment, and how its process groups are made."""
    from vllm.config import KVEventsConfig

    choices = choose_setup(
        device_kind(),
        dtype=config.dtype,
        kv_cache_mib=config.kv_cache_mib,
        stages=max(1, len(config.partition)),
        tp=config.tp,
        async_scheduling=config.async_scheduling,
    )
    os.environ.update(choices.environment | NAMED_ALIKE)
    os.environ.pop("PYTHONHASHSEED", None)  # vLLM would begin its block hashes with it, and others name prefixes so too
    share_device()
    scheduler = AsyncTurnScheduler if choices.arguments["async_scheduling"] else TurnScheduler
    return {
        **choices.arguments,
        "model": config.model,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_num_batched_tokens": config.max_batched_tokens,
        "max_num_seqs": config.max_requests,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": HASH_ALGORITHM,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        **({"scheduler_cls": scheduler} if config.sharing is not None else {}),
    }


def device_kind() -> DeviceKind:
    """What vLLM computes on here."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "cuda"


def eos_tokens(model_config: Any) -> tuple[int, ...]:
    """The token ids that end an answer: the model's and those of its generation settings."""
    found: set[int] = set()
    generation = model_config.try_get_generation_config() or {}
    for value in (getattr(model_config.hf_config, "eos_token_id", None), generation.get("eos_token_id")):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(value)
    return tuple(sorted(found))


def extra_arguments(submit: protocol.Submit, answered: tuple[int, ...]) -> dict[str, Any] | None:
    """What the connector and the workers are to know of a request beside its sampling."""
    extra: dict[str, Any] = {ANSWERED: list(answered)} if answered else {}
    if submit.send or submit.receive:
        opening = OpenTransfer(
            transfer=(submit.send or submit.receive)[0].ticket.transfer,
            tokens=len(submit.prompt) if submit.send else submit.receive_tokens,
            awaits_first_token=submit.awaits_first_token,
            send=submit.send,
            receive=submit.receive,
        )
        extra["kv_transfer_params"] = transfer_params(opening)
    return extra or None
