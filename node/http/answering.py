"""The box's end: HTTP that peers carry here over their sessions, answered by the box's own API server.

No port is opened: each exchange gets a fresh connection to that server, which is started when it is first needed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, final

import h11
import trio

from ...bootstrap import NetworkError, PeerId, RemoteError, Role
from ...bootstrap.methods import Messenger
from .. import messages, methods
from ..web.paths import find_refusal
from .bodies import BodyInlet, BodyOutlet
from .headers import drop_hop_by_hop, to_api_server
from .messages import MAX_HEADERS, MAX_HEADERS_BYTES, PIECE_BYTES, HttpAnswer, HttpHeader, HttpMore, HttpOpen

_log = logging.getLogger(__name__)

EXCHANGES_EACH: Final = 128  # of one peer: together they hold 32 MiB here at most, and as many frames as a session
EXCHANGES: Final = 1024
CONNECT_S: Final = 60.0  # for an API process that has to be started, perhaps with all that it imports
RETRY_S: Final = 1.0
STALLED_S: Final = 300.0  # so long an answer waits for a front that takes none of it
_READ_BYTES: Final = 64 << 10
BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError, OSError)


class ApiUnavailable(Exception):
    """This box has no API server, or it does not start. The text is one line for the user."""


Connect = Callable[[], Awaitable[trio.abc.Stream]]
"""A fresh connection to the box's API server, which speaks HTTP/1.1. Raises ApiUnavailable."""


async def no_api_server() -> trio.abc.Stream:
    """A `Connect` of a box without one."""
    raise ApiUnavailable("this node has no API server; send the request to another one")


class _ExchangeFailed(Exception):
    """There will be no more of the answer."""


@dataclass(slots=True, eq=False)
class _Served:
    peer: PeerId
    id: str
    request: BodyInlet = field(default_factory=BodyInlet)
    answer: BodyOutlet = field(default_factory=BodyOutlet)
    connecting: trio.CancelScope = field(default_factory=trio.CancelScope)
    running: trio.CancelScope = field(default_factory=trio.CancelScope)

    def cancel(self) -> None:
        self.connecting.cancel()
        self.running.cancel()


