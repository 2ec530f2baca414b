"""The emulated engine's decisions on messages and steps, given `now`; I/O is in `process`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

from ....coordinator.costs.replica import Hop, ReplicaError, StageHardware, kv_capacity_tokens, replica_times
from ....coordinator.costs.step_times import StepTimes, chunk_pairs
from ....coordinator.prefixes.block_cache import BlockCache
from ....coordinator.prefixes.held import choose_stride
from ....coordinator.prefixes.naming import prefix_names
from ....coordinator.sharing.service_profile import ExpectedService
from ....kvtransport.errors import TransferError
from .. import protocol
from ..sharing.turns import GUESSED_TOKENS, ServiceTurns, expect_requests
from ..stats import StepReporter, StepTotals, describe_step
from ..transfers.wait_limits import WaitLimits
from .batching import Batch, Batcher, step_s
from .batching import BatchedRequest as Work
from .memory import KvBlocks, OwnBlocks, ShareMemory
from .tokens import EmulatedAnswer
from .transfers import ComputedSpan

_log = logging.getLogger(__name__)

LEAST_KV_TOKENS: Final = 256  # an engine with less KV memory is refused: it could serve next to nothing
BLOCK_SIZE: Final = 16  # tokens of a KV block where the agent names none
CHECK_INTERVAL_S: Final = 0.05  # between looks at deadlines; less costs CPU in every step
_UNKNOWN: Final = ("constraint", "logprobs", "prompt_logprobs")  # what a request can ask for, and no emulation tell
CATCH_UP_S: Final = 0.1
"""How far behind its model an engine may still catch up; more is lost, with a warning, so that a pause does not become
a burst."""


class EmulationError(ValueError):
    """An engine that cannot be emulated; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class KvEnded:
    """From a thread of the transfers: no more KV will come for this request."""

    request: str


@dataclass(frozen=True, slots=True)
class KvSent:
    """From a thread of the transfers: the KV of this prompt has been delivered, or will not be."""

    work: Work


class ExpectedKv(Protocol):
    """The KV that is received for one prompt."""

    transfer: bytes
    deadline: float

    def start(self) -> None:
        """There are blocks for it: the senders may send."""

    def progress(self) -> tuple[float, int]:
        """The fraction of all bytes that is here, and how many tokens are complete."""

    def abort(self, reason: str) -> None:
        """Stop receiving."""


