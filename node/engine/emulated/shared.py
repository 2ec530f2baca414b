"""An emulated engine beside others in one process: its modelled GPU is theirs too, so they compute one at a time, and
have one budget of KV memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, final

from ....coordinator.sharing.values import SharingError
from .. import protocol
from ..mailbox import Outbox
from ..process import StartError
from ..sharing.turns import ProcessTurns, ServiceTurns
from .batching import BatchedRequest
from .engine import CHECK_INTERVAL_S, EmulatedEngine
from .memory import SharedBlocks
from .process import EmulatedProgram, Inbox, ToLoop

if TYPE_CHECKING:
    import socket

POLL_S: Final = CHECK_INTERVAL_S


@final
class EmulatedSharing:
    """What the emulated engines of one process have in common. See `sharing.process.ShareProcess`."""

    def __init__(self, turns: ProcessTurns) -> None:
        self._turns = turns

    def __call__(self, config: protocol.EngineConfig, outbox: Outbox, news: threading.Event) -> SharedEmulatedProgram:
        """One more."""
        return SharedEmulatedProgram(config, self._turns, EmulatedProgram(config, outbox, news.set))


@final
class SharedEmulatedProgram:
    """See `process.Program`."""

    def __init__(self, config: protocol.EngineConfig, turns: ProcessTurns, program: EmulatedProgram) -> None:
        self._config = config
        self._turns = turns
        self._program = program

    def take(self, message: ToLoop) -> None:
        """By any thread."""
        self._program.take(message)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """A connection of a KV link."""
        self._program.attach(hello, connection)

    def load(self) -> EmulatedTurns:
        """Raises StartError."""
        sharing = self._config.sharing
        assert sharing is not None
        if self._config.partition:
            raise StartError("an engine that shares its process is on one box: no pipeline")
        try:
            engine = self._program.load_engine(partial(self._share, sharing.service))
        except SharingError as error:
            raise StartError(f"kv-cache-mib: {error}") from error
        return EmulatedTurns(engine, self._program.inbox, partial(self._close, sharing.service))

    def _share(self, service: str, tokens: int, token_bytes: int, block_tokens: int) -> SharedBlocks:
        shares = self._turns.open_memory(tokens * token_bytes)
        self._turns.token_bytes[service] = token_bytes
        blocks = SharedBlocks(shares, service, block_tokens * token_bytes)
        shares.open_service(service, blocks.block_bytes)
        return blocks

    def _close(self, service: str) -> None:
        if self._turns.shares is not None:
            self._turns.shares.close_service(service)


@final
class EmulatedTurns:
    """See `sharing.process.TurnEngine`."""

    poll_s = POLL_S
    is_ahead = False

    def __init__(self, engine: EmulatedEngine, inbox: Inbox, leave: Callable[[], None]) -> None:
        assert isinstance(engine.memory, SharedBlocks)
        self._block_bytes = engine.memory.block_bytes
        self._engine = engine
        self._inbox = inbox
        self.ready = engine.ready
        self.expect = engine.expect
        self.begin_choice = engine.batcher.begin_choice
        self.tell_stats = engine.tell_stats
        self.leave = leave

    def take(self, request: str) -> bool:
        """See the protocol."""
        return self._engine.batcher.take(self._work_of(request), partial(self._make_room, request))

    def has_room_again(self, decodes: int) -> bool:
        """Here a choice costs nothing: steps take as long as the model says."""
        return False

    def can_lose_kv(self, request: str) -> bool:
        """See the protocol."""
        work = self._engine.find(request)
        return work is not None and self._engine.batcher.can_lose_kv(work)

    def freed_bytes(self, requests: Sequence[str], *, for_others: bool) -> int:
        """See the protocol: all engines have all blocks here."""
        found = (work for each in requests if (work := self._engine.find(each)) is not None)
        return self._engine.batcher.count_freed(found) * self._block_bytes

    def evict(self, request: str) -> None:
        """See the protocol."""
        self._engine.batcher.evict(self._work_of(request))
        self._engine.on_lost_kv(request)

    def _work_of(self, request: str) -> BatchedRequest:
        work = self._engine.find(request)
        assert work is not None, "what is in the turn order is here"
        return work

    def _make_room(self, request: str, blocks: int) -> bool:
        turns = self._engine.turns
        return turns is not None and turns.make_room(request, blocks * self._block_bytes)

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

    def run_turn(self, requests: tuple[str, ...], *, may_run_ahead: bool = False) -> int:
        """As long as the model says, which knows of no time between two steps."""
        engine = self._engine
        if engine.idle:
            return 0
        ends = engine.begin_step(time.monotonic(), requests)
        if ends is not None:
            time.sleep(max(0.0, ends - time.monotonic()))
            engine.end_step(time.monotonic())
        engine.check_deadlines(time.monotonic())
        for request in requests:
            self._note_kv(request)
        tokens, engine.scheduled_tokens = engine.scheduled_tokens, 0
        return tokens

    def settle(self) -> None:
        """See the protocol."""

    def _note_kv(self, request: str) -> None:
        """After its turn."""
        work, turns = self._engine.find(request), self._engine.turns
        assert turns is not None
        if work is not None and work.computed:
            turns.hold_kv(request)
            if work.known - work.computed == 1:
                turns.begin_decode(request)

    def awaits_news(self) -> bool:
        """See the protocol."""
        return self._engine.awaits_kv

    def close(self) -> None:
        """No other process is in it."""
