"""Addresses: what people type, and what a rented box should announce."""

import pytest

from p2pserve.bootstrap import Address, AddressError, announced_address, parse_address
from p2pserve.bootstrap.addresses import (
    AnnouncedBy,
    FoundAddress,
    default_route_address,
    find_announced,
    may_be_relayed_to,
    names_one_place,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("203.0.113.7:4001", Address("203.0.113.7", 4001)),
        (" box.example.org:1 ", Address("box.example.org", 1)),
        ("[2001:db8::7]:65535", Address("2001:db8::7", 65535)),
        ("0.0.0.0:0", Address("0.0.0.0", 0)),
    ],
)
def test_a_good_address(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no port"),
        ("203.0.113.7", "has no port"),
        ("203.0.113.7:", "has the port ''"),
        ("203.0.113.7:http", "has the port 'http'"),
        ("203.0.113.7:-1", "has the port '-1'"),
        ("203.0.113.7:65536", "has the port '65536'"),
        ("203.0.113.7:000000001", "has the port"),
        ("203.0.113.7:\u0664", "has the port"),
        (":4001", "has no usable host"),
        ("tcp://box:4001", "IPv6 address without brackets"),
        ("bo x:4001", "has no usable host"),
        ("box/a:4001", "has no usable host"),
        ("2001:db8::7:4001", "IPv6 address without brackets"),
        ("[2001:db8::7]", "is not an address"),
        ("[2001:db8::7:4001", "is not an address"),
        ("[box]:4001", "no IPv6 address between its brackets"),
    ],
)
def test_a_bad_address(text: str, reason: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
    assert reason in str(caught.value)
    assert "write host:port, such as 203.0.113.7:4001" in str(caught.value)


VAST = {"VAST_TCP_PORT_4001": "41234", "PUBLIC_IPADDR": "198.51.100.1"}
RUNPOD = {"RUNPOD_TCP_PORT_4001": "51234", "RUNPOD_PUBLIC_IP": "198.51.100.2"}


@pytest.mark.parametrize(
    ("flag", "environ", "host", "expected"),
    [
        ("203.0.113.7:1", VAST | RUNPOD, "0.0.0.0", "203.0.113.7:1"),
        (Address("203.0.113.7", 0), VAST, "0.0.0.0", "203.0.113.7:0"),
        (None, VAST | RUNPOD, "0.0.0.0", "198.51.100.1:41234"),
        (None, RUNPOD, "0.0.0.0", "198.51.100.2:51234"),
        (None, RUNPOD, "127.0.0.1", "198.51.100.2:51234"),
        (None, {"VAST_TCP_PORT_4001": "41234"}, "0.0.0.0", "10.1.2.3:4001"),
        (None, {"VAST_TCP_PORT_4002": "41234", "PUBLIC_IPADDR": "198.51.100.1"}, "0.0.0.0", "10.1.2.3:4001"),
        (None, {}, "::", "10.1.2.3:4001"),
        (None, {}, "192.0.2.9", "192.0.2.9:4001"),
    ],
)
def test_the_announced_address(flag: str | Address | None, environ: dict[str, str], host: str, expected: str) -> None:
    assert str(announced_address(flag, environ, Address(host, 4001), lambda: "10.1.2.3")) == expected


def test_a_bad_mapping_is_named() -> None:
    with pytest.raises(AddressError, match="VAST_TCP_PORT_4001=http"):
        announced_address(None, VAST | {"VAST_TCP_PORT_4001": "http"}, Address("0.0.0.0", 4001), lambda: "10.1.2.3")


def test_a_bad_flag_is_named() -> None:
    with pytest.raises(AddressError, match="'nowhere' has no port"):
        announced_address("nowhere", {}, Address("0.0.0.0", 4001), lambda: "10.1.2.3")


@pytest.mark.parametrize(
    ("host", "own", "private", "may"),
    [
        ("8.8.8.8", "9.9.9.9", False, True),
        ("8.8.8.8", "10.0.0.1", False, True),
        ("10.0.0.2", "9.9.9.9", False, False),
        ("10.0.0.2", "9.9.9.9", True, True),
        ("10.0.0.2", "192.168.0.1", False, True),
        ("10.0.0.2", "127.0.0.1", False, False),
        ("127.0.0.1", "10.0.0.1", False, False),
        ("127.0.0.1", "127.0.0.1", False, True),
        ("127.0.0.1", "9.9.9.9", True, True),
        ("169.254.169.254", "9.9.9.9", True, False),
        ("169.254.169.254", "10.0.0.1", True, False),
        ("::ffff:127.0.0.1", "9.9.9.9", False, False),
        ("64:ff9b::7f00:1", "9.9.9.9", False, False),
        ("2002:7f00:1::", "9.9.9.9", False, False),
        ("fd00::1", "2001:4860::1", False, False),
        ("0.0.0.0", "0.0.0.0", True, False),
        ("224.0.0.1", "9.9.9.9", True, False),
        ("240.0.0.1", "9.9.9.9", True, False),
        ("a.name", "9.9.9.9", True, False),
    ],
)
def test_where_a_relay_may_lead(host: str, own: str, private: bool, may: bool) -> None:
    assert may_be_relayed_to(host, own, private=private) is may


@pytest.mark.parametrize(
    ("host", "does"),
    [("8.8.8.8", True), ("127.0.0.1", True), ("2001:4860::1", True), ("172.17.0.2", False), ("a.name", False)],
)
def test_which_addresses_name_a_place(host: str, does: bool) -> None:
    assert names_one_place(host) is does


def test_a_port_that_is_the_same_within_and_without_is_named_by_its_value() -> None:
    environ = {"VAST_TCP_PORT_70000": "41234", "PUBLIC_IPADDR": "198.51.100.1", "VAST_TCP_PORT_22": "40022"}
    found = find_announced(None, environ, Address("0.0.0.0", 41234), lambda: "10.1.2.3")
    assert found == FoundAddress(
        Address("198.51.100.1", 41234), AnnouncedBy.PROVIDER, "VAST_TCP_PORT_70000=41234", (22, 41234)
    )
    broken = find_announced(None, environ | {"VAST_TCP_PORT_70000": "x"}, Address("0.0.0.0", 41234), lambda: "10.1.2.3")
    assert (broken.by, broken.mapped) == (AnnouncedBy.INTERFACE, (22,))


@pytest.mark.parametrize(
    ("flag", "host", "by"),
    [
        ("203.0.113.7:5", "0.0.0.0", AnnouncedBy.FLAG),
        (None, "0.0.0.0", AnnouncedBy.INTERFACE),
        (None, "192.0.2.9", AnnouncedBy.LISTEN),
    ],
)
def test_who_says_the_address(flag: str | None, host: str, by: AnnouncedBy) -> None:
    assert find_announced(flag, {}, Address(host, 4001), lambda: "10.1.2.3").by is by


def test_the_address_of_the_way_out_is_one_of_the_kind_that_is_listened_on() -> None:
    assert ":" not in default_route_address("0.0.0.0")
    assert parse_address(str(Address(default_route_address("::"), 1))).port == 1
