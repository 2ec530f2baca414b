"""How the network's thread hands results to a consumer: a thread, a trio or an asyncio task."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar, final

import sniffio
import trio

T = TypeVar("T")
Wake = Callable[[], None]
"""Ends one sleep of a consumer. May be called from any thread, again, and after the consumer's loop has ended."""


class MailboxClosed(Exception):
    """The mailbox was closed, and everything in it has been taken."""


def prepare_sleep() -> tuple[Wake, Callable[[], Awaitable[Any]]]:
    """What ends a sleep of the current task, and what sleeps until then. Raises RuntimeError outside trio and
    asyncio."""
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        library = "none"
    done: trio.Event | asyncio.Event
    post: Callable[[Callable[[], None]], object]
    if library == "trio":
        done, post = trio.Event(), trio.lowlevel.current_trio_token().run_sync_soon
    elif library == "asyncio":
        done, post = asyncio.Event(), asyncio.get_running_loop().call_soon_threadsafe
    else:
        raise RuntimeError(f"AsyncClient runs under trio and asyncio; here runs {library}")

    def wake() -> None:
        try:
            post(done.set)
        except RuntimeError:
            return  # the loop has ended, and the sleeper with it

    return wake, done.wait


@final
class Mailbox(Generic[T]):
    """Letters from any thread to one consumer at a time, in order; as many as an answer has."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may close a mailbox in the middle of a `put` to it.
        self._lock = threading.RLock()
        self._items: deque[T] = deque()
        self._wake: Wake | None = None
        self._closed = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Mailbox items={len(self._items)} {'closed' if self._closed else 'open'}>"

    def put(self, item: T) -> None:
        """Add an item; after `close` it is dropped, nobody reads any more."""
        with self._lock:
            if not self._closed:
                self._items.append(item)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def close(self, error: BaseException | None = None) -> None:
        """No more items; after the last the consumer gets `error` or `MailboxClosed`. First call
        counts."""
        with self._lock:
            if not self._closed:
                self._closed, self._error = True, error
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def take(self) -> T:
        """The next item; blocks the thread, but not for signals."""
        while True:
            done = threading.Event()
            if self._is_ready(done.set):
                return self._items.popleft()
            done.wait()

    async def take_async(self) -> T:
        """The next item; lets other tasks of the consumer's loop run meanwhile."""
        while True:
            wake, sleep = prepare_sleep()
            if self._is_ready(wake):
                return self._items.popleft()
            await sleep()

    def _is_ready(self, wake: Wake) -> bool:
        """Whether there is an item; if not, the next one calls `wake`. Raises what `close` was given."""
        with self._lock:
            if self._items:
                return True
            if self._closed:
                raise self._error if self._error is not None else MailboxClosed
            self._wake = wake
            return False