class TransferPort(Protocol):
    """The transfers of the engine; see `transfers.EmulatedTransfers`."""

    def send(self, outlets: Sequence[protocol.Outlet], on_end: Callable[[], None]) -> None:
        """Open the sending ends; `on_end` is called once, when all of them have ended."""

    def send_span(self, transfer: bytes, span: ComputedSpan) -> None:
        """A step computes these tokens of a prompt that is sent."""

    def withdraw(self, transfer: bytes) -> None:
        """The request has been preempted: what has not been sent is lost, and is computed again."""

    def expect(self, inlets: Sequence[protocol.Inlet], tokens: int, on_end: Callable[[], None]) -> ExpectedKv:
        """Open the receiving ends. Raises TransferError."""

    def close_incoming(self, transfer: bytes) -> object:
        """An expected transfer is over."""

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer."""

    def carry_out(self, order: protocol.SetLinkPaths | protocol.CloseLink | protocol.AbortTransfer) -> None:
        """Do what the agent wants of a link or a transfer."""


@dataclass(slots=True)
class _Request:
    work: Work
    answer: EmulatedAnswer
    deadline: float
    sends: bytes | None = None  # the transfer of its prompt's KV
    expected: ExpectedKv | None = None
    first_token_from: bytes | None = None  # the transfer whose sender tells the first token, while awaited
    received: int = 0  # tokens whose KV had come when the transfer ended
    first_token: tuple[int, ...] = ()  # the awaited token, until it is sent with the next one


@final
class EmulatedEngine:
    """All requests of one engine. `now` is monotonic seconds; `tell` sends to the agent, `wake` has
    `handle` called with a transfer thread's message. `hop`: between the stages of a replica of
    several boxes, whose head this is. Raises EmulationError for a model too large.
    """

    def __init__(
        self,
        config: protocol.EngineConfig,
        emulation: protocol.Emulation,
        transfers: TransferPort,
        *,
        tell: Callable[[protocol.EngineMessage], None],
        wake: Callable[[KvEnded | KvSent], None],
        hop: Hop | None = None,
        share: ShareMemory | None = None,
    ) -> None:
        self._emulation = emulation
        self._tp = config.tp
        self._partition = config.partition
        self._transfers, self._wake = transfers, wake
        capacity, self._times = model_capacity(
            emulation, tp=config.tp, kv_cache_mib=config.kv_cache_mib, partition=config.partition, hop=hop
        )
        block_size = config.block_size or BLOCK_SIZE
        token_bytes = emulation.model.layers * emulation.model.kv_bytes_per_token_layer
        self.memory: KvBlocks = share(capacity, token_bytes, block_size) if share else OwnBlocks(capacity // block_size)
        self._prefixes = BlockCache(choose_stride(self.memory.most))
        self.batcher = Batcher(
            blocks=self.memory,
            prefixes=self._prefixes,
            block_size=block_size,
            max_tokens=config.max_batched_tokens,
            max_requests=config.max_requests,
        )
        self._step_tokens = config.max_batched_tokens
        self._kv_tokens = self.memory.most * block_size
        self._longest = min(config.max_model_len or self._kv_tokens, self._kv_tokens)
        self._requests: dict[str, _Request] = {}
        self._wait_limits = WaitLimits(config.transfers.wait_limits)
        self._tally = StepTotals()
        self._reporter = StepReporter(tell)
        self._checked_at = -CHECK_INTERVAL_S
        self._batch: Batch | None = None
        self._ends: float | None = None  # modelled end of the step under way, or of the last one
        self._ended: float | None = None  # when the last step really ended
        self._first_began: float | None = None  # the first step of all
        self.scheduled_tokens = 0  # in the last step
        self.turns: ServiceTurns | None = None
        """Where it says what can be computed, in a process of several engines."""

    def __repr__(self) -> str:
        return f"<EmulatedEngine {self.name} {self.batcher}>"

    @property
    def name(self) -> str:
        """The name that is shown to people."""
        boxes = f"{len(self._partition)} boxes with " if self._partition else ""
        return f"emulated {boxes}{self._tp}x {self._emulation.gpu.name} ({self._times.source})"

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        return not self._requests

    def ready(self, load_s: float) -> protocol.EngineReady:
        """Describe the engine; the speeds are those of the cards on paper."""
        model, gpu = self._emulation.model, self._emulation.gpu
        return protocol.EngineReady(
            pid=os.getpid(),
            engine=self.name,
            device="cpu",
            dtype="bfloat16",
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            vocabulary=self._emulation.vocabulary,
            max_model_len=self._longest,
            kv_tokens=self._kv_tokens,
            eos_tokens=(),
            load_s=load_s,
            tflops=gpu.tflops * self._tp,
            memory_gbps=gpu.memory_gbps * self._tp,
            block_tokens=self.batcher.block_size,
            step_tokens=self._step_tokens,
        )

    def handle(self, message: protocol.ToEngine | KvEnded | KvSent, now: float) -> None:
        """Handle a message, between two steps. `Stop` is for the loop."""
        match message:
            case protocol.Submit(request=request):
                complaint = self._find_fault(message)
                if complaint:
                    refused = protocol.NewTokens(request, (), "refused", reason=complaint)
                    self._reporter.report((refused,), self._stats())
                else:
                    self._submit(message, now)
            case protocol.SetFirstToken():
                self._on_first_token(message)
            case protocol.Cancel(request=request):
                self._drop(request, "the request was cancelled")
            case KvEnded(request=request):
                self._on_kv(request)
            case KvSent(work=work):
                self.batcher.release_sent(work)
            case protocol.AbortTransfer() | protocol.SetLinkPaths() | protocol.CloseLink():
                if isinstance(message, protocol.AbortTransfer):
                    self._stop_waiting_for_token(message.transfer)
                self._transfers.carry_out(message)
            case protocol.LimitSteps(tokens=tokens):
                self.batcher.limit_step(tokens)
            case protocol.Stop():
                raise AssertionError("handled by the loop")

    def begin_step(self, now: float, turn: tuple[str, ...] | None = None) -> float | None:
        """Begin a step, of the requests of a turn alone where there is one; returns when it ends, or None when there is
        nothing to compute. It begins at the modelled end of the last, so that this process's own time is not added."""
        if turn is None:
            batch = self.batcher.schedule()
        else:
            self._ends = self._ended = None  # others have had theirs since
            batch = self.batcher.schedule_turn([self._requests[request].work for request in turn])
        for request in batch.admitted:
            live = self._requests[request]
            if live.expected is not None:
                live.expected.start()
                is_computed = live.first_token_from is None
                self._wait_limits.begin(request, 0, live.work.external, now, is_computed=is_computed)
        for request in batch.preempted:
            self.on_lost_kv(request)
        if not batch.scheduled:
            self._ends = self._ended = None
            return None
        began = self._ends if self._ends is not None else now
        if now - began > CATCH_UP_S:
            _log.warning("this machine is too slow: steps are %.2f s behind those of %s", now - began, self.name)
            began = now
        self._batch, self._ends = batch, began + self._slower(began) * step_s(self._times, batch.scheduled)
        if self._ended is None:
            self._ended = began
        self._send(batch, began, self._ends)
        return self._ends

    def _slower(self, now: float) -> float:
        """How many times as long steps take now as its cards would take: some throttle after a while."""
        self._first_began = now if self._first_began is None else self._first_began
        throttling = self._emulation.throttling
        return throttling.factor if throttling is not None and now >= self._first_began + throttling.after_s else 1.0

    def expect(self, lengths: tuple[int, int] | None) -> ExpectedService:
        """See `sharing.process.TurnEngine`."""
        prompt, _ = lengths or GUESSED_TOKENS
        token_s = self._times.prefill_s(prompt, chunk_pairs(0, prompt)) / prompt
        return expect_requests(token_s, self._times.decode_line(1).step_s(prompt), lengths)

    @property
    def awaits_kv(self) -> bool:
        """Whether any request waits for KV of another box."""
        return any(live.expected is not None or live.sends is not None for live in self._requests.values())

    def find(self, request: str) -> Work | None:
        """What is computed of it; None: it is not here."""
        live = self._requests.get(request)
        return live.work if live is not None else None

    def on_lost_kv(self, request: str) -> None:
        """It is computed again."""
        if (transfer := self._requests[request].sends) is not None:
            self._transfers.withdraw(transfer)
        if self.turns is not None:
            self.turns.lose_kv(request)

    def end_step(self, now: float) -> None:
        """The step has ended: report its tokens."""
        batch, began = self._batch, self._ended
        assert batch is not None
        assert began is not None
        self._batch, self._ended = None, now
        self.scheduled_tokens = sum(entry.tokens for entry in batch.scheduled)
        outputs = []
        for work in self.batcher.complete(batch):
            live = self._requests[work.request]
            finish = "length" if work.is_done else None
            tokens, live.first_token = (*live.first_token, live.answer.next()), ()
            outputs.append(protocol.NewTokens(work.request, tokens, finish, work.received or work.cached))
            if work.is_done:
                del self._requests[work.request]
                if self.turns is not None:
                    self.turns.finish(work.request, work.generated)
        scheduled = ((entry.first, entry.tokens) for entry in batch.scheduled)
        sample = describe_step(scheduled, max(0.0, now - began))
        self._tally.add(sample, len(batch.preempted))
        self._wait_limits.on_prefill(sample.prefill_tokens, sample.seconds)
        self._publish(outputs, now)

    def check_deadlines(self, now: float) -> None:
        """Now and then, give up requests beyond their deadline, and KV slower than computing."""
        if now < self._checked_at + CHECK_INTERVAL_S and not self.idle:
            return
        self._checked_at = now
        late = [request for request, live in self._requests.items() if now > live.deadline]
        for request in late:
            self._drop(request, "the request's deadline has passed")
        for request, live in self._requests.items():
            if live.expected is not None:
                self._wait_limits.on_arrival(request, *live.expected.progress(), now)
                if now > live.expected.deadline:
                    live.expected.abort("no KV arrived before the transfer's deadline")
        for request, reason in self._wait_limits.give_up(now).items():
            expected = self._requests[request].expected
            if expected is not None:
                expected.abort(reason)
        self._publish([protocol.NewTokens(request, (), "deadline") for request in late], now)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _find_fault(self, submit: protocol.Submit) -> str:
        """Why a request can never be served; "" for one that can."""
        prompt, worst = len(submit.prompt), max(submit.prompt, default=0)
        if not prompt:
            return "the prompt is empty"
        if submit.receive and not 1 <= submit.receive_tokens <= prompt:
            return f"KV of {submit.receive_tokens} tokens is to come, of a prompt of {prompt}"
        if worst >= self._emulation.vocabulary:
            return f"token {worst} is beyond the model's vocabulary of {self._emulation.vocabulary}"
        unknown = next((field for field in _UNKNOWN if getattr(submit.sampling, field) is not None), None)
        if unknown is not None:
            return f"{unknown}: an emulated engine makes its tokens up, and knows no text and no probabilities"
        if self._partition and (submit.send or submit.receive):
            return "emulated stages transfer no KV: pin the boxes of the network to mixed (--phase mixed)"
        if prompt >= self._longest:
            return f"a prompt of {prompt} tokens leaves no room for an answer; {self._longest} is the longest of both"
        return ""

    def _submit(self, submit: protocol.Submit, now: float) -> None:
        sampling, prompt = submit.sampling, len(submit.prompt)
        max_tokens = min(sampling.max_tokens, self._longest - prompt)
        seed = sampling.seed or 0 if sampling.temperature > 0 else 0
        answer = EmulatedAnswer(submit.prompt, self._emulation.vocabulary, seed)
        names = prefix_names(submit.prompt, self.batcher.block_size, submit.cache_salt)
        live = _Request(Work(submit.request, prompt, max_tokens, prefix=tuple(names)), answer, now + submit.deadline_s)
        if submit.send:
            sent = KvSent(live.work)
            live.sends, live.work.sends_kv = submit.send[0].ticket.transfer, True
            self._transfers.send(submit.send, lambda: self._wake(sent))
        if submit.receive:
            ended = KvEnded(submit.request)
            try:
                live.expected = self._transfers.expect(submit.receive, submit.receive_tokens, lambda: self._wake(ended))
                live.work.external = submit.receive_tokens
                live.first_token_from = submit.receive[0].ticket.transfer if submit.awaits_first_token else None
            except TransferError as error:  # then the prompt is computed
                _log.warning("request %s cannot receive: %s", submit.request, error)
        if self.idle:
            # After a pause the first step begins when its request came, however late this process looks.
            self._ends = self._ended = now
        self._requests[submit.request] = live
        self.batcher.add(live.work)
        if not live.work.external:
            self._announce(live.work)

    def _send(self, batch: Batch, began: float, ends: float) -> None:
        """Tell the transfers which tokens this step computes for other engines."""
        for work, first, count in batch.scheduled:
            live = self._requests[work.request]
            if live.sends is not None and first < work.prompt:
                # After a preemption tokens of the answer are computed again too: those are not sent.
                last = min(first + count, work.prompt)
                first = 0 if first == work.cached else first  # what was cached leaves with the first step
                self._transfers.send_span(live.sends, ComputedSpan(first, last, began, ends, last == work.prompt))

    def _on_kv(self, request: str) -> None:
        live = self._requests.get(request)
        if live is None or live.expected is None:
            return
        expected, live.expected = live.expected, None
        self._wait_limits.end(request)
        self._transfers.close_incoming(expected.transfer)
        fraction, tokens = expected.progress()
        if fraction < 1.0:
            tokens -= tokens % self.batcher.block_size  # vLLM keeps whole blocks only
            live.first_token_from = None  # what is missing is computed at once, and with it the first token
        live.received = tokens
        if live.first_token_from is None:
            self._receive_kv(live, tokens)

    def _on_first_token(self, told: protocol.SetFirstToken) -> None:
        """Go on from the prefill engine's first token; ours would be the same, being a hash."""
        live = self._requests.get(told.request)
        if live is None or live.first_token_from is None:
            return
        if told.token < self._emulation.vocabulary:
            live.answer.go_on_from(told.token)
            live.first_token = (told.token,)
            live.work.prompt += 1
            live.work.max_tokens -= 1
        self._stop_waiting_for_token(live.first_token_from)

    def _stop_waiting_for_token(self, transfer: bytes) -> None:
        """Let the request that this transfer is for begin without being told its first token."""
        for live in self._requests.values():
            if live.first_token_from == transfer:
                live.first_token_from = None
                self._wait_limits.on_computed(live.work.request)
                if live.expected is None:
                    self._receive_kv(live, live.received)
                return

    def _receive_kv(self, live: _Request, tokens: int) -> None:
        self.batcher.receive_kv(live.work.request, tokens)
        self._announce(live.work)

    def _announce(self, work: Work) -> None:
        """It waits for nothing but its turn, where there are turns."""
        if self.turns is not None and work.request not in self.turns:
            self.turns.add(work.request, work.prompt, self._requests[work.request].deadline)
            if work.blocks or work.shared:
                self.turns.hold_kv(work.request)

    def _drop(self, request: str, reason: str) -> None:
        """Forget a request and its transfers; the KV of a whole prompt may still be sent."""
        live = self._requests.pop(request, None)
        if live is None:
            return
        self.batcher.remove(request)
        if self.turns is not None:
            self.turns.remove(request)
        self._wait_limits.end(request)
        if live.sends is not None and live.work.computed < live.work.prompt:
            self._transfers.abort(live.sends, reason)
        if live.expected is not None:
            live.expected.abort(reason)
            self._transfers.close_incoming(live.expected.transfer)

    def _publish(self, outputs: list[protocol.NewTokens], now: float) -> None:
        if self.idle:
            self.batcher.check_integrity()
        iterations = self._tally.take(now, at_once=self.idle)
        self._reporter.report(outputs, self._stats(), iterations)
        if iterations is not None:
            self._reporter.tell_held(*self._prefixes.take_changes())

    def tell_stats(self) -> None:
        """If they have changed without a step: other engines have more or less of the memory."""
        self._reporter.report((), self._stats())

    def _stats(self) -> protocol.EngineStats:
        batcher = self.batcher
        return protocol.EngineStats(
            batcher.running,
            batcher.waiting,
            self.memory.usage(),
            batcher.free_tokens,
            batcher.pending_prefill_tokens,
            batcher.decodes,
            self.memory.quota(),
        )


