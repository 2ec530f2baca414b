"""The door in front of vLLM's app: keys, bounds, the network's refusals as errors of OpenAI's form, and what a request
was as header fields.

An answer's head is held back until its first bytes are there: what the network refuses meanwhile is then an error with
a status of its own, and not an answer of status 200 that breaks off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol, final

from ....bootstrap import Role
from ...web.access import Access, Caller, Verdict
from ...web.envelope import describe_error, describe_event
from ...web.fields import KEYS_TOLD, ROLE, VOUCHED, decode_headers, find_header, find_model, pick_request_id
from ...web.listening import HttpRefusal
from ...web.paths import is_below
from .admission import admit, too_large
from .carrying import Carry, NotCarriedOn
from .exchange import Exchange, current_exchange
from .metrics import PATHS as METRICS
from .protocol import ApiConfig, ServiceState
from .services import MODELS, ServedAt, add_services, find_service, rename

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SETTLE_S: Final = 0.5  # so long the end of an answer waits for what it was; it comes with its last tokens
PROBE_S: Final = 30.0
_DONE: Final = b"data: [DONE]"
_FRAMEWORKS: Final = {
    400: "body: it is no JSON that can be read",
    404: "path: nothing is served at {path}",
    405: "method: this one is not served at {path}",
}
"""Errors of the web framework's own form, and what is said instead."""


class Serves(Protocol):
    """What answers `/health`, and requests for other models."""

    @property
    def network(self) -> ServiceState:
        """What the network can do now."""

    async def probe(self) -> bool:
        """Whether it generates a token now."""

    @property
    def carry(self) -> Carry:
        """Has another box answer a request."""


