"""The one thread of a client that talks to the network. It runs trio, whatever the consumer runs.

A *job* is a coroutine in that thread which answers through a mailbox. It starts once the network is
reached, or ends with the reason why it is not."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar, final

import trio

from .errors import ClientClosed, ClientError, first_of
from .mailbox import Mailbox, MailboxClosed
from .session import Session

T = TypeVar("T")
Work = Callable[[Session, Mailbox[T]], Awaitable[None]]
Connect = Callable[[], AbstractAsyncContextManager[Session]]

JOIN_S = 5.0  # leaving the network takes about a second; a thread that hangs must not hang its program


@final
class ClientJob(Generic[T]):
    """Work in the network's thread, seen by its consumer."""

    def __init__(self, background: Background, work: Work[T]) -> None:
        self.mailbox: Mailbox[T] = Mailbox()
        self._background = background
        self._work = work
        self._scope = trio.CancelScope()

    def cancel(self) -> None:
        """End the work. May be called from any thread, at any time, and again."""
        self._background.call_soon(self._scope.cancel)
        self.mailbox.close()

    async def run(self, session: Session) -> None:
        """In the network's thread: do the work. An error that is no ClientError ends that thread."""
        try:
            with self._scope:
                await self._work(session, self.mailbox)
        except ClientError as error:
            self.mailbox.close(error)
        except BaseException as error:
            cancelled = first_of(error, (trio.Cancelled,)) is not None
            self.mailbox.close(ClientClosed("the client was closed before the answer came") if cancelled else error)
            raise
        else:
            self.mailbox.close()


@final
class Background:
    """A thread with a session in it. `connect` makes the session; ClientError says why it cannot."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._closed: Mailbox[None] = Mailbox()
        self._started = threading.Event()
        self._waiting: list[ClientJob[Any]] = []
        self._session: Session | None = None
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopping = False
        self._over: ClientError | None = None
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=self._run, name="p2pserve-client", daemon=True)
        self._thread.start()
        self._started.wait()

    def __repr__(self) -> str:
        state = "over" if self._over is not None else "connected" if self._session is not None else "connecting"
        return f"<Background {state}>"

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, or could not be made."""
        return self._over is not None

    def submit(self, work: Work[T]) -> ClientJob[T]:
        """Start a job."""
        job = ClientJob(self, work)
        if not self.call_soon(lambda: self._start(job)):
            job.mailbox.close(self._over or ClientClosed("the client is closed"))
        return job

    def call_soon(self, function: Callable[[], object]) -> bool:
        """Call a function in the thread; False when it has ended."""
        assert self._token is not None
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def close(self) -> None:
        """Cancel all jobs, leave the network and end the thread; blocks about a second."""
        self.call_soon(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    async def aclose(self) -> None:
        """The same from a task."""
        self.call_soon(self._stop)
        limit = threading.Timer(JOIN_S, self._closed.close)
        limit.daemon = True
        limit.start()
        try:
            await self._closed.take_async()
        except MailboxClosed:
            self._thread.join(0.5)
        finally:
            limit.cancel()

    # ---- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        finally:
            self._started.set()
            self._closed.close()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._started.set()
        over: ClientError = ClientClosed("the client's network thread has failed")
        try:
            with self._scope:
                async with self._connect() as session, trio.open_nursery() as nursery:
                    self._session, self._nursery = session, nursery
                    for job in self._waiting:
                        nursery.start_soon(job.run, session)
                    self._waiting.clear()
                    await trio.sleep_forever()
            over = ClientClosed("the client is closed")
        except ClientError as error:
            over = error
        finally:
            self._over = over
            for job in self._waiting:
                job.mailbox.close(over)

    def _start(self, job: ClientJob[Any]) -> None:
        if self._over is not None or self._stopping:
            job.mailbox.close(self._over or ClientClosed("the client is closed"))
        elif self._nursery is None or self._session is None:
            self._waiting.append(job)
        else:
            self._nursery.start_soon(job.run, self._session)

    def _stop(self) -> None:
        self._stopping = True
        self._scope.cancel()


@final
class ClientConnection:
    """A client's background thread: started when first needed, and again after an attempt that failed."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._background: Background | None = None
        self._closed = False

    def __repr__(self) -> str:
        return "closed" if self._closed else repr(self._background or "not connected")

    def submit(self, work: Work[T]) -> ClientJob[T]:
        """Start a job, in a new thread if there is none. Raises ClientClosed."""
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed")
            if self._background is not None and self._background.is_over:
                self._background.close()  # its thread is about to end
                self._background = None
            if self._background is None:
                self._background = Background(self._connect)
            background = self._background
        return background.submit(work)

    def close(self) -> None:
        """End the thread, and allow no new one."""
        background = self._end()
        if background is not None:
            background.close()

    async def aclose(self) -> None:
        """The same from a task."""
        background = self._end()
        if background is not None:
            await background.aclose()

    def _end(self) -> Background | None:
        with self._lock:
            self._closed = True
            background, self._background = self._background, None
        return background