def model_capacity(
    emulation: protocol.Emulation,
    *,
    tp: int,
    kv_cache_mib: int | None,
    partition: tuple[int, ...] = (),
    hop: Hop | None = None,
) -> tuple[int, StepTimes]:
    """Tokens of KV that fit beside the model, and step times; `partition`: layers of equal boxes that hold it together,
    with `hop` between them. Raises EmulationError."""
    model, gpu = emulation.model, emulation.gpu
    stages = tuple(
        StageHardware(gpu=gpu, tp=tp, layers=layers, link_gbps=emulation.gpu_link_gbps)
        for layers in partition or (model.layers,)
    )
    try:
        capacity = kv_capacity_tokens(model, stages)
        times = replica_times(model, stages, (hop,) * len(stages) if hop is not None else ())
    except ReplicaError as error:
        raise EmulationError(f"{model.name} on {tp}x {gpu.name}: {error}") from error
    if kv_cache_mib is not None:
        held = max(stage.layers for stage in stages) * model.kv_bytes_per_token_layer
        capacity = min(capacity, (kv_cache_mib << 20) // held)
    if capacity < LEAST_KV_TOKENS:
        raise EmulationError(
            f"{tp}x {gpu.name} with {gpu.memory_gib:g} GiB each have no room for KV beside the "
            f"{model.weight_bytes / 1e9:.0f} GB of {model.name}; name more cards, larger ones, or a smaller model"
        )
    return capacity, times
