"""An emulated engine beside others in one process: its modelled GPU is theirs too, so they compute one at a time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, final

from .. import protocol
from ..mailbox import Outbox
from ..process import StartError
from ..sharing.turns import ServiceTurns
from .engine import CHECK_INTERVAL_S, EmulatedEngine
from .process import EmulatedProgram, Inbox, ToLoop

if TYPE_CHECKING:
    import socket

POLL_S: Final = CHECK_INTERVAL_S


@final
class SharedEmulatedProgram:
    """See `process.Program`."""

    def __init__(self, config: protocol.EngineConfig, outbox: Outbox, news: threading.Event) -> None:
        self._config = config
        self._program = EmulatedProgram(config, outbox, news.set)

    def take(self, message: ToLoop) -> None:
        """By any thread."""
        self._program.take(message)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """A connection of a KV link."""
        self._program.attach(hello, connection)

    def load(self) -> EmulatedTurns:
        """Raises StartError."""
        if self._config.partition:
            raise StartError("an engine that shares its process is on one box: no pipeline")
        return EmulatedTurns(self._program.load_engine(), self._program.inbox)


@final
class EmulatedTurns:
    """See `sharing.process.TurnEngine`."""

    poll_s = POLL_S

    def __init__(self, engine: EmulatedEngine, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self.ready = engine.ready
        self.expect = engine.expect
        self.begin_choice = engine.begin_choice
        self.take = engine.take

    def begin(self, turns: ServiceTurns) -> None:
        """See the protocol."""
        self._engine.turns = turns

    def handle_messages(self) -> bool:
        """See the protocol."""
        while not self._inbox.empty():
            came_at, message = self._inbox.get()
            if isinstance(message, protocol.Stop):
                return False
            self._engine.handle(message, came_at)
        return True

    def run_turn(self, requests: tuple[str, ...]) -> int:
        """As long as the model says."""
        engine = self._engine
        if engine.idle:
            return 0
        ends = engine.begin_step(time.monotonic(), requests)
        if ends is not None:
            time.sleep(max(0.0, ends - time.monotonic()))
            engine.end_step(time.monotonic())
        engine.check_deadlines(time.monotonic())
        return engine.note_turn(requests)

    def awaits_news(self) -> bool:
        """See the protocol."""
        return self._engine.awaits_kv

    def leave(self) -> None:
        """It has no memory."""

    def close(self) -> None:
        """No other process is in it."""
