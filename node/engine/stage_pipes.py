"""Opening the pipes between the stages of a replica, whichever engine computes in them."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final, final

from ...kvtransport.errors import KVProtocolError, TransferError
from ...kvtransport.wire.channel import LinkHello, parse_link_hello
from ...kvtransport.wire.pipe import Pipe, accept_pipe, dial_pipe
from .protocol import PipeEnd
from .settings import PipelineSettings

_ARRIVALS_KEPT: Final = 16


class PipelineError(Exception):
    """This replica cannot be run, or no longer; the text is one line for the user."""


class StageLost(PipelineError):
    """Another stage of the replica is gone."""


@final
class PipeConnections:
    """Accepted connections whose hello names a link of a pipe, until somebody opens it."""

    def __init__(self, ends: Sequence[PipeEnd]) -> None:
        self._links = {end.ticket.link for end in ends if end.dial is None}
        self._waiting: list[tuple[LinkHello, socket.socket]] = []
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<PipeConnections expected={len(self._links)} waiting={len(self._waiting)}>"

    def put(self, hello: bytes, connection: socket.socket) -> bool:
        """Whether a connection with this hello is for a pipe; if so, it is taken over."""
        try:
            parsed = parse_link_hello(hello)
        except KVProtocolError:
            return False
        if parsed.link not in self._links:
            return False
        with self._changed:
            self._waiting.append((parsed, connection))
            surplus = self._waiting[:-_ARRIVALS_KEPT]
            del self._waiting[:-_ARRIVALS_KEPT]
            self._changed.notify_all()
        for _, old in surplus:
            old.close()
        return True

    def take(self, link: bytes, until: float) -> tuple[LinkHello, socket.socket] | None:
        """The next connection of that link; None if there is none by that moment of the monotonic clock."""
        with self._changed:
            while True:
                for at, (hello, _) in enumerate(self._waiting):
                    if hello.link == link:
                        return self._waiting.pop(at)
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    return None


def open_pipes(ends: Sequence[PipeEnd], arrivals: PipeConnections, settings: PipelineSettings) -> dict[PipeEnd, Pipe]:
    """All pipes of this stage, at once. Raises StageLost for the first failure; closes the rest."""
    until = time.monotonic() + settings.connect_s
    opened: queue.SimpleQueue[tuple[PipeEnd, Pipe | StageLost]] = queue.SimpleQueue()
    given_up = threading.Event()

    def attempt(end: PipeEnd) -> None:
        try:
            opened.put((end, _open(end, arrivals, until, given_up, settings)))
        except StageLost as error:
            opened.put((end, error))

    for end in ends:
        threading.Thread(target=attempt, args=(end,), name=f"pipe-{end.kind}-{end.stage}", daemon=True).start()
    pipes: dict[PipeEnd, Pipe] = {}
    failure: StageLost | None = None
    for _ in ends:
        end, pipe = opened.get()
        if isinstance(pipe, Pipe):
            pipes[end] = pipe
        else:
            failure = failure or pipe
            given_up.set()
    if failure is not None:
        for pipe in pipes.values():
            pipe.close(str(failure))
        raise failure
    return pipes


def _open(
    end: PipeEnd, arrivals: PipeConnections, until: float, given_up: threading.Event, settings: PipelineSettings
) -> Pipe:
    """Try, once at least, until it is there. Raises StageLost."""
    why = "it has not come"
    rng = random.Random(end.ticket.link)
    while True:
        try:
            if end.dial is not None:
                return dial_pipe(end.ticket, end.dial, timeout=settings.handshake_s)
            arrival = arrivals.take(end.ticket.link, min(until, time.monotonic() + 1.0))
            if arrival is not None:
                hello, connection = arrival
                return accept_pipe(end.ticket, hello, connection, timeout=settings.handshake_s)
        except TransferError as error:
            why = str(error)
            given_up.wait(settings.retry_s * rng.uniform(1, 2))
        if given_up.is_set() or time.monotonic() >= until:
            raise StageLost(f"no {end.kind} pipe to stage {end.stage}: {why}")
