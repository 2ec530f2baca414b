"""An emulated engine's program: its clock and its transfers, around the engine that knows neither."""

from __future__ import annotations

import os
import queue
import socket
import sys
import time
from collections.abc import Callable
from typing import final

import msgspec
import psutil

from .. import protocol
from ..mailbox import Outbox
from ..process import AgentSockets, LoadedEngine, StartError, serve_agent
from ..stage_pipes import PipeConnections, PipelineError
from .engine import EmulatedEngine, EmulationError, KvEnded, KvSent
from .memory import ShareMemory
from .stages import EmulatedStage, join_stages, sleep_while_loading
from .transfers import EmulatedTransfers

AWAIT_S = 0.05  # between looks at deadlines while no step runs and KV is awaited
THREAD_SWITCH_S = 0.0005  # how long a thread may keep the interpreter: no GPU waits for another

ToLoop = protocol.ToEngine | KvEnded | KvSent
Inbox = queue.SimpleQueue[tuple[float, ToLoop]]  # when it came, and what


def run_emulated_engine(config: protocol.EngineConfig, sockets: AgentSockets) -> int:
    """Serve until told to stop. Returns the exit status."""
    sys.setswitchinterval(THREAD_SWITCH_S)
    return serve_agent(sockets, lambda outbox: EmulatedProgram(config, outbox))


@final
class EmulatedProgram:
    """See `process.EngineProgram`."""

    def __init__(
        self, config: protocol.EngineConfig, outbox: Outbox, on_news: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._on_news = on_news
        self._emulation = msgspec.convert(config.options, protocol.Emulation)
        self._outbox = outbox
        self._inbox: Inbox = queue.SimpleQueue()
        self._connections = PipeConnections(config.pipes)
        self._transfers = EmulatedTransfers(
            layers=self._emulation.model.layers,
            head_dim=self._emulation.model.head_dim,
            limit_bytes=protocol.transfer_buffer_bytes(config, psutil.virtual_memory().total),
            report=outbox.send,
            settings=config.transfers,
        )

    def take(self, message: ToLoop) -> None:
        if isinstance(message, protocol.Stop) and self._config.stage:
            os._exit(0)  # no loop of its own would: its main thread waits for the head
        self._inbox.put((time.monotonic(), message))
        self._on_news()

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        if not self._connections.put(hello, connection):
            self._transfers.attach(hello, connection)

    def load_engine(self, share: ShareMemory | None = None) -> EmulatedEngine:
        """On one box; `share`: gives it a part of memory that several have. Raises StartError."""
        try:
            engine = EmulatedEngine(
                self._config, self._emulation, self._transfers, tell=self._outbox.send, wake=self.take, share=share
            )
        except EmulationError as error:
            raise StartError(str(error)) from error
        sleep_while_loading(self._emulation, (), self._outbox)
        return engine

    @property
    def inbox(self) -> Inbox:
        """What is to be handled."""
        return self._inbox

    def load(self) -> LoadedEngine:
        """There is nothing to load but time to take; the cards may be too small. The head of several stages waits for
        the others first. Raises StartError."""
        config, emulation = self._config, self._emulation
        if config.stage:
            return EmulatedStage(config, emulation, self._connections, self._outbox)
        try:
            hop = None
            if config.partition:
                hop = join_stages(config, emulation, self._connections, self._outbox)
            engine = EmulatedEngine(config, emulation, self._transfers, tell=self._outbox.send, wake=self.take, hop=hop)
        except (EmulationError, PipelineError) as error:
            raise StartError(str(error)) from error
        sleep_while_loading(emulation, config.partition, self._outbox)
        return EmulatedLoop(engine, self._inbox)


@final
class EmulatedLoop:
    """See `process.LoadedEngine`."""

    def __init__(self, engine: EmulatedEngine, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self.ready = engine.ready

    def serve(self) -> None:
        """Step by step, each as long as the model says."""
        engine, computing = self._engine, True
        while True:
            wait_s = 0.0 if computing else None if engine.idle else AWAIT_S
            while (letter := self._next(wait_s)) is not None:
                came_at, message = letter
                if isinstance(message, protocol.Stop):
                    return
                engine.handle(message, came_at)
                wait_s = 0.0
            ends = engine.begin_step(time.monotonic())
            computing = ends is not None
            if ends is not None:
                time.sleep(max(0.0, ends - time.monotonic()))
                engine.end_step(time.monotonic())
            engine.check_deadlines(time.monotonic())

    def close(self) -> None:
        """No other process is in it."""

    def _next(self, wait_s: float | None) -> tuple[float, ToLoop] | None:
        """The next message, if one comes in time; None: in whatever time."""
        try:
            return self._inbox.get(block=wait_s != 0.0, timeout=wait_s or None)
        except queue.Empty:
            return None
