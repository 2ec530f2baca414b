"""The process of a stage that is not the head: one worker of vLLM's, which does what the head calls it to."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast, final

import vllm
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput

from ....kvtransport.errors import TransferError
from ....kvtransport.pipe import Pipe
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
from ..weights import LOAD_FORMAT
from .executor import PipelineExecutor, RemoteStage
from .pipes import Arrivals, Inflow, OnLost, Outflow, PipelineError, Reader, StageLost, open_pipes
from .scheduler import PipelineScheduler
from .vocabulary import CALLABLE, CODEC, Answer, Call, Failed, Hello
from .worker import Seat, StageWorker, make_worker, worker_class

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..device import DeviceKind

_log = logging.getLogger(__name__)

MAX_REASON = 400  # characters of an error that are shown; the log has all of it
LOST_STATUS = 3  # of a process that has told its agent why


def check_pipeline(config: EngineConfig) -> None:
    """Raises PipelineError for a place in a pipeline that this engine cannot take."""
    stages = len(config.partition)
    if config.tp > 1:
        raise PipelineError(f"a replica of {stages} boxes uses one GPU of each; tp is {config.tp}")
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
    """Environment and fields of `EngineArgs` for one stage of a replica that spans boxes; the same for all."""
    environment = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, config.partition))}
    arguments = {
        "pipeline_parallel_size": len(config.partition),
        "distributed_executor_backend": PipelineExecutor,
        "worker_cls": worker_class(),
        "load_format": LOAD_FORMAT,
        "scheduler_cls": PipelineScheduler,
    }
    return environment, arguments


def take_seat(config: EngineConfig, arrivals: Arrivals, on_lost: OnLost) -> dict[PipeEnd, Pipe]:
    """Open the pipes of this stage and take its seat. `on_lost` is called by threads, and may be more than once.

    On the head, vLLM's engine may be built afterwards. Raises PipelineError.
    """
    pipes = open_pipes(config.pipes, arrivals)

    losing = threading.Lock()

    def lose(error: PipelineError) -> None:
        with losing:  # what follows from the first loss is no news: who notices that waits until the first is told
            for pipe in pipes.values():  # so that the others hear why
                pipe.close(str(error))
            on_lost(error)

    before: Inflow | None = None
    behind: Outflow | None = None
    for end, pipe in pipes.items():
        if end.kind == "data" and end.stage < config.stage:
            before = Inflow(pipe, end.stage, lose)
        elif end.kind == "data":
            behind = Outflow(pipe, end.stage, lose)
    StageWorker.seat = Seat(config.stage, config.partition, before, behind)
    if config.stage == 0:
        controls = sorted((end.stage, pipe) for end, pipe in pipes.items() if end.kind == "control")
        PipelineExecutor.stages = tuple(RemoteStage(stage, pipe, lose) for stage, pipe in controls)
    return pipes


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
    make_config: Callable[[], VllmConfig],
) -> int:
    """The main program of a stage's process. Returns the exit status. Raises PipelineError for a place that it cannot
    take; what happens later, the agent and the head are told."""
    check_pipeline(config)
    threading.Thread(target=_obey, args=(inbox, switchboard), name="agent-orders", daemon=True).start()
    outbox.send(_ready(config))
    on_lost = end_process(outbox)
    try:
        serve_stage(config, arrivals, make_config, on_lost)
    except PipelineError as error:
        on_lost(error)
    return LOST_STATUS


def _obey(inbox: queue.SimpleQueue[ToEngine], switchboard: Switchboard) -> None:
    """What this box's own agent wants: the requests are the head's business, the transfers of this stage are not."""
    while True:
        message = inbox.get()
        match message:
            case Stop():
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


def serve_stage(
    config: EngineConfig, arrivals: Arrivals, make_config: Callable[[], VllmConfig], on_lost: OnLost
) -> None:
    """Do what the head says until it is gone, which raises StageLost. Raises PipelineError when it is this stage that
    cannot go on; the head has been told by then. Both are all that ends it."""
    pipes = take_seat(config, arrivals, on_lost)
    control = next(pipe for end, pipe in pipes.items() if end.kind == "control")
    reason = f"stage {config.stage} has ended"
    try:
        Servant(control, make_config).serve()
    except PipelineError as error:  # whichever pipe is heard first tells the same
        reason = str(error)
        raise
    finally:
        for pipe in pipes.values():
            pipe.close(reason)


@final
class Servant:
    """Carries out the head's calls on the thread that calls `serve`."""

    def __init__(self, control: Pipe, make_config: Callable[[], VllmConfig]) -> None:
        self._control = control
        self._make_config = make_config
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._worker: Any = None
        self._reader = Reader(control, "calls", self._calls.put, lambda reason: self._calls.put(StageLost(reason)))

    def __repr__(self) -> str:
        return f"<Servant {'loaded' if self._worker else 'empty'} {self._reader}>"

    def serve(self) -> None:
        """Until the head is lost or a call fails."""
        while True:
            call = self._calls.get()
            if isinstance(call, StageLost):
                raise StageLost(f"the head is lost: {call}")
            try:
                result = self._carry_out(call)
                self._control.send(CODEC.encode(Answer(call.number, result)))
            except TransferError as error:
                raise StageLost(f"the head is lost: {error}") from error
            except Exception as error:
                reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
                _log.exception("a call of the head failed")
                self._control.send(CODEC.encode(Failed(reason)))
                raise PipelineError(reason) from error

    def _carry_out(self, call: Any) -> Any:
        if not isinstance(call, Call):
            raise PipelineError(f"a {type(call).__name__} where a call belongs")
        if call.method == "load":
            return self._load(*call.args)
        if call.method not in CALLABLE or self._worker is None:
            raise PipelineError(f"{call.method[:64]!r} is nothing that a stage can be asked to do now")
        result = getattr(self._worker, call.method)(*call.args, **call.kwargs)
        return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result

    def _load(self, hello: Hello) -> bool:
        """Load this stage's layers. Returns whether it takes merged activations."""
        seat = StageWorker.seat
        assert seat is not None
        if hello.vllm != vllm.__version__ or hello.schema != CODEC.schema:
            raise PipelineError(
                f"the head has vLLM {hello.vllm}, stage {seat.stage} {vllm.__version__}: all boxes of a replica need "
                "the same vLLM and the same p2pserve"
            )
        if tuple(hello.partition) != seat.partition:
            raise PipelineError(f"the head cuts the model {hello.partition}, stage {seat.stage} {seat.partition}")
        self._worker = make_worker(self._make_config())
        return bool(self._worker.merges())
