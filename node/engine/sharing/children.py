"""The fork server's end of a process that several engines share: which of them are in it, and in which one it ended."""

from __future__ import annotations

import contextlib
import socket
from typing import Final, NamedTuple, final

from .. import protocol
from ..backends import find_backend
from ..mailbox import Outbox
from ..process import AgentSockets
from .process import Arrival, Blame, read_news, run_shared, send_arrival

_MOST_READ: Final = 4096


Exit = tuple[socket.socket, protocol.EngineExited]
"""An agent's channel, and what it is to be told."""


class SharingEngine(NamedTuple):
    """An engine of the process: who has asked for it, and what with."""

    channel: socket.socket
    spawn: protocol.Spawn

    @property
    def service(self) -> str:
        """What it is called there."""
        sharing = self.spawn.config.sharing
        assert sharing is not None
        return sharing.service


class EndedProcess(NamedTuple):
    """What follows from the end of a process: what agents are to be told, and engines that it has not taken in any
    more, for which another one is to be made."""

    exits: list[Exit]
    left_over: list[tuple[SharingEngine, AgentSockets]]


@final
class SharedChildren:
    """One process at a time: engines that share go to it, and the first one makes it."""

    def __init__(self) -> None:
        self.pid = 0
        """Of the process; 0: there is none."""
        self._control: socket.socket | None = None  # to it
        self._blame = Blame()
        self._engines: dict[int, SharingEngine] = {}  # by their number in it, until they leave
        self._number = 0  # of the last that has joined
        self._unread: dict[int, AgentSockets] = {}  # of those that it has not taken in yet

    def __repr__(self) -> str:
        return f"<SharedChildren pid={self.pid} {len(self._engines)} engines>"

    def pass_on(self, engine: SharingEngine, ends: AgentSockets) -> bool:
        """Give this engine to the process that runs; False: none does, and this one is to make it."""
        if self._control is None:
            return False
        self._number = number = self._number + 1
        self._engines[number] = engine
        self._unread[number] = AgentSockets(*(end.dup() for end in ends))
        with contextlib.suppress(OSError):  # it has just ended: this is left over
            send_arrival(self._control, number, engine.spawn, [end.fileno() for end in ends])
        return True

    def prepare(self) -> socket.socket:
        """Before the fork: the end that the process gets."""
        self._blame.set(0)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        return theirs

    def run(self, control: socket.socket, spawn: protocol.Spawn, ends: AgentSockets) -> int:
        """In the fork: be the process."""
        if self._control is not None:
            self._control.close()
        share = find_backend(spawn.config.backend).share
        if share is None:
            outbox = Outbox(ends.messages, lambda: None)
            reason = f"engines of the kind {spawn.config.backend} do not share a process: take one model for each box"
            outbox.send(protocol.StartFailed(reason=reason))
            outbox.flush()
            return 1
        return run_shared(Arrival(1, spawn.config, ends), control, self._blame, share)

    def add(self, pid: int, engine: SharingEngine) -> None:
        """After it, in the server."""
        self.pid = pid
        self._engines, self._number = {1: engine}, 1

    def look(self) -> list[Exit]:
        """See which engines it has taken in: their sockets are its own from then on. Returns those that have left."""
        left: list[Exit] = []
        while self._control is not None:
            try:
                packet = self._control.recv(_MOST_READ)
            except OSError:
                break
            if not packet:
                break
            number, is_new = read_news(packet)
            if not is_new:
                channel, spawn = self._engines.pop(number)
                left.append((channel, protocol.EngineExited(engine=spawn.engine, status=0)))
            elif number in self._unread:
                self._unread.pop(number).close()
        return left

    def end(self, status: int) -> EndedProcess:
        """It has ended."""
        exits = self.look()
        culprit, engines, unread = self._blame.get(), self._engines, self._unread
        self.pid, self._engines, self._unread = 0, {}, {}
        if self._control is not None:
            self._control.close()
        self._control = None
        name = engines[culprit].service if culprit in engines else ""
        for number, (channel, spawn) in engines.items():
            if number not in unread:
                other = name if number != culprit else ""
                exits.append((channel, protocol.EngineExited(engine=spawn.engine, status=status, culprit=other)))
        return EndedProcess(exits, [(engines[number], ends) for number, ends in unread.items()])
