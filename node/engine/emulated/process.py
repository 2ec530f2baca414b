"""An emulated engine's program: its clock and its transfers, around the engine that knows neither."""

from __future__ import annotations

import queue
import socket
import sys
import time
from typing import final

import msgspec
import psutil

from .. import protocol
from ..mailbox import Outbox
from ..process import AgentSockets, StartError, serve_agent
from .engine import EmulatedEngine, EmulationError, KvEnded, KvSent
from .transfers import EmulatedTransfers

AWAIT_S = 0.05  # between looks at deadlines while no step runs and KV is awaited

ToLoop = protocol.ToEngine | KvEnded | KvSent


def run_emulated_engine(config: protocol.EngineConfig, sockets: AgentSockets) -> int:
    """Serve until told to stop. Returns the exit status."""
    sys.setswitchinterval(config.transfers.thread_switch_s)
    return serve_agent(sockets, lambda outbox: EmulatedProgram(config, outbox))


@final
class EmulatedProgram:
    """See `process.EngineProgram`."""

    def __init__(self, config: protocol.EngineConfig, outbox: Outbox) -> None:
        self._config = config
        self._emulation = msgspec.convert(config.options, protocol.Emulation)
        self._outbox = outbox
        self._inbox: queue.SimpleQueue[tuple[float, ToLoop]] = queue.SimpleQueue()  # when it came, and what
        self._transfers = EmulatedTransfers(
            layers=self._emulation.model.layers,
            head_dim=self._emulation.model.head_dim,
            limit_bytes=protocol.transfer_buffer_bytes(config, psutil.virtual_memory().total),
            report=outbox.send,
            settings=config.transfers,
        )
        self._engine: EmulatedEngine | None = None

    def take(self, message: ToLoop) -> None:
        """By any thread."""
        self._inbox.put((time.monotonic(), message))

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """By any thread."""
        self._transfers.attach(hello, connection)

    def load(self) -> None:
        """There is nothing to load, but the cards may be too small. Raises StartError."""
        try:
            self._engine = EmulatedEngine(
                self._config, self._emulation, self._transfers, tell=self._outbox.send, wake=self.take
            )
        except EmulationError as error:
            raise StartError(str(error)) from error

    def ready(self, load_s: float) -> protocol.EngineReady:
        """The speeds are those of the cards on paper."""
        return self._loaded.ready(load_s)

    def serve(self) -> None:
        """Step by step, each as long as the model says."""
        engine, computing = self._loaded, True
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

    @property
    def _loaded(self) -> EmulatedEngine:
        assert self._engine is not None, "load comes first"
        return self._engine

    def _next(self, wait_s: float | None) -> tuple[float, ToLoop] | None:
        """The next message, if one comes in time; None: in whatever time."""
        try:
            return self._inbox.get(block=wait_s != 0.0, timeout=wait_s or None)
        except queue.Empty:
            return None
