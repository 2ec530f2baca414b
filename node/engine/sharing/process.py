"""A process of several engines: it loads each that comes, and has them step one at a time.

    fork server --fork--> run_shared <--packets with two sockets each-- fork server: one for each engine that joins

Each engine has an agent, message socket and KV memory of its own; when its agent hangs up, it leaves, and the others
go on. Whose turn it is stands in memory that the fork server sees, so that it can say in which engine the process has
ended. A turn that takes too long ends it, too (`Sharing.hang_s`), by a thread of C's: Python's may be waiting.

While the only requests are decodes of one engine, it may run ahead: its next step is scheduled while the one before
it computes, as it would be in a process of its own. Before anybody else has a turn, the outputs are waited for.

While an engine loads, the others wait: vLLM's state of the process is that of the one that loads.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, final

import msgspec

from ....coordinator.sharing.service_profile import ExpectedService
from ....coordinator.sharing.values import SharedRequest, Turn
from ...box.heap import return_freed_memory
from .. import protocol
from ..mailbox import Outbox
from ..process import AgentSockets, DescribedEngine, Program, connect, load
from ..settings import Sharing
from .turns import KvHolder, ProcessTurns, ServiceTurns, ids_of

_log = logging.getLogger(__name__)

REST_S: Final = 1.0  # without a request, until memory goes back
LATE_S: Final = 1.0  # between looks at the deadlines of requests that have no turn
_NUMBER_BYTES: Final = 8
_REARM_SHARE: Final = 4  # the watch for a turn that hangs may be late by one part in so many: to set it takes 50 us


class TurnEngine(DescribedEngine, KvHolder, Protocol):
    """An engine that steps when it is its turn. All is called by the main thread."""

    poll_s: float
    """How often what it waits for is to be looked at, while nothing says that it has come."""

    def expect(self, lengths: tuple[int, int] | None) -> ExpectedService:
        """What requests are taken to be like before any has ended. `lengths`: see `Sharing`."""

    def begin(self, turns: ServiceTurns) -> None:
        """Requests are to be told there from now on."""

    def handle_messages(self) -> bool:
        """Do what the agent wants; False: it is to stop."""

    def begin_choice(self) -> None:
        """A turn is chosen: all of the batch is free."""

    def take(self, request: str) -> bool:
        """Take it into the turn that is being chosen, if there is room."""

    def has_room_again(self, decodes: int) -> bool:
        """Whether so many requests, all that it has, certainly have room for one decode step more. False costs the time
        of a choice."""

    @property
    def is_ahead(self) -> bool:
        """Whether a step has been scheduled whose output is not known."""

    def run_turn(self, requests: tuple[str, ...], *, may_run_ahead: bool = False) -> int:
        """One iteration, of these requests alone; of none: only what waits for something else is looked at. Returns how
        many tokens were scheduled. Their output is known by then, unless it `may_run_ahead` and can: then that of the
        step before is."""

    def settle(self) -> None:
        """Wait for the output of a step that runs ahead, if one does."""

    def tell_stats(self) -> None:
        """How much of the memory of all is used and free, if that has changed since last told."""

    def awaits_news(self) -> bool:
        """Whether anything waits for something else than its turn."""

    def leave(self) -> None:
        """Its agent has gone, or wants it to stop, and it is closed: give back its memory."""


MakeProgram = Callable[[protocol.EngineConfig, Outbox, threading.Event], Program[TurnEngine]]
"""Of an engine that sets the event when there is something for the main thread."""

ShareProcess = Callable[[ProcessTurns], MakeProgram]
"""Makes what the engines of one process have in common."""


@final
class Blame:
    """Which engine has the process, in memory that the fork server shares: a number, 0 for none."""

    def __init__(self) -> None:
        self._number = memoryview(mmap.mmap(-1, _NUMBER_BYTES)).cast("Q")

    def set(self, number: int) -> None:
        """The engine of this number has it from now on."""
        self._number[0] = number

    def get(self) -> int:
        """Whose it is, or was when the process ended."""
        return self._number[0]


@dataclass(slots=True)
class Arrival:
    """An engine that joins: its number in this process, and what it is started with."""

    number: int
    config: protocol.EngineConfig
    sockets: AgentSockets
    has_gone: bool = False  # its agent has hung up


class _StepAhead(NamedTuple):
    """Whose step runs ahead, and since when its time counts: the output of the step before it came, or, of the first,
    it was scheduled."""

    member: SharingMember
    since: float


@final
class SharingMember:
    """One engine of the process."""

    def __init__(self, arrival: Arrival, engine: TurnEngine, outbox: Outbox, turns: ServiceTurns) -> None:
        self.arrival = arrival
        self.engine = engine
        self.outbox = outbox
        self.turns = turns
        self.looked_at = 0.0

    def __repr__(self) -> str:
        return f"<SharingMember {self.turns}>"

    @property
    def number(self) -> int:
        """In this process."""
        return self.arrival.number

    def hang_up(self) -> None:
        """The agent sees the engine as gone; threads that wait for it end."""
        for end in self.arrival.sockets:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the agent was faster


def send_arrival(control: socket.socket, number: int, spawn: protocol.Spawn, sockets: list[int]) -> None:
    """To a process that runs already. Raises OSError: it has just ended."""
    socket.send_fds(control, [protocol.pack(msgspec.structs.replace(spawn, engine=number))], sockets)


def _pack_news(number: int, *, is_new: bool) -> bytes:
    return bytes([is_new]) + number.to_bytes(_NUMBER_BYTES, "little")


def read_news(packet: bytes) -> tuple[int, bool]:
    """What a process tells of an engine of this number: it has taken it in, or, if it is not new, it has left."""
    return int.from_bytes(packet[1:], "little"), bool(packet[0])


def run_shared(arrival: Arrival, control: socket.socket, blame: Blame, share: ShareProcess) -> int:
    """Serve the agents until the last has gone; the exit status."""
    assert arrival.config.sharing is not None
    process = SharedProcess(arrival.config.sharing, control, blame, share)
    process.arrivals.put(arrival)
    threading.Thread(target=process.receive, name="engines", daemon=True).start()
    return process.run()


@final
class SharedProcess:
    """See the module."""

    def __init__(self, sharing: Sharing, control: socket.socket, blame: Blame, share: ShareProcess) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._hang_s = sharing.hang_s
        self._control = control
        self._blame = blame
        self._members: dict[str, SharingMember] = {}
        self._turns = ProcessTurns(sharing.order, time.monotonic, self._find_holder)
        self._make_program = share(self._turns)
        self._news = threading.Event()
        self._armed_at = 0.0
        self._ahead: _StepAhead | None = None
        self._has_looked = False  # at what waits for something else than its turn, since the last choice

    def __repr__(self) -> str:
        return f"<SharedProcess {list(self._members.values())}>"

    def receive(self) -> None:
        """By a thread: the engines that the fork server passes on."""
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 2)
            except OSError:
                return
            if not packet:
                return  # there is no fork server any more, and no agent can come
            spawn = msgspec.msgpack.decode(packet, type=protocol.Spawn)
            messages, sockets = (socket.socket(fileno=descriptor) for descriptor in descriptors)
            self.arrivals.put(Arrival(spawn.engine, spawn.config, AgentSockets(messages, sockets)))
            self._news.set()

    def run(self) -> int:
        """Until the last engine has left; an exception of an engine's ends the process."""
        self._news.set()
        while True:
            if self._news.is_set():
                self._news.clear()  # before anything is looked at
                while not self.arrivals.empty():
                    self._add(self.arrivals.get())
                for member in tuple(self._members.values()):
                    if not self._handle_messages(member):
                        self._dismiss(member)
                if not self._members and self.arrivals.empty():
                    return 0
            if not self._take_turn() and not self._news.is_set():
                self._wait()

    def take(self, request: SharedRequest) -> bool:
        """See `TurnRoom`."""
        key, member = request.key, self._members[request.service]
        assert isinstance(key, tuple)
        self._blame.set(member.number)
        return member.engine.take(key[1])

    # ---- inside ---------------------------------------------------------------------------------------------

    def _add(self, arrival: Arrival) -> None:
        self._settle()
        self._control.send(_pack_news(arrival.number, is_new=True))  # its sockets are in good hands now
        sharing, outbox = arrival.config.sharing, Outbox(arrival.sockets.messages, lambda: self._on_gone(arrival))
        assert sharing is not None
        if sharing.service in self._members:  # its agent has started another, and has not closed this one
            self._dismiss(self._members[sharing.service])
        with self.blamed(arrival.number):
            program = self._make_program(arrival.config, outbox, self._news)
            connect(arrival.sockets, outbox, program, lambda: self._on_gone(arrival))
            engine = load(program, outbox)
            if engine is None:
                arrival.sockets.close()
                self._tell_left(arrival.number)
                return
            turns = self._turns.open_service(sharing.service, engine.expect(sharing.lengths))
            engine.begin(turns)
        self._members[sharing.service] = SharingMember(arrival, engine, outbox, turns)

    def _handle_messages(self, member: SharingMember) -> bool:
        with self.blamed(member.number):
            return not member.arrival.has_gone and member.engine.handle_messages()

    def _on_gone(self, arrival: Arrival) -> None:
        arrival.has_gone = True
        self._news.set()

    def _tell_left(self, number: int) -> None:
        """The fork server, which forgets the engine, as its agent does."""
        with suppress(OSError):  # there is none any more
            self._control.send(_pack_news(number, is_new=False))

    def _dismiss(self, member: SharingMember) -> None:
        self._settle()
        del self._members[member.turns.service]
        with self.blamed(member.number):
            member.turns.clear()
            if not member.arrival.has_gone:
                member.outbox.flush()
            member.hang_up()
            member.engine.close()
            member.engine.leave()
        self._turns.close_service(member.turns.service)
        self._tell_left(member.number)
        return_freed_memory()

    def _take_turn(self) -> bool:
        """Have one engine step, and those looked at that wait for something else; whether any has stepped."""
        turn = self._choose_again() or self._choose()
        while turn is None and (self._settle() or self._turns.evict_last()):
            turn = self._choose()
        if turn is not None:
            self._run(turn)
        now = time.monotonic()
        for member in self._members.values():
            waited_s = now - member.looked_at  # least of all by who has just stepped, which is the cheapest to see
            if waited_s >= LATE_S or (waited_s >= member.engine.poll_s and member.engine.awaits_news()):
                member.looked_at = now
                self._has_looked = True
                if member.engine.awaits_news():
                    self._settle()
                with self.blamed(member.number):
                    member.engine.run_turn(())
                    member.engine.tell_stats()
        return turn is not None

    def _run(self, turn: Turn) -> None:
        member = self._members[turn.service]
        may_run_ahead = self._turns.sole_decoder == turn.service
        if not may_run_ahead:  # a request has lost its KV so that others of the turn have room
            self._settle()
        before = self._ahead
        began = before.since if before is not None else time.monotonic()
        with self.blamed(member.number):
            tokens = member.engine.run_turn(ids_of(turn), may_run_ahead=may_run_ahead)
        now = member.looked_at = time.monotonic()
        self._ahead = None
        if member.engine.is_ahead:
            self._ahead = _StepAhead(member, now if before is not None else began)
        if self._ahead is not None and before is None:
            self._turns.charge_ahead(turn)
        elif before is not None and not tokens:  # all were in their last step, whose output has come
            self._turns.note_decode(turn.service, now - began)
            self._turns.charge(turn, 0.0, 0, is_expected=True)
        else:
            self._turns.charge(turn, now - began, tokens)
        if not tokens and before is None:  # there was no room after all
            self._turns.evict_last()

    def _settle(self) -> bool:
        """Whether a step ran ahead, whose output is known now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return False
        with self.blamed(ahead.member.number):
            ahead.member.engine.settle()
        self._turns.note_decode(ahead.member.turns.service, time.monotonic() - ahead.since)
        return True

    def _choose_again(self) -> Turn | None:
        """The last turn, where a choice would come to the same: a choice costs a hundredth of a small model's step.
        Whatever else was awaited is only seen by a choice."""
        turn, has_looked, self._has_looked = self._turns.sole_turn, self._has_looked, False
        if turn is None or has_looked or self._news.is_set():
            return None
        member = self._members[turn.service]
        self._blame.set(member.number)
        has_room = member.engine.has_room_again(len(turn.requests))
        self._blame.set(0)
        if not has_room:
            return None
        self._turns.choose_again(turn)
        return turn

    def _choose(self) -> Turn | None:
        """Blame is of whoever is asked to take a request."""
        for member in self._members.values():
            with self.blamed(member.number):
                member.engine.begin_choice()
        ahead = self._ahead
        if ahead is not None and self._turns.sole_decoder != ahead.member.turns.service:
            self._settle()
            with self.blamed(ahead.member.number):
                ahead.member.engine.begin_choice()
        turn = self._turns.choose(self)
        self._blame.set(0)
        return turn

    def _find_holder(self, service: str) -> KvHolder:
        return _BlamedHolder(self, self._members[service])

    def _wait(self) -> None:
        """For a message, an engine, or KV."""
        pauses = [each.engine.poll_s for each in self._members.values() if each.engine.awaits_news()]
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = 0.0
        if not self._news.wait(min(pauses, default=REST_S)) and not pauses:
            for member in self._members.values():
                member.engine.tell_stats()
            return_freed_memory()
            self._news.wait()

    def blamed(self, number: int) -> AbstractContextManager[None]:
        """The engine of this number has the process for the body."""
        self._watch()
        return _Blamed(self._blame, number)

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._armed_at >= self._hang_s / _REARM_SHARE:
            self._armed_at = now
            faulthandler.dump_traceback_later(self._hang_s, exit=True)


@final
class _BlamedHolder:
    """See `turns.KvHolder`: one that fails while another has the process."""

    def __init__(self, process: SharedProcess, member: SharingMember) -> None:
        self._process = process
        self._member = member

    def can_lose_kv(self, request: str) -> bool:
        """See the protocol."""
        with self._process.blamed(self._member.number):
            return self._member.engine.can_lose_kv(request)

    def freed_bytes(self, requests: Sequence[str], *, for_others: bool) -> int:
        """See the protocol."""
        with self._process.blamed(self._member.number):
            return self._member.engine.freed_bytes(requests, for_others=for_others)

    def evict(self, request: str) -> None:
        """See the protocol."""
        with self._process.blamed(self._member.number):
            self._member.engine.evict(request)


@final
class _Blamed(AbstractContextManager[None]):
    """It stays with who has raised, or ended the process, and goes back to who had it before otherwise."""

    __slots__ = ("_before", "_blame", "_number")

    def __init__(self, blame: Blame, number: int) -> None:
        self._blame = blame
        self._number = number
        self._before = 0

    def __enter__(self) -> None:
        self._before = self._blame.get()
        self._blame.set(self._number)

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self._blame.set(self._before)