@final
class HttpAnswering:
    """Takes exchanges from peers. `nursery` runs a task for each."""

    def __init__(self, messenger: Messenger, connect: Connect, nursery: trio.Nursery) -> None:
        self._messenger = messenger
        self._connect = connect
        self._nursery = nursery
        self._served: dict[tuple[PeerId, str], _Served] = {}
        self._each: Counter[PeerId] = Counter()
        self._draining = False
        messenger.handle(methods.HTTP_OPEN, self.open)
        messenger.on_notice(methods.HTTP_MORE, self.on_more)
        messenger.on_notice(methods.HTTP_STOP, self.stop)

    def __repr__(self) -> str:
        return f"<HttpAnswering exchanges={len(self._served)}>"

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._served

    def drain(self) -> None:
        """Finish what is running, refuse what is new."""
        self._draining = True

    def resume(self) -> None:
        """Take what is new again."""
        self._draining = False

    async def open(self, peer: PeerId, role: Role, body: HttpOpen) -> messages.Opened:
        """Hand a request to the API server; its answer follows as notices. Raises RemoteError."""
        self._check(peer, role, body)
        served = _Served(peer, body.exchange)
        self._served[peer, body.exchange] = served
        self._each[peer] += 1
        stream: trio.abc.Stream | None = None
        running = False
        try:
            connection = h11.Connection(h11.CLIENT)
            head = _encode_head(connection, peer, role, body)
            with served.connecting, trio.move_on_after(CONNECT_S) as limit:
                stream = await self._connect()
            if stream is None:
                what = f"did not start within {CONNECT_S:g} s" if limit.cancelled_caught else "is wanted no more"
                raise RemoteError("no-engine", f"the API server of this node {what}")
            served.request.put(b"", body.ended)
            self._nursery.start_soon(self._run, served, stream, connection, head, name=f"http {body.exchange}")
            running = True
        except ApiUnavailable as error:
            raise RemoteError("no-engine", str(error)) from error
        finally:
            if not running:
                self._forget(served)
                if stream is not None:
                    await trio.aclose_forcefully(stream)
        return messages.Opened()

    def on_more(self, peer: PeerId, role: Role, body: HttpMore) -> None:
        """More of a request, or room for more of its answer. Raises ProtocolError for what there was no room for."""
        served = self._served.get((peer, body.exchange))
        if served is None:
            return  # it has ended here
        served.answer.grant(body.granted)
        if body.data or body.ended:
            served.request.put(body.data, body.ended)

    def stop(self, peer: PeerId, role: Role, body: messages.StopRequest) -> None:
        """The peer wants no more of this."""
        served = self._served.get((peer, body.request))
        if served is not None:
            served.cancel()

    def peer_lost(self, peer: PeerId) -> None:
        """The connection to a peer has ended, and with it what it asked for."""
        for served in self._served.values():
            if served.peer == peer:
                served.cancel()

    # ---- inside ---------------------------------------------------------------------------------------------

    def _check(self, peer: PeerId, role: Role, body: HttpOpen) -> None:
        if self._draining:
            raise RemoteError("draining", "this node is draining; send the request to another one")
        if (refusal := find_refusal(body.method, body.target, role)) is not None:
            raise RemoteError(f"http-{refusal[0]}", refusal[1])
        if (peer, body.exchange) in self._served:
            raise RemoteError("invalid", f"exchange: the id {body.exchange} is in use")
        if sum(len(each.name) + len(each.value) for each in body.headers) > MAX_HEADERS_BYTES:
            raise RemoteError("http-431", f"headers: there are more than {MAX_HEADERS_BYTES} bytes of them")
        if self._each[peer] >= EXCHANGES_EACH or len(self._served) >= EXCHANGES:
            raise RemoteError("busy", "this node has too many HTTP requests now", retry_after_s=RETRY_S)

    def _forget(self, served: _Served) -> None:
        del self._served[served.peer, served.id]
        self._each[served.peer] -= 1
        if not self._each[served.peer]:
            del self._each[served.peer]

    async def _run(self, served: _Served, stream: trio.abc.Stream, connection: h11.Connection, head: bytes) -> None:
        """Carry one exchange to its end."""
        try:
            with served.running:
                async with stream, trio.open_nursery() as nursery:
                    failure = await self._carry(served, stream, connection, head, nursery)
                    nursery.cancel_scope.cancel()
                if failure:
                    self._tell(served, HttpAnswer(exchange=served.id, failed=failure[:1000]))
        except NetworkError as error:  # whoever asked is gone, and with it the reason for the answer
            _log.debug("an answer to %s was not told: %s", served.peer, error)
        finally:
            self._forget(served)

    async def _carry(
        self,
        served: _Served,
        stream: trio.abc.Stream,
        connection: h11.Connection,
        head: bytes,
        nursery: trio.Nursery,
    ) -> str:
        """Request and answer at the same time; returns why the answer is not whole, if it is not."""
        try:
            await stream.send_all(head)
            nursery.start_soon(self._send_request, served, stream, connection)
            await self._pass_answer(served, stream, connection)
        except BROKEN as error:
            _log.info("the API server broke off: %r", error)
            return "the API server of this node broke off"
        except (_ExchangeFailed, NetworkError) as error:
            return str(error)
        return ""

    async def _send_request(self, served: _Served, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        """The rest of the request's body. What breaks here shows where the answer is read."""
        try:
            while data := await served.request.take():
                await stream.send_all(connection.send(h11.Data(data)) or b"")
                if granted := served.request.take_grant():
                    self._tell(served, HttpAnswer(exchange=served.id, granted=granted))
            await stream.send_all(connection.send(h11.EndOfMessage()) or b"")
        except h11.LocalProtocolError as error:  # not as long as it said: the API server would wait for the rest
            self._tell(served, HttpAnswer(exchange=served.id, failed=f"the request's body is malformed: {error}"))
            served.cancel()
        except (*BROKEN, NetworkError) as error:
            _log.debug("the rest of a request was not sent: %s", error)

    async def _pass_answer(self, served: _Served, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        while True:
            event = connection.next_event()
            match event:
                case h11.NEED_DATA:
                    connection.receive_data(bytes(await stream.receive_some(_READ_BYTES)))
                case h11.Response():
                    self._tell(served, _head_of(served, event))
                case h11.Data(data=data):
                    await self._pass_data(served, bytes(data))
                case h11.EndOfMessage():
                    self._tell(served, HttpAnswer(exchange=served.id, ended=True))
                    return
                case h11.InformationalResponse():
                    pass
                case _:
                    raise _ExchangeFailed("the API server of this node ended its connection before it had answered")

    async def _pass_data(self, served: _Served, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            with trio.move_on_after(STALLED_S) as limit:
                await served.answer.reserve()
            if limit.cancelled_caught:
                raise _ExchangeFailed(f"nothing of the answer was taken for {STALLED_S:g} s")
            self._tell(served, HttpAnswer(exchange=served.id, data=data[start : start + PIECE_BYTES]))

    def _tell(self, served: _Served, answer: HttpAnswer) -> None:
        self._messenger.notify(served.peer, methods.HTTP_ANSWER, answer)


def _encode_head(connection: h11.Connection, peer: PeerId, role: Role, body: HttpOpen) -> bytes:
    """The request as far as it has come. Raises RemoteError where it is no HTTP."""
    headers = to_api_server(body.headers, peer, role)
    names = {name for name, _ in headers}
    if not body.ended and b"content-length" not in names:
        headers.append((b"transfer-encoding", b"chunked"))
    elif body.data and b"content-length" not in names:
        headers.append((b"content-length", str(len(body.data)).encode()))
    try:
        head = connection.send(h11.Request(method=body.method, target=body.target, headers=headers)) or b""
        return head + ((connection.send(h11.Data(body.data)) or b"") if body.data else b"")
    except h11.LocalProtocolError as error:
        raise RemoteError("http-400", f"this is no HTTP request: {error}") from error


def _head_of(served: _Served, response: h11.Response) -> HttpAnswer:
    kept = drop_hop_by_hop(list(response.headers))
    return HttpAnswer(
        exchange=served.id,
        status=response.status_code,
        reason=bytes(response.reason).decode("latin-1")[:128],
        headers=tuple(HttpHeader(name, value) for name, value in kept)[:MAX_HEADERS],
    )
