"""What a box does with its engine: how much of the model it takes, and its part in requests and replicas."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, final

import msgspec
import trio

from ...bootstrap import PeerId
from ...bootstrap.methods import Messenger
from ...coordinator import Phase, Plan, Replica, Stage
from ...coordinator.planning.model.kv_quality import find_kv_quality, resolve_kv_cache_dtype
from ...coordinator.services.catalogue import ServiceCatalogue
from .. import messages
from ..box.hardware import Hardware
from ..box.shares import Share, count_layers_beside, share_of_stage
from ..engine import protocol
from ..engine.agent_side.engine_link import EngineStarter
from ..engine.agent_side.fork_server import open_fork_server
from ..engine.backend import ServedModel
from ..engine.settings import Sharing
from ..engine.vllm_program.backend import VLLM
from ..links.kv_outlets import KvOutlets
from ..links.reach import PathTo
from ..models import ModelInfo
from ..models.fetching import run_download
from ..observing.event_log import Record, ignore
from ..settings import BoxEngineSettings, NodeSettings
from .kv_transfers import KvTransfers
from .place import Place, find_place, place_in
from .pool_desk import PoolDesk
from .prefetch import Prefetch
from .splitting import PromptSplitter
from .stages import Stages, with_limits
from .supervisor import Supervisor
from .sweep import EngineSweep
from .worker import Worker

MOVE_POLL_S: Final = 0.05


def describe_length(served: ServedModel, settings: BoxEngineSettings) -> str | None:
    """For people, where nobody has said how long requests may be, and the model's own length does not fit."""
    info, longest = served.model.info, served.share.limits.max_model_len
    if longest is None or settings.max_model_len is not None:
        return None
    return f"{info.name}: {longest:,} of {info.max_model_len:,} tokens fit on this box; --max-model-len says otherwise"


def describe_kv_quality(served: ServedModel, settings: BoxEngineSettings) -> str | None:
    """For people, where the owner wants KV in 8 bits, and nobody has measured what that costs this model."""
    shape = served.model.info.shape
    dtype = resolve_kv_cache_dtype(settings.kv_cache_dtype, shape)
    if dtype == "auto" or find_kv_quality(shape, dtype) is not None:
        return None
    return f"{shape.name}: what KV in {dtype} costs in quality is not known; --kv-cache-dtype auto leaves it as it is"


def describe_wait(share: Share, layers: int) -> str:
    """For people: what a box waits for that has no room for all of the model, and no place in a replica yet."""
    lacking = share.lacking_bytes / 2**30
    more = f"{lacking:.1f} GiB" if lacking >= 0.1 else f"{1024 * lacking + 0.5:.0f} MiB"
    return f"has {share.layers} of {layers} layers, needs another box or {more} more"


def describe_sharing(info: ModelInfo, catalogue: ServiceCatalogue) -> Sharing:
    """Of an engine that shares its process, with what the catalogue remembers of its service's requests."""
    entry = catalogue.entry_of(info.service, info.name)
    return Sharing(service=info.service, lengths=entry.lengths if entry is not None else None)


class EngineConfigs(NamedTuple):
    """The settings of this box's engine processes: for all the layers that it takes, and for fewer of them, where it
    holds the model and is to be a stage all the same; and what is left beside one."""

    most: protocol.EngineConfig
    of_stage: Callable[[int], protocol.EngineConfig]
    room_beside: Callable[[Place], int]
    """How many layers another engine has memory for, beside one in this place."""


def engine_configs(
    served: ServedModel,
    hardware: Hardware,
    settings: BoxEngineSettings,
    log: Path,
    *,
    codec: str,
    sharing: Sharing | None = None,
) -> EngineConfigs:
    """Of a model on this box, as its owner wants it. `sharing`: where its engine shares a process."""
    alone = _config_of_share(served, served.share, hardware, settings, log, codec=codec)
    most = msgspec.structs.replace(alone, sharing=sharing)

    def of_stage(layers: int) -> protocol.EngineConfig:
        if settings.backend != VLLM.name:
            return alone
        share = share_of_stage(served.model.info, hardware, settings, layers)
        return _config_of_share(served, share, hardware, settings, log, codec=codec)

    def room_beside(place: Place) -> int:
        return count_layers_beside(served.model.info, hardware, settings, place.stage)

    return EngineConfigs(most, of_stage, room_beside)


