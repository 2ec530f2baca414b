"""Dialling a host that may have several addresses, within one deadline."""

import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

import trio

from ..addresses import Address
from ..errors import PeerLost, Unreachable
from ..reasons import explain
from ..settings import TransportSettings
from ..trust.keys import PeerId

SMALL_SEGMENT_BYTES: Final = TransportSettings().segment_bytes
T = TypeVar("T")
Resolver = Callable[[Address], Awaitable[list[str]]]


async def resolve_host(address: Address) -> list[str]:
    """A host's IP addresses, best first. libp2p's own resolver ignores the hosts file."""
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"cannot resolve host {address.host!r}: {error}; check the spelling") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def open_connection(address: Address, segment_bytes: int = SMALL_SEGMENT_BYTES) -> trio.SocketStream:
    """A TCP connection whose segments have so many bytes at most, both ways. Raises OSError or Unreachable."""
    problem: OSError | None = None
    for host in await resolve_host(address):
        sock = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if segment_bytes:
                with suppress(OSError, AttributeError):  # clients run on systems that do not have it
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
            await sock.connect((host, address.port))
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
        else:
            return trio.SocketStream(sock)
    raise problem or Unreachable(f"{address.host} has no IP address")


async def try_hosts(
    address: Address,
    peer_id: PeerId | None,
    attempt: Callable[[str], Awaitable[T]],
    *,
    dial_s: float,
    resolve: Resolver = resolve_host,
) -> T:
    """The first success with the IP addresses of a host, tried in turn for ``dial_s`` seconds in all; ``attempt``
    gets one of them and raises PeerLost. Raises Unreachable with the last reason."""
    deadline = trio.current_time() + dial_s
    problem = f"no answer within {dial_s:g} s; check the address and the firewall"
    with trio.move_on_at(deadline):
        hosts = await resolve(address)
        for index, host in enumerate(hosts):
            now = trio.current_time()
            # The deadline may be over already: trio sees to it only at the next wait, and a
            # process that gets no processor has none. A moment to stop at may lie in the past;
            # a number of seconds to go on for may not.
            with trio.move_on_at(now + (deadline - now) / (len(hosts) - index)):
                try:
                    return await attempt(host)
                except PeerLost as error:
                    problem = explain(error, peer_id)
    raise Unreachable(f"cannot reach {peer_id or 'a member'} at {address}: {problem}")
