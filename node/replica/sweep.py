"""How fast an engine is, measured before it has traffic: batches of equal requests, some batch sizes and lengths
(Xiong et al., section 3.1).

Requests that come one at a time cannot tell what a request costs from what a token costs; a sweep can, so all eight
constants of the profile are known when the first request is routed. It goes through the engine's own protocol, and
what is learned are the engine's own steps: any engine can be swept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, final

import trio

from ...coordinator.costs.sweep import ENGINE_SWEEP, SweepBatch
from ..engine import protocol
from ..engine.agent_side.engine_link import EngineHandle
from ..learning import Learner

DECODED: Final = 4
"""Tokens that each request is answered with: as many steps that only decode, but for the last."""

CANCEL_S: Final = 2.0
"""For so long an engine is waited for that is in a step when the time is over."""


def choose_batches(ready: protocol.EngineReady, max_requests: int) -> list[SweepBatch]:
    """Those of ENGINE_SWEEP that this engine has room for."""
    return [
        batch
        for batch in ENGINE_SWEEP
        if batch.requests <= max_requests
        and batch.prompt + DECODED <= ready.max_model_len
        and batch.requests * (batch.prompt + DECODED + ready.block_tokens) <= ready.kv_tokens
    ]


@final
class EngineSweep:
    """The sweep of one engine process, at most `limit_s` long; 0: none. What it learns goes to `learner`."""

    def __init__(self, learner: Learner, limit_s: float) -> None:
        self._learner = learner
        self._limit_s = limit_s
        self.is_over = limit_s <= 0.0
        self._running = False
        self._counts = False  # not while it warms up
        self._is_late = False  # the time is over
        self._open: set[str] = set()
        self._news = trio.Event()
        self._numbers = 0
        self._random = random.Random(0)

    def __repr__(self) -> str:
        return f"<EngineSweep {self._numbers} requests, {len(self._open)} open>"

    def take(self, message: protocol.FromEngine) -> bool:
        """Whether what the engine says is for the sweep, and for nobody else."""
        if not (self._running and isinstance(message, protocol.Step)):
            return False
        if message.iterations is not None and self._counts:
            self._learner.add(message.iterations)
        self._open -= {output.request for output in message.outputs if output.finish is not None}
        # What the last steps were like may be told after their tokens.
        if not self._open and (message.iterations is not None or self._is_late):
            self._news.set()
        return True

    async def run(self, engine: EngineHandle, max_requests: int) -> None:
        """Sweep until all batches are done, the time is over, or the engine is gone; then fit."""
        self.is_over = True
        ready = engine.ready
        batches = choose_batches(ready, max_requests) if ready is not None else []
        if ready is None or not batches:
            return
        self._running = True
        try:
            with trio.move_on_after(self._limit_s):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._stop_with, engine, nursery.cancel_scope)
                    await self._run_batches(engine, ready, batches)
                    nursery.cancel_scope.cancel()
            await self._cancel_open(engine)
        finally:
            self._running = False
        await self._learner.refit()

    async def _run_batches(self, engine: EngineHandle, ready: protocol.EngineReady, batches: list[SweepBatch]) -> None:
        # The first steps of an engine take longer than those that follow, so the first batch is done twice.
        for number, batch in enumerate([batches[0], *batches]):
            if not engine.running:
                return
            self._counts = number > 0
            self._news = trio.Event()
            for submit in self._make_requests(batch, ready):
                self._open.add(submit.request)
                engine.send(submit)
            await self._news.wait()

    def _make_requests(self, batch: SweepBatch, ready: protocol.EngineReady) -> Iterator[protocol.Submit]:
        """Prompts that differ, so that no cache has them."""
        sampling = protocol.Sampling(max_tokens=DECODED, ignore_eos=True)
        for _ in range(batch.requests):
            self._numbers += 1
            prompt = tuple(self._random.choices(range(max(1, ready.vocabulary)), k=batch.prompt))
            yield protocol.Submit(
                request=f"sweep:{self._numbers}", prompt=prompt, sampling=sampling, deadline_s=self._limit_s
            )

    async def _stop_with(self, engine: EngineHandle, scope: trio.CancelScope) -> None:
        await engine.wait_gone()
        scope.cancel()

    async def _cancel_open(self, engine: EngineHandle) -> None:
        """Nothing of the sweep is to be in the engine when requests come: what runs when the time is over is given
        up."""
        if not (self._open and engine.running):
            return
        for request in self._open:
            engine.send(protocol.Cancel(request=request))
        with trio.move_on_after(CANCEL_S):
            self._news, self._is_late = trio.Event(), True
            self._open.clear()
            await self._news.wait()  # its next step says that it goes on without