def _config_of_share(
    served: ServedModel, share: Share, hardware: Hardware, settings: BoxEngineSettings, log: Path, *, codec: str
) -> protocol.EngineConfig:
    """With the limits of a share."""
    model = served.model
    config = protocol.EngineConfig(
        model=str(model.folder),
        dtype=settings.dtype,
        # What fits is estimated here, and found out by the engine; what the owner wants fits or is refused.
        shorten_to_fit=settings.max_model_len is None
        and (bool(hardware.gpus) or share.layers < model.info.layers or share.limits.max_model_len is not None),
        kv_cache_mib=share.kv_cache_mib,
        async_scheduling=settings.async_scheduling,
        threads=settings.threads or max(1, hardware.cores - 1),
        codec=codec,
        log_file=str(log),
        backend=settings.backend,
        options=dict(served.options),
    )
    kept = resolve_kv_cache_dtype(settings.kv_cache_dtype, model.info.shape)
    return with_limits(config, msgspec.structs.replace(share.limits, kv_cache_dtype=kept))


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
        configs: EngineConfigs,
        *,
        network: Messenger,
        outlets: KvOutlets,
        path_to: PathTo,
        on_change: Callable[[messages.EngineAdvert], None],
        settings: NodeSettings,
        record: Record = ignore,
    ) -> None:
        self._model = served.model
        self.share = served.share
        info, tuning = served.model.info, settings.tuning
        transfers = KvTransfers(model=info, outlets=outlets, messenger=network, tuning=tuning)
        self.worker = Worker(service=info.service, transfers=transfers, messenger=network, tuning=tuning, record=record)
        PromptSplitter(self.worker, model=info, messenger=network)  # lives as a handler of the network
        self._pool = PoolDesk(self.worker, limits=settings.routing.pool_limits, messenger=network)
        outlets.set_paths = self.worker.set_paths
        stages = Stages(
            service=info.service, messenger=network, path_to=path_to, random=secrets.token_bytes, tuning=tuning
        )
        self._own = network.peer_id
        self._tuning = tuning
        whole = Stage(peer=self._own, tp=self.share.tp, first_layer=0, last_layer=info.layers)
        self._alone = Place((whole,), 0) if self.share.layers == info.layers else None
        self._wanted = self._alone  # the place that the plan gives this box
        self._moves = trio.Event()  # set while requests finish before it takes that place
        served_by_vllm = settings.engine.backend == VLLM.name
        self._prefetch = Prefetch(self._fetch, self._tell_beside)
        self._supervisor = Supervisor(
            configs.most,
            worker=self.worker,
            stages=stages,
            fetch=self._prefetch.fetch,
            channel=settings.engine_channel,
            on_change=on_change,
            tuning=tuning,
            # Elsewhere the API process is started when somebody asks, which may be never.
            open_server=partial(
                open_fork_server,
                at=settings.engine_socket,
                serves_api=settings.http is not None and served_by_vllm,
            ),
        )
        self._supervisor.sweep = EngineSweep(self.worker.learner, settings.engine.sweep_s)
        self._supervisor.waits_for = describe_wait(served.share, info.layers)
        self._supervisor.count_room_beside = configs.room_beside
        if self._alone is not None:
            self._supervisor.config_of_stage = configs.of_stage

    async def run(self) -> None:
        """Keep the engine process running until cancelled. Raises EngineStartError or ModelError when the first start
        of a box that serves alone fails."""
        if self._alone is not None and self._wanted == self._alone:
            self._supervisor.assign(self._alone)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.worker.learner.run)
            nursery.start_soon(self._move)
            nursery.start_soon(self._prefetch.run)
            nursery.start_soon(self._supervisor.run)
            nursery.start_soon(self._supervisor.run_beside)

    async def wait_server(self) -> EngineStarter:
        """Wait for what forks this box's processes."""
        return await self._supervisor.wait_server()

    def follow(self, plan: Plan | None) -> None:
        """A plan may give this box other layers, or take them away, and says how much a step of a replica may compute.
        A box that holds the model serves alone unless the plan makes it a stage; before its part changes it finishes
        its requests, and takes no new ones."""
        ours = plan is not None and plan.service == self._model.info.service
        replica = plan.replica_of(self._own) if plan is not None and ours else None
        self.worker.limit_steps(step_limit(replica, self._own))
        self._pool.home = replica.phase if replica is not None else Phase.MIXED
        place = find_place(plan, self._own, self._model.info.service) or self._alone
        coming = plan.regrouping.next_group_of(self._own) if plan is not None and ours and plan.regrouping else None
        if coming is not None:
            self._supervisor.load_beside(place_in(coming, self._own))
        else:
            self._supervisor.keep_beside(place)
        self._wanted = place
        changes = place != self._supervisor.place
        if changes and self._alone is not None and not (self.worker.idle or self.worker.is_hung):
            self.worker.is_moving = True
            self._moves.set()
            self._prefetch.want(place)
        else:
            self._take_place()

    def _tell_beside(self, detail: str) -> None:
        self._supervisor.tell_beside(detail)

    async def _move(self) -> None:
        """Take another place when all requests have ended here, or have had their time: they go on elsewhere."""
        while True:
            await self._moves.wait()
            until = trio.current_time() + self._tuning.move_s
            migrate_at = until - self._tuning.migrate_before_s(self._tuning.move_s)
            while self.worker.is_moving and not self.worker.idle:
                if trio.current_time() >= until:
                    break
                if trio.current_time() >= migrate_at:
                    migrate_at = inf
                    self.worker.migrate()
                await trio.sleep(MOVE_POLL_S)
            self._moves = trio.Event()
            self._take_place()

    def _take_place(self) -> None:
        self.worker.is_moving = False
        runs_on = self._supervisor.assign(self._wanted)
        self._prefetch.want(self._wanted if runs_on else None)

    async def _fetch(self, place: Place, say: Callable[[str], None]) -> Path:
        """Download what the place needs and is not here. Raises ModelError."""
        first, last = place.stage.first_layer, place.stage.last_layer
        return await run_download(lambda report: self._model.fetch(first, last, report), say)
