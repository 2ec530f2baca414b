"""An engine is measured before it has traffic: in bounded time, whatever it answers, and nothing of it is left."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2pserve.coordinator.costs.sweep import ENGINE_SWEEP
from p2pserve.coordinator.profile import PhaseCost, StepSample
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLost
from p2pserve.node.learning import Learner
from p2pserve.node.replica.sweep import CANCEL_S, DECODED, EngineSweep, choose_batches
from p2pserve.node.testing import READY

from .supervised import elapse

PREFILL = PhaseCost(token_s=2e-4, request_s=1e-3, length_s=1e-5, step_s=8e-3)
DECODE = PhaseCost(token_s=3e-7, request_s=4e-4, length_s=2e-6, step_s=6e-3)
ROOMY = msgspec.structs.replace(READY, max_model_len=4096, kv_tokens=100_000, block_tokens=16)
LIMIT_S = 3.0


class SteppingEngine:
    """An `EngineHandle` whose engine takes as long as two costs say: first all prompts that have come, then decodes."""

    ended_by_other = False

    def __init__(self, nursery: trio.Nursery, sweep: EngineSweep, slower: float = 1.0) -> None:
        self.ready: protocol.EngineReady | None = ROOMY
        self.slower = slower
        self.kept = True  # False: it never answers
        self.steps: list[StepSample] = []
        self.prompts: list[tuple[int, ...]] = []
        self.cancelled: list[str] = []
        self.others: list[protocol.FromEngine] = []
        self._sweep = sweep
        self._noise = random.Random(5)
        self._gone = trio.Event()
        self._life = trio.CancelScope()
        self._arrived = trio.Event()
        self._waiting: dict[str, int] = {}  # prompts that are to be read: their tokens
        self._decoding: dict[str, tuple[int, int]] = {}  # context, and tokens that are still to come
        nursery.start_soon(self._run)

    @property
    def running(self) -> bool:
        return not self._gone.is_set()

    def send(self, message: protocol.EngineMessage) -> None:
        if self._gone.is_set():
            raise EngineLost("gone")
        match message:
            case protocol.Submit(request=request, prompt=prompt):
                self.prompts.append(prompt)
                self._waiting[request] = len(prompt)
            case protocol.Cancel(request=request):
                self.cancelled.append(request)
                self._waiting.pop(request, None)
                self._decoding.pop(request, None)
        self._arrived.set()

    def end(self) -> None:
        self._gone.set()
        self._life.cancel()

    def attach(self, hello: bytes, connection: object) -> None:
        raise EngineLost("no connections")

    async def wait_gone(self) -> str:
        await self._gone.wait()
        return "ended"

    def exit_text(self) -> str:
        return "ended"

    def close(self) -> None:
        self.end()

    async def _run(self) -> None:
        with self._life:
            await self._step_on()

    async def _step_on(self) -> None:
        while True:
            if not self._waiting and not self._decoding:
                self._arrived = trio.Event()
                await self._arrived.wait()
            if not self.kept:
                await trio.sleep_forever()
            step, outputs = self._step()
            await elapse(step.seconds)
            self.steps.append(step)
            self._tell(step, [output for output in outputs if output.request not in self.cancelled])

    def _step(self) -> tuple[StepSample, list[protocol.NewTokens]]:
        if self._waiting:
            count, tokens = len(self._waiting), sum(self._waiting.values())
            seconds, sample = PREFILL.seconds(count, tokens / count), (count, tokens, 0, 0)
            self._decoding |= {request: (prompt, DECODED - 1) for request, prompt in self._waiting.items()}
            outputs = [protocol.NewTokens(request, (1,)) for request in self._waiting]
            self._waiting.clear()
        else:
            count, context = len(self._decoding), sum(held for held, _ in self._decoding.values())
            seconds, sample = DECODE.seconds(count, context / count), (0, 0, count, context)
            outputs = list(self._decode())
        return StepSample(seconds * self.slower * self._noise.gauss(1.0, 0.03), *sample), outputs

    def _decode(self) -> Iterator[protocol.NewTokens]:
        for request, (context, left) in list(self._decoding.items()):
            self._decoding[request] = (context + 1, left - 1)
            if left == 1:
                del self._decoding[request]
            yield protocol.NewTokens(request, (1,), "length" if left == 1 else None)

    def _tell(self, step: StepSample, outputs: list[protocol.NewTokens]) -> None:
        told = protocol.Step(
            outputs=tuple(outputs),
            stats=protocol.EngineStats(len(self._decoding), len(self._waiting), 0.0, 1000),
            iterations=protocol.Iterations(
                steps=1, seconds=step.seconds, longest_s=step.seconds, prefill_tokens=step.prefill_tokens,
                decode_tokens=step.decode_requests, decode_context=step.decode_context, preemptions=0, samples=(step,),
            ),
        )  # fmt: skip
        if not self._sweep.take(told):
            self.others.append(told)


class Swept:
    """What came of a sweep."""

    def __init__(self, *, slower: float = 1.0, kept: bool = True, ends_after_s: float | None = None) -> None:
        self.learner = Learner()
        self.sweep = EngineSweep(self.learner, LIMIT_S)
        self.took_s = 0.0
        trio.run(self._main, slower, kept, ends_after_s, clock=MockClock(autojump_threshold=0))

    async def _main(self, slower: float, kept: bool, ends_after_s: float | None) -> None:
        async with trio.open_nursery() as nursery:
            self.engine = SteppingEngine(nursery, self.sweep, slower)
            self.engine.kept = kept
            if ends_after_s is not None:
                nursery.start_soon(self._end_later, ends_after_s)
            began = trio.current_time()
            await self.sweep.run(self.engine, 64)
            self.took_s = trio.current_time() - began
            await elapse(60.0)
            nursery.cancel_scope.cancel()

    async def _end_later(self, seconds: float) -> None:
        await elapse(seconds)
        self.engine.end()


def test_a_sweep_finds_the_constants_at_all_sizes() -> None:
    found = Swept()
    profile = found.learner.profile
    assert profile is not None
    assert profile.prefill is not None
    assert profile.decode is not None
    for requests, length in ((1, 32), (2, 100), (8, 256), (16, 128), (32, 64)):
        assert profile.prefill.cost.seconds(requests, length) == pytest.approx(
            PREFILL.seconds(requests, length), rel=0.15
        )
        assert profile.decode.cost.seconds(requests, length) == pytest.approx(DECODE.seconds(requests, length), rel=0.1)
    once_and_the_first_again = sum(batch.requests for batch in ENGINE_SWEEP) + ENGINE_SWEEP[0].requests
    assert len(found.engine.prompts) == once_and_the_first_again
    assert found.took_s < LIMIT_S
    assert len(set(found.engine.prompts)) == len(found.engine.prompts), "no cache is to have a prompt"
    assert (found.engine.cancelled, found.engine.others) == ([], [])


def test_a_slow_engine_comes_as_far_as_it_comes() -> None:
    """The first batches tell all that a slow one has the time to tell."""
    found = Swept(slower=5.0)
    profile = found.learner.profile
    assert profile is not None
    assert profile.decode is not None
    assert LIMIT_S <= found.took_s <= LIMIT_S + CANCEL_S
    assert found.engine.cancelled
    for requests, length in ((1, 32), (8, 32), (1, 256)):
        expected = 5.0 * DECODE.seconds(requests, length)
        assert profile.decode.cost.seconds(requests, length) == pytest.approx(expected, rel=0.1)
    # Only its step under way was waited for; nothing has been computed since.
    assert not found.engine.others
    assert sum(step.seconds for step in found.engine.steps) == pytest.approx(found.took_s, abs=1e-6)


def test_an_engine_that_never_answers_is_not_waited_for_without_end() -> None:
    found = Swept(kept=False)
    assert found.took_s == pytest.approx(LIMIT_S + CANCEL_S)
    assert found.learner.profile is not None, "of nothing"
    assert found.learner.profile.decode is None


def test_an_engine_that_ends_meanwhile_ends_the_sweep() -> None:
    found = Swept(ends_after_s=0.3)
    assert found.took_s == pytest.approx(0.3)


def test_only_batches_that_fit_are_tried() -> None:
    assert choose_batches(ROOMY, 64) == list(ENGINE_SWEEP)
    small = msgspec.structs.replace(READY, max_model_len=200, kv_tokens=800, block_tokens=16)
    assert [(batch.requests, batch.prompt) for batch in choose_batches(small, 8)] == [(1, 32), (8, 32), (4, 128)]
    assert choose_batches(msgspec.structs.replace(READY, kv_tokens=0), 64) == []


def test_a_message_is_for_the_sweep_only_while_it_runs() -> None:
    sweep = EngineSweep(Learner(), 0.0)
    assert sweep.is_over
    assert not sweep.take(protocol.Beat())
    assert not sweep.take(protocol.Step(outputs=(), stats=protocol.EngineStats(0, 0, 0.0, 0)))
    assert "0 open" in repr(sweep)
