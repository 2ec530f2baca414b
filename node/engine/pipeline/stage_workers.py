"""The workers that share the layers of one stage, as one worker: the first in this process, the others in
processes of their own on the same box.

    head --control pipe--> first worker ==control pipe, in this box==> second worker ...
    stage before --data pipe--> first worker --torch.distributed--> second worker ...

They are forked before this process has any thread, and end with it.
"""

from __future__ import annotations

import copy
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method

from ....kvtransport.wire.channel import LinkHello, LinkRole
from ....kvtransport.wire.pipe import greet
from ....kvtransport.wire.sockets import fresh_nonce
from ....kvtransport.wire.tickets import LinkTicket, issue_link
from ..kv.connector import read_settings
from ..scratch import own_temporary_folder
from ..settings import PIPELINE_DEFAULTS, PipelineSettings
from .pipes import OnLost
from .remote import Answers, RemoteWorker, call_all
from .vocabulary import JoinStage
from .worker import make_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_LEASE_S = 600.0


@final
@dataclass(slots=True)
class ForkedWorker:
    """A forked worker, number `rank` of its stage, and the connection to it before the handshake."""

    rank: int
    line: socket.socket
    ticket: LinkTicket
    pid: int  # 0 once it has been seen off: the number may be another process's then

    def greet(self, stage: int, on_lost: OnLost, settings: PipelineSettings) -> RemoteWorker:
        """Raises TransferError."""
        hello = LinkHello(self.ticket.link, fresh_nonce(), LinkRole.SENDER)
        pipe = greet(self.line, self.ticket, hello, dials=True, timeout=settings.greeting_s)
        return RemoteWorker(f"worker {self.rank} of stage {stage}", pipe, on_lost, settings)

    def end(self) -> None:
        """Now, and for good; its memory is free when this returns."""
        pid, self.pid = self.pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def fork_workers(
    count: int, become: Callable[[int, socket.socket, LinkTicket], NoReturn], inherited: Iterable[socket.socket]
) -> tuple[ForkedWorker, ...]:
    """Fork the workers from 1 to `count`, which `become` what they are and never return. They close what is
    `inherited`. To be called while this process has one thread."""
    forked: list[ForkedWorker] = []
    for rank in range(1, count + 1):
        ours, theirs = socket.socketpair()
        ticket = issue_link(_LEASE_S, secrets.token_bytes)
        pid = os.fork()
        if pid == 0:
            for other in (ours, *inherited, *(worker.line for worker in forked)):
                other.close()
            become(rank, theirs, ticket)
        theirs.close()
        forked.append(ForkedWorker(rank, ours, ticket, pid))
    return tuple(forked)


@final
class StageWorkers:
    """All calls come from one thread. `worker` is there once it is loaded."""

    def __init__(self, remotes: Sequence[RemoteWorker] = (), settings: PipelineSettings = PIPELINE_DEFAULTS) -> None:
        self.batch_s = settings.batch_s
        self.remotes = tuple(remotes)
        self.worker: Any = None
        self._aggregator = KVOutputAggregator(1 + len(self.remotes))

    def __repr__(self) -> str:
        return f"<StageWorkers of {1 + len(self.remotes)}, {'loaded' if self.worker else 'empty'}>"

    def load(self, config: VllmConfig) -> None:
        """Make all workers, which meet while they load. Raises StageLost."""
        with own_temporary_folder():
            meeting = get_file_store_init_method()
            joining = call_all(self.remotes, "load", JoinStage(meeting, read_settings(config).switchboard))
            self.join(config, meeting)
            _wait(joining, None)

    def join(self, config: VllmConfig, meeting: str) -> None:
        """Make the worker of this process, which meets the others there."""
        self.worker = make_worker(config, meeting)

    def merges(self) -> bool:
        """Whether it is the same for this stage to be given merged activations."""
        return bool(self.worker.merges())

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the stage as a whole returns. Raises StageLost."""
        told = call_all(self.remotes, method, *args, **kwargs)
        mine = run_method(self.worker, method, args, kwargs)
        if isinstance(mine, AsyncModelRunnerOutput):
            mine = mine.get_output()
        if method in ("run_batch", "sample_batch") and told and mine is not None:
            # A copy, because vLLM keeps one empty output for all steps.
            whole = self._aggregator.aggregate([copy.copy(mine), *_wait(told, self.batch_s)])
            assert whole is not None
            assert whole.kv_connector_output is not None
            whole.kv_connector_output.expected_finished_count = 0  # how many report to us is nothing to the head
            return whole
        others = _wait(told, self.batch_s if method == "compute_batch" else None)
        return min(mine, *others) if method == "determine_available_memory" and others else mine

    def close(self) -> None:
        """The end of all of them."""
        for remote in self.remotes:
            remote.close("the engine has stopped")
        if self.worker is not None:
            self.worker.shutdown()


def _wait(told: Answers, timeout: float | None) -> list[Any]:
    return [remote.wait(answer, timeout) for remote, answer in told]
