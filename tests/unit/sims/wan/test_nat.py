"""A box behind NAT: what it sends comes from its router, answers find it, and nobody can dial it."""

from __future__ import annotations

import socket
import struct

import pytest

from p2pserve.sims.wan import nat
from p2pserve.sims.wan.nat import TCP, UDP, Nat

INSIDE, OUTSIDE, SERVER, STRANGER = "192.168.1.2", "11.77.0.6", "11.77.0.1", "11.77.0.2"
OFFLOAD = b"\0" * 10  # what lies before a packet on a TUN device
AT = len(OFFLOAD)


def total(data: bytes) -> int:
    """The sum of 16-bit words in ones' complement, as RFC 1071 says it."""
    words: tuple[int, ...] = struct.unpack(f"!{len(data) // 2}H", data)
    found = sum(words)
    while found >> 16:
        found = (found & 0xFFFF) + (found >> 16)
    return found


def pseudo(source: str, target: str, protocol: int, size: int) -> bytes:
    return socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, protocol, size)


def packet(
    source: str, port: int, target: str, target_port: int, *, protocol: int = TCP, checksum: str = "whole"
) -> bytes:
    """A packet with some payload. `checksum`: whole, partial (of the addresses alone, as with offload) or none."""
    ports = struct.pack("!HH", port, target_port)
    rest = struct.pack("!IIBBHHH", 1, 2, 5 << 4, 16, 100, 0, 0) if protocol == TCP else struct.pack("!HH", 14, 0)
    body = bytearray(ports + rest + b"bytes!")
    header = pseudo(source, target, protocol, len(body))
    at = nat.CHECKSUM_AT[protocol]
    if checksum == "partial":
        struct.pack_into("!H", body, at, total(header))
    elif checksum == "whole":
        struct.pack_into("!H", body, at, ~total(header + bytes(body)) & 0xFFFF)
    ip = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0, 64, protocol, 0))
    ip += socket.inet_aton(source) + socket.inet_aton(target)
    struct.pack_into("!H", ip, 10, ~total(bytes(ip)) & 0xFFFF)
    return OFFLOAD + bytes(ip) + bytes(body)


def ends(found: bytes | None) -> tuple[str, int, str, int]:
    """Where a packet comes from and where it goes, after its IP header was seen to be right."""
    assert found is not None
    assert found[:AT] == OFFLOAD
    assert total(found[AT : AT + 20]) == 0xFFFF
    source, target = (socket.inet_ntoa(found[AT + at : AT + at + 4]) for at in (12, 16))
    port, target_port = struct.unpack_from("!HH", found, AT + 20)
    return source, port, target, target_port


def sums(found: bytes) -> int:
    """0xFFFF where the checksum of what follows the IP header is right."""
    source, _, target, _ = ends(found)
    body = found[AT + 20 :]
    return total(pseudo(source, target, found[AT + 9], len(body)) + body)


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_what_the_box_sends_comes_from_its_router_and_answers_find_it(protocol: int) -> None:
    router = Nat(INSIDE, OUTSIDE)
    left = router.leave(packet(INSIDE, 40_000, SERVER, 4001, protocol=protocol), AT, partial=False)
    source, port, target, target_port = ends(left)
    assert (source, target, target_port) == (OUTSIDE, SERVER, 4001)
    assert left is not None
    assert sums(left) == 0xFFFF
    came = router.enter(packet(SERVER, 4001, OUTSIDE, port, protocol=protocol), AT, partial=False)
    assert ends(came) == (SERVER, 4001, INSIDE, 40_000)
    assert came is not None
    assert sums(came) == 0xFFFF
    assert router.refused == 0


def test_a_flow_keeps_its_port_and_another_place_sees_another_one() -> None:
    router = Nat(INSIDE, OUTSIDE)

    def port(target: str) -> int:
        return ends(router.leave(packet(INSIDE, 40_000, target, 4001), AT, partial=False))[1]

    assert port(SERVER) == port(SERVER)
    assert port(SERVER) != port(STRANGER)
    assert "2 flows" in repr(router)


def test_nobody_can_dial_the_box() -> None:
    router = Nat(INSIDE, OUTSIDE)
    assert router.enter(packet(SERVER, 5000, OUTSIDE, 4001), AT, partial=False) is None
    port = ends(router.leave(packet(INSIDE, 4001, SERVER, 5000), AT, partial=False))[1]
    assert router.enter(packet(STRANGER, 5000, OUTSIDE, port), AT, partial=False) is None, "it was opened for another"
    assert router.enter(packet(SERVER, 5001, OUTSIDE, port), AT, partial=False) is None, "and for another port there"
    assert router.refused == 3


def test_a_checksum_that_is_yet_to_be_computed_covers_the_new_addresses() -> None:
    router = Nat(INSIDE, OUTSIDE)
    left = router.leave(packet(INSIDE, 40_000, SERVER, 4001, checksum="partial"), AT, partial=True)
    source, port, target, target_port = ends(left)
    assert left == packet(source, port, target, target_port, checksum="partial")


def test_udp_without_a_checksum_stays_without() -> None:
    router = Nat(INSIDE, OUTSIDE)
    left = router.leave(packet(INSIDE, 40_000, SERVER, 53, protocol=UDP, checksum="none"), AT, partial=False)
    assert left is not None
    assert left[AT + 26 : AT + 28] == b"\0\0"


@pytest.mark.parametrize("found", [b"", OFFLOAD, OFFLOAD + b"\x45" + b"\0" * 19, OFFLOAD + b"\x60" + b"\0" * 60])
def test_other_packets_go_nowhere(found: bytes) -> None:
    router = Nat(INSIDE, OUTSIDE)
    assert router.leave(found, AT, partial=False) is None
    assert router.enter(found, AT, partial=False) is None


def test_a_port_that_was_used_long_ago_is_given_to_another_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nat, "LAST_PORT", nat.FIRST_PORT + 1)
    router = Nat(INSIDE, OUTSIDE)
    ports = [ends(router.leave(packet(INSIDE, at, SERVER, 80), AT, partial=False))[1] for at in (1, 2, 3)]
    assert ports[2] == ports[0] != ports[1]
    assert ends(router.enter(packet(SERVER, 80, OUTSIDE, ports[0]), AT, partial=False))[3] == 3
    assert ends(router.leave(packet(INSIDE, 1, SERVER, 80), AT, partial=False))[1] == ports[1]
