"""What follows from being dialled back or not, and who is dialled for whom."""

import pytest

from p2pserve.bootstrap import Address, PeerId, Role
from p2pserve.bootstrap.addresses import AnnouncedBy, FoundAddress, find_announced
from p2pserve.node.links.messages import DialledBack
from p2pserve.node.links.reach import choose_relays
from p2pserve.node.links.reachability import (
    ASKED,
    ReachVerdict,
    choose_askable,
    choose_seen,
    describe_closed,
    judge,
    may_dial_back,
)

LISTEN = Address("0.0.0.0", 4002)
MET, MISSED = DialledBack(met=True), DialledBack(met=False)
PRIVATE = FoundAddress(Address("10.0.0.7", 4002), AnnouncedBy.INTERFACE)


def test_one_that_met_this_node_counts_and_nobody_says_nothing() -> None:
    assert judge([MISSED, MET]) is ReachVerdict.OPEN
    assert judge([MISSED]) is ReachVerdict.CLOSED
    assert judge([]) is ReachVerdict.UNKNOWN


@pytest.mark.parametrize(
    ("host", "seen", "role", "may"),
    [
        ("8.8.8.8", "9.9.9.9", Role.WORKER, True),
        ("8.8.8.8", None, Role.WORKER, True),
        ("8.8.8.8", "9.9.9.9", Role.CLIENT, False),
        ("8.8.8.8", "8.8.8.8", Role.CLIENT, True),
        ("10.0.0.7", "9.9.9.9", Role.WORKER, False),
        ("10.0.0.7", "10.0.0.7", Role.WORKER, True),
        ("::ffff:10.0.0.7", "10.0.0.7", Role.WORKER, True),
        ("10.0.0.7", "10.0.0.8", Role.WORKER, False),
        ("127.0.0.1", "9.9.9.9", Role.WORKER, False),
        ("127.0.0.1", "127.0.0.1", Role.WORKER, True),
        ("169.254.169.254", "9.9.9.9", Role.ADMIN, False),
        ("224.0.0.1", "224.0.0.1", Role.WORKER, False),
        ("0.0.0.0", "0.0.0.0", Role.WORKER, False),
        ("box.example.org", "9.9.9.9", Role.WORKER, False),
    ],
)
def test_a_member_dials_what_is_public_or_where_the_asker_comes_from(
    host: str, seen: str | None, role: Role, may: bool
) -> None:
    assert may_dial_back(host, seen, role) is may


def test_members_elsewhere_are_asked_first() -> None:
    boxes = {PeerId("a"): "8.8.8.8", PeerId("b"): "9.9.9.9", PeerId("c"): "7.7.7.7", PeerId("d"): "6.6.6.6"}
    assert choose_askable(boxes, "8.8.8.8") == ["b", "c", "d"]
    assert choose_askable({PeerId("a"): "8.8.8.8"}, "8.8.8.8") == ["a"]
    assert len(choose_askable(boxes, "name.example.org")) == ASKED


def test_the_address_that_others_see_is_tried_where_nobody_has_said_one() -> None:
    seen = [DialledBack(met=False, seen="198.51.100.7"), DialledBack(met=False, seen="198.51.100.7")]
    assert choose_seen(PRIVATE, seen) == Address("198.51.100.7", 4002)
    assert choose_seen(PRIVATE, [*seen, DialledBack(met=False, seen="198.51.100.8")]) is None
    assert choose_seen(PRIVATE, [DialledBack(met=False, seen="10.0.0.7")]) is None
    assert choose_seen(FoundAddress(PRIVATE.address, AnnouncedBy.FLAG), seen) is None


VAST = {"VAST_TCP_PORT_4002": "41000", "PUBLIC_IPADDR": "203.0.113.9"}


@pytest.mark.parametrize(
    ("flag", "environ", "seen", "says"),
    [
        (None, VAST, "", ["203.0.113.9:41000", "VAST_TCP_PORT_4002=41000", "-p 4002:4002"]),
        ("203.0.113.9:5000", {}, "", ["203.0.113.9:5000", "forward TCP port 5000 there to port 4002 here"]),
        (None, {}, "198.51.100.7", ["own private network", "forward TCP port 4002 of 198.51.100.7 to port 4002"]),
        (None, {"VAST_TCP_PORT_7000": "41000"}, "", ["--port 7000"]),
        (None, {}, "10.0.0.7", ["open TCP port 4002 in the firewall", "--announce HOST:PORT"]),
    ],
)
def test_one_line_says_the_port_the_mapping_and_what_to_do(
    flag: str | None, environ: dict[str, str], seen: str, says: list[str]
) -> None:
    found = find_announced(flag, environ, LISTEN, lambda: "10.0.0.7")
    line = describe_closed(found, LISTEN, [DialledBack(met=False, seen=seen, why="connection refused; check it")])
    assert "\n" not in line
    assert "(connection refused)" in line
    assert "relays connect it" in line
    for part in says:
        assert part in line
    assert "nobody met it there" in describe_closed(found, LISTEN, [MISSED])


def test_relays_are_those_that_the_other_one_has_sessions_with() -> None:
    boxes = [PeerId(name) for name in "abcde"]
    closed, connected = {PeerId("a"), PeerId("e")}, {PeerId("c")}
    assert choose_relays(PeerId("e"), boxes, closed, connected, 16) == ["c", "b", "d"]
    many = [PeerId(f"n{number}") for number in range(100)]
    chosen = choose_relays(many[0], many, (), {many[5]}, 16)
    assert many[0] not in chosen
    assert 3 <= len(chosen) < 20
