"""What a box does with its engine: how much of the model it takes, and its part in requests and replicas."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import trio

from ...bootstrap import Address, PeerId
from ...bootstrap.network import Network
from ...coordinator import Phase, Plan, Replica, Stage
from .. import messages
from ..box.emulation import Cards, EmulatedModel, emulated_model, emulated_tp, parse_cards
from ..box.fitting import requests_at_once, step_tokens_on
from ..box.hardware import Hardware
from ..box.home import NodeError
from ..box.shares import EngineSettings, Share, choose_limits, share_of
from ..engine import protocol
from ..engine.emulated.engine import EmulationError, model_capacity
from ..links.kv_ways import KvWays
from ..models import DownloadProgress, OpenedModel, TerminalProgress, open_model
from ..requests.text import TextModel
from .kv_transfers import KvTransfers
from .place import Place, place_in
from .stages import Stages, with_limits
from .supervisor import Supervisor
from .worker import Worker

__all__ = [
    "EngineSettings",
    "Host",
    "ServedModel",
    "Share",
    "describe_length",
    "engine_config",
    "inspect_model",
    "share_of",
    "step_limit",
]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a box has to serve with: the model, its tokenizer, and how much of it fits."""

    model: OpenedModel | EmulatedModel
    text: TextModel
    share: Share


def inspect_model(name: str, hardware: Hardware, knobs: EngineSettings) -> ServedModel:
    """Find the model and see how much of it fits; blocks. Raises ModelError, NodeError or GpuError."""
    if knobs.emulate is not None:
        return _inspect_emulated_model(name, hardware, parse_cards(knobs.emulate, knobs.emulate_specs), knobs)
    model = open_model(name)
    share = share_of(model.info, hardware, knobs)
    return ServedModel(model, TextModel(model.folder), share)


def _inspect_emulated_model(name: str, hardware: Hardware, cards: Cards, knobs: EngineSettings) -> ServedModel:
    model = emulated_model(name, cards)
    tp = emulated_tp(hardware, knobs.tp, model.info)
    try:
        capacity, _ = model_capacity(model.emulation, tp=tp, kv_cache_mib=knobs.kv_cache_mib)
    except EmulationError as error:
        raise NodeError(f"emulate: {error}") from error
    limits = choose_limits(knobs, step_tokens_on(hardware, model.info.shape, tp=tp), requests_at_once(capacity))
    share = Share(model.info.layers, tp, limits, knobs.kv_cache_mib)
    return ServedModel(model, TextModel(model.folder), share)


def describe_length(served: ServedModel, knobs: EngineSettings) -> str | None:
    """For people, where nobody has said how long requests may be, and the model's own length does not fit."""
    info, longest = served.model.info, served.share.limits.max_model_len
    if longest is None or knobs.max_model_len is not None:
        return None
    return f"{info.name}: {longest:,} of {info.max_model_len:,} tokens fit on this box; --max-model-len says otherwise"


def engine_config(served: ServedModel, hardware: Hardware, knobs: EngineSettings, log: Path) -> protocol.EngineConfig:
    """The settings of this box's engine processes, whatever part of the model they get."""
    model, share = served.model, served.share
    config = protocol.EngineConfig(
        model=str(model.folder),
        dtype=knobs.dtype,
        # What fits is estimated here, and found out by the engine; what the owner wants fits or is refused.
        shorten_to_fit=knobs.max_model_len is None
        and (bool(hardware.gpus) or share.layers < model.info.layers or share.limits.max_model_len is not None),
        kv_cache_mib=share.kv_cache_mib,
        async_scheduling=knobs.async_scheduling,
        threads=knobs.threads or max(1, hardware.cores - 1),
        log_file=str(log),
        emulation=model.emulation if isinstance(model, EmulatedModel) else None,
    )
    return with_limits(config, share.limits)


def step_limit(replica: Replica | None, own: PeerId) -> int:
    """How many tokens a step of the engine here computes at most, by the plan's word; 0: as many as it was started
    with. Where nobody decodes, nobody is held up."""
    if replica is None or replica.head != own or replica.phase is Phase.PREFILL:
        return 0
    return replica.step_tokens


@final
class Host:
    """The engine of this box, and everything that others may ask of it."""

    def __init__(
        self,
        served: ServedModel,
        config: protocol.EngineConfig,
        *,
        network: Network,
        ways: KvWays,
        where: Callable[[PeerId], Address | None],
    ) -> None:
        model = self._model = served.model
        self._config = config
        self._own = network.peer_id
        self.share = served.share
        transfers = KvTransfers(model=model.info, ways=ways, messenger=network)
        self.worker = Worker(service=model.info.service, transfers=transfers, messenger=network)
        self._stages = Stages(
            service=model.info.service,
            messenger=network,
            where=where,
            random=secrets.token_bytes,
        )
        self._supervisor: Supervisor | None = None

    async def run(self, log: Path, channel: int | None, on_change: Callable[[messages.EngineAdvert], None]) -> None:
        """Keep the engine process running until cancelled. Raises EngineStartError or ModelError when the first start
        of a box that serves alone fails."""
        supervisor = self._supervisor = Supervisor(
            self._config,
            worker=self.worker,
            stages=self._stages,
            fetch=self._fetch,
            log=log,
            channel=channel,
            on_change=on_change,
        )
        if self._serves_alone:
            layers = self._model.info.layers
            stage = Stage(peer=self._own, tp=self.share.tp, first_layer=0, last_layer=layers)
            supervisor.assign(Place((stage,), 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.worker.learner.run)
            nursery.start_soon(supervisor.run)

    def follow(self, plan: Plan | None) -> None:
        """A plan may give this box layers, or take them away, and says how much a step of a replica may compute."""
        ours = plan is not None and plan.service == self._model.info.service
        replica = plan.replica_of(self._own) if plan is not None and ours else None
        self.worker.limit_steps(step_limit(replica, self._own))
        if self._supervisor is not None and not self._serves_alone:
            self._supervisor.assign(place_in(plan, self._own, self._model.info.service))

    @property
    def _serves_alone(self) -> bool:
        return self.share.layers == self._model.info.layers

    async def _fetch(self, place: Place, say: Callable[[str], None]) -> Path:
        """Download what the place needs and is not here. Raises ModelError."""
        token = trio.lowlevel.current_trio_token()
        terminal = TerminalProgress(sys.stderr, time.monotonic)
        told = -1
        called_off = False

        def report(progress: DownloadProgress) -> None:
            nonlocal told
            if called_off:
                raise NodeError("the download has been called off")
            terminal(progress)
            if progress.percent != told:
                told = progress.percent
                token.run_sync_soon(say, f"downloads {progress.file}: {told} % of {progress.total_bytes / 1e9:.1f} GB")

        try:
            return await trio.to_thread.run_sync(
                self._model.fetch, place.stage.first_layer, place.stage.last_layer, report, abandon_on_cancel=True
            )
        finally:
            called_off = True
