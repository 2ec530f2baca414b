"""The process of a stage that is not the head: its workers, as one, do what the head calls them to."""

from __future__ import annotations

import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast, final

import vllm
from vllm.platforms import current_platform

from ....kvtransport.errors import TransferError
from ....kvtransport.wire.pipe import Pipe, accept_pipe
from ....kvtransport.wire.sockets import read_link_hello
from ....kvtransport.wire.tickets import LinkTicket
from ..kv.switchboard import Switchboard
from ..mailbox import Outbox
from ..process import StartError
from ..protocol import (
    AbortTransfer,
    CloseLink,
    EngineConfig,
    EngineFailed,
    EngineReady,
    PipeEnd,
    SetLinkPaths,
    Stop,
    ToEngine,
)
from ..stage_pipes import PipeConnections, PipelineError, open_pipes
from ..vllm.weights import LOAD_FORMAT, telling_weights
from .call_server import CallServer
from .executor import PipelineExecutor
from .pipes import ActivationsOutput, OnLost, PipeInput, StageRank
from .remote import RemoteWorker
from .scheduler import PipelineScheduler
from .stage_workers import ForkedWorker, StageWorkers
from .vocabulary import CODEC, JoinStage, LoadStage
from .worker import StageWorker, worker_class

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..vllm.device import DeviceKind

_log = logging.getLogger(__name__)

LOST_STATUS = 3  # of a process that has told its agent why


def check_pipeline(config: EngineConfig) -> None:
    """Raises PipelineError for a place in a pipeline that this engine cannot take."""
    stages = len(config.partition)
    if not 0 <= config.stage < stages:
        raise PipelineError(f"stage {config.stage} of {stages}: there is no such stage")
    wanted = set()
    if config.stage == 0:
        wanted |= {("control", stage) for stage in range(1, stages)}
    else:
        wanted |= {("control", 0), ("data", config.stage - 1)}
    if config.stage < stages - 1:
        wanted.add(("data", config.stage + 1))
    if {(end.kind, end.stage) for end in config.pipes} != wanted or len(config.pipes) != len(wanted):
        names = ", ".join(f"{kind} {stage}" for kind, stage in sorted(wanted))
        raise PipelineError(f"stage {config.stage} of {stages} needs these pipes: {names}")


