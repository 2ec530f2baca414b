"""vLLM's executor on the head of a pipeline: it calls its own worker in place, other stages over
pipes.

All stages get calls in order. The head's part runs on the calling thread, while the others compute
earlier batches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.executor.abstract import Executor

from ..stage_pipes import PipelineError
from .pipes import WhileWaiting, do_nothing
from .remote import Answers, RemoteWorker, call_all
from .stage_workers import StageWorkers
from .vocabulary import CALLABLE, CODEC, LoadStage
from .worker import StageWorker

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.executor.abstract import FailureCallback
    from vllm.v1.outputs import ModelRunnerOutput


class JoinedAnswers(Future[Any]):
    """One result of the answers of all workers, joined by the thread that asks for it."""

    def __init__(
        self,
        mine: Any,
        others: Answers,
        join: Callable[[list[Any]], Any],
        meanwhile: WhileWaiting = do_nothing,
        limit_s: float | None = None,
    ) -> None:
        """`limit_s`: how long others may take where vLLM sets no limit, as it sets none for a batch."""
        super().__init__()
        self._limit_s = limit_s
        self._meanwhile = meanwhile
        self._mine = mine
        self._others = others
        self._join = join

    def result(self, timeout: float | None = None) -> Any:
        """Raises StageLost."""
        if not self.done():
            others = (stage.wait(each, timeout or self._limit_s, self._meanwhile) for stage, each in self._others)
            self.set_result(self._join([self._mine, *others]))
        return super().result()


class PipelineExecutor(Executor):
    """`workers` and the other `stages` are class attributes: vLLM constructs the bare class."""

    supports_pp = True
    workers: ClassVar[StageWorkers] = StageWorkers()
    stages: ClassVar[tuple[RemoteWorker, ...]] = ()
    _sampling: Answers = ()  # what the other stages will answer to the batch that was told last
    _samples_apart: bool = False  # and whether they wait to be told how to sample it

    def _init_executor(self) -> None:
        stage_rank = StageWorker.stage_rank
        assert stage_rank is not None
        hello = LoadStage(vllm.__version__, CODEC.schema, stage_rank.partition)
        loading = call_all(self.stages, "load", hello)
        self.workers.load(self.vllm_config)
        merges = JoinedAnswers(False, loading, lambda answers: answers[1:]).result()
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
        others = call_all(self.stages, method, *args, **(kwargs or {}))
        joined = JoinedAnswers(self.workers.call(method, args, kwargs or {}), others, list)
        return joined if non_block else joined.result(timeout)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Run a batch. With tokens in it the outcome is that of `sample_tokens`, which follows at once."""
        # What may come next in an answer that follows a grammar is known once the batch before has been sampled.
        tokens, follows = scheduler_output.num_scheduled_tokens, scheduler_output.has_structured_output_requests
        self._samples_apart = bool(tokens and follows)
        method = "compute_batch" if self._samples_apart else "run_batch"
        others = call_all((*self.workers.remotes, *self.stages), method, scheduler_output)
        mine = self.workers.worker.execute_model(scheduler_output)
        if scheduler_output.num_scheduled_tokens:
            self._sampling, others = others, ()
        joined = self._join_batch(mine, others)
        return joined if non_block else joined.result()

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """What the last stage has sampled, and what all connectors have to say. The other stages sample without being
        asked, but where a grammar has a say in it."""
        others, self._sampling = self._sampling, ()
        if self._samples_apart:  # that they have computed says nothing, and whatever they say comes in order
            others = call_all((*self.workers.remotes, *self.stages), "sample_batch", grammar_output)
        joined = self._join_batch(self.workers.worker.sample_tokens(grammar_output), others)
        return joined if non_block else joined.result()

    def check_health(self) -> None:
        """Whoever is lost has said so before anybody asks."""

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """The process that owns the pipes is told of a loss by them."""

    def shutdown(self) -> None:
        """End the other stages, and what this one holds."""
        for stage in self.stages:
            stage.close("the head has stopped")
        self.workers.close()

    def init_kv_output_aggregator(self, connector: KVConnectorBase) -> None:
        """A transfer has ended when it has for all that report to `_output`: our own workers, and each other stage."""
        self.kv_output_aggregator = KVOutputAggregator(1 + len(self.workers.remotes) + len(self.stages))

    def _join_batch(self, mine: Any, others: Answers) -> JoinedAnswers:
        return JoinedAnswers(mine, others, self._output, self.workers.worker.warm_up, self.workers.batch_s)

    def _output(self, outputs: list[ModelRunnerOutput | None]) -> ModelRunnerOutput | None:
        last = len(outputs) - 1
        if self.kv_output_aggregator is None or outputs[last] is None:
            return outputs[last]
        return self.kv_output_aggregator.aggregate(outputs, output_rank=last)
