"""An emulated engine without its clock, its threads and its sockets: what it does with messages and at each step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

from ....coordinator.costs.replica import ReplicaError, StageHardware, kv_capacity_tokens, replica_times
from ....coordinator.costs.step_times import StepTimes
from ....kvtransport.errors import TransferError
from .. import protocol
from ..stats import StepTotals
from ..transfers.wait_limits import WaitLimits
from .batching import Batch, Batcher, step_s
from .batching import BatchedRequest as Work
from .tokens import EmulatedAnswer
from .transfers import ComputedSpan

__all__ = ["EmulatedEngine", "EmulationError", "ExpectedKv", "KvEnded", "KvSent", "TransferPort", "model_capacity"]

_log = logging.getLogger(__name__)

BLOCK_SIZE: Final = 16
LEAST_KV_TOKENS: Final = 256
"""With less than that nothing of interest can be served."""

LOOK_INTERVAL_S: Final = 0.05
LATE_S: Final = 0.1
"""How far behind its model the engine may fall and still catch up; what is beyond that is lost, and said."""


class EmulationError(ValueError):
    """An engine that cannot be emulated; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class KvEnded:
    """To the engine, by a thread of its transfers: no more KV will come for this request."""

    request: str


@dataclass(frozen=True, slots=True)
class KvSent:
    """To the engine, by a thread of its transfers: the KV of this prompt has been delivered, or will not be."""

    work: Work


class ExpectedKv(Protocol):
    """What comes for one prompt."""

    transfer: bytes
    deadline: float

    def start(self) -> None:
        """There is room for it."""
        ...

    def progress(self) -> tuple[float, int]:
        """Which part of everything is there, and how many positions every layer and head has."""
        ...

    def abort(self, reason: str) -> None:
        """No more is wanted."""
        ...


class TransferPort(Protocol):
    """The transfers of the engine; see `transfers.Transfers`."""

    def send(self, outlets: Sequence[protocol.Outlet], on_end: Callable[[], None]) -> None:
        """Open sending ends; `on_end` is called once, when all of them have ended."""
        ...

    def compute(self, transfer: bytes, chunk: ComputedSpan) -> None:
        """A step computes these positions of what is sent."""
        ...

    def withdraw(self, transfer: bytes) -> None:
        """What has been computed of this prompt and not read is not there any more. It will be computed again."""
        ...

    def expect(self, inlets: Sequence[protocol.Inlet], tokens: int, on_end: Callable[[], None]) -> ExpectedKv:
        """Open receiving ends. Raises TransferError."""
        ...

    def forget(self, transfer: bytes) -> None:
        """What was expected has come."""
        ...

    def abort(self, transfer: bytes, reason: str) -> None:
        """End a transfer."""
        ...

    def carry_out(self, order: protocol.SetLinkPaths | protocol.CloseLink | protocol.AbortTransfer) -> None:
        """What the agent wants of a link or a transfer."""
        ...


@dataclass(slots=True)
class _Request:
    work: Work
    answer: EmulatedAnswer
    deadline: float
    sends: bytes | None = None  # the transfer of its prompt's KV
    expected: ExpectedKv | None = None
    told_by: bytes | None = None  # the transfer whose sender is to tell the first token, while that is waited for
    here: int = 0  # positions of KV that have come by then
    first: tuple[int, ...] = ()  # that token, until it has gone out with the next