def pipeline_arguments(config: EngineConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Environment and `EngineArgs` fields of one stage; all but `tp` are the same for all."""
    environment = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, config.partition))}
    arguments = {
        "pipeline_parallel_size": len(config.partition),
        "tensor_parallel_size": config.tp,
        "distributed_executor_backend": PipelineExecutor,
        "worker_cls": worker_class(),
        "load_format": LOAD_FORMAT,
        "scheduler_cls": PipelineScheduler,
    }
    return environment, arguments


def join_pipeline(
    config: EngineConfig, arrivals: PipeConnections, forked: Sequence[ForkedWorker], on_lost: OnLost
) -> tuple[dict[PipeEnd, Pipe], StageWorkers]:
    """Open the pipes of this stage, set its `StageRank`, and greet its other workers. `on_lost` is called by threads,
    and may be more than once. On the head, vLLM's engine may be built afterwards. Raises PipelineError."""
    settings = config.pipeline
    pipes: dict[PipeEnd, Pipe] = {}
    losing = threading.Lock()

    def lose(error: PipelineError) -> None:
        with losing:  # what follows from the first loss is no news: who notices that waits until the first is told
            for pipe in pipes.values():  # so that the others hear why
                pipe.close(str(error))
            for worker in forked:
                worker.end()
            on_lost(error)

    try:  # before the other stages, which may keep us waiting for long
        workers = StageWorkers([worker.greet(config.stage, lose, settings) for worker in forked], settings)
    except TransferError as error:
        raise PipelineError(f"a worker of stage {config.stage} does not start: {error}") from error
    pipes.update(open_pipes(config.pipes, arrivals, settings))

    before: PipeInput | None = None
    behind: ActivationsOutput | None = None
    for end, pipe in pipes.items():
        if end.kind == "data" and end.stage < config.stage:
            before = PipeInput(pipe, f"stage {end.stage}", lose, settings)
        elif end.kind == "data":
            behind = ActivationsOutput(pipe, end.stage, lose, settings)
    StageWorker.stage_rank = StageRank(config.stage, config.partition, before, behind, config.tp, settings=settings)
    if config.stage == 0:
        controls = sorted((end.stage, pipe) for end, pipe in pipes.items() if end.kind == "control")
        PipelineExecutor.workers = workers
        PipelineExecutor.stages = tuple(
            RemoteWorker(f"stage {stage}", pipe, lose, settings) for stage, pipe in controls
        )
    return pipes, workers


def end_process(outbox: Outbox) -> OnLost:
    """What to do on the loss of a stage: tell the agent why, and end this process, whatever its threads wait for.
    Nobody returns from it; who comes second waits for the end."""
    first = threading.Lock()

    def end(error: PipelineError) -> NoReturn:
        first.acquire()
        outbox.send(EngineFailed(reason=str(error)))
        outbox.flush()
        os._exit(LOST_STATUS)

    return end


@final
class StageProgram:
    """See `process.EngineProgram`: a stage that is not the head. What goes wrong once it is ready, both its agent and
    the head are told. `make_config` is given the name of this box's switchboard."""

    def __init__(
        self,
        config: EngineConfig,
        outbox: Outbox,
        forked: Sequence[ForkedWorker],
        make_config: Callable[[str], VllmConfig],
    ) -> None:
        self._config = config
        self._outbox = outbox
        self._forked = forked
        self._make_config = make_config
        self._switchboard = Switchboard(config.tp, outbox.send, config.transfers)
        self._connections = PipeConnections(config.pipes)

    def take(self, message: ToEngine) -> None:
        """What this box's own agent wants: requests are the head's business, the transfers of this stage are not."""
        match message:
            case Stop():
                self.close()
                os._exit(0)
            case SetLinkPaths() | CloseLink() | AbortTransfer():
                self._switchboard.carry_out(message)
            case _:
                _log.warning("a stage that is not the head was sent %s", type(message).__name__)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """A pipe from another stage, or a connection of a KV link."""
        if not self._connections.put(hello, connection):
            self._switchboard.attach(hello, connection)

    def load(self) -> Self:
        """The layers are loaded when the head says so. Raises StartError for a place that cannot be taken."""
        try:
            check_pipeline(self._config)
        except PipelineError as error:
            raise StartError(str(error)) from error
        return self

    def ready(self, load_s: float) -> EngineReady:
        """Said before anything is loaded: the process can be dialled from now on. What only the head knows is 0."""
        kind = cast("DeviceKind", current_platform.device_type)
        return EngineReady(
            pid=os.getpid(),
            engine=f"vllm{'-cpu' if kind == 'cpu' else ''} {vllm.__version__}",
            device=kind,
            dtype=self._config.dtype,
            layers=self._config.partition[self._config.stage],
            max_model_len=self._config.max_model_len or 0,
        )

    def serve(self) -> None:
        """Do what the head says until it is lost, which ends this process."""
        on_lost = end_process(self._outbox)
        try:
            pipes, workers = join_pipeline(self._config, self._connections, self._forked, on_lost)
            name = self._switchboard.name
            with telling_weights(self._outbox.tell_weights):
                serve_stage(self._config, pipes, lambda hello: _load(workers, hello, lambda: self._make_config(name)))
        except PipelineError as error:
            self.close()
            on_lost(error)

    def close(self) -> None:
        """End the other workers of this stage."""
        for worker in self._forked:
            worker.end()


def serve_stage(config: EngineConfig, pipes: dict[PipeEnd, Pipe], load: Callable[[LoadStage], StageWorkers]) -> None:
    """Do what the head says until it is gone, which raises StageLost. Raises PipelineError when it is this stage that
    cannot go on; the head has been told by then. Both are all that ends it."""
    control = next(pipe for end, pipe in pipes.items() if end.kind == "control")
    reason = f"stage {config.stage} has ended"
    try:
        CallServer(control, load, settings=config.pipeline).serve()
    except PipelineError as error:  # whichever pipe is heard first tells the same
        reason = str(error)
        raise
    finally:
        for pipe in pipes.values():
            pipe.close(reason)


def _load(workers: StageWorkers, hello: LoadStage, make_config: Callable[[], VllmConfig]) -> StageWorkers:
    """Load this stage's layers."""
    place = StageWorker.stage_rank
    assert place is not None
    if hello.vllm != vllm.__version__ or hello.schema != CODEC.schema:
        raise PipelineError(
            f"the head has vLLM {hello.vllm}, stage {place.stage} {vllm.__version__}: all boxes of a replica need "
            "the same vLLM and the same p2pserve"
        )
    if tuple(hello.partition) != place.partition:
        raise PipelineError(f"the head cuts the model {hello.partition}, stage {place.stage} {place.partition}")
    workers.load(make_config())
    return workers


def run_forked_worker(
    config: EngineConfig,
    make_config: Callable[[str], VllmConfig],
    rank: int,
    line: socket.socket,
    ticket: LinkTicket,
) -> NoReturn:
    """The main program of a stage's other workers: do what the first says until it is gone."""

    def end(error: PipelineError | TransferError) -> NoReturn:
        os._exit(LOST_STATUS)

    def load(joining: JoinStage) -> StageWorkers:
        workers = StageWorkers()
        workers.join(make_config(joining.switchboard), joining.meeting)
        return workers

    StageWorker.stage_rank = StageRank(
        config.stage, config.partition, tp=config.tp, rank=rank, settings=config.pipeline
    )
    greeting_s = config.pipeline.greeting_s
    try:
        pipe = accept_pipe(ticket, read_link_hello(line, greeting_s), line, timeout=greeting_s)
        CallServer(pipe, load, end, config.pipeline).serve()
    except (TransferError, PipelineError) as error:  # the first worker is gone, or has been told
        end(error)
    finally:
        traceback.print_exc()  # nobody else would: the process ends here
        os._exit(1)
