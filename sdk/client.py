"""The client SDK.

    with Client("p2p_client_...") as client:
        print(client.generate("def fibonacci(n):", max_tokens=40).text)
        with client.generate("import ", stream=True) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)

Both clients keep one background thread that talks to the network, and differ only in how a
consumer waits for it. The connection is made when it is first needed, or by entering the client.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, final, overload

import trio

from ..bootstrap import PeerId
from ..node.messages import Generate, Status
from ..node.methods import CATALOGUE_CHANGE, EVENTS, PLAN_REGROUP, TRACE
from ..node.observing.queries import EventPage, EventQuery, TraceQuery
from ..node.observing.values import RequestTrace
from ..node.owner.messages import CatalogueChange, CatalogueChanged
from ..node.planning.messages import RegroupBegun, RegroupOrder
from .background import ClientConnection, ClientJob, Connect, Work
from .batches import CONCURRENCY, Outcome, Progress, Prompt, build_batch, check_concurrency, show_progress
from .environment import network_address
from .errors import ClientError, InvalidRequest, RequestFailed
from .mailbox import Mailbox, MailboxClosed
from .requests import GenerateOptions, Generation, TextDelta, build_request
from .requests import TokenLogprobs as TokenLogprobs
from .session import Session, check_target, open_session

Messages = list[dict[str, str]]
StreamItem = TextDelta | Generation
TRACE_TIMEOUT_S = 15.0  # all boxes of a network may be asked
EVENTS_TIMEOUT_S = 5.0
T = TypeVar("T")
Many = TypeVar("Many")
Whole = TypeVar("Whole")
Streamed = TypeVar("Streamed")


async def _serve_generate(body: Generate, session: Session, mailbox: Mailbox[StreamItem]) -> None:
    mailbox.put(await session.generate(body, mailbox.put))


async def _serve_many(
    bodies: list[Generate | ClientError], concurrency: int, session: Session, mailbox: Mailbox[tuple[int, Outcome]]
) -> None:
    limiter = trio.CapacityLimiter(concurrency)

    async def serve(number: int, body: Generate | ClientError) -> None:
        outcome: Outcome
        try:
            if isinstance(body, ClientError):
                raise body
            async with limiter:
                outcome = await session.generate(body, lambda delta: None)
        except ClientError as error:
            outcome = error
        mailbox.put((number, outcome))

    async with trio.open_nursery() as nursery:
        for number, body in enumerate(bodies):
            nursery.start_soon(serve, number, body)


async def _serve_status(session: Session, mailbox: Mailbox[Status]) -> None:
    mailbox.put(await session.status())


async def _serve_trace(request: str, session: Session, mailbox: Mailbox[RequestTrace | None]) -> None:
    mailbox.put((await session.ask(TRACE, TraceQuery(request=request), TRACE_TIMEOUT_S)).trace)


async def _serve_events(query: EventQuery, node: str | None, session: Session, mailbox: Mailbox[EventPage]) -> None:
    peer = PeerId(node) if node is not None else None
    mailbox.put(await session.ask(EVENTS, query, query.wait_s + EVENTS_TIMEOUT_S, peer))


async def _serve_regroup(
    order: RegroupOrder, coordinator: str, session: Session, mailbox: Mailbox[RegroupBegun]
) -> None:
    mailbox.put(await session.ask(PLAN_REGROUP, order, EVENTS_TIMEOUT_S, PeerId(coordinator)))


async def _serve_change(
    change: CatalogueChange, owner: str, session: Session, mailbox: Mailbox[CatalogueChanged]
) -> None:
    mailbox.put(await session.ask(CATALOGUE_CHANGE, change, EVENTS_TIMEOUT_S, PeerId(owner)))


async def _serve_ready(session: Session, mailbox: Mailbox[None]) -> None:
    mailbox.put(None)  # there is a session: the network has been reached


class _Answering:
    """An answer on its way: the job that brings it, and the whole of it once it has come."""

    def __init__(self, job: ClientJob[StreamItem]) -> None:
        self._job = job
        self._result: Generation | None = None
        # A stream that nobody holds any more cancels its request as if it had been closed.
        self._abandon = weakref.finalize(self, job.cancel)

    @property
    def result(self) -> Generation:
        """The complete answer. Raises RequestFailed while there is none."""
        if self._result is None:
            raise RequestFailed("result: the answer is not complete; iterate over the stream to its end first")
        return self._result

    def _new_text(self, item: StreamItem) -> TextDelta | None:
        """What an item adds to the text; None for the last one, which is the result."""
        if isinstance(item, TextDelta):
            return item
        self._result = item
        self._abandon()
        return None


@final
class GenerationStream(_Answering):
    """An answer as it is decoded: iterate over its `TextDelta`s, then read `result`.

    Closing it, also by leaving a `with` block, cancels the request on the network unless it has
    ended."""

    def close(self) -> None:
        """Stop here."""
        self._abandon()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TextDelta:
        if self._result is not None:
            raise StopIteration
        try:
            new = self._new_text(self._job.mailbox.take())
        except MailboxClosed:
            raise StopIteration from None
        except BaseException:  # also KeyboardInterrupt: nobody will read on
            self.close()
            raise
        if new is None:
            raise StopIteration
        return new

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@final
class AsyncGenerationStream(_Answering):
    """An answer as it is decoded, for `async for`; see `GenerationStream`. For asyncio and trio."""

    async def aclose(self) -> None:
        """Stop here."""
        self._abandon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if self._result is not None:
            raise StopAsyncIteration
        try:
            new = self._new_text(await self._job.mailbox.take_async())
        except MailboxClosed:
            raise StopAsyncIteration from None
        except BaseException:  # also a cancellation: nobody will read on
            self._abandon()
            raise
        if new is None:
            raise StopAsyncIteration
        return new

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abandon()


class _AnyClient(ABC, Generic[Whole, Streamed, Many]):
    """What both clients share: the connection, and how a request is made."""

    def __init__(
        self,
        bootstrap: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        connect: Connect | None = None,
    ) -> None:
        given: object = timeout_s  # whatever an untyped program passes
        if not (isinstance(given, int | float) and math.isfinite(given) and given > 0):
            raise InvalidRequest(f"timeout_s: {timeout_s!r} is not a number of seconds above 0")
        if connect is not None and not callable(connect):
            raise InvalidRequest(f"connect: {connect!r} is not a function that makes a session")
        if connect is None:
            where, secret = network_address(bootstrap, token)
            check_target(where, secret)
            connect = partial(open_session, where, secret, timeout_s)
        self._connection = ClientConnection(connect)
        self._finalizer = weakref.finalize(self, self._connection.close)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._connection!r}>"

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Whole: ...

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> Streamed: ...

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        stream: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Whole | Streamed:
        """Continue a `prompt`, or answer `messages` (`{"role": ..., "content": ...}`).

        `AsyncClient` returns what is awaited or, with `stream=True`, iterated by `async for`. See
        `GenerateOptions` for the parameters. Raises InvalidRequest before anything is sent; the
        answer raises ConnectionFailed, RequestFailed, Busy or DeadlineExceeded."""
        wanted: object = stream
        if not isinstance(wanted, bool):
            raise InvalidRequest(f"stream: {wanted!r} is neither True nor False")
        body = build_request(prompt, messages, options)
        return self._stream(body) if stream else self._generate(body)

    @overload
    def chat(
        self, messages: str | Messages, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Whole: ...

    @overload
    def chat(
        self, messages: str | Messages, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> Streamed: ...

    def chat(
        self, messages: str | Messages, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Whole | Streamed:
        """Answer a conversation, by the model's chat template; a text is a user's only message. Else as `generate`."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if turns is None:
            raise InvalidRequest("messages: give a text or a list of {'role': ..., 'content': ...}")
        if stream is True:
            return self.generate(messages=turns, stream=True, **options)
        return self.generate(messages=turns, stream=stream, **options)

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        progress: Progress = False,
        concurrency: int = CONCURRENCY,
        **options: Unpack[GenerateOptions],
    ) -> Many:
        """Answer all prompts, each a text, token ids or a conversation, so many at once; `options` are for each.

        Returns, in the order of the prompts, its `Generation` or the ClientError that ended it: one that fails costs
        the others nothing. `progress=True` shows a bar on standard error; a function is called with (ended, all).
        `deadline_s` counts for each from when its turn has come. Raises InvalidRequest for what is wrong with all of
        them, and ConnectionFailed."""
        bodies = build_batch(prompts, options)
        if not callable(progress) and not isinstance(progress, bool):
            raise InvalidRequest(f"progress: {progress!r} is neither True nor False nor a function")
        work = partial(_serve_many, bodies, check_concurrency(concurrency))
        return self._collect(partial(self._connection.submit, work), len(bodies), progress)

    @abstractmethod
    def _collect(
        self, submit: Callable[[], ClientJob[tuple[int, Outcome]]], total: int, progress: Progress
    ) -> Many: ...

    @abstractmethod
    def _generate(self, body: Generate) -> Whole: ...

    @abstractmethod
    def _stream(self, body: Generate) -> Streamed: ...

    def _submit(self, body: Generate) -> ClientJob[StreamItem]:
        return self._connection.submit(partial(_serve_generate, body))


