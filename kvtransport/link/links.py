"""The rim of a link that both ends share: sockets and threads around a `LinkMachine`, which decides
everything.

One thread per connection dials or accepts it, shakes hands and then reads; the sending end adds one
that writes. One thread per link keeps time and starts dials. `_lock` guards the machine and
everything of the link but the sockets; nothing that can wait is done under it, and no caller's code
is called.
"""

from __future__ import annotations

import random
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ..errors import KVProtocolError, TransferError
from ..wire.channel import Channel, LinkHello, LinkRole
from ..wire.dial_path import DialPath
from ..wire.signals import Chunk, Signal
from ..wire.sockets import dial, explain, fresh_nonce, hang_up, round_trip_s, shake_hands, tune
from ..wire.tickets import LinkTicket, TransferTicket
from .dialling import DialAttempt, Dialler
from .machine import LinkMachine, PathStatistics
from .transfers import CloseConnection, EndState, LinkEnded, LinkEvent

_JOIN_S = 5.0
_SHORTEST_WAIT_S = 0.005


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """What a link is doing. `failures`: label -> why its last dial failed, unless one worked since."""

    link: str
    ended: str | None
    transfers: int
    paths: dict[str, PathStatistics]
    bytes_sent: int
    bytes_received: int
    bytes_resent: int
    connections_lost: int
    failures: dict[str, str]


class LinkConnection:
    """An authenticated connection: its socket, its channel, and its number in the machine."""

    def __init__(self, number: int, sock: socket.socket, channel: Channel, slot: int | None, near_s: float) -> None:
        self.number = number
        self.sock = sock
        self.channel = channel
        self.slot = slot
        self.dead = False
        self.sending = threading.Lock()
        self.writer: threading.Thread | None = None
        self.scratch = memoryview(bytearray(0))
        self.wakes_at = 1
        self.read_at = 0.0
        self.near = round_trip_s(sock) < near_s
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)


