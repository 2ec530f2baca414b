"""How the network's thread hands results to a consumer: a thread, a trio or an asyncio task.

A `Waiter` is one sleep of one consumer; `wake` may be called from any thread, even after the
consumer's event loop has ended."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Generic, Protocol, TypeVar, final

import sniffio
import trio

T = TypeVar("T")


class EndOfMail(Exception):
    """The mailbox was closed, and everything in it has been taken."""


class Waiter(Protocol):
    """One sleep."""

    def wake(self) -> None:
        """End it. May be called from any thread, and again."""
        ...


class AsyncWaiter(Waiter, Protocol):
    """One sleep of a task."""

    async def wait(self) -> None:
        """Sleep until woken."""
        ...


@final
class _ThreadWaiter:
    def __init__(self) -> None:
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait(self) -> None:
        self._event.wait()


@final
class _TrioWaiter:
    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._event = trio.Event()

    def wake(self) -> None:
        try:
            self._token.run_sync_soon(self._event.set)
        except trio.RunFinishedError:
            return  # the loop has ended, and the sleeper with it

    async def wait(self) -> None:
        await self._event.wait()


@final
class _AsyncioWaiter:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return  # the loop has been closed, and the sleeper is gone

    async def wait(self) -> None:
        await self._event.wait()


def async_waiter() -> AsyncWaiter:
    """A sleep for the current task. Raises RuntimeError outside trio and asyncio."""
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        library = "none"
    if library == "trio":
        return _TrioWaiter()
    if library == "asyncio":
        return _AsyncioWaiter()
    raise RuntimeError(f"AsyncClient runs under trio and asyncio; here runs {library}")


@final
class Mailbox(Generic[T]):
    """Letters from any thread to one consumer at a time, in order; as many as an answer has."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may close a mailbox in the middle of a `put` to it.
        self._lock = threading.RLock()
        self._letters: deque[T] = deque()
        self._waiter: Waiter | None = None
        self._closed = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Mailbox letters={len(self._letters)} {'closed' if self._closed else 'open'}>"

    def put(self, letter: T) -> None:
        """Add a letter; after `close` it is dropped, nobody reads any more."""
        with self._lock:
            if not self._closed:
                self._letters.append(letter)
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def close(self, error: BaseException | None = None) -> None:
        """No more letters; after the last the consumer gets `error` or `EndOfMail`. First call
        counts."""
        with self._lock:
            if not self._closed:
                self._closed, self._error = True, error
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.wake()

    def take(self) -> T:
        """The next letter; blocks the thread, but not for signals."""
        while True:
            waiter = _ThreadWaiter()
            if self._ready(waiter):
                return self._letters.popleft()
            waiter.wait()

    async def take_async(self) -> T:
        """The next letter; lets other tasks of the consumer's loop run meanwhile."""
        while True:
            waiter = async_waiter()
            if self._ready(waiter):
                return self._letters.popleft()
            await waiter.wait()

    def _ready(self, waiter: Waiter) -> bool:
        """Whether there is a letter; if not, the next wakes `waiter`. Raises what `close` was
        given."""
        with self._lock:
            if self._letters:
                return True
            if self._closed:
                raise self._error if self._error is not None else EndOfMail
            self._waiter = waiter
            return False
