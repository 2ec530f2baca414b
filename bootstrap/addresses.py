"""Addresses as people write them, and the address a box should announce.

A rented box maps its ports, so others dial something else. In order: an explicit flag, the
provider's variables, the interface."""

import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import AddressError

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_FORM = "write host:port, such as 203.0.113.7:4001 or [2001:db8::7]:4001"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where something can be dialled. ``str()`` gives the text that :func:`parse_address` reads."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``host:port``; IPv6 goes in brackets. Port 0 is allowed and means "any free port"."""
    stripped = text.strip()
    if stripped.startswith("["):
        host, closed, rest = stripped[1:].partition("]")
        if not closed or not rest.startswith(":"):
            raise AddressError(f"{text!r} is not an address; {_FORM}")
        port_text = rest[1:]
        if not _is_ipv6(host):
            raise AddressError(f"{text!r} has no IPv6 address between its brackets; {_FORM}")
    else:
        host, colon, port_text = stripped.rpartition(":")
        if not colon:
            raise AddressError(f"{text!r} has no port; {_FORM}")
        if ":" in host:
            raise AddressError(f"{text!r} has an IPv6 address without brackets; {_FORM}")
    if not host or any(letter.isspace() or letter == "/" for letter in host):
        raise AddressError(f"{text!r} has no usable host; {_FORM}")
    return Address(host, _port(port_text, text))


def names_one_place(host: str) -> bool:
    """Whether boxes with this address are in one place: behind one public address, or on one machine. Private addresses
    and names say nothing: each provider has its own 172.17.0.2."""
    found = plain_ip(host)
    return found is not None and (found.is_global or found.is_loopback)


def may_be_relayed_to(host: str, own: str, *, private: bool) -> bool:
    """Whether a box that announces ``own`` may connect others with this address: what they cannot reach themselves may
    be none of their business. So it is public, or of the same kind as its own, or ``private`` and its owner says so."""
    there, here = plain_ip(host), plain_ip(own)
    if there is None or there.is_multicast or there.is_unspecified or there.is_reserved:
        return False
    if there.is_global:
        return True
    is_same_kind = (
        here is not None
        and not here.is_global
        and (here.is_loopback, here.is_link_local) == (there.is_loopback, there.is_link_local)
    )
    return is_same_kind or (private and not there.is_link_local)  # where providers keep a box's credentials


def announced_address(
    flag: str | Address | None,
    environ: Mapping[str, str],
    listen: Address,
    interface: Callable[[], str] | None = None,
) -> Address:
    """The address to tell others; ``interface`` finds it when the box listens on all of them."""
    if isinstance(flag, Address):
        return flag
    if flag is not None:
        return parse_address(flag)
    for port_name, host_name in (
        (f"VAST_TCP_PORT_{listen.port}", "PUBLIC_IPADDR"),
        (f"RUNPOD_TCP_PORT_{listen.port}", "RUNPOD_PUBLIC_IP"),
    ):
        port_text, host = environ.get(port_name, "").strip(), environ.get(host_name, "").strip()
        if port_text and host:
            return Address(host, _port(port_text, f"{port_name}={port_text}"))
    if listen.host in ("0.0.0.0", "::", ""):
        return Address((interface or default_route_address)(), listen.port)
    return listen


def default_route_address() -> str:
    """The address of the interface that leads out of this box, else loopback. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # connecting a datagram socket only picks a route
        except OSError:
            return "127.0.0.1"
        host: str = probe.getsockname()[0]
        return host


def plain_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that is reached in the end: IPv6 forms may hold one of IPv4. None for a name."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    if found in _NAT64:
        return ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
    return found.ipv4_mapped or found.sixtofour or found


def _port(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 5 or int(text) > 65535:
        raise AddressError(f"{whole!r} has the port {text!r}, which is not a number from 0 to 65535; {_FORM}")
    return int(text)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
