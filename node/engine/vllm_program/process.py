"""vLLM's engine process: the program that its agent talks to. One thread owns the `LLMEngine` and
runs the loop (`process`); KV connections go through a switchboard to the workers. With tensor
parallelism those are processes, which end with this one."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, final

from ....coordinator.prefixes.held import choose_stride
from ...box.heap import return_freed_memory
from .. import protocol
from ..kv.connector import P2PConnector
from ..kv.switchboard import Switchboard
from ..mailbox import Outbox, await_message
from ..pipeline.stage import StageProgram, check_pipeline, end_process, join_pipeline, run_forked_worker
from ..pipeline.stage_workers import ForkedWorker, fork_workers
from ..process import AgentSockets, StartError, explain, serve_agent
from ..scratch import own_temporary_folder
from ..stage_pipes import PipeConnections, PipelineError
from ..stats import StepMeter, StepReporter
from ..transfers.idle import IdleSteps
from ..vllm.device import DeviceKind, device_of
from ..vllm.layout import head_dim, kv_heads
from ..vllm.speed import measure, measure_worker
from ..vllm.synchronisations import record_if_asked
from ..vllm.weights import telling_weights
from .arguments import build_engine, device_kind, eos_tokens, extra_arguments, stage_config
from .constraints import BACKEND, ConstraintSupport
from .held_blocks import HeldBlockEvents
from .logprobs import prompt_top_tokens, top_tokens
from .prompt_limits import PromptLimits
from .sampling import structured_outputs, to_vllm

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

REST_S: Final = 1.0  # without a request, until memory goes back: that takes some 10 ms, and so does getting it again


def run_engine(config: protocol.EngineConfig, sockets: AgentSockets) -> int:
    """Load the model, or one stage of it, and serve until told to stop. Returns the exit status."""
    record_if_asked()
    make_config = partial(stage_config, config)
    forked: tuple[ForkedWorker, ...] = ()
    if config.partition:
        # Before this process has a second thread: a fork would inherit its locks, and not the thread that holds them.
        forked = fork_workers(config.tp - 1, partial(run_forked_worker, config, make_config), sockets)
    if config.stage > 0:
        return serve_agent(sockets, lambda outbox: StageProgram(config, outbox, forked, make_config))
    return serve_agent(sockets, lambda outbox: VllmProgram(config, outbox, forked))


@final
class VllmProgram:
    """See `process.EngineProgram`: an engine on one box, or the head of a replica that spans several."""

    def __init__(
        self,
        config: protocol.EngineConfig,
        outbox: Outbox,
        forked: tuple[ForkedWorker, ...],
        news: threading.Event | None = None,
    ) -> None:
        """`news`: of a process of several engines, to be set when there is something for its main thread."""
        self._config = config
        self._outbox = outbox
        self._forked = forked
        self._inbox: queue.SimpleQueue[protocol.ToEngine] = queue.SimpleQueue()
        self._switchboard = Switchboard(config.tp, outbox.send, config.transfers)
        if news is not None:
            self._switchboard.news = news
        self._connections = PipeConnections(config.pipes)

    def take(self, message: protocol.ToEngine) -> None:
        """By the thread that reads messages; wakes a loop that waits for KV."""
        self._inbox.put(message)
        self._switchboard.news.set()

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """A pipe from another stage, or a connection of a KV link."""
        if not self._connections.put(hello, connection):
            self._switchboard.attach(hello, connection)

    def load(self) -> EngineRunner:
        """Build vLLM's engine; the head of a pipeline waits for the other stages first. Raises StartError."""
        try:
            if self._config.partition:
                check_pipeline(self._config)
                join_pipeline(self._config, self._connections, self._forked, end_process(self._outbox))
            with own_temporary_folder(), telling_weights(self._tell_weights):
                return EngineRunner(self._config, self._outbox, self._switchboard, self._inbox, self._forked)
        except PipelineError as error:
            raise StartError(str(error)) from error

    def _tell_weights(self, file: int, files: int) -> None:
        """In the process that loads: vLLM forks those of several workers while this one waits for them. Of a stage of
        several, only this process tells."""
        if self._config.tp == 1 or self._config.partition:
            self._outbox.tell_weights(file, files)
            return
        from vllm.distributed import get_tensor_model_parallel_rank

        self._outbox.tell_worker_weights(get_tensor_model_parallel_rank(), self._config.tp, file, files)


