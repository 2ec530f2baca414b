"""Workers in other processes: calls go out over a control pipe, and their answers come back in the same order."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, final

from ....kvtransport.errors import TransferError
from ....kvtransport.wire.pipe import Pipe
from ..settings import PipelineSettings
from ..stage_pipes import StageLost
from .codec import MessageCodecError
from .pipes import OnLost, PipeReader, WhileWaiting, do_nothing
from .vocabulary import CODEC, Call, CallFailed, CallResult


@final
class RemoteWorker:
    """Our end of a control pipe to a worker, or to those of a stage as one. `name`: what people are told of it."""

    def __init__(self, name: str, pipe: Pipe, on_lost: OnLost, settings: PipelineSettings) -> None:
        self.name = name
        self._pipe = pipe
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, Future[Any]]] = deque()
        self._lost: StageLost | None = None
        self._reader = PipeReader(pipe, f"answers of {name}", self._on_message, self._lose, settings)

    def __repr__(self) -> str:
        return f"<RemoteWorker {self.name} pending={len(self._pending)} {self._reader}>"

    def call(self, number: int, buffers: Sequence[bytes | bytearray | memoryview]) -> Future[Any]:
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

    def wait(self, answer: Future[Any], timeout: float | None, meanwhile: WhileWaiting = do_nothing) -> Any:
        """For the answer to a call. Raises StageLost; one that takes longer is given up."""
        if not self._reader.read_until(answer.done, timeout, meanwhile):
            self._lose(f"it is alive, but has not answered for {timeout:g} s")
        return answer.result()

    def close(self, reason: str) -> None:
        """Say good-bye; what is there ends."""
        self._pipe.close(reason)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, CallFailed):
            self._lose(message.reason)
            return
        with self._lock:
            if not isinstance(message, CallResult) or not self._pending or self._pending[0][0] != message.number:
                raise MessageCodecError(f"a {type(message).__name__} that answers nothing")
            _, future = self._pending.popleft()
        future.set_result(message.result)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = StageLost(f"{self.name} is lost: {reason}")
            pending, self._pending = self._pending, deque()
        self._on_lost(self._lost)  # first: it ends the process with the reason, before anybody trips over the loss
        for _, future in pending:
            future.set_exception(self._lost)


Answers = Sequence[tuple[RemoteWorker, Future[Any]]]

_numbers = itertools.count(1)


def call_all(workers: Sequence[RemoteWorker], method: str, *args: Any, **kwargs: Any) -> Answers:
    """One call to all of them, encoded once. Raises StageLost."""
    if not workers:
        return []
    number = next(_numbers)
    buffers = CODEC.encode(Call(number, method, args, kwargs))
    return [(worker, worker.call(number, buffers)) for worker in workers]
