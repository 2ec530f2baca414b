"""Addresses as people write them, and the address a box should announce.

A rented box maps its ports, so others dial something else. In order: an explicit flag, the
provider's variables, the interface."""

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

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


class AnnouncedBy(Enum):
    """Who says which address to announce."""

    FLAG = "flag"
    PROVIDER = "provider"
    INTERFACE = "interface"  # of the default route: nobody has said anything
    LISTEN = "listen"  # the one address that the node listens on


@dataclass(frozen=True, slots=True)
class FoundAddress:
    """The address to announce, and by what: ``variable`` is the provider's, such as ``VAST_TCP_PORT_4001=41000``.
    ``mapped``: the ports of this box that the provider maps."""

    address: Address
    by: AnnouncedBy
    variable: str = ""
    mapped: tuple[int, ...] = ()

    def describe(self, listen: Address) -> str:
        """Which port of this box was to be reached there, and by which mapping."""
        if self.variable:
            return f"the provider should map it to port {listen.port} of this box ({self.variable})"
        if self.by is AnnouncedBy.FLAG:
            return f"--announce says that it leads to port {listen.port} of this box"
        ip = plain_ip(self.address.host)
        if ip is not None and not ip.is_global:
            return f"that is port {listen.port} of this box, at an address of its own private network"
        return f"that is port {listen.port} of this box, and nothing is known of a mapping"

    def advise(self, listen: Address, seen: str = "") -> str:
        """How to open it. ``seen``: where others see this box come from."""
        if self.mapped and listen.port not in self.mapped:
            return f"listen on a port that the provider maps: --port {self.mapped[0]}"
        if self.variable:
            port = listen.port
            return f"rent the box anew with TCP port {port} open (-p {port}:{port}), or see that no firewall is on it"
        if self.by is AnnouncedBy.FLAG:
            return f"forward TCP port {self.address.port} there to port {listen.port} here, or correct --announce"
        if seen and plain_ip(seen) != plain_ip(self.address.host):
            return f"forward TCP port {self.address.port} of {seen} to port {listen.port} here, or give --announce"
        return f"open TCP port {listen.port} in the firewall, or say with --announce HOST:PORT what leads there"


_WILDCARDS: Final = ("0.0.0.0", "::", "")
_MAPPED: Final = re.compile(r"(VAST|RUNPOD)_TCP_PORT_(\d{1,5})")
_HOSTS: Final = {"VAST": "PUBLIC_IPADDR", "RUNPOD": "RUNPOD_PUBLIC_IP"}
_MAX_PORT: Final = 65535


def find_announced(
    flag: str | Address | None,
    environ: Mapping[str, str],
    listen: Address,
    interface: Callable[[], str] | None = None,
) -> FoundAddress:
    """The address to tell others; ``interface`` finds it when the box listens on all of them. Raises AddressError."""
    mappings = _read_mappings(environ)
    mapped = tuple(sorted(mappings))
    if flag is not None:
        address = flag if isinstance(flag, Address) else parse_address(flag)
        return FoundAddress(address, AnnouncedBy.FLAG, mapped=mapped)
    name = mappings.get(listen.port, "")
    host = environ.get(_HOSTS.get(name.partition("_")[0], ""), "").strip()
    if host:
        variable = f"{name}={environ[name].strip()}"
        address = Address(host, _port(environ[name].strip(), variable))
        return FoundAddress(address, AnnouncedBy.PROVIDER, variable, mapped)
    if listen.host in _WILDCARDS:
        address = Address((interface or partial(default_route_address, listen.host))(), listen.port)
        return FoundAddress(address, AnnouncedBy.INTERFACE, mapped=mapped)
    return FoundAddress(listen, AnnouncedBy.LISTEN, mapped=mapped)


def _read_mappings(environ: Mapping[str, str]) -> dict[int, str]:
    """Ports of this box that the provider maps, each with its variable. One beyond all ports asks for a port that is
    the same within and without: the value says which (vast.ai and RunPod, "symmetric" or "identity" ports)."""
    found: dict[int, str] = {}
    for name in sorted(environ):  # of two providers' variables Vast's count, which come last
        match = _MAPPED.fullmatch(name)
        text = environ[name].strip()
        if match is None or not text:
            continue
        port = int(match[2])
        if port > _MAX_PORT:
            if not (text.isascii() and text.isdigit() and int(text[:6]) <= _MAX_PORT):
                continue
            port = int(text)
        host_known = environ.get(_HOSTS[match[1]], "").strip()
        if host_known or port not in found:
            found[port] = name
    return found


def announced_address(
    flag: str | Address | None,
    environ: Mapping[str, str],
    listen: Address,
    interface: Callable[[], str] | None = None,
) -> Address:
    """The address of :func:`find_announced` alone."""
    return find_announced(flag, environ, listen, interface).address


def default_route_address(listen: str = "") -> str:
    """The address of the interface that leads out of this box, else loopback. Sends nothing. Where the box listens on
    ``::`` and has no route for IPv4, its IPv6 address."""
    routes = [(socket.AF_INET, "192.0.2.1")]
    if listen == "::":
        routes.append((socket.AF_INET6, "2001:db8::1"))
    for family, anywhere in routes:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((anywhere, 9))  # connecting a datagram socket only picks a route
                host: str = probe.getsockname()[0]
                return host
        except OSError:
            continue
    return "::1" if listen == "::" else "127.0.0.1"


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
