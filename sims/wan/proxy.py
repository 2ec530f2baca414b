"""The process that carries bytes between loopback sockets with a network's delay and rates. Started
by `EmulatedWan`.

For machines without root: each route is a listening port here, and what connects to it is joined to
the real port. TCP ends at the proxy, so what TCP does over a long path is not there. One thing is
put in by hand: of each connection and direction at most `WINDOW_BYTES` are under way, which gives
one stream the rate that Linux's window would.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections import deque
from enum import Enum
from heapq import heappop, heappush
from typing import Final

from .control import Commands, EmulatorReady, run_emulator, say_ready
from .scenario import Scenario, ScenarioError
from .switch import Switch

# What Linux's default tcp_wmem lets one connection have under way (measured: 2.35 to 2.8 MB).
WINDOW_BYTES: Final = 2_700_000
CHUNK: Final = 32_768
# Bytes that opening, ending and resetting a connection cost on a link.
SIGNAL_BYTES: Final = 40
IDLE_S: Final = 60.0
# `select` knows file numbers below 1024, and each connection needs a second one.
MAX_FILES: Final = 1000
RESET: Final = struct.pack("ii", 1, 0)


class StreamSignal(Enum):
    """What a connection says beside its bytes."""

    OPEN = "open"
    END = "end"
    RESET = "reset"


class ProxyEnd:
    """One of a connection's two sockets, in a box; `peer` is the other box's."""

    def __init__(self, box: str, sock: socket.socket | None) -> None:
        self.box = box
        self.sock = sock
        self.peer: ProxyEnd = self
        self.target = 0
        self.under_way = 0  # bytes read here that the other end does not have yet
        self.unsent: deque[bytes] = deque()
        self.opened = self.read_all = self.write_end = self.wrote_all = False


class ProxyEmulator:
    """Carries bytes until its control input ends."""

    kind = "proxy"

    def __init__(self, scenario: Scenario, addresses: dict[str, str]) -> None:
        self._switch: Switch[tuple[ProxyEnd, bytes | StreamSignal]] = Switch(scenario, lossless=True)
        self._addresses = addresses
        self._commands = Commands(self._switch, self, time.monotonic)
        self._listeners: dict[int, tuple[socket.socket, str, str, int]] = {}
        self._routes: dict[tuple[str, str, int], int] = {}
        self._ends: dict[int, ProxyEnd] = {}
        self._arrivals: list[tuple[float, int, ProxyEnd, int]] = []  # when a sender hears of an arrival
        self._sequence = 0
        self.strays = 0

    def route(self, a: str, b: str, port: int) -> int:
        """The port here that leads from `a` to `port` of `b`. Raises `ScenarioError`."""
        self._switch.waiting(a, b)  # refuses names that are no boxes
        if not 0 < port < 65_536:
            raise ScenarioError(f"port: {port} is none: 1 to 65535")
        if (a, b, port) not in self._routes:
            listener = socket.create_server((self._addresses[b], 0), backlog=512)
            listener.setblocking(False)
            self._listeners[listener.fileno()] = (listener, a, b, port)
            self._routes[a, b, port] = listener.getsockname()[1]
        return self._routes[a, b, port]

    def run(self, control: int, replies: int) -> None:
        """Forward until `control` is at its end."""
        while True:
            due = [self._switch.wake_at(), self._commands.wake_at(), self._arrivals[0][0] if self._arrivals else None]
            wake = min((at for at in due if at is not None), default=None)
            timeout = IDLE_S if wake is None else max(0.0, wake - time.monotonic())
            readable_ends = [n for n, end in self._ends.items() if not end.read_all and end.under_way < WINDOW_BYTES]
            writable_ends = [n for n, end in self._ends.items() if end.unsent]
            watched = [control, *self._listeners, *readable_ends]
            readable, writable, _ = select.select(watched, writable_ends, [], timeout)
            now = time.monotonic()
            for number in readable:
                if number == control:
                    data = os.read(control, 65_536)
                    if not data:
                        return
                    os.write(replies, self._commands.feed(data))
                elif number in self._listeners:
                    self._accept(number, now)
                elif number in self._ends:
                    self._read(self._ends[number], now)
            for number in writable:
                if number in self._ends:
                    self._write(self._ends[number])
            self._commands.on_timer(now)
            while self._arrivals and self._arrivals[0][0] <= now:
                _, _, sender, size = heappop(self._arrivals)
                sender.under_way -= size
            for _, (end, what) in self._switch.release(now):
                self._arrive(end, what)

    def _accept(self, number: int, now: float) -> None:
        listener, a, b, port = self._listeners[number]
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if sock.fileno() >= MAX_FILES:
            sock.close()
            self.strays += 1
            return
        near, far = ProxyEnd(a, sock), ProxyEnd(b, None)
        near.peer, far.peer, far.target = far, near, port
        near.opened = True
        self._add(near)
        self._send(near, StreamSignal.OPEN, now)

    def _add(self, end: ProxyEnd) -> None:
        assert end.sock is not None
        end.sock.setblocking(False)
        end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends[end.sock.fileno()] = end

    def _send(self, end: ProxyEnd, what: bytes | StreamSignal, now: float) -> None:
        """Send what came from `end` to its peer."""
        size = SIGNAL_BYTES if isinstance(what, StreamSignal) else len(what)
        self._switch.enter(end.box, end.peer.box, size, (end.peer, what), now)

    def _read(self, end: ProxyEnd, now: float) -> None:
        assert end.sock is not None
        try:
            data = end.sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._send(end, StreamSignal.RESET, now)
            self._close(end)
            return
        if data:
            end.under_way += len(data)
            self._send(end, data, now)
        else:
            end.read_all = True
            self._send(end, StreamSignal.END, now)
            self._close_if_done(end)

    def _arrive(self, end: ProxyEnd, what: bytes | StreamSignal) -> None:
        """Something for `end` has crossed the network."""
        if what is StreamSignal.OPEN:
            self._open(end)
        elif end.sock is None:  # closed meanwhile: TCP would answer with a reset
            if isinstance(what, bytes) and end.peer.sock is not None:
                self._send(end, StreamSignal.RESET, time.monotonic())
        elif what is StreamSignal.RESET:
            self._close(end, reset=True)
        elif what is StreamSignal.END:
            end.write_end = True
            self._write(end)
        elif isinstance(what, bytes):
            end.unsent.append(what)
            self._write(end)

    def _open(self, end: ProxyEnd) -> None:
        """Join the connection to the box's real port; the loopback answers at once."""
        try:
            end.sock = socket.create_connection((self._addresses[end.box], end.target), timeout=1)
        except OSError:
            self._send(end, StreamSignal.RESET, time.monotonic())
            return
        end.opened = True
        self._add(end)

    def _write(self, end: ProxyEnd) -> None:
        assert end.sock is not None
        try:
            while end.unsent:
                sent = end.sock.send(end.unsent[0])
                self._acknowledge(end, sent)
                if sent < len(end.unsent[0]):
                    end.unsent[0] = end.unsent[0][sent:]
                    return
                end.unsent.popleft()
            if end.write_end and not end.wrote_all:
                end.wrote_all = True
                end.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:
            self._send(end, StreamSignal.RESET, time.monotonic())
            self._close(end)
            return
        self._close_if_done(end)

    def _acknowledge(self, end: ProxyEnd, size: int) -> None:
        """The other end may send as much more, half a round trip from now."""
        rtt_ms = self._switch.rtt_ms(end.box, end.peer.box)
        self._sequence += 1
        heappush(self._arrivals, (time.monotonic() + rtt_ms / 2e3, self._sequence, end.peer, size))

    def _close_if_done(self, end: ProxyEnd) -> None:
        if end.read_all and end.wrote_all:
            self._close(end)

    def _close(self, end: ProxyEnd, *, reset: bool = False) -> None:
        if end.sock is None:
            return
        if reset:
            end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._ends.pop(end.sock.fileno(), None)
        end.sock.close()
        end.sock = None
        end.unsent.clear()


def main() -> int:
    """Run one emulation, as told on the standard input."""
    return run_emulator(_emulate)


def _emulate(scenario: Scenario) -> None:
    # All of 127.0.0.0/8 is this machine on Linux, so each box has all the ports; elsewhere they share them.
    many = sys.platform.startswith("linux")
    addresses = {
        name: f"127.77.{i // 250}.{i % 250 + 1}" if many else "127.0.0.1" for i, name in enumerate(scenario.boxes)
    }
    emulator = ProxyEmulator(scenario, addresses)
    say_ready(EmulatorReady(addresses=addresses))
    emulator.run(sys.stdin.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