class ThreadedLink(ABC):
    """One end of a link. Use as a context manager, or `close`."""

    _role: LinkRole

    def __init__(
        self,
        ticket: LinkTicket,
        machine: LinkMachine[Any],
        paths: Sequence[DialPath],
        make_channel: Callable[..., Channel] = Channel,
    ) -> None:
        self.ticket = ticket
        self._make_channel = make_channel
        self._machine = machine
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for threads that send
        self._changed = threading.Condition(self._lock)  # for callers
        self._timer = threading.Condition(self._lock)
        self._wires: dict[int, LinkConnection] = {}
        self._raw: set[socket.socket] = set()  # not authenticated yet
        self._threads: set[threading.Thread] = set()
        self._dialler = Dialler(machine.settings, random.Random())
        self._dialler.set_paths(list(paths), time.monotonic())
        self._closed = False
        self._lost = self._bytes_out = self._bytes_in = 0
        with self._lock:
            self._start(self._keep_time, "time")

    def __repr__(self) -> str:
        state = self._machine.ended or f"{len(self._wires)} connections"
        return f"<{type(self).__name__} {self.ticket.link.hex()[:8]} {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    @property
    def ended(self) -> str | None:
        """Why the link is over; None while it is not."""
        return self._machine.ended

    @property
    def connections(self) -> int:
        """How many are up."""
        return len(self._wires)

    def attach(self, sock: socket.socket, hello: LinkHello) -> None:
        """Take over an accepted connection, its hello read; it joins once it has authenticated."""
        with self._lock:
            if self._closed or len(self._wires) + len(self._raw) >= self._machine.settings.max_connections:
                sock.close()
                return
            self._raw.add(sock)
            self._start(self._serve, "accept", sock, hello)

    def set_paths(self, paths: Sequence[DialPath]) -> None:
        """Carry everything over these paths from now on, also what is under way: connections of
        other paths are closed as soon as one of these is up, and what they had not confirmed is
        sent again."""
        with self._lock:
            self._dialler.set_paths(list(paths), time.monotonic())
            self._timer.notify_all()

    def wait_connected(self, count: int, timeout: float) -> bool:
        """Until `count` connections are up, or the link is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._wires) >= count or self._closed, timeout)
            return len(self._wires) >= count

    def statistics(self) -> LinkStatistics:
        """A view of now."""
        with self._lock:
            return LinkStatistics(
                link=self.ticket.link.hex(),
                ended=self._machine.ended,
                transfers=len(self._machine.transfers),
                paths=self._machine.path_statistics(time.monotonic()),
                bytes_sent=self._bytes_out + sum(wire.channel.bytes_out for wire in self._wires.values()),
                bytes_received=self._bytes_in + sum(wire.channel.bytes_in for wire in self._wires.values()),
                bytes_resent=self._machine.bytes_resent,
                connections_lost=self._lost,
                failures=dict(self._dialler.failures),
            )

    def abort(self, transfer: bytes, reason: str) -> None:
        """See `TransferHandle.abort`."""
        with self._use_machine():
            self._machine.abort(transfer, reason)

    def close(self, reason: str = "") -> None:
        """End the link: open transfers fail, the other side is told if it listens, threads end."""
        with self._use_machine() as now:
            self._machine.close(reason)
            self._dialler.set_paths([], now)
            self._closed = True
            self._timer.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _require_own(self, ticket: TransferTicket) -> None:
        if ticket.link != self.ticket.link:
            raise TransferError(f"the ticket is for link {ticket.link.hex()}, this is {self.ticket.link.hex()}")

    # ---- what depends on who sends --------------------------------------------------------------------------

    @abstractmethod
    def _handle(self, event: LinkEvent, later: list[Callable[[], None]]) -> None:
        """An event of a transfer, under the lock. What calls others goes into `later`."""

    @abstractmethod
    def _on_connection(self, wire: LinkConnection) -> None:
        """A connection has joined, under the lock."""

    def _send_soon(self) -> None:  # noqa: B027 (not every end has a use for it)
        """There may be something to send, under the lock."""

    def _flush(self) -> None:  # noqa: B027 (not every end has a use for it)
        """The same, the lock released."""

    def _take_chunk(self, wire: LinkConnection, chunk: Chunk, now: float) -> None:
        raise KVProtocolError("a chunk does not come from a receiver")

    def _before_read(self, wire: LinkConnection) -> None:  # noqa: B027 (not every end has a use for it)
        """The reading thread of a connection has dealt with everything that has come."""

    # ---- threads --------------------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], what: str, *args: object) -> threading.Thread:
        """A thread that is counted until it ends. Under the lock."""
        name = f"kv-{what}-{self.ticket.link.hex()[:8]}"
        thread = threading.Thread(target=self._run, args=(target, *args), name=name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def _run(self, target: Callable[..., None], *args: object) -> None:
        try:
            target(*args)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    @contextmanager
    def _use_machine(self) -> Iterator[float]:
        """Use the machine; then do what has come of it. Yields now."""
        later: list[Callable[[], None]] = []
        try:
            with self._lock:
                try:
                    yield time.monotonic()
                finally:
                    self._handle_events(later)
        finally:
            self._flush()
            for call in later:
                call()

    def _handle_events(self, later: list[Callable[[], None]]) -> None:
        """Act on the machine's events, under the lock."""
        for event in self._machine.take_events():
            match event:
                case CloseConnection(number, is_stuck=is_stuck):
                    if is_stuck:
                        self._dialler.note_stuck(number)
                    wire = self._wires.get(number)
                    if wire is not None:
                        hang_up(wire.sock)
                case LinkEnded():
                    self._dialler.set_paths([], time.monotonic())
                    self._closed = True
                    self._work.notify_all()
                    self._changed.notify_all()
                    self._timer.notify_all()
                case _:
                    self._handle(event, later)
        self._send_soon()

    def _keep_time(self) -> None:
        """The link's own thread: deadlines, keepalive, dialling."""
        while True:
            with self._use_machine() as now:
                self._machine.tick(now)
                # A link that is over has no path left to prefer: its connections stay until they have said goodbye.
                for number in () if self._closed else self._dialler.take_leaving():
                    self._machine.retire(number, "its path is no longer used", now)
                for attempt in self._dialler.take_due(now):
                    self._start(self._dial, "dial", attempt)
            self._on_time()
            with self._timer:
                if self._closed:
                    break
                now = time.monotonic()
                at = min(self._machine.wake_at(now), self._dialler.wake_at())
                self._timer.wait(max(at - now, _SHORTEST_WAIT_S))
        self._wind_up()

    def _wind_up(self) -> None:
        """The link is over. Connections end after both sides' goodbyes, or are ended."""
        with self._changed:
            for sock in self._raw:
                hang_up(sock)
            self._changed.wait_for(lambda: not self._wires, self._machine.settings.goodbye_s)
            for sock in (*self._raw, *(wire.sock for wire in self._wires.values())):
                hang_up(sock)

    def _on_time(self) -> None:  # noqa: B027 (not every end has a use for it)
        """Keepalive and what else is due, outside the lock."""

    def _dial(self, attempt: DialAttempt) -> None:
        timeout = self._machine.settings.authenticate_s
        try:
            sock = dial(attempt.path, timeout)
        except TransferError as error:
            self._dial_failed(attempt.slot, str(error))
            return
        with self._lock:
            is_wanted = not self._closed
            if is_wanted:
                self._raw.add(sock)
        if is_wanted:
            self._serve(sock, None, attempt)
        else:
            sock.close()

    def _dial_failed(self, slot: int, reason: str) -> None:
        with self._lock:
            self._dialler.mark_down(slot, reason, time.monotonic())
            self._timer.notify_all()

    def _serve(self, sock: socket.socket, hello: LinkHello | None, attempt: DialAttempt | None = None) -> None:
        """A connection from its handshake to its end."""
        wire: LinkConnection | None = None
        reason = ""
        try:
            if attempt is None:
                tune(sock)
            label = "" if attempt is None else attempt.path.label
            channel = self._make_channel(self.ticket, self._role, fresh_nonce(), hello=hello, label=label)
            shake_hands(sock, channel, self._machine.settings.authenticate_s)
            wire = self._join(sock, channel, attempt)
            if wire is not None:
                self._read(wire)
        except TransferError as error:
            reason = str(error)
        except OSError as error:
            reason = explain(error)
        finally:
            self._leave(sock, wire, attempt, reason)

    def _join(self, sock: socket.socket, channel: Channel, attempt: DialAttempt | None) -> LinkConnection | None:
        with self._use_machine() as now:
            self._raw.discard(sock)
            if self._closed:
                return None
            number = self._machine.add_connection(channel.label, now)
            if attempt is not None and not self._dialler.mark_up(attempt.slot, number):
                self._machine.remove_connection(number, now)
                return None
            slot = None if attempt is None else attempt.slot
            wire = LinkConnection(number, sock, channel, slot, self._machine.settings.near_s)
            self._wires[number] = wire
            self._on_connection(wire)
            self._changed.notify_all()
            self._timer.notify_all()
            return wire

    def _read(self, wire: LinkConnection) -> None:
        """Read until the connection ends; raises why. A peer's protocol error ends the link first."""
        sock, channel, machine = wire.sock, wire.channel, self._machine
        try:
            while True:
                self._before_read(wire)
                count = sock.recv_into(channel.space())
                if not count:
                    return
                channel.note_received(count)
                now = time.monotonic()
                with self._lock:
                    machine.note_heard(wire.number, count, now)
                while (signal := channel.next_signal()) is not None:
                    if type(signal) is Chunk:
                        self._take_chunk(wire, signal, now)
                    else:
                        self._take_signal(wire, signal, now)
        except KVProtocolError as error:
            if not channel.is_damaged:
                with self._use_machine():
                    machine.end_for_violation(error)
            raise

    def _take_signal(self, wire: LinkConnection, signal: Signal, now: float) -> None:
        """Anything but a chunk."""
        with self._use_machine():
            self._machine.receive(wire.number, signal, now)

    def _leave(
        self, sock: socket.socket, wire: LinkConnection | None, attempt: DialAttempt | None, reason: str
    ) -> None:
        """The connection is over: tell the machine first, then give its socket's number back."""
        hang_up(sock)
        with self._use_machine() as now:
            self._raw.discard(sock)
            if wire is not None:
                wire.dead = True
                if self._machine.is_stuck(wire.number, now):
                    self._dialler.note_stuck(wire.number)
                self._machine.remove_connection(wire.number, now)
                self._lost += not self._closed
                self._bytes_in += wire.channel.bytes_in
            if attempt is not None:
                self._dialler.mark_down(attempt.slot, reason or "the connection ended", now)
            self._work.notify_all()
            self._timer.notify_all()
        if wire is not None and wire.writer is not None:
            wire.writer.join()
        with self._changed:
            if wire is not None:
                self._bytes_out += wire.channel.bytes_out
                del self._wires[wire.number]
            self._changed.notify_all()
        sock.close()


L = TypeVar("L", bound=ThreadedLink)


class TransferHandle(Generic[L]):
    """What both ends of one transfer offer. Any thread may use it; it ends exactly once."""

    def __init__(self, link: L, ticket: TransferTicket) -> None:
        self.ticket = ticket
        self._link = link
        self._ended = threading.Event()
        self._state = EndState("open")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ticket.transfer.hex()[:8]} {self._state}>"

    @property
    def state(self) -> EndState:
        return self._state

    def abort(self, reason: str) -> None:
        """Give up; the peer is told why. Never raises; an ended transfer stays as it is."""
        self._link.abort(self.ticket.transfer, reason)

    def wait(self, timeout: float | None = None) -> EndState:
        """The state once it has ended, or after `timeout` seconds."""
        self._ended.wait(timeout)
        return self._state
