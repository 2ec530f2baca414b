"""In-memory stand-ins for what a node talks to (the network, its engine, the sending ends of KV), for tests of this
project and of what builds on it.

exchange = MemoryExchange(latency_s=0.01)
decode = Worker(service=MODEL.service, transfers=transfers, messenger=exchange.join(DECODE))
exchange.join(GATEWAY).on_notice(TOKENS, take)
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, final

import msgspec
import trio

from ..bootstrap import DECODE_ERRORS, Address, PeerId, PeerLost, ProtocolError, RequestTimeout, Role, Unreachable
from ..bootstrap.handlers import Handlers
from ..bootstrap.methods import Answer, AsyncHandler, Body, Method, Notice, NoticeHandler
from ..bootstrap.streams.control import encode_body
from ..kvtransport.wire.dial_path import DialPath
from ..kvtransport.wire.tickets import LinkTicket
from . import messages
from .engine import protocol
from .engine.agent_side.engine_link import ApiLink, EngineLost, EngineStartError, ignore_starting
from .engine.api.protocol import ApiConfig, FromApi


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


READY = protocol.EngineReady(
    pid=1, engine="in memory", device="cpu", dtype="float32", layers=4, kv_heads=2, head_dim=64, vocabulary=4096,
    max_model_len=512, kv_tokens=1000, eos_tokens=(0,), load_s=0.1, tflops=1.0, memory_gbps=1.0,
)  # fmt: skip
"""What an engine of a small model says of itself."""


@final
class MemoryEngine:
    """An engine process that computes nothing: an `EngineHandle` that keeps what it is given, and ends when told to.

    What it would say, a test says for it: `worker.on_engine_message(...)`.
    """

    ended_by_other = False

    def __init__(self, ready: protocol.EngineReady | None = READY, config: protocol.EngineConfig | None = None) -> None:
        self.ready = ready
        self.config = config  # what it was started with
        self.hellos: list[bytes] = []  # of the connections that it took
        self.takes_connections = True
        self._sent: list[protocol.EngineMessage] = []
        self._how = "ended"
        self._gone = trio.Event()

    @property
    def running(self) -> bool:
        return self.ready is not None and not self.gone

    @property
    def gone(self) -> bool:
        """Whether it has ended, or was never to start."""
        return self._gone.is_set()

    def take_sent(self) -> list[protocol.EngineMessage]:
        """What it has been sent since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def end(self, how: str) -> None:
        """The process is gone; the first reason stays."""
        if not self.gone:
            self._how = how
            self._gone.set()

    def send(self, message: protocol.EngineMessage) -> None:
        if self.gone:
            raise EngineLost("the engine process is gone")
        self._sent.append(message)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        if self.gone or not self.takes_connections:
            raise EngineLost("the engine process takes no connections")
        self.hellos.append(hello)

    async def wait_gone(self) -> str:
        await self._gone.wait()
        return self._how

    def exit_text(self) -> str:
        return self._how

    def close(self) -> None:
        self.end("ended")


@final
class MemoryStarter:
    """In place of a fork server: an `EngineStarter`. `start` makes an engine, or raises EngineStartError."""

    gone = False

    def __init__(self, start: Callable[[protocol.EngineConfig], Awaitable[MemoryEngine]]) -> None:
        self._start = start
        self.version = "0.0"
        self.starting: list[protocol.Starting] = []  # what engines say of themselves before they have started

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()

    async def start_engine(
        self,
        config: protocol.EngineConfig,
        on_message: Callable[[protocol.FromEngine], None],
        on_starting: Callable[[protocol.Starting], None] = ignore_starting,
    ) -> MemoryEngine:
        for each in self.starting:
            on_starting(each)
        return await self._start(config)

    async def start_api(self, config: ApiConfig, on_message: Callable[[FromApi], None]) -> ApiLink:
        raise EngineStartError("this server forks no API process")


@final
@dataclass(slots=True)
class MemoryOutlets:
    """Sending ends that ask and dial nobody: `Outlets` where each peer has the link of its last ticket, and one path.

    `before` sees each slice that is to be sent, and may raise what `KvOutlets.open` raises.
    """

    before: Callable[[messages.TicketedSlice], None] = lambda ticketed: None
    usd: float = 0.0  # of every transfer
    links: dict[PeerId, LinkTicket] = field(default_factory=dict)
    opened: list[tuple[messages.TicketedSlice, int]] = field(default_factory=list)
    reports: list[protocol.LinkReport] = field(default_factory=list)
    dtype: str = ""

    async def open(self, ticketed: messages.TicketedSlice, tokens: int) -> protocol.Outlet:
        self.opened.append((ticketed, tokens))
        self.before(ticketed)
        wanted, target = ticketed.rank_slice, PeerId(ticketed.rank_slice.target_peer)
        link = self.links[target] = LinkTicket(ticketed.ticket.link, bytes(32), 600.0)
        paths = (DialPath(f"{target}.example", 7000),)
        return protocol.Outlet(
            rank=wanted.source,
            slice=wanted.slice,
            ticket=ticketed.ticket,
            link=link,
            paths=paths,
            gbps=1.0,
            rtt_s=0.01,
        )

    def use_dtype(self, dtype: str) -> None:
        self.dtype = dtype

    def on_link_report(self, report: protocol.LinkReport) -> None:
        self.reports.append(report)

    def end_transfer(self, peer: PeerId, report: protocol.TransferReport) -> float:
        return self.usd

    def forget_all(self) -> None:
        self.links.clear()

    def forget_peer(self, peer: PeerId) -> list[LinkTicket]:
        link = self.links.pop(peer, None)
        return [] if link is None else [link]


def dial_at(where: Callable[[PeerId], Address | None]) -> Callable[[PeerId], Awaitable[DialPath]]:
    """How members are dialled that can be: in place of `links.reach.Reach.path_to`."""

    async def path_to(peer: PeerId) -> DialPath:
        address = where(peer)
        if address is None or not address.port:
            raise Unreachable(f"{peer} has no address that could be dialled")
        return DialPath(address.host, address.port)

    return path_to
