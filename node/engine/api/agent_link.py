"""The API process's end of its sockets with the agent, on asyncio. It ends with the agent: nobody else needs it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Final, cast, final

import msgspec

from ..process import AgentSockets
from ..protocol import EngineMessage, EngineProtocolError, Unframer, frame
from .protocol import ApiQuestion, ApiReply, ToApi, to_api

_log = logging.getLogger(__name__)

MAX_QUESTIONS: Final = 256
ASK_S: Final = 10.0


class AgentRefused(Exception):
    """The agent does not answer a question. The text is one line."""


@final
class AgentLink(asyncio.Protocol):
    """Messages to and from the agent, and the sockets that it passes. Give it `on_message` and `on_socket` before
    `open`."""

    def __init__(self, sockets: AgentSockets) -> None:
        self.on_message: Callable[[ToApi], None] = lambda message: None
        self.on_socket: Callable[[bytes, socket.socket], None] = lambda kind, given: given.close()
        self._sockets = sockets
        self._unframer = Unframer()
        self._transport: asyncio.Transport | None = None
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._asked = 0

    async def open(self) -> None:
        """Begin to read."""
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: self, self._sockets.messages)
        self._sockets.connections.setblocking(False)
        loop.add_reader(self._sockets.connections, self._take_socket)

    def send(self, message: EngineMessage) -> None:
        """Queue a message."""
        if self._transport is not None:
            self._transport.write(frame(message))

    async def ask(self, what: str, body: bytes = b"") -> bytes:
        """Ask the agent, for whatever is mounted beside vLLM's own routes. Raises AgentRefused."""
        if len(self._questions) >= MAX_QUESTIONS:
            raise AgentRefused(f"{MAX_QUESTIONS} questions wait for an answer already")
        number = self._asked = self._asked + 1
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(ApiQuestion(number=number, what=what, body=body))
            return await asyncio.wait_for(answer, ASK_S)
        except TimeoutError as error:
            raise AgentRefused(f"{what}: no answer after {ASK_S:g} s") from error
        finally:
            del self._questions[number]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._unframer.feed(data):
                self._take(to_api.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, EngineProtocolError) as error:
            _log.error("the agent sent what is no message: %s", error)
            os._exit(1)

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(0)  # the agent is gone, and with it the reason for this process

    def _take(self, message: ToApi) -> None:
        if not isinstance(message, ApiReply):
            self.on_message(message)
            return
        waiting = self._questions.get(message.number)
        if waiting is None or waiting.done():
            return
        if message.error:
            waiting.set_exception(AgentRefused(message.error))
        else:
            waiting.set_result(message.body)

    def _take_socket(self) -> None:
        try:
            kind, descriptors, _, _ = socket.recv_fds(self._sockets.connections, 64, 1)
        except BlockingIOError:
            return
        except OSError:
            kind, descriptors = b"", []
        if not kind:
            asyncio.get_running_loop().remove_reader(self._sockets.connections)
            return
        for descriptor in descriptors:
            self.on_socket(kind, socket.socket(fileno=descriptor))
