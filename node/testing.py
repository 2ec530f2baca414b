"""An in-memory stand-in for the network that a node's parts talk through, for tests of this project and of what builds
on it.

exchange = MemoryExchange(latency_s=0.01)
decode = Worker(service=MODEL.service, transfers=transfers, messenger=exchange.join(DECODE))
exchange.join(GATEWAY).on_notice(TOKENS, take)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, final

import msgspec
import trio

from ..bootstrap import DECODE_ERRORS, PeerId, PeerLost, ProtocolError, RequestTimeout, Role
from ..bootstrap.handlers import Handlers
from ..bootstrap.methods import Answer, AsyncHandler, Body, Method, Notice, NoticeHandler
from ..bootstrap.streams.control import encode_body


class Sent(NamedTuple):
    """A question or a notice on its way: who sends it to whom, its method's name, and what it says."""

    source: PeerId
    target: PeerId
    method: str
    body: msgspec.Struct


@final
@dataclass(slots=True)
class MemoryExchange:
    """Nodes in one process that ask and tell each other as over control streams.

    Bodies and answers are encoded and decoded on the way, so that they meet the bounds of their types. `before` sees
    every question and notice, and may raise a NetworkError in place of its delivery. Peers in `lost` are gone.
    """

    latency_s: float = 0.0  # of every question
    before: Callable[[Sent], None] = lambda sent: None
    lost: set[PeerId] = field(default_factory=set)
    asked: list[Sent] = field(default_factory=list)
    told: list[Sent] = field(default_factory=list)  # notices that were not refused
    nodes: dict[PeerId, Handlers] = field(default_factory=dict)

    def join(self, peer: PeerId, role: Role = Role.WORKER) -> MemoryMessenger:
        """A node's end; those of one id share their handlers."""
        return MemoryMessenger(self, peer, role, self.nodes.setdefault(peer, Handlers()))

    def asked_of(self, method: Method[Body, Answer]) -> list[tuple[PeerId, Body]]:
        """The questions of a kind: whom, and what they said."""
        return [(sent.target, _as(sent.body, method.body)) for sent in self.asked if sent.method == method.name]

    def handlers_of(self, sent: Sent) -> Handlers:
        """Who is to take it. Raises PeerLost, and what `before` raises."""
        self.before(sent)
        handlers = self.nodes.get(sent.target)
        if handlers is None or sent.target in self.lost:
            raise PeerLost(f"{sent.target} is gone")
        return handlers


@final
class MemoryMessenger:
    """One node's end of an exchange: a `Messenger`."""

    def __init__(self, exchange: MemoryExchange, peer: PeerId, role: Role, handlers: Handlers) -> None:
        self.peer_id = peer
        self._exchange = exchange
        self._role = role
        self._handlers = handlers

    async def request(self, peer: PeerId, method: Method[Body, Answer], body: Body, timeout: float) -> Answer:
        """Ask a node, or this one. Raises NetworkError."""
        sent = Sent(self.peer_id, peer, method.name, body)
        self._exchange.asked.append(sent)
        with trio.move_on_after(timeout):
            await trio.sleep(self._exchange.latency_s)
            handlers = self._exchange.handlers_of(sent)
            answer = await handlers.serve(self.peer_id, self._role, method.name, encode_body(body))
            try:
                return msgspec.msgpack.decode(answer, type=method.answer)
            except DECODE_ERRORS as error:
                raise ProtocolError(f"the answer of {peer} to {method.name!r} is malformed: {error}") from error
        raise RequestTimeout(f"{peer} did not answer {method.name!r} within {timeout:g} s")

    def notify(self, peer: PeerId, notice: Notice[Body], body: Body) -> None:
        """Tell a node, or this one. Raises PeerLost."""
        sent = Sent(self.peer_id, peer, notice.name, body)
        handlers = self._exchange.handlers_of(sent)
        self._exchange.told.append(sent)
        handlers.notify(self.peer_id, self._role, notice.name, encode_body(body))

    def handle(self, method: Method[Body, Answer], handler: AsyncHandler[Body, Answer]) -> None:
        """Answer a method of the others."""
        self._handlers.add_request(method, handler)

    def on_notice(self, notice: Notice[Body], handler: NoticeHandler[Body]) -> None:
        """Take a notice of the others."""
        self._handlers.add_notice(notice, handler)


def _as(body: msgspec.Struct, kind: type[Body]) -> Body:
    if not isinstance(body, kind):
        raise TypeError(f"{body} was sent where {kind.__name__} belongs")
    return body
