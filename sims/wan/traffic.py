"""What runs inside a box to measure the network: plain sockets, as any program would use them.

    python -m p2pserve.sims.wan.traffic receive HOST PORT STREAMS SECONDS
    python -m p2pserve.sims.wan.traffic send HOST PORT STREAMS SECONDS
    python -m p2pserve.sims.wan.traffic echo HOST PORT
    python -m p2pserve.sims.wan.traffic ping HOST PORT COUNT
    python -m p2pserve.sims.wan.traffic count HOST PORT
    python -m p2pserve.sims.wan.traffic datagrams HOST PORT COUNT

Those that listen first say `ready`; those that measure say a JSON document at the end.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise, repeat
from statistics import median

CONNECT_S = 60.0
BUFFER = 1 << 20
# The start of a transfer is TCP finding its rate; it is left out.
STEADY_FROM = 0.4
SLICE_S = 0.2
PING = b"p" * 64
DATAGRAM_BYTES = 1000
DATAGRAM_GAP_S = 0.0005
# After the last datagram, so often that not all of them can be lost: nothing else is to come.
END = b"end"
ENDS = 50
SILENCE_S = 20.0


def receive(host: str, port: int, streams: int, seconds: float) -> None:
    """Count bytes on `streams` connections: Gb/s of payload at the end of `seconds`, the median of
    short slices, so that a busy moment does not count."""
    counts = [0] * streams
    with socket.create_server((host, port), backlog=512) as server:
        _say_ready()
        server.settimeout(CONNECT_S)
        socks = [server.accept()[0] for _ in range(streams)]
    for index, sock in enumerate(socks):
        threading.Thread(target=_count, args=(sock, counts, index), daemon=True).start()
    time.sleep(seconds * STEADY_FROM)
    seen = [(time.monotonic(), sum(counts))]
    for _ in range(round(seconds * (1 - STEADY_FROM) / SLICE_S)):
        time.sleep(SLICE_S)
        seen.append((time.monotonic(), sum(counts)))
    rates = [8e-9 * (size - before) / (now - then) for (then, before), (now, size) in pairwise(seen)]
    _report({"gbps": median(rates)})


def _count(sock: socket.socket, counts: list[int], index: int) -> None:
    sock.settimeout(None)
    buffer = bytearray(BUFFER)
    with suppress(ConnectionError):
        while got := sock.recv_into(buffer):
            counts[index] += got


def send(host: str, port: int, streams: int, seconds: float) -> None:
    """Send all that `streams` connections take, for `seconds` or until they close."""
    socks = [_connect(host, port) for _ in range(streams)]
    for sock in socks:
        threading.Thread(target=_fill, args=(sock,), daemon=True).start()
    time.sleep(seconds)


def _fill(sock: socket.socket) -> None:
    data = bytes(BUFFER)
    with suppress(ConnectionError):
        while True:
            sock.sendall(data)


def echo(host: str, port: int) -> None:
    """Send back what comes on one connection."""
    with socket.create_server((host, port)) as server:
        _say_ready()
        server.settimeout(CONNECT_S)
        sock, _ = server.accept()
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(ConnectionError):
        while data := sock.recv(4096):
            sock.sendall(data)


def ping(host: str, port: int, count: int) -> None:
    """Round trips of 64 bytes, one after the other, in ms."""
    sock = _connect(host, port)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for _ in range(count):
        start = time.monotonic()
        sock.sendall(PING)
        sock.recv(len(PING), socket.MSG_WAITALL)
        took.append(1e3 * (time.monotonic() - start))
    _report({"rtt_ms": took})


def count(host: str, port: int) -> None:
    """Count datagrams until their sender says that it was all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((host, port))
        _say_ready()
        sock.settimeout(CONNECT_S)
        received = 0
        with suppress(TimeoutError):
            while sock.recv(2048) != END:
                sock.settimeout(SILENCE_S)
                received += 1
    _report({"received": received})


def datagrams(host: str, port: int, number: int) -> None:
    """Send `number` datagrams, evenly spaced, and then that it was all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for data in (*repeat(bytes(DATAGRAM_BYTES), number), *repeat(END, ENDS)):
            sock.sendto(data, (host, port))
            time.sleep(DATAGRAM_GAP_S)


def _connect(host: str, port: int) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=CONNECT_S)
    sock.settimeout(None)
    return sock


def _say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def _report(figures: object) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


ROLES: dict[str, tuple[Callable[..., None], tuple[Callable[[str], object], ...]]] = {
    "receive": (receive, (str, int, int, float)),
    "send": (send, (str, int, int, float)),
    "echo": (echo, (str, int)),
    "ping": (ping, (str, int, int)),
    "count": (count, (str, int)),
    "datagrams": (datagrams, (str, int, int)),
}


def main(argv: list[str]) -> int:
    """Run one role."""
    role, kinds = ROLES.get(argv[0] if argv else "", (None, ()))
    if role is None or len(argv) != len(kinds) + 1:
        sys.stderr.write(__doc__ or "")
        return 2
    role(*(kind(value) for kind, value in zip(kinds, argv[1:], strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
