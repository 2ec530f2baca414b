"""Sockets of a link: dialling, options, handshake. Blocking; failures are TransferErrors."""

from __future__ import annotations

import math
import secrets
import socket
import struct
import sys
import time

from ..errors import ConnectionClosed, RelayRefused, TransferError, TransferTimeout
from .channel import LINK_HELLO_BYTES, NONCE_BYTES, Channel, LinkHello, parse_link_hello
from .dial_path import DialPath
from .permits import RELAY_HELLO_BYTES, pack_relay_hello
from .signals import LinkGreeting

_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; the socket module has no name for it
_RTT_AT = 68  # tcpi_rtt, microseconds, in struct tcp_info
_USER_TIMEOUT_MS = 15_000
SMALL_SEGMENT_BYTES = 1220
"""Of a TCP segment in a packet of 1,280 bytes, which every path carries (RFC 8200, 5)."""
_UNSENT_BYTES = 1024 * 1024
"""Above this many unsent bytes in its kernel buffer a connection takes no new chunk: what it cannot
send now is better taken by another one.
"""


def tune(sock: socket.socket, congestion: str = "", pace_bytes_s: int = 0) -> None:
    """Options of a data connection; not SO_SNDBUF and SO_RCVBUF, which would end autotuning."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    if pace_bytes_s:
        pace(sock, pace_bytes_s)
    if congestion:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError:
            pass  # not in this kernel, or not allowed in this container: the default serves


def pace(sock: socket.socket, bytes_s: int) -> None:
    """Let the kernel hold a connection to a rate, in bytes per second."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_s.to_bytes(8, sys.byteorder))


def connect(host: str, port: int, timeout: float, segment_bytes: int) -> socket.socket:
    """A TCP connection, of segments of so many bytes at most, in both directions; 0: as the devices
    at its ends allow. Raises OSError."""
    problem: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            if segment_bytes:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)  # of no use once it is connected
            sock.settimeout(timeout)
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise problem or OSError(f"{host} has no IP address")


def dial(path: DialPath, timeout: float) -> socket.socket:
    """A connection to the other end, through the path's relay if any, up to the link's bytes."""
    try:
        sock = connect(path.host, path.port, timeout, path.segment_bytes)
    except OSError as error:
        raise ConnectionClosed(f"{path.host}:{path.port} does not answer: {error.strerror or error}") from None
    try:
        tune(sock, path.congestion, path.pace_bytes_s)
        if path.relay is not None:
            sock.sendall(pack_relay_hello(path.relay, secrets.token_bytes(16)))
            code, length = receive_exactly(sock, 2, time.monotonic() + timeout)
            reason = receive_exactly(sock, length, time.monotonic() + timeout).decode("utf-8", "replace")
            if code:
                raise RelayRefused(code, reason)
    except OSError as error:
        sock.close()
        raise ConnectionClosed(f"{path.host}:{path.port} hung up: {error.strerror or error}") from None
    except TransferError:
        sock.close()
        raise
    return sock


def read_link_hello(sock: socket.socket, timeout: float) -> LinkHello:
    """The hello of an accepted connection, and not a byte more: the socket may be passed on."""
    try:
        data = receive_exactly(sock, LINK_HELLO_BYTES, time.monotonic() + timeout)
    except OSError as error:
        raise ConnectionClosed(f"the connection failed before its hello: {error.strerror or error}") from None
    return parse_link_hello(data)


def read_relay_hello(sock: socket.socket, timeout: float) -> bytes:
    """The same for a connection that is to be forwarded."""
    try:
        return receive_exactly(sock, RELAY_HELLO_BYTES, time.monotonic() + timeout)
    except OSError as error:
        raise ConnectionClosed(f"the connection failed before its hello: {error.strerror or error}") from None


def receive_exactly(sock: socket.socket, count: int, until: float) -> bytes:
    """`count` bytes until the monotonic moment `until`, else TransferTimeout."""
    data = bytearray()
    while len(data) < count:
        _wait_until(sock, until)
        try:
            read = sock.recv(count - len(data))
        except TimeoutError:
            raise TransferTimeout(f"{len(data)} of {count} bytes came in time") from None
        if not read:
            raise ConnectionClosed(f"the other side closed the connection after {len(data)} of {count} bytes")
        data += read
    return bytes(data)


def shake_hands(sock: socket.socket, channel: Channel, timeout: float) -> None:
    """Until both ends have proved themselves. Leaves the socket blocking, without timeout."""
    until = time.monotonic() + timeout
    try:
        _wait_until(sock, until)
        sock.sendall(channel.begin_handshake())
        while not channel.authenticated:
            greeting = channel.next_signal()
            if greeting is None:
                _wait_until(sock, until)
                count = sock.recv_into(channel.space())
                if not count:
                    raise ConnectionClosed("the other side closed the connection instead of greeting")
                channel.note_received(count)
        if channel.dials:
            sock.sendall(channel.seal(LinkGreeting(channel.label)))
        sock.settimeout(None)
    except TimeoutError:
        raise TransferTimeout(f"no authentication within {timeout:g} s") from None
    except OSError as error:
        raise ConnectionClosed(f"the connection failed in its handshake: {error.strerror or error}") from None


def round_trip_s(sock: socket.socket) -> float:
    """The kernel's smoothed round trip, handshake included; infinite where unknown."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4) if hasattr(socket, "TCP_INFO") else b""
    return struct.unpack_from("I", info, _RTT_AT)[0] / 1e6 if len(info) == _RTT_AT + 4 else math.inf


def hang_up(sock: socket.socket) -> None:
    """Wake every thread inside the socket. Its number stays taken until `close`."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # never connected, or the other side was faster: there is nothing left to shut down


def fresh_nonce() -> bytes:
    """For one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def _wait_until(sock: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TransferTimeout("the handshake takes too long")
    sock.settimeout(left)


def explain(error: OSError) -> str:
    """One line for a failed connection."""
    return error.strerror or str(error) or type(error).__name__