@final
class Door:
    """An ASGI app around another. `open_paths`: below them requests are let in without an API key."""

    def __init__(
        self, app: App, config: ApiConfig, serves: Serves, open_paths: tuple[str, ...], *, is_vouched: bool
    ) -> None:
        self._app = app
        self._config = config
        self._serves = serves
        self._open_paths = open_paths
        self._is_vouched = is_vouched
        self._access = Access(config.admin_token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, headers = scope["path"], scope["headers"]
        request_id = pick_request_id(headers).decode("latin-1")
        answer = _Answer(send, path, request_id)
        if path == "/live":
            await answer.say(200, b"")
            return
        is_plain_health = path == "/health" and not _asks_for_token(scope)
        if is_plain_health:
            await self._tell_health(answer)
            return
        if is_below(path, self._open_paths):
            is_admin = self._is_vouched and find_header(headers, ROLE) == Role.ADMIN.value.encode()
            await self._app({**scope, VOUCHED: is_admin}, receive, send)
            return
        is_owner = path in METRICS and self._is_owner(scope)
        has_token = is_owner and self._access.needs_token
        admitted = admit(scope["method"], headers, self._config, is_vouched=self._is_vouched, has_token=has_token)
        if isinstance(admitted, HttpRefusal):
            await answer.refuse(admitted)
            return
        scope = {**scope, KEYS_TOLD: self._keys_told(admitted.key, is_owner=is_owner)}
        bounded = _BoundedBody(receive, answer, self._config)
        receive = bounded.receive
        if scope["method"] == "POST" and path != "/health":
            receive = await self._receive_own(scope, bounded, answer)
            if answer.is_over:
                return
        exchange = answer.exchange = Exchange(request_id, admitted.key, admitted.deadline_s)
        token = current_exchange.set(exchange)
        try:
            if path == "/health":
                await self._generate_token(answer)
            else:
                is_list = path == MODELS and scope["method"] == "GET"
                await self._app(scope, receive, self._listing(answer.send) if is_list else answer.send)
        finally:
            current_exchange.reset(token)

    async def _receive_own(self, scope: Scope, bounded: _BoundedBody, answer: _Answer) -> Receive:
        """The body of a request for this box's own model, once it is all here. A request for another one is answered
        here: by a box that has it, or with what there is."""
        body = bytearray()
        event: Event = {"type": "http.request", "more_body": True}
        while event["type"] == "http.request" and event.get("more_body", False):
            event = await bounded.receive()
            body += event.get("body", b"")
        if event["type"] == "http.request":
            model = find_model(scope["headers"], bytes(body))
            found = find_service(model, self._config.names, self._serves.network, is_carried=self._is_vouched)
            if isinstance(found, HttpRefusal):
                await answer.refuse(found)
            elif found is ServedAt.ELSEWHERE:
                await self._carry(scope, bounded, bytes(body), answer)
            elif model not in (None, *self._config.names) and model in self._serves.network.own_names:
                body = bytearray(rename(bytes(body), self._config.names[0]))
            event = {"type": "http.request", "body": bytes(body), "more_body": False}
        held = [event]

        async def receive_again() -> Event:
            return held.pop() if held else await bounded.receive()

        return receive_again

    async def _carry(self, scope: Scope, bounded: _BoundedBody, body: bytes, answer: _Answer) -> None:
        """Have a box answer that has the model."""
        query = scope.get("query_string", b"").decode("latin-1")
        target = scope["path"] + (f"?{query}" if query else "")
        carrying = asyncio.ensure_future(
            self._serves.carry(scope["method"], target, scope["headers"], body, answer.pass_on)
        )
        gone = asyncio.ensure_future(bounded.wait_gone())  # a client that hangs up wants no answer any more
        try:
            await asyncio.wait((carrying, gone), return_when=asyncio.FIRST_COMPLETED)
            if carrying.done():
                carrying.result()
        except NotCarriedOn as error:
            await answer.refuse(HttpRefusal(503, str(error), 2.0))
        finally:
            answer.is_over = True
            carrying.cancel()
            gone.cancel()

    def _listing(self, send: Send) -> Send:
        """Sends a list of models with those of the network's other services."""
        held: list[Event] = []

        async def send_all(event: Event) -> None:
            held.append(event)
            if event["type"] != "http.response.body" or event.get("more_body", False):
                return
            body = b"".join(each.get("body", b"") for each in held)
            start = held[0]
            if start["status"] == 200:
                body = add_services(body, self._config.names, self._serves.network)
                fields = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                start = {**start, "headers": [*fields, (b"content-length", str(len(body)).encode())]}
            await send(start)
            await send({"type": "http.response.body", "body": body})

        return send_all

    def _is_owner(self, scope: Scope) -> bool:
        """Whether who asks may see the network as the dashboard shows it: not through others' gateways, of whom the
        agent says which they are, and not who asks there."""
        if self._is_vouched:
            return False
        headers = decode_headers(scope["headers"])
        caller = Caller.of_scope(scope, headers)
        return self._access.judge_bearer(caller, headers.get("authorization", "")) is Verdict.ADMITTED

    def _keys_told(self, key: str, *, is_owner: bool) -> tuple[str, ...] | None:
        """Whose costs are told: of who asks, of all to the owner, and where there are no keys, to everybody."""
        if self._is_vouched:
            return ()
        return None if is_owner or not self._config.keys else (key,)

    async def _tell_health(self, answer: _Answer) -> None:
        network = self._serves.network
        if network.serving:
            await answer.say(200, b"")
        else:
            await answer.refuse(
                HttpRefusal(503, network.reason or "no node of this network serves this model now", 2.0)
            )

    async def _generate_token(self, answer: _Answer) -> None:
        is_served, reason = False, f"no token within {PROBE_S:g} s"
        with contextlib.suppress(TimeoutError):
            is_served = self._serves.network.serving and await asyncio.wait_for(self._serves.probe(), PROBE_S)
            reason = self._serves.network.reason or "the network generated no token"
        if is_served:
            await answer.say(200, b"")
            return
        refusal = answer.exchange.refusal if answer.exchange is not None else None
        await answer.refuse(HttpRefusal(503, refusal.reason if refusal is not None else reason, 2.0))


@final
class _BoundedBody:
    """A request's body as it is received, at most as long as it may be."""

    def __init__(self, receive: Receive, answer: _Answer, config: ApiConfig) -> None:
        self._receive = receive
        self._answer = answer
        self._config = config
        self._taken = 0

    async def wait_gone(self) -> None:
        """Until the client has hung up; the body has been received."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def receive(self) -> Event:
        if self._answer.is_over:
            return {"type": "http.disconnect"}
        event = await self._receive()
        self._taken += len(event.get("body", b""))
        if self._taken > self._config.max_body_bytes:
            await self._answer.refuse(too_large(self._config))
            return {"type": "http.disconnect"}
        return event


@final
class _Answer:
    """One answer on its way out."""

    def __init__(self, send: Send, path: str, request_id: str) -> None:
        self.exchange: Exchange | None = None
        self.is_over = False
        self._send = send
        self._path = path
        self._request_id = request_id
        self._head: Event | None = None  # that is held back
        self._is_stream = False
        self._is_described = False

    async def say(self, status: int, body: bytes, *fields: tuple[str, str]) -> None:
        """A whole answer of ours."""
        self.is_over = True
        head = [("content-length", str(len(body))), ("x-request-id", self._request_id), *fields]
        await self._send({"type": "http.response.start", "status": status, "headers": _encode(head)})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, refusal: HttpRefusal) -> None:
        """An error in the form that the path's clients expect."""
        fields = [("content-type", "application/json")]
        if refusal.retry_after_s is not None:
            fields.append(("retry-after", str(max(1, math.ceil(refusal.retry_after_s)))))
        if refusal.status == 401:
            fields.append(("www-authenticate", "Bearer"))
        if refusal.status == 413:
            fields.append(("connection", "close"))  # the rest of the body is not read
        await self.say(refusal.status, describe_error(refusal.status, refusal.text, self._path), *fields)

    async def pass_on(self, event: Event) -> None:
        """What another box answers: as it is."""
        self.is_over = True
        await self._send(event)

    async def send(self, event: Event) -> None:
        """What the app answers."""
        if self.is_over:
            return
        if event["type"] == "http.response.start":
            self._head = event
            return
        if event["type"] == "http.response.body":
            if self._head is not None and not await self._send_head(self._head, event.get("body", b"")):
                return
            if self._is_stream:
                await self._send_piece(event)
                return
        await self._send(event)

    async def _send_head(self, head: Event, begin: bytes) -> bool:
        """Whether the app's answer stands."""
        exchange = self.exchange
        assert exchange is not None
        content = next((value for name, value in head["headers"] if name.lower() == b"content-type"), b"")
        self._is_stream = content.startswith(b"text/event-stream")
        if not self._is_stream:
            await self._settle()
        if exchange.refusal is not None:
            refused = exchange.refusal
            await self.refuse(HttpRefusal(refused.status, refused.reason, refused.retry_after_s))
            return False
        if head["status"] in _FRAMEWORKS and begin.startswith(b'{"detail"'):  # the framework's, and no client's, form
            await self.refuse(HttpRefusal(head["status"], _FRAMEWORKS[head["status"]].format(path=self._path[:200])))
            return False
        self._head = None
        fields = [("x-request-id", self._request_id), *exchange.describe()]
        kept = [(name, value) for name, value in head["headers"] if name.lower() != b"x-request-id"]
        await self._send({**head, "headers": [*kept, *_encode(fields)]})
        return True

    async def _send_piece(self, event: Event) -> None:
        """A piece of a stream: where the network has refused the rest, its end says so; else what it was comes last."""
        exchange = self.exchange
        assert exchange is not None
        if exchange.refusal is not None:
            self.is_over = True
            said = describe_event(exchange.refusal.status, exchange.refusal.reason, self._path)
            await self._send({"type": "http.response.body", "body": said})
            return
        is_last = event.get("body", b"").startswith(_DONE) or not event.get("more_body", False)
        if is_last and not self._is_described:
            self._is_described = True
            await self._settle()
            if known := exchange.describe():
                lines = "".join(f": {name}: {value}\n" for name, value in known)
                await self._send({"type": "http.response.body", "body": f"{lines}\n".encode(), "more_body": True})
        await self._send(event)

    async def _settle(self) -> None:
        exchange = self.exchange
        if exchange is not None and exchange.waiting:
            try:
                await asyncio.wait_for(exchange.settled.wait(), SETTLE_S)
            except TimeoutError:
                _log.info("the agent has not said what %s was", exchange.id)


def _asks_for_token(scope: Scope) -> bool:
    return b"generate=1" in scope.get("query_string", b"").split(b"&")


def _encode(fields: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in fields]
