"""Engines and sending ends of KV that are values in memory."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import final

import trio

from p2pserve.bootstrap import PeerId
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.tickets import LinkTicket
from p2pserve.node import messages
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLost

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
    version = "0.0"

    def __init__(self, start: Callable[[protocol.EngineConfig], Awaitable[MemoryEngine]]) -> None:
        self._start = start

    async def wait_ready(self) -> None:
        await trio.lowlevel.checkpoint()

    async def start_engine(
        self, config: protocol.EngineConfig, on_message: Callable[[protocol.FromEngine], None]
    ) -> MemoryEngine:
        return await self._start(config)


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
