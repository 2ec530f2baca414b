"""Prompts on their way to threads that turn them into tokens: a few at a time, and clients in turn.

Tokenising takes a second and 600 MB for three megabytes of text, and its order is what clients wait by: how much of it
waits and runs is bounded for each client and in all, and one client has one thread at most.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final, TypeVar, final

import trio

from ...bootstrap import PeerId
from ...coordinator.requests.fair_queue import FairQueue, Quota, ServiceRoom
from ..settings import ClientLimits

T = TypeVar("T")
Key = tuple[PeerId, str]
SHORT_BYTES: Final = 512  # of a prompt that is tokenised sooner (0.25 ms) than a thread takes it up and answers
THREADS: Final = 2
TOKEN_BYTES: Final = 8  # a token of the answer so far takes the memory of so many bytes of text


@final
class Tokenizing:
    """Runs work on prompts. Called on the event loop."""

    def __init__(self, limits: ClientLimits) -> None:
        quota = Quota(
            requests=limits.prompts,
            size=limits.text_bytes,
            all_requests=limits.all_requests,
            all_size=limits.all_text_bytes,
        )
        self._queue: FairQueue[Key] = FairQueue("prompts that wait to be tokenised", "bytes", quota, limits.retry)
        self._room = ServiceRoom(requests=THREADS, size=limits.tokenizing_bytes, unstarted=inf, share=1.0)
        self._turns: dict[Key, trio.Event] = {}
        self._threads = trio.CapacityLimiter(THREADS)

    def __repr__(self) -> str:
        return f"<Tokenizing {self._queue!r}>"

    async def run(self, key: Key, size: int, work: Callable[[], T]) -> T:
        """What `work` returns, done when it is its client's turn; `size` is in bytes. Raises OverQuota before anything
        is done, and what `work` raises."""
        if size <= SHORT_BYTES:
            return work()
        self._queue.add(key[0], key, size, trio.current_time())
        turn = self._turns[key] = trio.Event()
        try:
            self._give_turns()
            await turn.wait()
            return await trio.to_thread.run_sync(work, limiter=self._threads)
        finally:
            del self._turns[key]
            self._queue.remove(key, trio.current_time())
            self._give_turns()

    def _give_turns(self) -> None:
        while (key := self._queue.take(self._room, trio.current_time())) is not None:
            self._turns[key].set()
