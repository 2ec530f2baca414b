"""The pipes of one stage: who reads them, and the place of a worker at their ends."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from ....kvtransport.errors import TransferError
from ....kvtransport.wire.pipe import Pipe
from ..settings import PIPELINE_DEFAULTS, PipelineSettings
from ..stage_pipes import PipelineError, StageLost
from .codec import MessageCodecError
from .vocabulary import CODEC
from .warm_up import MessageWarmUp

_HAS_CORES = len(os.sched_getaffinity(0)) > 1


OnLost = Callable[[PipelineError], None]
WhileWaiting = Callable[[], object]
"""What a thread does again and again while it looks for a message: little, and for itself."""


def do_nothing() -> None:
    """Of that."""


@final
class PipeReader:
    """Takes messages until the pipe ends: on the thread that waits for one, else on its own, so
    that both ends always hear that the other is alive.

    `on_message` and, once, `on_end` are called by whichever reads; bad messages end the pipe."""

    def __init__(
        self,
        pipe: Pipe,
        name: str,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        settings: PipelineSettings,
    ) -> None:
        self._settings = settings
        self._pipe = pipe
        self._on_message = on_message
        self._on_end = on_end
        self._turn = threading.Condition()
        self._reading = self._ended = False
        self._waited_at = time.monotonic()
        self._look_s = 0.0
        self._warm_up = MessageWarmUp(settings)
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    def __repr__(self) -> str:
        return f"<PipeReader {self._pipe}>"

    def read_until(
        self, done: Callable[[], bool], timeout: float | None = None, meanwhile: WhileWaiting = do_nothing
    ) -> bool:
        """Read until it is so, to which the end of the pipe must lead as well. False if it takes longer."""
        began = time.monotonic()
        until = math.inf if timeout is None else began + timeout
        while self._take_turn(done, until):
            try:
                self._read(until - time.monotonic(), self._look_s, meanwhile)
            finally:
                self._pass_turn()
        self._waited_at = time.monotonic()
        # What came soon will come soon again; for what takes longer, looking is not worth a core.
        may_look = _HAS_CORES or self._settings.look_on_one_core
        look_s = self._settings.look_s
        self._look_s = look_s if may_look and self._waited_at - began < look_s else 0.0
        return done()

    def _take_turn(self, done: Callable[[], bool], until: float) -> bool:
        """Wait until it is ours to read; False if there is nothing to read for: it is so, or too late."""
        with self._turn:
            while not (self._ended or done() or (left := until - time.monotonic()) <= 0):
                if not self._reading:
                    self._reading = True
                    return True
                self._turn.wait(min(left, threading.TIMEOUT_MAX))
            return False

    def _pass_turn(self) -> None:
        with self._turn:
            self._reading = False
            self._turn.notify_all()

    def _watch(self) -> None:
        """Read in place of those who wait for messages, while there are none; and the end, at once."""
        while not self._ended:
            gone = self._pipe.wait_gone(self._settings.rest_s)
            if self._take_turn(partial(self._leaves_to_others, gone), math.inf):
                try:
                    self._read(math.inf)
                finally:
                    self._pass_turn()

    def _leaves_to_others(self, gone: bool) -> bool:
        """Whether those who wait for messages see to it. That the other end is gone, nobody leaves to anybody."""
        return not gone and (self._reading or time.monotonic() - self._waited_at < self._settings.rest_s)

    def _read(self, wait_s: float, look_s: float = 0.0, meanwhile: WhileWaiting = do_nothing) -> None:
        """Hand on one message, if one begins within that time, or the end."""
        try:
            message = self._pipe.receive_within(wait_s, look_s, partial(self._while_looking, meanwhile))
            if message is not None:
                self._warm_up.remember(message)
                self._on_message(CODEC.decode(message))
        except (TransferError, MessageCodecError) as error:
            self._pipe.close(str(error))
            self._warm_up.close()
            self._on_end(str(error))
            self._ended = True

    def _while_looking(self, meanwhile: WhileWaiting) -> None:
        self._warm_up.run_if_due()
        meanwhile()
        os.sched_yield()  # the core is anybody's who has work for it


@final
class PipeInput:
    """What another stage says, in order. `who` it is, for people."""

    def __init__(self, pipe: Pipe, who: str, on_lost: OnLost, settings: PipelineSettings) -> None:
        self._who = who
        self._on_lost = on_lost
        self._items: deque[Any] = deque()
        self._lost: StageLost | None = None
        self._reader = PipeReader(pipe, f"from {who}", self._items.append, self._end, settings)

    def __repr__(self) -> str:
        return f"<PipeInput from {self._who}: {self._reader}>"

    def get(self, meanwhile: WhileWaiting = do_nothing) -> Any:
        """Wait for the next. Raises StageLost."""
        self._reader.read_until(lambda: bool(self._items) or self._lost is not None, meanwhile=meanwhile)
        if self._items:
            return self._items.popleft()
        assert self._lost is not None
        raise self._lost

    def _end(self, reason: str) -> None:
        lost = StageLost(f"{self._who} is lost: {reason}")
        self._on_lost(lost)  # first: it ends the process with the reason, before anybody trips over the loss
        self._lost = lost


@final
class ActivationsOutput:
    """Activations to the stage behind. `put` never waits: a thread sends, but for a few at once,
    which saves two thread changes per token. Bounded by the batches in flight, one per stage."""

    def __init__(self, pipe: Pipe, stage: int, on_lost: OnLost, settings: PipelineSettings) -> None:
        self._pipe = pipe
        self._stage = stage
        self._on_lost = on_lost
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._queued = self._dequeued = 0  # each counted by one thread; the second, when it has been sent
        # Nothing comes back; but whoever reads hears that the other end is alive, and when it is not.
        self._reader = PipeReader(pipe, f"activations-to-{stage}", self._refuse, self._end, settings)
        threading.Thread(target=self._run, name=f"activations-to-{stage}-writer", daemon=True).start()

    def __repr__(self) -> str:
        return f"<ActivationsOutput to stage {self._stage}: {self._reader}>"

    def put(self, value: Callable[[], object], *, at_once: bool = False) -> None:
        """Send what this returns; it is called by the thread that sends, and may wait for a copy from a device. One
        thread may call this; `at_once` says that nothing would be waited for, and that the kernel will have room."""
        if at_once and self._queued == self._dequeued:
            self._send(value)
        else:
            self._queued += 1
            self._queue.put(value)

    def _run(self) -> None:
        while True:
            self._send(self._queue.get())
            self._dequeued += 1

    def _send(self, value: Callable[[], object]) -> None:
        with contextlib.suppress(TransferError):  # the reader says so
            self._pipe.send(CODEC.encode(value()))

    def _refuse(self, message: Any) -> None:
        raise MessageCodecError(f"a {type(message).__name__} from the stage behind, which has nothing to say here")

    def _end(self, reason: str) -> None:
        self._on_lost(StageLost(f"stage {self._stage} is lost: {reason}"))


@dataclass(frozen=True, slots=True)
class StageRank:
    """This process's place: worker `rank` of its stage's `tp`; the first has the pipes."""

    stage: int
    partition: tuple[int, ...]
    before: PipeInput | None = None
    behind: ActivationsOutput | None = None
    tp: int = 1
    rank: int = 0
    settings: PipelineSettings = PIPELINE_DEFAULTS

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.partition)