@dataclass(slots=True)
class _RunningRequest:
    """A request in the engine."""

    deadline: float  # on this process's clock
    first_token_from: bytes | None  # the transfer whose sender is to tell the first token, until it has
    pending_prefill_tokens: int  # tokens of the prompt that are to be read here, until the answer has a token
    stop_tokens: frozenset[int]  # that were asked for, beside the model's own
    decodes: bool  # False: it is only prefilled here
    first_token: tuple[int, ...] = ()  # that token, until it has gone out with the next
    cached_tokens: int = 0


@final
class EngineRunner:
    """See `process.LoadedEngine`: a vLLM engine and the loop around it."""

    def __init__(
        self,
        config: protocol.EngineConfig,
        outbox: Outbox,
        switchboard: Switchboard,
        inbox: queue.SimpleQueue[protocol.ToEngine],
        forked: tuple[ForkedWorker, ...],
    ) -> None:
        self._config = config
        self._switchboard = switchboard
        self._inbox = inbox
        self._forked = forked
        self._engine = build_engine(config, switchboard.name)
        self._core: Any = self._engine.engine_core.engine_core  # in-process
        self.scheduler: Any = self._core.scheduler
        """vLLM's, or for a process of several engines ours under it."""
        if config.tp > 1:
            self._core.model_executor.register_failure_callback(_worker_lost)
        connector = self.scheduler.get_kv_connector()
        assert isinstance(connector, P2PConnector)
        self._transfers = connector.scheduler_side
        cache = self._engine.vllm_config.cache_config
        self._held = HeldBlockEvents(self.scheduler, choose_stride(cache.num_gpu_blocks or 0))
        self._prompt_limits = PromptLimits(self.scheduler)
        self._step_tokens = int(self.scheduler.max_num_scheduled_tokens)
        self._requests: dict[str, _RunningRequest] = {}
        self._eos = eos_tokens(self._engine.model_config)
        self._constraints = ConstraintSupport(
            self._core.structured_output_manager, self._engine.vllm_config, switchboard.news.set
        )
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._reporter = StepReporter(outbox.send)
        on_step, stages = self._transfers.on_step, bool(config.partition)
        self._meter = StepMeter(self.scheduler, time.monotonic, on_step, concurrent=stages)
        self._idle_steps = IdleSteps(1 if stages else self._core.batch_queue_size)

    def ready(self, load_s: float) -> protocol.EngineReady:
        """Describe the engine, with the speed of its device measured now."""
        import vllm

        model, device = self._engine.model_config, device_kind()
        tflops, memory_gbps = self._measure(device, model.dtype)
        cache = self._engine.vllm_config.cache_config
        blocks = (cache.num_gpu_blocks or 0) if self._config.sharing is None else self._pool.usable_blocks
        return protocol.EngineReady(
            pid=os.getpid(),
            engine=f"vllm{'-cpu' if device == 'cpu' else ''} {vllm.__version__}",
            device=device,
            dtype=str(model.dtype).removeprefix("torch."),
            layers=model.get_total_num_hidden_layers(),
            kv_heads=kv_heads(model),
            head_dim=head_dim(model),
            vocabulary=self._vocabulary,
            max_model_len=model.max_model_len,
            kv_tokens=blocks * cache.block_size,
            eos_tokens=self._eos,
            load_s=load_s,
            tflops=tflops,
            memory_gbps=memory_gbps,
            async_scheduling=bool(self._core.async_scheduling),
            block_tokens=cache.block_size,
            step_tokens=self._engine.vllm_config.scheduler_config.max_num_batched_tokens,
        )

    def _measure(self, device: DeviceKind, dtype: torch.dtype) -> tuple[float, float]:
        """Where workers are other processes, this one is to leave their GPUs alone."""
        if device == "cuda" and self._config.tp > 1 and not self._config.partition:
            each = self._core.model_executor.collective_rpc(measure_worker, args=(device, dtype))
            return sum(tflops for tflops, _ in each), sum(gbps for _, gbps in each)
        return measure(device_of(device), dtype, tp=self._config.tp)

    def close(self) -> None:
        """See worker processes and other stages off, so that none outlives this one."""
        if self._config.tp > 1 or self._config.partition:
            self._core.model_executor.shutdown()
        self._constraints.close()
        self._switchboard.close()
        for worker in self._forked:
            worker.end()

    def serve(self) -> None:
        """Until `Stop`. An exception of vLLM's ends the process: its state cannot be trusted any more."""
        while True:
            while not self._inbox.empty() or not self.is_busy:
                # Steps leave freed memory behind, which the next step uses again; where none follows, it goes back.
                if not self.handle(await_message(self._inbox, REST_S, return_freed_memory)):
                    return
            self._prompt_limits.limit_running()
            idle = not self.step() and not self.scheduler.running
            self._idle_steps.on_step(idle=idle)
            if idle and self._switchboard.news.wait(self._idle_wait_s() if self._idle_steps.may_sleep else 0.0):
                self._switchboard.news.clear()
                self._idle_steps.on_news()

    @property
    def has_messages(self) -> bool:
        """Whether the agent has said anything that has not been handled."""
        return not self._inbox.empty()

    def handle_all(self) -> bool:
        """Do what the agent has wanted so far; False: it is to stop."""
        while not self._inbox.empty():
            if not self.handle(self._inbox.get()):
                return False
        return True

    def model(self) -> torch.nn.Module:
        """Of an engine of one worker, which is this process."""
        found: torch.nn.Module = self._core.model_executor.driver_worker.get_model()
        return found

    def deadline_of(self, request: str) -> float:
        """When a request is given up, on this process's clock."""
        return self._requests[request].deadline

    def drop_memory(self) -> None:
        """Let go of weights and KV; the engine is of no use any more. Not of buffers: models of one process share those
        of their position embeddings."""
        import torch

        self._engine.engine_core._finalizer.detach()  # noqa: SLF001 (it would tear down what is the process's)
        for each in self.model().parameters():
            each.data = torch.empty(0)
        self._core.model_executor.driver_worker.worker.model_runner.kv_caches.clear()
        for layer in self._engine.vllm_config.compilation_config.static_forward_context.values():
            layer.kv_cache = torch.empty(0)

    def _idle_wait_s(self) -> float:
        """Workers of this box say when KV has come, those of other stages tell only their own agents. For KV that
        leaves nobody hurries."""
        settings, is_blind = self._config.transfers, self._config.partition and self._transfers.awaits_kv
        return settings.blind_wait_s if is_blind else settings.idle_wait_s

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to make a step for."""
        # Not has_unfinished_requests(): finished requests whose cleanup the connector has not seen count too.
        return bool(self.scheduler.has_requests() or self._core.batch_queue)

    def step(self) -> bool:
        """One iteration; whether there was anything to tell of it."""
        # Of vLLM's engine, its core: it is the text of answers that the rest of it is for.
        return self._tell(self._engine.engine_core.get_output().outputs)

    @property
    def is_ahead(self) -> bool:
        """Whether a step has been scheduled whose output is not known yet."""
        return bool(self._core.batch_queue)

    def settle(self) -> None:
        """Wait for the outputs of such steps, if there are any; of an engine that has a `TurnScheduler`."""
        while self.is_ahead:
            with self.scheduler.scheduling_nothing():
                outputs = self._engine.engine_core.get_output().outputs
            self._tell(outputs)

    def _tell(self, outputs: list[Any]) -> bool:
        late = [*self._refuse_unconstrained(), *self._expire()]
        self._publish(outputs, late)
        return bool(outputs or late)

    def pause(self) -> None:
        """Others compute before the next step, whose time begins when it is scheduled."""
        self._meter.pause()

    def handle(self, message: protocol.ToEngine) -> bool:
        """Do what the agent wants; False: it is to stop."""
        match message:
            case protocol.Submit(request=request):
                try:
                    self._submit(message)
                except Exception as error:
                    # Whatever vLLM has against a request, it says so before the scheduler has it (its own errors are
                    # no ValueErrors): that costs the request, not the others.
                    _log.warning("refused request %s: %s", request, error)
                    self._refuse(message, explain(error))
            case protocol.SetFirstToken():
                self._set_first_token(message)
            case protocol.Cancel(request=request):
                self._abort([request])
            case protocol.AbortTransfer() | protocol.SetLinkPaths() | protocol.CloseLink():
                if isinstance(message, protocol.AbortTransfer):
                    self._stop_waiting_for_token(message.transfer)
                # With the next step, so that it does not overtake what has been submitted; without one, directly. A
                # batch that is in flight when all requests have gone is the last one.
                if self.scheduler.requests or self.scheduler.finished_req_ids:
                    self._transfers.queue_order(message)
                else:
                    self._switchboard.carry_out(message)
            case protocol.LimitSteps(tokens=tokens):
                self._limit_steps(tokens)
            case protocol.Stop():
                return False
        return True

    def _limit_steps(self, tokens: int) -> None:
        """vLLM's scheduler looks at its budget in every step. All that decode at once must have a place in it."""
        scheduler = self.scheduler
        wanted = max(tokens, scheduler.max_num_running_reqs) if tokens else self._step_tokens
        scheduler.max_num_scheduled_tokens = min(self._step_tokens, wanted)

    def _submit(self, submit: protocol.Submit) -> None:
        self._check(submit)
        sampling, first = submit.sampling, len(submit.prompt) - submit.sampling.answered
        prompt, answered = submit.prompt[:first], submit.prompt[first:]
        asked = self._engine.input_processor.process_inputs(
            submit.request,
            {"prompt_token_ids": list(prompt)},
            to_vllm(sampling, self._eos, extra_arguments(submit, answered)),
            supported_tasks=self._engine.get_supported_tasks(),
        )
        if sampling.constraint is not None:  # vLLM would look at it here, which takes seconds
            structured = structured_outputs(sampling.constraint)
            structured._backend = BACKEND  # noqa: SLF001 (vLLM's own check would set it)
            asked.sampling_params.structured_outputs = structured
            self._constraints.announce(submit.request, sampling)
        asked.cache_salt = submit.cache_salt or None
        request, wave = self._core.preprocess_add_request(asked)
        if answered:
            request.append_output_token_ids(list(answered))
            request.prefill_stats = None  # vLLM's are for a prompt alone: it is wrong of KV that reaches beyond
        cached = self._held.count_cached(request)
        self._requests[submit.request] = _RunningRequest(
            time.monotonic() + submit.deadline_s,
            submit.receive[0].ticket.transfer if submit.awaits_first_token else None,
            len(submit.prompt) - max(submit.receive_tokens if submit.receive else 0, cached),
            frozenset(sampling.stop_token_ids),
            not submit.send,
        )
        self._core.add_request(request, wave)
        if submit.send and self._config.sharing is None:
            self._prompt_limits.add_send(request, cached)

    def _check(self, submit: protocol.Submit) -> None:
        """Raise ValueError for what vLLM would find out inside a step, which takes the engine with it."""
        vocabulary, sampling = self._vocabulary, submit.sampling
        if submit.request in self.scheduler.requests:
            raise ValueError(f"the id {submit.request} is in use")
        if submit.receive and not 1 <= submit.receive_tokens <= len(submit.prompt):
            raise ValueError(f"KV of {submit.receive_tokens} tokens is to come, of a prompt of {len(submit.prompt)}")
        if (worst := max(submit.prompt, default=0)) >= vocabulary:
            raise ValueError(f"token {worst} is beyond the model's vocabulary of {vocabulary}")
        if (worst := max(sampling.token_ids(), default=0)) >= vocabulary:
            raise ValueError(f"sampling: token {worst} is beyond the model's vocabulary of {vocabulary}")
        if not all(map(isfinite, sampling.logit_bias.values())):
            raise ValueError("logit_bias: it has one that is not a finite number")
        if sampling.answered and sampling.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: they were told with the beginning of this answer")

    def _refuse_unconstrained(self) -> list[protocol.NewTokens]:
        """Those whose constraint turns out to be none, or another than the answer so far is made by."""
        refused = []
        for request in self._constraints.failed:
            reason = self._constraints.take_failure(request)
            if request in self._requests:
                self._abort([request])
                refused.append(protocol.NewTokens(request, (), "refused", reason=reason))
        return refused

    def _refuse(self, submit: protocol.Submit, reason: str) -> None:
        self._requests.pop(submit.request, None)
        self._constraints.take_failure(submit.request)
        refused = protocol.NewTokens(submit.request, (), "refused", reason=reason)
        self._reporter.report((refused,), self._stats())

    def _set_first_token(self, told: protocol.SetFirstToken) -> None:
        """Another engine has written the first token of this answer. What comes too late, or is no token, is left: then
        the answer begins with one of our own."""
        live = self._requests.get(told.request)
        if live is None or live.first_token_from is None:
            return
        transfer, live.first_token_from = live.first_token_from, None
        if told.token < self._vocabulary and self._transfers.set_first_token(transfer, told.token):
            live.first_token = (told.token,)
        self._stop_waiting_for_token(transfer)

    def _stop_waiting_for_token(self, transfer: bytes) -> None:
        """For the first token of the request that receives this."""
        request = self._transfers.stop_waiting_for_token(transfer)
        if request is not None:
            self.scheduler.finished_recving_kv_req_ids.add(request)

    def _abort(self, requests: list[str]) -> None:
        """Those that are known. One whose KV is here must not be taken for one that still receives: its blocks would
        never be free."""
        ended = {request: live for request in requests if (live := self._requests.pop(request, None)) is not None}
        for live in ended.values():
            if live.first_token_from is not None:
                self._stop_waiting_for_token(live.first_token_from)
        for request in ended:
            self._constraints.take_failure(request)
        if ended:
            self._core.abort_requests(list(ended))

    def _expire(self) -> list[protocol.NewTokens]:
        now = time.monotonic()
        late = [request for request, live in self._requests.items() if now > live.deadline]
        self._abort(late)
        return [protocol.NewTokens(request, (), "deadline") for request in late]

    def _publish(self, outputs: list[Any], late: list[protocol.NewTokens]) -> None:
        news = list(late)
        for output in outputs:
            live = self._requests.get(output.request_id)
            if live is None:
                continue
            tokens, live.first_token = (*live.first_token, *output.new_token_ids), ()
            live.pending_prefill_tokens = 0
            if output.prefill_stats is not None:
                live.cached_tokens = output.prefill_stats.num_cached_tokens
            finish = str(output.finish_reason) if output.finish_reason is not None else None
            if finish is not None:
                del self._requests[output.request_id]
                self._constraints.take_failure(output.request_id)
            news.append(
                protocol.NewTokens(
                    output.request_id,
                    tokens,
                    finish,
                    live.cached_tokens,
                    logprobs=top_tokens(output.new_logprobs),
                    prompt_logprobs=prompt_top_tokens(output.new_prompt_logprobs_tensors),
                    stop_reason=output.stop_reason if output.stop_reason in live.stop_tokens else None,
                )
            )
        pausing = not self.is_busy
        if pausing:
            self._meter.pause()
        iterations = self._meter.tally.take(time.monotonic(), at_once=pausing)
        self._reporter.report(news, self._stats(), iterations)
        if iterations is not None:
            self._reporter.tell_held(*self._held.names.take())

    def tell_stats(self) -> None:
        """If they have changed without a step: other engines have more or less of the KV memory."""
        self._reporter.report((), self._stats())

    def _stats(self) -> protocol.EngineStats:
        running, waiting = self.scheduler.get_request_counts()
        pool = self._pool
        return protocol.EngineStats(
            running,
            waiting,
            pool.get_usage(),
            pool.get_num_free_blocks() * self.scheduler.block_size,
            sum(live.pending_prefill_tokens for live in self._requests.values()),
            sum(live.decodes for live in self._requests.values()),
            kv_quota=1.0 if self._config.sharing is None else pool.quota(),
        )

    @property
    def _pool(self) -> Any:
        """vLLM's blocks, or of a process of several engines `kv_pool.PagedBlockPool`."""
        return self.scheduler.kv_cache_manager.block_pool


def _worker_lost() -> None:
    """By a thread of vLLM's: the engine's own may wait for that worker for ever."""
    _log.error("a worker process is gone, and this engine with it")
    os._exit(1)
