"""The process of a stage that is not the head: its workers, as one, do what the head calls them to."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import vllm
from vllm.platforms import current_platform

from ....kvtransport.errors import TransferError
from ....kvtransport.wire.pipe import Pipe, accept_pipe
from ....kvtransport.wire.sockets import read_link_hello
from ....kvtransport.wire.tickets import LinkTicket
from ..kv.switchboard import Switchboard
from ..protocol import (
    AbortTransfer,
    CloseLink,
    EngineConfig,
    EngineFailed,
    Message,
    PipeEnd,
    Ready,
    SetPaths,
    Stop,
    ToEngine,
)
from ..vllm.weights import LOAD_FORMAT
from .crew import Crew, Mate
from .executor import PipelineExecutor
from .pipes import Arrivals, Inflow, OnLost, Outflow, PipelineError, Seat, open_pipes
from .remote import RemoteWorker
from .scheduler import PipelineScheduler
from .servant import Servant
from .vocabulary import CODEC, Hello, Joining
from .worker import StageWorker, worker_class

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..vllm.device import DeviceKind

_log = logging.getLogger(__name__)

MATE_GREETING_S = 60.0
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
    """Environment and fields of `EngineArgs` for one stage of a replica that spans boxes; all but `tp` are the same for
    all."""
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


def take_seat(
    config: EngineConfig, arrivals: Arrivals, mates: Sequence[Mate], on_lost: OnLost
) -> tuple[dict[PipeEnd, Pipe], Crew]:
    """Open the pipes of this stage, take its seat, and gather its crew. `on_lost` is called by threads, and may be more
    than once. On the head, vLLM's engine may be built afterwards. Raises PipelineError."""
    pipes: dict[PipeEnd, Pipe] = {}

    losing = threading.Lock()

    def lose(error: PipelineError) -> None:
        with losing:  # what follows from the first loss is no news: who notices that waits until the first is told
            for pipe in pipes.values():  # so that the others hear why
                pipe.close(str(error))
            for mate in mates:
                mate.end()
            on_lost(error)

    try:  # before the other stages, which may keep us waiting for long
        crew = Crew([mate.greet(config.stage, lose) for mate in mates])
    except TransferError as error:
        raise PipelineError(f"a worker of stage {config.stage} does not start: {error}") from error
    pipes.update(open_pipes(config.pipes, arrivals))

    before: Inflow | None = None
    behind: Outflow | None = None
    for end, pipe in pipes.items():
        if end.kind == "data" and end.stage < config.stage:
            before = Inflow(pipe, f"stage {end.stage}", lose)
        elif end.kind == "data":
            behind = Outflow(pipe, end.stage, lose)
    StageWorker.seat = Seat(config.stage, config.partition, before, behind, config.tp)
    if config.stage == 0:
        controls = sorted((end.stage, pipe) for end, pipe in pipes.items() if end.kind == "control")
        PipelineExecutor.crew = crew
        PipelineExecutor.stages = tuple(RemoteWorker(f"stage {stage}", pipe, lose) for stage, pipe in controls)
    return pipes, crew


class Outbox(Protocol):
    """Messages to the agent."""

    def send(self, message: Message) -> None:
        """Queue one."""

    def flush(self) -> None:
        """Wait until all of them have left."""


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


def run_stage(
    config: EngineConfig,
    outbox: Outbox,
    inbox: queue.SimpleQueue[ToEngine],
    switchboard: Switchboard,
    arrivals: Arrivals,
    mates: Sequence[Mate],
    make_config: Callable[[str], VllmConfig],
) -> int:
    """The main program of a stage's process. `make_config` is given the switchboard's name. Returns the exit status.
    Raises PipelineError for a place that it cannot take; what happens later, the agent and the head are told."""
    check_pipeline(config)
    threading.Thread(target=_obey, args=(inbox, switchboard, mates), name="agent-orders", daemon=True).start()
    outbox.send(_ready(config))
    on_lost = end_process(outbox)
    try:
        pipes, crew = take_seat(config, arrivals, mates, on_lost)
        serve_stage(config, pipes, lambda hello: _load(crew, hello, lambda: make_config(switchboard.name)))
    except PipelineError as error:
        for mate in mates:
            mate.end()
        on_lost(error)
    return LOST_STATUS


