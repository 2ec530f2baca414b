"""Requests for a model that another box serves: from the API process to the agent, which carries them there."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, final

import h11

from ...web.fields import RawHeaders
from .agent_link import AgentLink, AgentRefused
from .protocol import CARRY

_log = logging.getLogger(__name__)

ARRIVE_S: Final = 10.0  # for the socket, once the agent has said that it comes
_READ_BYTES: Final = 64 << 10
_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect"})

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


Carry = Callable[[str, str, RawHeaders, bytes, Send], Awaitable[None]]
"""As `Carrier.carry`."""


class NotCarriedOn(Exception):
    """The agent takes no request now. The text is one line."""


@final
class Carrier:
    """One per API process. `take` gets the sockets that the agent passes for it."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._sockets: dict[bytes, asyncio.Future[socket.socket]] = {}

    def take(self, kind: bytes, given: socket.socket) -> None:
        """A socket that was asked for."""
        waiting = self._wait_for(kind)
        if waiting.done():
            given.close()
        else:
            waiting.set_result(given)

    async def carry(self, method: str, target: str, headers: RawHeaders, body: bytes, send: Send) -> None:
        """Ask, and pass the answer on as ASGI events. Raises NotCarriedOn before any of it has come."""
        reader, writer = await self._connect()
        try:
            await _exchange(reader, writer, (method, target, headers, body), send)
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            kind = await self._link.ask(CARRY.decode())
        except AgentRefused as error:
            raise NotCarriedOn(str(error)) from error
        try:
            return await asyncio.open_connection(sock=await asyncio.wait_for(self._wait_for(kind), ARRIVE_S))
        except (TimeoutError, OSError) as error:
            raise NotCarriedOn("the node's agent does not take the request") from error
        finally:
            self._sockets.pop(kind, None)

    def _wait_for(self, kind: bytes) -> asyncio.Future[socket.socket]:
        """The socket may come before the answer that names it, or after."""
        return self._sockets.setdefault(kind, asyncio.get_running_loop().create_future())


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: tuple[str, str, RawHeaders, bytes],
    send: Send,
) -> None:
    method, target, headers, body = request
    http = h11.Connection(h11.CLIENT)
    kept = [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP | {b"content-length"}]
    kept.append((b"content-length", str(len(body)).encode()))
    for said in (h11.Request(method=method, target=target, headers=kept), h11.Data(body), h11.EndOfMessage()):
        writer.write(http.send(said) or b"")
    await writer.drain()
    has_begun = False
    while True:
        try:
            event = http.next_event()
        except h11.RemoteProtocolError as error:
            if not has_begun:
                raise NotCarriedOn("the node's agent broke off") from error
            # An answer that is cut short is not ended: its reader sees that.
            _log.warning("an answer that was carried here broke off: %s", error)
            return
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            has_begun = True
            fields = [(name, value) for name, value in event.headers if name not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": event.status_code, "headers": fields})
        elif isinstance(event, h11.Data):
            await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        elif isinstance(event, h11.EndOfMessage):
            await send({"type": "http.response.body", "body": b""})
            return
