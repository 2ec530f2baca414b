"""Boxes in network namespaces, and the routers between them (address translation, port mappings, firewalls), which are
this process: it carries their packets. Needs root on Linux, `ip` and /dev/net/tun, and no packet filter.

    203.0.113.1  [public box]   --+
                                  +-- the internet (this process)
    10.0.0.2 [box] -- NAT 198.51.100.7, port 41000 -> 4002 --+

A router translates as most do: what a box sends from a port leaves from another one, chosen for each place that it goes
to (symmetric, RFC 4787), and what comes back is let in from there alone. Ports that are forwarded are let in from
everywhere.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from p2pserve.sims.wan.namespaces import IFF_NO_PI, IFF_TUN, PREFIX, TUN, TUNSETIFF, command, sweep
from p2pserve.sims.wan.nat import CHECKSUM_AT, adjust_checksum

FIRST_PORT = 20_000
LIMIT_S = 20.0


@dataclass
class Box:
    """A machine. `address` is its interface's; `outside`: of the router that it is behind, None: of none. `forwards`:
    ports of the router that lead to ports of the box. `is_walled`: nobody is let in who was not asked. `carries`: bytes
    of the largest packet that gets to the box or from it; larger ones are lost, and nobody is told."""

    address: str
    outside: str | None = None
    forwards: dict[int, int] = field(default_factory=dict)
    is_walled: bool = False
    mtu: int = 1500
    carries: int = 1 << 16

    @property
    def host(self) -> str:
        """Where others see it come from."""
        return self.outside or self.address


Flow = tuple[int, str, int, str, int]  # protocol, from, port, to, port


class Internet:
    """The boxes' namespaces, and a thread that carries packets between them."""

    def __init__(self, boxes: dict[str, Box]) -> None:
        self.boxes = boxes
        self._descriptors: dict[int, str] = {}
        self._ports: dict[Flow, int] = {}  # as a box sends it -> the port from which it leaves its router
        self._back: dict[Flow, tuple[str, int]] = {}  # as an answer comes to a router -> the box's address and port
        self._seen: set[Flow] = set()  # as walled boxes have sent it
        self.dead: set[tuple[str, str]] = set()  # (from, to) boxes: what does not arrive
        self._next = FIRST_PORT
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="internet", daemon=True)

    def __enter__(self) -> Self:
        sweep()
        try:
            for number, (name, box) in enumerate(self.boxes.items()):
                self._open(number, name, box)
        except BaseException:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join(LIMIT_S)
        self._close()

    def namespace(self, name: str) -> str:
        """The box's."""
        return f"{PREFIX}-{os.getpid()}-{name}"

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs a program on a box."""
        return command(self.namespace(name), argv)

    def move(self, name: str, address: str) -> None:
        """The box's interface gets another address, and loses the one that it had."""
        box = self.boxes[name]
        self._ip(name, "addr", "add", _with_prefix(address), "dev", "wan0")
        self._ip(name, "addr", "del", _with_prefix(box.address), "dev", "wan0")
        self._ip(name, "route", "replace", "default", "dev", "wan0", "src", address)
        box.address = address

    def _open(self, number: int, name: str, box: Box) -> None:
        device = f"pi{os.getpid()}x{number}"
        ip("netns", "add", self.namespace(name))
        descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors[descriptor] = name
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
        ip("link", "set", device, "netns", self.namespace(name), "name", "wan0")
        self._ip(name, "link", "set", "lo", "up")
        self._ip(
            name, "addr", "add", _with_prefix(box.address), "dev", "wan0", *(["nodad"] if ":" in box.address else [])
        )
        self._ip(name, "link", "set", "wan0", "mtu", str(box.mtu), "up")
        family = ["-6"] if ":" in box.address else []
        self._ip(name, *family, "route", "add", "default", "dev", "wan0")

    def _ip(self, name: str, *arguments: str) -> None:
        ip("-n", self.namespace(name), *arguments)

    def _close(self) -> None:
        sweep(of=os.getpid())
        for descriptor in (*self._descriptors, self._stop_read, self._stop_write):
            os.close(descriptor)
        self._descriptors.clear()

    # ---- packets ----------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        by_name = {name: descriptor for descriptor, name in self._descriptors.items()}
        watched = [self._stop_read, *self._descriptors]
        while True:
            for descriptor in select.select(watched, [], [])[0]:
                if descriptor == self._stop_read:
                    return
                for _ in range(64):
                    try:
                        packet = os.read(descriptor, 65_536)
                    except BlockingIOError:
                        break
                    found = self._route(self._descriptors[descriptor], packet)
                    if found is not None:
                        try:
                            os.write(by_name[found[0]], found[1])
                        except OSError:  # too large for the box's link, or its device is down
                            pass

    def _route(self, name: str, packet: bytes) -> tuple[str, bytes] | None:
        """To which box, and as what; None: it is dropped."""
        found = self._find(name, packet)
        if found is None or len(packet) > min(self.boxes[each].carries for each in (name, found[0])):
            return None
        return found

    def _find(self, name: str, packet: bytes) -> tuple[str, bytes] | None:
        if packet[0] >> 4 == 6:
            target = str(ipaddress.IPv6Address(packet[24:40]))
            return next(((each, packet) for each, box in self.boxes.items() if box.address == target), None)
        head, protocol = 4 * (packet[0] & 15), packet[9]
        if protocol not in CHECKSUM_AT or len(packet) < head + 8:
            return None
        source, target = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
        ports = struct.unpack_from("!HH", packet, head)
        flow = self._leave(self.boxes[name], (protocol, source, ports[0], target, ports[1]))
        for other, box in self.boxes.items():
            if other != name and box.host == flow[3] and (name, other) not in self.dead:
                arrived = self._enter(box, flow)
                return None if arrived is None else (other, _rewrite(packet, head, arrived))
        return None

    def _leave(self, box: Box, flow: Flow) -> Flow:
        protocol, source, port, target, target_port = flow
        if box.is_walled:
            self._seen.add((protocol, target, target_port, box.host, port))
        if box.outside is None:
            return flow
        for outside, inside in box.forwards.items():  # an answer from a port that is forwarded
            if inside == port and (protocol, target, target_port, box.outside, outside) in self._seen:
                return (protocol, box.outside, outside, target, target_port)
        if flow not in self._ports:
            self._next += 1
            self._ports[flow] = self._next
            self._back[protocol, target, target_port, box.outside, self._next] = source, port
        return (protocol, box.outside, self._ports[flow], target, target_port)

    def _enter(self, box: Box, flow: Flow) -> Flow | None:
        protocol, source, source_port, _, port = flow
        if box.outside is None:
            return flow if not box.is_walled or flow in self._seen else None
        if flow in self._back:
            return (protocol, source, source_port, *self._back[flow])
        if port in box.forwards:
            self._seen.add(flow)
            return (protocol, source, source_port, box.address, box.forwards[port])
        return None


def ip(*arguments: str) -> None:
    """Run `ip`."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _with_prefix(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"


def _rewrite(packet: bytes, head: int, flow: Flow) -> bytes:
    """The packet with the addresses and ports of a flow."""
    protocol, source, source_port, target, port = flow
    old = packet[12:20], packet[head : head + 4]
    new = socket.inet_aton(source) + socket.inet_aton(target), struct.pack("!HH", source_port, port)
    if old == new:
        return packet
    found = bytearray(packet)
    found[12:20], found[head : head + 4] = new
    for at, changes in ((10, [0]), (head + CHECKSUM_AT[protocol], [0, 1])):
        (checksum,) = struct.unpack_from("!H", packet, at)
        struct.pack_into("!H", found, at, adjust_checksum(checksum, ((old[each], new[each]) for each in changes)))
    return bytes(found)