@final
class Client(_AnyClient[Generation, GenerationStream, list[Outcome]]):
    """A client that blocks. May be used from several threads at once.

    Args:
        bootstrap: a join token (`p2p_client_...`), or `host:port` of any node together with `token`;
            left out, what P2PSERVE_BOOTSTRAP says.
        token: the join token when `bootstrap` is an address; left out, what P2PSERVE_TOKEN says.
        timeout_s: how long to try to reach the network, and to look for a node that serves.
        connect: makes the session instead of joining at an address, for tests of what uses a client.

    Raises:
        InvalidAddress: the address or the token is malformed.
    """

    def _generate(self, body: Generate) -> Generation:
        with self._stream(body) as answer:
            for _ in answer:
                pass
            return answer.result

    def _stream(self, body: Generate) -> GenerationStream:
        return GenerationStream(self._submit(body))

    def _collect(
        self, submit: Callable[[], ClientJob[tuple[int, Outcome]]], total: int, progress: Progress
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        with show_progress(progress, total) as advance:
            job = submit()
            try:
                while len(outcomes) < total:
                    number, outcome = job.mailbox.take()
                    outcomes[number] = outcome
                    advance(outcome)
            finally:
                job.cancel()
        return [outcomes[number] for number in range(total)]

    def status(self) -> Status:
        """The network as the nearest node sees it. Raises ConnectionFailed."""
        return self._call(_serve_status)

    def trace(self, request: str) -> RequestTrace | None:
        """What happened to a request, on all boxes that had a part in it, by its id (`figures.id`); None where no node
        knows it. Raises ConnectionFailed."""
        found: RequestTrace | None = self._call(partial(_serve_trace, request))
        return found

    def events(self, query: EventQuery, node: str | None = None) -> EventPage:
        """What happened at a node, or at the nearest. Raises ConnectionFailed, RequestFailed."""
        found: EventPage = self._call(partial(_serve_events, query, node))
        return found

    def regroup(self, order: RegroupOrder, coordinator: str) -> RegroupBegun:
        """Have the network's coordinator begin with other groups of boxes, with an admin's token. Raises
        ConnectionFailed, RequestFailed."""
        found: RegroupBegun = self._call(partial(_serve_regroup, order, coordinator))
        return found

    def change_catalogue(self, change: CatalogueChange, owner: str) -> CatalogueChanged:
        """Have the node with the network's key change its catalogue, with an admin's token. Raises as `regroup`."""
        found: CatalogueChanged = self._call(partial(_serve_change, change, owner))
        return found

    def connect(self) -> None:
        """Reach the network now instead of with the first request. Raises ConnectionFailed,
        InvalidAddress."""
        self._call(_serve_ready)

    def close(self) -> None:
        """Cancel what is running and leave. Waits about a second; calling it again is safe."""
        self._finalizer()

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:  # there will be no __exit__
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Work[T]) -> T:
        job = self._connection.submit(work)
        try:
            return job.mailbox.take()
        finally:
            job.cancel()


