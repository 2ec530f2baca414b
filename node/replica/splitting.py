"""Where prompts are split of which this replica computes a part: the balancer of Cronus, with slots for two requests.

As a prefill replica it is asked for a slot by gateways; as a decode replica it is asked by prefill replicas how it
stands. Both say what their own engine's steps have shown, and until there are such, what is expected of its device.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import trio

from ...bootstrap import NetworkError, PeerId, Role
from ...bootstrap.methods import Messenger
from ...coordinator.profile import LatencyProfile, StepSample
from ...coordinator.routing.balancer import ChunkedPrefillState, ChunkLine, PrefillLine, choose_split
from ...coordinator.routing.balancer_fit import (
    expected_chunk_line,
    expected_prefill_line,
    fit_chunk_line,
    fit_prefill_line,
    measured_times,
)
from .. import methods
from ..engine.protocol import EngineReady
from ..models import ModelInfo
from ..requests.slot_messages import DecodeStateAnswer, DecodeStateQuery, SlotOpen, SlotOpened
from .worker import Worker

SLOT_WAIT_S: Final = 4.0
"""A gateway waits so long for an answer at most; then it asks again. Less than it waits for any answer."""

STATE_TIMEOUT_S: Final = 2.0
"""For a decode replica to say how it stands; without its word all of the prompt is computed first."""


class _Lines(NamedTuple):
    """What is known of an engine's times, and from what."""

    ready: EngineReady
    profile: LatencyProfile | None
    prefill: PrefillLine
    chunk: ChunkLine


@final
class PromptSplitter:
    """See the module. Answers for the `worker` of the same node."""

    def __init__(self, worker: Worker, *, model: ModelInfo, messenger: Messenger) -> None:
        self._worker = worker
        self._model = model
        self._messenger = messenger
        self._lines: _Lines | None = None
        messenger.handle(methods.PREFILL_SLOT, self.open_slot)
        messenger.handle(methods.DECODE_STATE, self.describe_state)

    def __repr__(self) -> str:
        return f"<PromptSplitter {self._worker.slots!r}>"

    async def open_slot(self, gateway: PeerId, role: Role, body: SlotOpen) -> SlotOpened:
        """Wait until the request's turn has come here, and choose how much of its prompt this replica computes."""
        self._worker.describe_engine(body.service)
        if not await self._worker.slots.wait((gateway, body.request), SLOT_WAIT_S):
            return SlotOpened()
        try:
            lines = await self._known_lines(body.service)
            asked = DecodeStateQuery(service=body.service)
            found = await self._messenger.request(PeerId(body.decode), methods.DECODE_STATE, asked, STATE_TIMEOUT_S)
        except NetworkError:
            # Nothing is known of what it has room for. What it can still do is found out when it is asked to decode.
            return SlotOpened(split=body.prompt_tokens)
        return SlotOpened(split=choose_split(body.prompt_tokens, lines.prefill, found.chunk, found.state))

    async def describe_state(self, prefill: PeerId, role: Role, body: DecodeStateQuery) -> DecodeStateAnswer:
        """How it stands here after the engine's last step."""
        lines, stats = await self._known_lines(body.service), self._worker.stats
        ready = lines.ready
        free_tokens = min(stats.kv_free_tokens, ready.kv_tokens) if stats is not None else ready.kv_tokens
        state = ChunkedPrefillState(
            decoding=stats.running if stats is not None else 0,
            context_tokens=ready.kv_tokens - free_tokens,
            free_tokens=free_tokens,
            block_tokens=ready.block_tokens,
            step_tokens=ready.step_tokens,
        )
        return DecodeStateAnswer(state=state, chunk=lines.chunk)

    async def _known_lines(self, service: str) -> _Lines:
        """Fitted anew when the engine is another, or its profile is. Raises RemoteError without an engine."""
        ready, learner = self._worker.describe_engine(service), self._worker.learner
        known = self._lines
        if known is None or known.ready != ready or known.profile is not learner.profile:
            profile = learner.profile
            prefill, chunk = await trio.to_thread.run_sync(self._fit, ready, learner.samples())
            known = self._lines = _Lines(ready, profile, prefill, chunk)
        return known

    def _fit(self, ready: EngineReady, samples: list[StepSample]) -> tuple[PrefillLine, ChunkLine]:
        """Some ten milliseconds of work."""
        times = measured_times(self._model.shape, ready.tflops, ready.memory_gbps)
        step_tokens = ready.step_tokens or 1
        return (
            fit_prefill_line(samples, expected_prefill_line(times)),
            fit_chunk_line(samples, expected_chunk_line(times, step_tokens), step_tokens),
        )
