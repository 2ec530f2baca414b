"""An HTTP/1.1 front: requests that come to a port of this machine are carried over the network to boxes that serve.

It answers nothing itself but `/health`, `/live` and where an admin's browser logs in, and holds each body until its
request has been answered, so that another box can be asked when one is lost.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, final

import h11
import trio

from ...bootstrap import Address
from ...bootstrap.errors import AddressError, PortInUse
from ..web.envelope import describe_error, describe_event
from ..web.fields import REQUEST_ID, RawHeaders, find_cookie, find_header, find_model, pick_request_id
from ..web.listening import HttpRefusal
from ..web.paths import ADMIN, is_below, path_of
from .admission import FrontRules, check_listen, judge
from .asking import AnswerLost, CarriedAnswer, CarriedRequest, HttpAsking, NotCarried
from .event_stream import EventSplitter
from .headers import pass_answer, pass_request
from .login import MAX_FORM_BYTES, answer_login
from .messages import HttpHeader

_log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 16 << 20
MAX_HELD_BYTES: Final = 128 << 20  # of all bodies
MAX_HEAD_BYTES: Final = 64 << 10
MAX_CONNECTIONS: Final = 1024
HEAD_S: Final = 75.0  # until a connection has said its next request
BODY_S: Final = 120.0  # for all of its body
LINGER_S: Final = 1.0  # for what is still being sent to a refusal
BUSY_RETRY_S: Final = 1.0
_AHEAD_BYTES: Final = 64 << 10  # of further requests that come before an answer is whole
_READ_BYTES: Final = 64 << 10
_IN_USE: Final = (errno.EADDRINUSE, errno.EACCES)
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)


@final
@dataclass(frozen=True, slots=True)
class _Received:
    """A request with its body."""

    head: h11.Request
    body: bytes
    id: bytes

    @property
    def target(self) -> str:
        return self.head.target.decode("latin-1")

    @property
    def path(self) -> str:
        return path_of(self.target) or "/"

    @property
    def headers(self) -> RawHeaders:
        return list(self.head.headers)


@final
class HttpFront:
    """Serves one port. Run `serve` in a nursery of whoever owns the network. `wall`: unix seconds, for sessions."""

    def __init__(self, asking: HttpAsking, rules: FrontRules, wall: Callable[[], float] = time.time) -> None:
        self._asking = asking
        self._rules = rules
        self.wall = wall
        self._connections = 0
        self._held = 0  # bytes of bodies

    def __repr__(self) -> str:
        return f"<HttpFront connections={self._connections} held={self._held}>"

    async def serve(self, listen: Address, *, task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept until cancelled; `task_status` gets where. Raises AddressError or PortInUse before it has started."""
        check_listen(listen, self._rules)
        try:
            listeners = await trio.open_tcp_listeners(listen.port, host=listen.host)
        except OSError as error:
            kind, what = (PortInUse, "port") if error.errno in _IN_USE else (AddressError, "address")
            raise kind(f"http: cannot listen on {listen}: {error.strerror or error}; give another {what}") from error
        port: int = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self.serve_stream, listeners)
            task_status.started(Address(listen.host, port))

    async def serve_stream(self, stream: trio.abc.HalfCloseableStream) -> None:
        """Serve one connection to its end. A bug in it costs that connection."""
        self._connections += 1
        try:
            async with stream:
                await _Connection(stream, self._asking, self._rules, self).run(self._connections > MAX_CONNECTIONS)
        except Exception:
            _log.exception("serving an HTTP connection failed")
        finally:
            self._connections -= 1

    def hold(self, size: int) -> bool:
        """Count bytes of a body that is held; False where there is no room for them."""
        if self._held + size > MAX_HELD_BYTES:
            return False
        self._held += size
        return True

    def release(self, size: int) -> None:
        """They are held no more."""
        self._held -= size


