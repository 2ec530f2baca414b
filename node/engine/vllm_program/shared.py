"""A vLLM engine beside others in one process: what vLLM has once for a process is put in place before its turn.

- The worker's half of the KV connector is a global: each engine has its own, which is there while it loads or steps.
- KV lies in one pool (`kv_pool`), of which blocks are handed out to each.
- An engine that is torn down, which vLLM does when one is collected, takes the process groups of all with it. So none
  is: one that leaves gives back its weights and KV, and is collected when the next one has been built.
- Workers that are other processes would be forked from one with threads: `tp` above 1 and pipelines are refused.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast, final

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.engine import core as vllm_core

from .. import protocol
from ..mailbox import Outbox
from ..process import StartError
from ..sharing.turns import ProcessTurns, ServiceTurns, expect_requests
from .kv_pool import KvPool
from .process import EngineRunner, VllmProgram
from .turn_scheduler import TurnScheduler

if TYPE_CHECKING:
    import socket

    from ....coordinator.sharing.service_profile import ExpectedService

POLL_S: Final = 0.005
"""Between looks at KV that is awaited, which says itself when it has come. Less: an earlier end of what nobody hears
of; more: fewer steps of nobody, of half a millisecond each."""


@final
class VllmSharing:
    """What the vLLM engines of one process have in common. See `sharing.process.ShareProcess`."""

    def __init__(self, turns: ProcessTurns) -> None:
        self._pool = KvPool(turns)

    def __call__(self, config: protocol.EngineConfig, outbox: Outbox, news: threading.Event) -> SharedVllmProgram:
        """One more."""
        return SharedVllmProgram(config, self._pool, VllmProgram(config, outbox, (), news))


@final
class SharedVllmProgram:
    """See `process.Program`."""

    def __init__(self, config: protocol.EngineConfig, pool: KvPool, program: VllmProgram) -> None:
        self._config = config
        self._pool = pool
        self._program = program

    def take(self, message: protocol.ToEngine) -> None:
        """By the thread that reads messages."""
        self._program.take(message)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """A connection of a KV link."""
        self._program.attach(hello, connection)

    def load(self) -> VllmTurns:
        """Build the engine beside those that are here. Raises StartError."""
        sharing = self._config.sharing
        assert sharing is not None
        if self._config.tp > 1 or self._config.partition:
            raise StartError("an engine that shares its process has one GPU of one box: take tp 1, and no pipeline")
        cast("Any", vllm_core).cleanup_dist_env_and_memory = _keep_all
        agent = ConnectorAgent()
        try:
            with agent, self._pool.give_blocks(sharing.service):
                return VllmTurns(self._program.load(), agent, self._pool, sharing.service)
        except StartError:
            self._pool.close_service(sharing.service)
            raise


def _keep_all(shutdown_ray: bool = False) -> None:
    """Instead of what takes down the process groups of all engines of the process."""


@final
class ConnectorAgent:
    """The worker's half of one engine's KV connector. In the body of a `with` it is where vLLM looks for it."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._state: Any = kv_transfer_state  # vLLM has no other way to say it

    def __enter__(self) -> None:
        self._state._KV_CONNECTOR_AGENT = self._agent  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        self._agent, self._state._KV_CONNECTOR_AGENT = self._state._KV_CONNECTOR_AGENT, None  # noqa: SLF001

    def stop_reading(self, request: str | None = None) -> None:
        """When this returns, nobody reads KV of this request, or of any, to send it."""
        if self._agent is not None:
            self._agent.worker_side.stop_reading(request)

    def drop(self) -> None:
        """The engine has left."""
        self.stop_reading()
        self._agent = None


@final
class VllmTurns:
    """See `sharing.process.TurnEngine`."""

    poll_s = POLL_S

    def __init__(self, runner: EngineRunner, agent: ConnectorAgent, pool: KvPool, service: str) -> None:
        assert isinstance(runner.scheduler, TurnScheduler)
        self._runner = runner
        self._scheduler = runner.scheduler
        self._agent = agent
        self._pool = pool
        self._service = service
        self._step_s = 0.0
        self._token_s = 0.0

    def ready(self, load_s: float) -> protocol.EngineReady:
        """With the speed of the device, by which requests are expected to take so long as a roofline says."""
        ready = self._runner.ready(load_s)
        weights = sum(each.nbytes for each in self._runner.model().parameters())
        parameters = sum(each.numel() for each in self._runner.model().parameters())
        self._step_s = weights / (ready.memory_gbps * 1e9)
        self._token_s = 2.0 * parameters / (ready.tflops * 1e12)
        return ready

    def expect(self, lengths: tuple[int, int] | None) -> ExpectedService:
        """By that."""
        return expect_requests(self._token_s, self._step_s, lengths)

    def begin(self, turns: ServiceTurns) -> None:
        """See the protocol."""
        self._scheduler.turns, self._scheduler.deadline_of = turns, self._runner.deadline_of

    def handle_messages(self) -> bool:
        """See the protocol."""
        if not self._runner.has_messages:
            return True
        with self._agent:
            return self._runner.handle_all()

    def begin_choice(self) -> None:
        """See the protocol."""
        self._scheduler.begin_choice()

    def take(self, request: str) -> bool:
        """See the protocol."""
        return self._scheduler.take(request)

    def has_room_again(self, decodes: int) -> bool:
        """See the protocol."""
        return self._scheduler.has_room_again(decodes)

    def run_turn(self, requests: tuple[str, ...], *, may_run_ahead: bool = False) -> int:
        """See the protocol."""
        if not requests and not self._runner.is_busy:
            return 0
        scheduler = self._scheduler
        scheduler.set_turn(requests)
        with self._agent:
            self._runner.step()
        if not (may_run_ahead and scheduler.scheduled_tokens and self.is_ahead):
            self.settle()
        scheduler.note_turn()
        return scheduler.scheduled_tokens

    @property
    def is_ahead(self) -> bool:
        """See the protocol."""
        return self._runner.is_ahead

    def settle(self) -> None:
        """See the protocol."""
        if self.is_ahead:
            with self._agent:
                self._runner.settle()
        self._runner.pause()

    def can_lose_kv(self, request: str) -> bool:
        """See the protocol."""
        return self._scheduler.can_lose_kv(request)

    def freed_bytes(self, requests: Sequence[str], *, for_others: bool) -> int:
        """See the protocol."""
        return self._scheduler.freed_bytes(requests, for_others=for_others)

    def evict(self, request: str) -> None:
        """See the protocol."""
        self._agent.stop_reading(request)
        self._scheduler.evict(request)

    def tell_stats(self) -> None:
        """See the protocol."""
        self._runner.tell_stats()

    def awaits_news(self) -> bool:
        """See the protocol."""
        return self._scheduler.awaits

    def close(self) -> None:
        """See `process.DescribedEngine`."""
        self._runner.close()

    def leave(self) -> None:
        """Weights go when whoever still reads them has ended, and blocks at once."""
        self._runner.drop_memory()
        gc.unfreeze()  # vLLM has frozen all that was there when an engine had been built, and does so again
        self._agent.drop()
        self._pool.close_service(self._service)
