"""The process that carries real IP packets between the boxes' TUN devices. Started by
`EmulatedWan`.

It reads the scenario from its input, says on its output when the network is up, obeys commands (see
`control`) and removes everything when its input ends. A process of its own: what it emulates must
not share its interpreter.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time
from typing import Final

from .control import Commands, EmulatorReady, run_emulator, say_ready
from .namespaces import NEEDS_CHECKSUM, VNET_HEADER, Namespaces
from .nat import Nat
from .scenario import Scenario
from .switch import Switch

# Packets read from one device before the others, and what is due, get their turn.
BATCH: Final = 64
MAX_PACKET: Final = 65_536 + VNET_HEADER.size
# What a TCP packet has of headers: IP, TCP, timestamps.
HEADERS: Final = 52
IDLE_S: Final = 60.0
PRIORITY: Final = -15


class TunEmulator:
    """Carries packets until its control input ends."""

    kind = "tun"

    def __init__(self, namespaces: Namespaces, scenario: Scenario) -> None:
        self._switch: Switch[bytes] = Switch(scenario)
        self._namespaces = namespaces
        self._together = True
        self._devices = namespaces.devices
        self._boxes = {descriptor: name for name, descriptor in namespaces.devices.items()}
        self._names = {socket.inet_aton(address): name for name, address in namespaces.addresses.items()}
        self._nats = {name: Nat(inside, namespaces.addresses[name]) for name, inside in namespaces.inside.items()}
        self._commands = Commands(self._switch, self, time.monotonic)
        self.strays = 0

    def route(self, a: str, b: str, port: int) -> int:
        """The boxes have addresses of their own: a port is the same seen from everywhere."""
        return port

    def _aggregate(self) -> None:
        """Forward segments together, unless single packets can be lost: it saves work."""
        together = not self._switch.lossy
        if together is not self._together:
            self._together = together
            self._namespaces.aggregate(together)

    def run(self, control: int, replies: int) -> None:
        """Forward packets until `control` is at its end.

        `select` and not `epoll`: its timeout has microseconds, where Python's `epoll` rounds to
        milliseconds.
        """
        switch, commands, clock = self._switch, self._commands, time.monotonic
        watched = [control, *self._boxes]
        self._namespaces.aggregate(self._together)
        self._aggregate()
        while True:
            due = [at for at in (switch.wake_at(), commands.wake_at()) if at is not None]
            timeout = max(0.0, min(due) - clock()) if due else IDLE_S
            readable, _, _ = select.select(watched, [], [], timeout)
            now = clock()
            for descriptor in readable:
                if descriptor != control:
                    self._read(descriptor, now)
                    continue
                data = os.read(control, 65_536)
                if not data:
                    return
                os.write(replies, commands.feed(data))
                self._aggregate()
            commands.on_timer(now)
            for name, packet in switch.release(now):
                try:
                    os.write(self._devices[name], packet)
                except OSError:  # the box's device is down, or its kernel out of memory: the packet is lost
                    self.strays += 1

    def _read(self, descriptor: int, now: float) -> None:
        a, names, enter, read = self._boxes[descriptor], self._names, self._switch.enter, os.read
        start, unpack = VNET_HEADER.size, VNET_HEADER.unpack_from
        for _ in range(BATCH):
            try:
                packet = read(descriptor, MAX_PACKET)
            except BlockingIOError:
                return
            b = names.get(packet[start + 16 : start + 20])
            if b is None or b == a:
                self.strays += 1
                continue
            if self._nats:
                translated = self._translate(packet, a, b)
                if translated is None:
                    self.strays += 1
                    continue
                packet = translated
            size = len(packet) - start
            _, together, _, segment, _, _ = unpack(packet)
            if together:  # on a real wire each segment has headers of its own
                size += (size - HEADERS - 1) // segment * HEADERS
            enter(a, b, size, packet, now)

    def _translate(self, packet: bytes, a: str, b: str) -> bytes | None:
        """A packet from `a` to `b` after the routers that are in front of them; None: one of them does not let it
        through."""
        start, partial = VNET_HEADER.size, bool(packet[0] & NEEDS_CHECKSUM)
        found: bytes | None = packet
        if a in self._nats:
            found = self._nats[a].leave(packet, start, partial=partial)
        if b in self._nats and found is not None:
            found = self._nats[b].enter(found, start, partial=partial)
        return found


def main() -> int:
    """Run one emulation, as told on the standard input."""
    return run_emulator(_emulate)


def _emulate(scenario: Scenario) -> None:
    with Namespaces(scenario) as namespaces:
        _prefer()
        emulator = TunEmulator(namespaces, scenario)
        say_ready(
            EmulatorReady(addresses=namespaces.addresses, namespaces=namespaces.namespaces, notes=namespaces.notes)
        )
        # No cycles are made per packet, and a collection would hold up all of them.
        gc.collect()
        gc.freeze()
        gc.disable()
        emulator.run(sys.stdin.fileno(), sys.stdout.fileno())


def _prefer() -> None:
    """Ask to run before what is emulated: a late emulator is a slow network."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