@final
class _Connection:
    """One connection: requests one after the other."""

    def __init__(
        self, stream: trio.abc.HalfCloseableStream, asking: HttpAsking, rules: FrontRules, front: HttpFront
    ) -> None:
        self._stream = stream
        self._asking = asking
        self._rules = rules
        self._front = front
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._ahead = 0
        self._is_head = False  # the request that is being answered
        self._host = _host_of(stream)

    async def run(self, is_one_too_many: bool) -> None:
        """Until either side ends it."""
        try:
            while await self._serve_next(is_one_too_many):
                self._http.start_next_cycle()
        except _GONE:
            return  # the client has gone away
        except h11.RemoteProtocolError as error:
            await self._refuse_garbage(error)

    async def _serve_next(self, is_one_too_many: bool) -> bool:
        """One request; whether there may be another."""
        head = None
        with trio.move_on_after(HEAD_S):
            head = await self._next_event()
        if not isinstance(head, h11.Request):
            return False
        headers = list(head.headers)
        self._is_head = head.method == b"HEAD"
        request_id = pick_request_id(headers)
        method, target = head.method.decode(), head.target.decode("latin-1")
        refusal = judge(method, target, headers, self._rules, self._host, self._front.wall())
        if is_one_too_many:
            refusal = HttpRefusal(503, f"this gateway has {MAX_CONNECTIONS} connections; try again", BUSY_RETRY_S)
        size = 0
        try:
            body = b""
            if refusal is None:
                bound = MAX_FORM_BYTES if self._rules.has_login(path_of(target)) else MAX_BODY_BYTES
                taken = await self._take_body(headers, bound)
                if isinstance(taken, HttpRefusal):
                    refusal = taken
                else:
                    body, size = taken, len(taken)
            received = _Received(head, body, request_id)
            if refusal is not None:
                await self._answer_refusal(received, refusal)
                return await self._may_go_on()
            return await self._answer(received) and await self._may_go_on()
        finally:
            self._front.release(size)

    async def _take_body(self, headers: RawHeaders, bound: int) -> bytes | HttpRefusal:
        """All of it, counted as held, or why not."""
        too_large = HttpRefusal(413, f"body: more than {bound} bytes are not taken")
        length = find_header(headers, b"content-length")
        if length is not None and int(length) > bound:  # h11 has seen to it that it is a number
            return too_large
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        pieces: list[bytes] = []
        held = 0
        kept = False
        try:
            with trio.move_on_after(BODY_S):
                while isinstance(event := await self._next_event(), h11.Data):
                    if held + len(event.data) > bound:
                        return too_large
                    if not self._front.hold(len(event.data)):
                        return HttpRefusal(503, "this gateway holds too many bodies; try again", BUSY_RETRY_S)
                    held += len(event.data)
                    pieces.append(bytes(event.data))
                kept = isinstance(event, h11.EndOfMessage)
                if not kept:
                    raise trio.BrokenResourceError("the client went away in the middle of its request")
                return b"".join(pieces)
            return HttpRefusal(408, f"body: it did not come within {BODY_S:g} s")
        finally:
            if not kept:
                self._front.release(held)

    async def _answer(self, received: _Received) -> bool:
        """Answer a request; False where the connection is of no use afterwards."""
        if received.path in {"/health", "/live"} and b"?" not in received.head.target:
            await self._answer_health(received)
            return True
        if self._rules.has_login(received.path):
            await self._answer_login(received)
            return True
        is_whole = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_client, nursery.cancel_scope)
            is_whole = await self._carry(received)
            nursery.cancel_scope.cancel()
        return is_whole

    async def _answer_health(self, received: _Received) -> None:
        if received.path == "/live" or self._asking.is_served:
            await self._send_whole(200, [(REQUEST_ID, received.id)], b"")
        else:
            await self._answer_refusal(received, HttpRefusal(503, "no box of this network is ready to serve", 5.0))

    async def _answer_login(self, received: _Received) -> None:
        """Here, and at no box: it would learn the token, or the cookie."""
        method, now = received.head.method.decode(), self._front.wall()
        page = answer_login(method, received.path, received.headers, received.body, self._rules, self._host, now)
        await self._send_whole(page.status, [*page.headers, (REQUEST_ID, received.id)], page.body)

    async def _carry(self, received: _Received) -> bool:
        """False where the answer broke off, or its reader."""
        request = CarriedRequest(
            method=received.head.method.decode(),
            target=received.target,
            headers=self._pass_request(received),
            body=received.body,
            service=find_model(received.headers, received.body),
        )
        try:
            async with self._asking.carry(request) as answer:
                return await self._pass_answer(received, answer)
        except NotCarried as error:
            await self._answer_refusal(received, HttpRefusal(error.status, str(error), error.retry_after_s))
            return True
        except _GONE:
            return False
        except h11.LocalProtocolError as error:  # the box says what is no HTTP
            _log.warning("an answer was cut short, which is no HTTP: %s", error)
            return False

    def _pass_request(self, received: _Received) -> tuple[HttpHeader, ...]:
        shows_network = is_below(received.path, ADMIN)
        has_session = shows_network and find_cookie(received.headers, self._rules.access.cookie) != ""
        return pass_request(received.headers, received.id, names_front=shows_network, has_session=has_session)

    async def _pass_answer(self, received: _Received, answer: CarriedAnswer) -> bool:
        headers = pass_answer(answer.headers)
        if find_header(headers, REQUEST_ID) is None:
            headers.append((REQUEST_ID, received.id))
        content = find_header(headers, b"content-type") or b""
        splitter = EventSplitter() if content.lower().startswith(b"text/event-stream") else None
        reason = answer.reason.encode("latin-1", "replace")
        await self._send(h11.Response(status_code=answer.status, headers=headers, reason=reason))
        try:
            while data := await answer.read():
                if splitter is not None:
                    data = splitter.feed(data)
                if data:
                    await self._send(h11.Data(data))
        except AnswerLost as error:
            if splitter is None:
                return False  # what is missing shows by the length, or by the end of the chunks
            text = f"the box that answered was lost: {error}; ask again"
            await self._send(h11.Data(describe_event(502, text, received.path)))
        else:
            if splitter is not None and splitter.rest:
                await self._send(h11.Data(splitter.rest))
        await self._send(h11.EndOfMessage())
        return True

    async def _watch_client(self, scope: trio.CancelScope) -> None:
        """A client that hangs up wants no answer any more. What comes meanwhile is its next request."""
        while self._ahead < _AHEAD_BYTES:
            try:
                data = await self._stream.receive_some(_READ_BYTES)
            except _GONE:
                data = b""
            if not data:
                scope.cancel()
                return
            self._ahead += len(data)
            self._http.receive_data(bytes(data))

    async def _answer_refusal(self, received: _Received, refusal: HttpRefusal) -> None:
        headers = [(b"content-type", b"application/json"), (REQUEST_ID, received.id)]
        if refusal.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(refusal.retry_after_s))).encode()))
        if refusal.location is not None:
            headers.append((b"location", refusal.location.encode()))
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        while self._http.their_state is h11.SEND_BODY and self._http.next_event() is not h11.NEED_DATA:
            pass  # what has come of it is skipped
        if self._http.their_state is h11.SEND_BODY:  # the rest of it is not waited for
            headers.append((b"connection", b"close"))
        await self._send_whole(refusal.status, headers, describe_error(refusal.status, refusal.text, received.path))

    async def _refuse_garbage(self, error: h11.RemoteProtocolError) -> None:
        if self._http.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            return
        body = describe_error(error.error_status_hint, f"this is no HTTP request: {error}", "/")
        try:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await self._send_whole(error.error_status_hint, headers, body)
            await self._linger()
        except _GONE:
            return

    async def _send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        reason = HTTPStatus(status).phrase.encode()
        await self._send(h11.Response(status_code=status, headers=[*headers, length], reason=reason))
        if body and not self._is_head:
            await self._send(h11.Data(body))
        await self._send(h11.EndOfMessage())

    async def _may_go_on(self) -> bool:
        """Whether the connection can take another request; else lets the client read what it was told."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._ahead = 0
            return True
        await self._linger()
        return False

    async def _linger(self) -> None:
        """A socket that is closed while something comes loses what was sent on it."""
        with trio.move_on_after(LINGER_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(_READ_BYTES):
                pass

    async def _next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(bytes(await self._stream.receive_some(_READ_BYTES)))

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            await self._stream.send_all(data)


def _host_of(stream: trio.abc.Stream) -> str | None:
    """The address at the other end; None where it is gone, or is none."""
    if not isinstance(stream, trio.SocketStream):
        return None
    try:
        name = stream.socket.getpeername()
    except OSError:
        return None
    return str(name[0]) if isinstance(name, tuple) else None  # a socket of this machine has no address