@final
class EmulatedEngine:
    """All requests of one engine. `now` is monotonic seconds; `tell` sends to the agent, `wake` has `take` called with
    what a thread of the transfers has to say.

    Raises EmulationError for a model that the cards cannot hold.
    """

    def __init__(
        self,
        config: protocol.EngineConfig,
        ways: TransferPort,
        *,
        tell: Callable[[protocol.EngineMessage], None],
        wake: Callable[[KvEnded | KvSent], None],
    ) -> None:
        assert config.emulation is not None
        self._emulation = emulation = config.emulation
        self._tp = config.tp
        self._ways, self._tell, self._wake = ways, tell, wake
        capacity, self._times = model_capacity(emulation, tp=config.tp, kv_cache_mib=config.kv_cache_mib)
        block_size = config.block_size or BLOCK_SIZE
        self._batcher = Batcher(
            blocks=capacity // block_size,
            block_size=block_size,
            max_tokens=config.max_batched_tokens,
            max_requests=config.max_requests,
        )
        self._kv_tokens = self._batcher.free_tokens
        self._longest = min(config.max_model_len or self._kv_tokens, self._kv_tokens)
        self._live: dict[str, _Request] = {}
        self._wait_limits = WaitLimits()
        self._tally = StepTotals()
        self._reported: protocol.EngineStats | None = None
        self._looked_at = -LOOK_INTERVAL_S
        self._batch: Batch | None = None
        self._ends: float | None = None  # of the step under way, or of the last one where the next follows it
        self._ended: float | None = None  # when that really was

    def __repr__(self) -> str:
        return f"<EmulatedEngine {self.name} {self._batcher}>"

    @property
    def name(self) -> str:
        """As it is shown to people."""
        return f"emulated {self._tp}x {self._emulation.gpu.name} ({self._times.source})"

    @property
    def idle(self) -> bool:
        """Whether there are no requests."""
        return not self._live

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
        )

    def take(self, message: protocol.ToEngine | KvEnded | KvSent, now: float) -> None:
        """A message, between two steps. `Stop` is for the loop."""
        match message:
            case protocol.Submit(request=request):
                complaint = self._complaint(message)
                if complaint:
                    refused = protocol.NewTokens(request, (), "refused", reason=complaint)
                    self._tell(protocol.Step(outputs=(refused,), stats=self._stats()))
                else:
                    self._submit(message, now)
            case protocol.SetFirstToken():
                self._begin_with(message)
            case protocol.Cancel(request=request):
                self._drop(request, "the request was cancelled")
            case KvEnded(request=request):
                self._on_kv(request)
            case KvSent(work=work):
                self._batcher.sent(work)
            case protocol.AbortTransfer() | protocol.SetLinkPaths() | protocol.CloseLink():
                if isinstance(message, protocol.AbortTransfer):
                    self._wait_no_longer(message.transfer)
                self._ways.carry_out(message)
            case protocol.LimitSteps(tokens=tokens):
                self._batcher.limit(tokens)
            case protocol.Stop():
                raise AssertionError("handled by the loop")

    def begin(self, now: float) -> float | None:
        """Begin a step; returns when it ends, or None when nothing can be computed now.

        A step begins when the one before it was to end, so that the time this process takes is not added to the model.
        """
        batch = self._batcher.next()
        for request in batch.admitted:
            live = self._live[request]
            if live.expected is not None:
                live.expected.start()
                self._wait_limits.begin(request, 0, live.work.external, now)
        for request in batch.preempted:
            if (transfer := self._live[request].sends) is not None:
                self._ways.withdraw(transfer)
        if not batch.pieces:
            self._ends = self._ended = None
            return None
        began = self._ends if self._ends is not None else now
        if now - began > LATE_S:
            _log.warning("this machine is too slow: steps are %.2f s behind those of %s", now - began, self.name)
            began = now
        self._batch, self._ends = batch, began + step_s(self._times, batch.pieces)
        if self._ended is None:
            self._ended = began
        self._send(batch, began, self._ends)
        return self._ends

    def end(self, now: float) -> None:
        """The step is over: tell of its tokens."""
        batch, began = self._batch, self._ended
        assert batch is not None
        assert began is not None
        self._batch, self._ended = None, now
        outputs = []
        for work in self._batcher.complete(batch):
            live = self._live[work.request]
            finish = "length" if work.done else None
            tokens, live.first = (*live.first, live.answer.next()), ()
            outputs.append(protocol.NewTokens(work.request, tokens, finish, work.arrived))
            if work.done:
                del self._live[work.request]
        sample = batch.sample(max(0.0, now - began))
        self._tally.add(sample, len(batch.preempted))
        self._wait_limits.on_prefill(sample.prefill_tokens, sample.seconds)
        self._publish(outputs, now)

    def look(self, now: float) -> None:
        """Now and then: give up what is late, requests beyond their deadline and KV that would be computed sooner."""
        if now < self._looked_at + LOOK_INTERVAL_S and not self.idle:
            return
        self._looked_at = now
        late = [request for request, live in self._live.items() if now > live.deadline]
        for request in late:
            self._drop(request, "the request's deadline has passed")
        for request, live in self._live.items():
            if live.expected is not None:
                self._wait_limits.on_arrival(request, *live.expected.progress(), now)
                if now > live.expected.deadline:
                    live.expected.abort("no KV arrived before the transfer's deadline")
        for request, reason in self._wait_limits.give_up(now).items():
            expected = self._live[request].expected
            if expected is not None:
                expected.abort(reason)
        self._publish([protocol.NewTokens(request, (), "deadline") for request in late], now)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _complaint(self, submit: protocol.Submit) -> str:
        """Why a request can never be served; "" for one that can."""
        prompt, worst = len(submit.prompt), max(submit.prompt, default=0)
        if not prompt:
            return "the prompt is empty"
        if submit.receive and not 1 <= submit.receive_tokens <= prompt:
            return f"KV of {submit.receive_tokens} tokens is to come, of a prompt of {prompt}"
        if worst >= self._emulation.vocabulary:
            return f"token {worst} is beyond the model's vocabulary of {self._emulation.vocabulary}"
        if prompt >= self._longest:
            return f"a prompt of {prompt} tokens leaves no room for an answer; {self._longest} is the longest of both"
        return ""

    def _submit(self, submit: protocol.Submit, now: float) -> None:
        sampling, prompt = submit.sampling, len(submit.prompt)
        wanted = min(sampling.max_tokens, self._longest - prompt)
        seed = sampling.seed or 0 if sampling.temperature > 0 else 0
        answer = EmulatedAnswer(submit.prompt, self._emulation.vocabulary, seed)
        live = _Request(Work(submit.request, prompt, wanted), answer, now + submit.deadline_s)
        if submit.send:
            sent = KvSent(live.work)
            live.sends, live.work.sends = submit.send[0].ticket.transfer, True
            self._ways.send(submit.send, lambda: self._wake(sent))
        if submit.receive:
            ended = KvEnded(submit.request)
            try:
                live.expected = self._ways.expect(submit.receive, submit.receive_tokens, lambda: self._wake(ended))
                live.work.external = submit.receive_tokens
                live.told_by = submit.receive[0].ticket.transfer if submit.told_first else None
            except TransferError as error:  # then the prompt is computed
                _log.warning("request %s cannot receive: %s", submit.request, error)
        if self.idle:  # after a pause a step begins when its request comes, however long this process takes to see it
            self._ends = self._ended = now
        self._live[submit.request] = live
        self._batcher.add(live.work)

    def _send(self, batch: Batch, began: float, ends: float) -> None:
        """Positions of prompts that others wait for are being computed."""
        for work, first, count in batch.pieces:
            live = self._live[work.request]
            if live.sends is not None and first < work.prompt:
                last = min(first + count, work.prompt)  # after a preemption, tokens of the answer are computed again
                self._ways.compute(live.sends, ComputedSpan(first, last, began, ends, last == work.prompt))

    def _on_kv(self, request: str) -> None:
        live = self._live.get(request)
        if live is None or live.expected is None:
            return
        expected, live.expected = live.expected, None
        self._wait_limits.end(request)
        self._ways.forget(expected.transfer)
        part, tokens = expected.progress()
        if part < 1.0:
            tokens -= tokens % self._batcher.block_size  # as the real engine does, which drops whole blocks
            live.told_by = None  # computing what is missing does not wait for anybody
        live.here = tokens
        if live.told_by is None:
            self._batcher.arrived(request, tokens)

    def _begin_with(self, told: protocol.SetFirstToken) -> None:
        """Another engine has written the first token of this answer; one that begins by itself writes the same."""
        live = self._live.get(told.request)
        if live is None or live.told_by is None:
            return
        if told.token < self._emulation.vocabulary:
            live.answer.go_on_from(told.token)
            live.first = (told.token,)
            live.work.prompt += 1
            live.work.wanted -= 1
        self._wait_no_longer(live.told_by)

    def _wait_no_longer(self, transfer: bytes) -> None:
        """For the first token of the request that receives this."""
        for request, live in self._live.items():
            if live.told_by == transfer:
                live.told_by = None
                if live.expected is None:
                    self._batcher.arrived(request, live.here)
                return

    def _drop(self, request: str, reason: str) -> None:
        """Forget a request, and end what is under way for it; the KV of a whole prompt may still be sent."""
        live = self._live.pop(request, None)
        if live is None:
            return
        self._batcher.remove(request)
        self._wait_limits.end(request)
        if live.sends is not None and live.work.computed < live.work.prompt:
            self._ways.abort(live.sends, reason)
        if live.expected is not None:
            live.expected.abort(reason)
            self._ways.forget(live.expected.transfer)

    def _publish(self, outputs: list[protocol.NewTokens], now: float) -> None:
        if self.idle:
            self._batcher.check_integrity()
        stats = self._stats()
        iterations = self._tally.take(now, at_once=self.idle)
        # Also when requests have gone without a word: routes follow the load.
        if outputs or iterations or stats != self._reported:
            self._reported = stats
            self._tell(protocol.Step(outputs=tuple(outputs), stats=stats, iterations=iterations))

    def _stats(self) -> protocol.EngineStats:
        batcher = self._batcher
        usage = 1.0 - batcher.free_tokens / self._kv_tokens
        return protocol.EngineStats(batcher.running, batcher.waiting, usage, batcher.free_tokens, batcher.unread_tokens)


def model_capacity(emulation: protocol.Emulation, *, tp: int, kv_cache_mib: int | None) -> tuple[int, StepTimes]:
    """Positions of KV that the cards hold beside the model, and how long their steps take. Raises EmulationError."""
    model, gpu = emulation.model, emulation.gpu
    stage = StageHardware(gpu=gpu, tp=tp, layers=model.layers, link_gbps=emulation.gpu_link_gbps)
    try:
        capacity = kv_capacity_tokens(model, (stage,))
        times = replica_times(model, (stage,))
    except ReplicaError as error:
        raise EmulationError(f"{model.name} on {tp}x {gpu.name}: {error}") from error
    if kv_cache_mib is not None:
        capacity = min(capacity, (kv_cache_mib << 20) // model.kv_bytes_per_token)
    if capacity < LEAST_KV_TOKENS:
        raise EmulationError(
            f"{tp}x {gpu.name} with {gpu.memory_gib:g} GiB each have no room for KV beside the "
            f"{model.weight_bytes / 1e9:.0f} GB of {model.name}; name more cards, larger ones, or a smaller model"
        )
    return capacity, times