def _obey(inbox: queue.SimpleQueue[ToEngine], switchboard: Switchboard, mates: Sequence[Mate]) -> None:
    """What this box's own agent wants: the requests are the head's business, the transfers of this stage are not."""
    while True:
        message = inbox.get()
        match message:
            case Stop():
                for mate in mates:
                    mate.end()
                os._exit(0)
            case SetPaths() | CloseLink() | AbortTransfer():
                switchboard.carry_out(message)
            case _:
                _log.warning("a stage that is not the head was sent %s", type(message).__name__)


def _ready(config: EngineConfig) -> Ready:
    """Said before anything is loaded: the process can be dialled from now on. What only the head knows is 0."""
    kind = cast("DeviceKind", current_platform.device_type)
    return Ready(
        pid=os.getpid(),
        engine=f"vllm{'-cpu' if kind == 'cpu' else ''} {vllm.__version__}",
        device=kind,
        dtype=config.dtype,
        layers=config.partition[config.stage],
        kv_heads=0,
        head_dim=0,
        vocabulary=0,
        max_model_len=config.max_model_len or 0,
        kv_tokens=0,
        eos_tokens=(),
        load_s=0.0,
        tflops=0.0,
        memory_gbps=0.0,
    )


def serve_stage(config: EngineConfig, pipes: dict[PipeEnd, Pipe], load: Callable[[Hello], Crew]) -> None:
    """Do what the head says until it is gone, which raises StageLost. Raises PipelineError when it is this stage that
    cannot go on; the head has been told by then. Both are all that ends it."""
    control = next(pipe for end, pipe in pipes.items() if end.kind == "control")
    reason = f"stage {config.stage} has ended"
    try:
        Servant(control, load).serve()
    except PipelineError as error:  # whichever pipe is heard first tells the same
        reason = str(error)
        raise
    finally:
        for pipe in pipes.values():
            pipe.close(reason)


def _load(crew: Crew, hello: Hello, make_config: Callable[[], VllmConfig]) -> Crew:
    """Load this stage's layers."""
    seat = StageWorker.seat
    assert seat is not None
    if hello.vllm != vllm.__version__ or hello.schema != CODEC.schema:
        raise PipelineError(
            f"the head has vLLM {hello.vllm}, stage {seat.stage} {vllm.__version__}: all boxes of a replica need "
            "the same vLLM and the same p2pserve"
        )
    if tuple(hello.partition) != seat.partition:
        raise PipelineError(f"the head cuts the model {hello.partition}, stage {seat.stage} {seat.partition}")
    crew.load(make_config())
    return crew


def run_mate(
    config: EngineConfig,
    make_config: Callable[[str], VllmConfig],
    rank: int,
    line: socket.socket,
    ticket: LinkTicket,
) -> NoReturn:
    """The main program of a stage's other workers: do what the first says until it is gone."""

    def end(error: PipelineError | TransferError) -> NoReturn:
        os._exit(LOST_STATUS)

    def load(joining: Joining) -> Crew:
        crew = Crew()
        crew.join(make_config(joining.switchboard), joining.meeting)
        return crew

    StageWorker.seat = Seat(config.stage, config.partition, tp=config.tp, rank=rank)
    try:
        pipe = accept_pipe(ticket, read_link_hello(line, MATE_GREETING_S), line, timeout=MATE_GREETING_S)
        Servant(pipe, load, end).serve()
    except (TransferError, PipelineError) as error:  # the first worker is gone, or has been told
        end(error)
    finally:
        traceback.print_exc()  # nobody else would: the process ends here
        os._exit(1)
