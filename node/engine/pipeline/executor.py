"""vLLM's executor on the head of a pipeline: it calls its own worker in place, and those of other stages over pipes.

A call goes to all stages, in the order of calls. Its own part runs on the thread that calls, as in an engine of one
process: while the head computes its layers for one batch, the other stages compute theirs for those before.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, final

import vllm
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import run_method

from ....kvtransport.errors import TransferError
from ....kvtransport.pipe import Pipe
from .codec import CodecError
from .pipes import OnLost, PipelineError, Reader, StageLost
from .vocabulary import CALLABLE, CODEC, Answer, Call, Failed, Hello
from .worker import StageWorker, make_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.executor.abstract import FailureCallback
    from vllm.v1.outputs import ModelRunnerOutput

ANSWER_S = 300.0
"""How long a stage that is alive may take for a batch. Loading and compiling are bounded by its liveness alone."""


@final
class RemoteStage:
    """The head's end of a control pipe: calls go out, and their answers come back in the same order."""

    def __init__(self, stage: int, pipe: Pipe, on_lost: OnLost) -> None:
        self.stage = stage
        self._pipe = pipe
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, Future[Any]]] = deque()
        self._lost: StageLost | None = None
        self._reader = Reader(pipe, f"answers-of-{stage}", self._on_message, self._lose)

    def __repr__(self) -> str:
        return f"<RemoteStage {self.stage} pending={len(self._pending)} {self._reader}>"

    def say(self, number: int, buffers: Sequence[bytes | bytearray | memoryview]) -> Future[Any]:
        """Send a call that `CODEC` has encoded."""
        future: Future[Any] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._pending.append((number, future))
        try:
            self._pipe.send(buffers)
        except TransferError as error:
            self._lose(str(error))
        return future

    def wait(self, answer: Future[Any], timeout: float | None) -> Any:
        """For the answer to a call. Raises StageLost; a stage that takes longer is given up."""
        try:
            return answer.result(timeout)
        except concurrent.futures.TimeoutError:
            self._lose(f"it is alive, but has not answered for {timeout:g} s")
            return answer.result()

    def close(self, reason: str) -> None:
        """Say good-bye; the stage ends."""
        self._pipe.close(reason)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, Failed):
            self._lose(message.reason)
            return
        with self._lock:
            if not isinstance(message, Answer) or not self._pending or self._pending[0][0] != message.number:
                raise CodecError(f"a {type(message).__name__} that answers nothing")
            _, future = self._pending.popleft()
        future.set_result(message.result)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = StageLost(f"stage {self.stage} is lost: {reason}")
            pending, self._pending = self._pending, deque()
        self._on_lost(self._lost)  # first: it ends the process with the reason, before anybody trips over the loss
        for _, future in pending:
            future.set_exception(self._lost)


Answers = list[tuple[RemoteStage, Future[Any]]]


class Joined(Future[Any]):
    """One result of the answers of all stages, joined by the thread that asks for it."""

    def __init__(self, mine: Any, others: Answers, join: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self._mine = mine
        self._others = others
        self._join = join

    def result(self, timeout: float | None = None) -> Any:
        """Raises StageLost."""
        if not self.done():
            self.set_result(self._join([self._mine, *(stage.wait(each, timeout) for stage, each in self._others)]))
        return super().result()


class JoinedBatch(Joined):
    """The same for a batch, which no stage may take for ever to compute. vLLM sets no limit of its own."""

    def result(self, timeout: float | None = None) -> Any:
        """Raises StageLost."""
        return super().result(timeout or ANSWER_S)


class PipelineExecutor(Executor):
    """Made by vLLM from its class alone; `stages` is set once, before that."""

    supports_pp = True
    stages: ClassVar[tuple[RemoteStage, ...]] = ()

    def _init_executor(self) -> None:
        self._number = 0
        self._sampling: Answers = []  # what the other stages will answer to the batch that was told last
        seat = StageWorker.seat
        assert seat is not None
        hello = Hello(vllm.__version__, CODEC.schema, seat.partition)
        loading = self._tell("load", hello)
        self._worker = make_worker(self.vllm_config)
        merges = Joined(False, loading, lambda answers: answers[1:]).result()
        self.collective_rpc("merge_activations", args=(merges,))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Results of all stages, the head's first. Raises PipelineError for what other stages cannot be asked."""
        if not isinstance(method, str) or method not in CALLABLE:
            raise PipelineError(f"{method} is nothing that the stages of a pipeline are asked to do")
        others = self._tell(method, *args, **(kwargs or {}))
        joined = Joined(run_method(self._worker, method, args, kwargs or {}), others, list)
        return joined if non_block else joined.result(timeout)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run a batch. With tokens in it the outcome is that of `sample_tokens`, which follows at once."""
        others = self._tell("run_batch", scheduler_output)
        mine = self._worker.execute_model(scheduler_output)
        if scheduler_output.num_scheduled_tokens:
            self._sampling, others = others, []
        joined = JoinedBatch(mine, others, self._output)
        return joined if non_block else joined.result()

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """What the last stage has sampled, and what all connectors have to say. The other stages sample without being
        asked. Raises PipelineError for answers that must follow a grammar, of which they know nothing."""
        if grammar_output is not None:
            raise PipelineError("a replica of several stages cannot make an answer follow a grammar")
        others, self._sampling = self._sampling, []
        joined = JoinedBatch(self._worker.sample_tokens(None), others, self._output)
        return joined if non_block else joined.result()

    def check_health(self) -> None:
        """Whoever is lost has said so before anybody asks."""

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """The process that owns the pipes is told of a loss by them."""

    def shutdown(self) -> None:
        """End the other stages, and what this one holds."""
        for stage in self.stages:
            stage.close("the head has stopped")
        self._worker.shutdown()

    def _output(self, outputs: list[ModelRunnerOutput | None]) -> ModelRunnerOutput | None:
        last = len(outputs) - 1
        if self.kv_output_aggregator is None or outputs[last] is None:
            return outputs[last]
        return self.kv_output_aggregator.aggregate(outputs, output_rank=last)

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> Answers:
        """One call to all other stages, encoded once."""
        self._number += 1
        buffers = CODEC.encode(Call(self._number, method, args, kwargs))
        return [(stage, stage.say(self._number, buffers)) for stage in self.stages]
