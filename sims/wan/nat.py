"""The router of a box behind NAT: it translates addresses as home and office routers do, and forwards no port. Pure.

    192.168.1.2:40112 in the box -> 11.77.0.6:20001 outside, for what goes to one address and port

What the box sends from a port leaves from another one, chosen for each place that it goes to
(symmetric, RFC 4787); what comes back is let in from there alone, so nobody can dial the box.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from itertools import cycle
from typing import Final, final

TCP, UDP = 6, 17
CHECKSUM_AT: Final = {TCP: 16, UDP: 6}
"""Where the checksum lies in what follows the IP header."""
FIRST_PORT, LAST_PORT = 20_000, 65_535
IP_CHECKSUM_AT, SOURCE_AT, TARGET_AT = 10, 12, 16
LEAST_IP_HEADER: Final = 20

Place = tuple[int, bytes]
"""A protocol, and an address with a port as they stand in a packet."""


@final
class Nat:
    """One box's router; `inside` is the box's own address, `outside` what others see. `refused`: packets that nobody in
    the box had asked for."""

    def __init__(self, inside: str, outside: str) -> None:
        self._inside = socket.inet_aton(inside)
        self._outside = socket.inet_aton(outside)
        self._ports = cycle(range(FIRST_PORT, LAST_PORT + 1))
        self._leaving: dict[tuple[Place, bytes], bytes] = {}  # where to, and the port inside -> the port outside
        self._coming: dict[tuple[Place, bytes], bytes] = {}  # where from, and the port outside -> the port inside
        self.refused = 0

    def __repr__(self) -> str:
        return f"<Nat {socket.inet_ntoa(self._outside)}: {len(self._leaving)} flows>"

    def leave(self, packet: bytes, at: int, *, partial: bool) -> bytes | None:
        """A packet from the box as it leaves the router, None where it has no port. Its IP header begins at `at`;
        `partial`: its checksum is yet to be computed, as with offload."""
        head = _transport_at(packet, at)
        if head is None:
            return None
        to = (packet[at + 9], packet[at + TARGET_AT : at + TARGET_AT + 4] + packet[head + 2 : head + 4])
        port = packet[head : head + 2]
        outside = self._leaving.get((to, port)) or self._open(to, port)
        return _readdress(packet, at, head, SOURCE_AT, self._outside, outside, partial=partial)

    def enter(self, packet: bytes, at: int, *, partial: bool) -> bytes | None:
        """A packet for the box as the router passes it on; None for one that is let in by nothing."""
        head = _transport_at(packet, at)
        if head is None:
            return None
        source = (packet[at + 9], packet[at + SOURCE_AT : at + SOURCE_AT + 4] + packet[head : head + 2])
        port = self._coming.get((source, packet[head + 2 : head + 4]))
        if port is None:
            self.refused += 1
            return None
        return _readdress(packet, at, head, TARGET_AT, self._inside, port, partial=partial)

    def _open(self, to: Place, inside: bytes) -> bytes:
        """Choose the port outside for a new flow. One that was used so long ago that all others came after it is taken
        from its flow."""
        outside = next(self._ports).to_bytes(2, "big")
        before = self._coming.get((to, outside))
        if before is not None:
            del self._leaving[to, before]
        self._leaving[to, inside], self._coming[to, outside] = outside, inside
        return outside


def adjust_checksum(checksum: int, changes: Iterable[tuple[bytes, bytes]]) -> int:
    """RFC 1624: a checksum after some bytes that it covers have changed."""
    return ~_adjust_sum(~checksum & 0xFFFF, changes) & 0xFFFF


def _adjust_sum(total: int, changes: Iterable[tuple[bytes, bytes]]) -> int:
    """The sum in ones' complement of which a checksum is the complement."""
    for old, new in changes:
        for index in range(0, len(old), 2):
            total += (~int.from_bytes(old[index : index + 2], "big") & 0xFFFF) + int.from_bytes(
                new[index : index + 2], "big"
            )
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _transport_at(packet: bytes, at: int) -> int | None:
    """Where the TCP or UDP header begins; None for other packets."""
    if len(packet) < at + LEAST_IP_HEADER or packet[at] >> 4 != 4 or packet[at + 9] not in CHECKSUM_AT:
        return None
    head = at + 4 * (packet[at] & 15)
    return head if len(packet) >= head + CHECKSUM_AT[packet[at + 9]] + 2 else None


def _readdress(packet: bytes, at: int, head: int, end: int, address: bytes, port: bytes, *, partial: bool) -> bytes:
    """The packet with another address and port at one of its ends."""
    port_at = head + (0 if end == SOURCE_AT else 2)
    addresses = packet[at + end : at + end + 4], address
    found = bytearray(packet)
    found[at + end : at + end + 4] = address
    found[port_at : port_at + 2] = port
    _write(found, at + IP_CHECKSUM_AT, adjust_checksum(_read(packet, at + IP_CHECKSUM_AT), [addresses]))
    checksum_at = head + CHECKSUM_AT[packet[at + 9]]
    checksum = _read(packet, checksum_at)
    if partial:
        # What stands there is the sum over the addresses; the kernel that takes the packet adds the rest.
        _write(found, checksum_at, _adjust_sum(checksum, [addresses]))
    elif checksum or packet[at + 9] == TCP:  # 0: UDP without a checksum
        ports = packet[port_at : port_at + 2], port
        _write(found, checksum_at, adjust_checksum(checksum, [addresses, ports]))
    return bytes(found)


def _read(packet: bytes, at: int) -> int:
    return int.from_bytes(packet[at : at + 2], "big")


def _write(packet: bytearray, at: int, value: int) -> None:
    packet[at : at + 2] = value.to_bytes(2, "big")