@final
class AsyncClient(
    _AnyClient[Coroutine[Any, Any, Generation], AsyncGenerationStream, Coroutine[Any, Any, list[Outcome]]]
):
    """A client for trio and asyncio. See `Client` for the arguments."""

    async def _generate(self, body: Generate) -> Generation:
        async with self._stream(body) as answer:
            async for _ in answer:
                pass
            return answer.result

    def _stream(self, body: Generate) -> AsyncGenerationStream:
        return AsyncGenerationStream(self._submit(body))

    async def _collect(
        self, submit: Callable[[], ClientJob[tuple[int, Outcome]]], total: int, progress: Progress
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        with show_progress(progress, total) as advance:
            job = submit()
            try:
                while len(outcomes) < total:
                    number, outcome = await job.mailbox.take_async()
                    outcomes[number] = outcome
                    advance(outcome)
            finally:
                job.cancel()
        return [outcomes[number] for number in range(total)]

    async def status(self) -> Status:
        """The network as the nearest node sees it. Raises ConnectionFailed."""
        return await self._call(_serve_status)

    async def trace(self, request: str) -> RequestTrace | None:
        """What happened to a request, on all boxes that had a part in it, by its id (`figures.id`); None where no node
        knows it. Raises ConnectionFailed."""
        return await self._call(partial(_serve_trace, request))

    async def events(self, query: EventQuery, node: str | None = None) -> EventPage:
        """What happened at a node, or at the nearest. Raises ConnectionFailed, RequestFailed."""
        return await self._call(partial(_serve_events, query, node))

    async def regroup(self, order: RegroupOrder, coordinator: str) -> RegroupBegun:
        """Have the network's coordinator begin with other groups of boxes, with an admin's token. Raises
        ConnectionFailed, RequestFailed."""
        return await self._call(partial(_serve_regroup, order, coordinator))

    async def connect(self) -> None:
        """Reach the network now instead of with the first request. Raises ConnectionFailed,
        InvalidAddress."""
        await self._call(_serve_ready)

    async def aclose(self) -> None:
        """Cancel what is running and leave. Waits about a second; calling it again is safe."""
        # Leaving must not be cut short by the cancellation that ends the block.
        with trio.CancelScope(shield=True) if trio.lowlevel.in_trio_run() else nullcontext():
            await self._connection.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:  # there will be no __aexit__
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _call(self, work: Work[T]) -> T:
        job = self._connection.submit(work)
        try:
            return await job.mailbox.take_async()
        finally:
            job.cancel()
