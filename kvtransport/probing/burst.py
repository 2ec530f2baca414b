"""The sockets and threads of a bandwidth burst. What it shows is judged in `burst_meter`.

    sending box, having agreed on a ticket              receiving box, whose listener reads BURST_MAGIC
    with dial_burst(ticket, path, 5) as ends:           gate = BurstGate(ticket)
        sample = send_burst(ends)                       gate.attach(sock, hello)   for each connection
                                                        with gate.wait(5) as ends:
                                                            sample = receive_burst(ends)

Either box may dial, whichever can. Both get the same sample, as the receiver counted it. Blocking,
for threads; failures are TransferErrors.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

from ..errors import ConnectionClosed, KVProtocolError, TransferError, TransferTimeout
from ..wire.dial_path import DialPath
from ..wire.sockets import connect, dial, hang_up, receive_exactly
from .burst_meter import BurstMeter
from .burst_ticket import (
    BURST_HELLO_BYTES,
    RESULT_HEAD_BYTES,
    BurstHello,
    BurstTicket,
    pack_hello,
    pack_result,
    parse_hello,
    parse_result,
    result_bytes,
)
from .estimates import BurstSample

_BLOCK_BYTES = 256 * 1024
_LOOK_S = 0.02
_GRACE_S = 2.0
_TURN_S = 0.2  # how long a thread stays inside one call
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@final
@dataclass(frozen=True, slots=True)
class BurstEnds:
    """The n connections of a burst at one of its boxes. Closing it drops what is still under way."""

    ticket: BurstTicket
    socks: tuple[socket.socket, ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hang_up(self) -> None:
        """Wake the threads inside the sockets; what was not sent yet will not be."""
        for sock in self.socks:
            with suppress(OSError):  # closed or gone already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            hang_up(sock)

    def close(self) -> None:
        """Free the sockets. Idempotent."""
        self.hang_up()
        for sock in self.socks:
            sock.close()


@final
class BurstGate:
    """Collects a burst's connections at the listening box. Threads may attach at once."""

    def __init__(self, ticket: BurstTicket) -> None:
        self.ticket = ticket
        self._lock = threading.Condition()
        self._socks: dict[int, socket.socket] = {}
        self._over = False

    def __repr__(self) -> str:
        return f"<BurstGate {self.ticket.burst.hex()}: {len(self._socks)} of {self.ticket.streams}>"

    @property
    def is_complete(self) -> bool:
        """Whether all connections are there."""
        return len(self._socks) == self.ticket.streams

    def attach(self, sock: socket.socket, hello: BurstHello) -> None:
        """Takes the socket of an accepted connection over. ProtocolError, and a closed socket, if
        it does not belong here, comes twice, or too late."""
        try:
            hello.check(self.ticket)
            with self._lock:
                if self._over or hello.index in self._socks:
                    raise KVProtocolError(f"burst connection {hello.index} comes twice or too late")
                self._socks[hello.index] = sock
                self._lock.notify_all()
        except KVProtocolError:
            sock.close()
            raise

    def wait(self, timeout: float) -> BurstEnds:
        """All the connections, once they are there."""
        with self._lock:
            complete = self._lock.wait_for(lambda: self.is_complete, timeout)
            self._over = True
            ends = BurstEnds(self.ticket, tuple(self._socks[index] for index in sorted(self._socks)))
        if not complete:
            ends.close()
            raise TransferTimeout(f"{len(ends.socks)} of {self.ticket.streams} burst connections came in {timeout:g} s")
        return ends

    def close(self) -> None:
        """No burst after all."""
        with self._lock:
            self._over = True
            BurstEnds(self.ticket, tuple(self._socks.values())).close()


def read_burst_hello(sock: socket.socket, timeout: float) -> BurstHello:
    """The hello of an accepted connection, and not a byte more."""
    try:
        return parse_hello(receive_exactly(sock, BURST_HELLO_BYTES, time.monotonic() + timeout))
    except OSError as error:
        raise ConnectionClosed(f"the connection failed before its hello: {error.strerror or error}") from None


def dial_burst(ticket: BurstTicket, path: DialPath, timeout: float) -> BurstEnds:
    """Dial all connections of a burst, through a relay where there is a permit, and say hello on each."""
    until = time.monotonic() + timeout
    socks: list[socket.socket] = []
    try:
        for index in range(ticket.streams):
            left_s = max(until - time.monotonic(), 0.001)
            if path.relay is None:
                sock = connect(path.host, path.port, left_s, path.segment_bytes)
            else:
                sock = dial(path, left_s)
                sock.settimeout(left_s)
            socks.append(sock)
            sock.sendall(pack_hello(ticket, index))
    except OSError as error:
        BurstEnds(ticket, tuple(socks)).close()
        text = f"{path.host}:{path.port}, burst connection {len(socks)}: {error.strerror or error}"
        raise (TransferTimeout if isinstance(error, TimeoutError) else ConnectionClosed)(text) from None
    except TransferError:
        BurstEnds(ticket, tuple(socks)).close()
        raise
    return BurstEnds(ticket, tuple(socks))


def send_burst(ends: BurstEnds) -> BurstSample:
    """Send on all connections until the receiver has seen enough, and return what it saw. The
    connections are used up."""
    stop, sent = threading.Event(), [0] * len(ends.socks)
    payload = os.urandom(_BLOCK_BYTES)  # no box in between can compress it
    # More than the receiver will count, so that no stream runs dry before the end.
    limit = ends.ticket.max_bytes + len(sent) * _BLOCK_BYTES
    threads = [
        threading.Thread(target=_pour, args=(sock, payload, index, sent, limit, stop), name=f"burst-send-{index}")
        for index, sock in enumerate(ends.socks)
    ]
    with _running(ends, threads, stop):
        first = ends.socks[0]
        until = time.monotonic() + ends.ticket.seconds + ends.ticket.lease_s + _GRACE_S
        head = _receive(first, RESULT_HEAD_BYTES, until)
        return parse_result(ends.ticket, head, _receive(first, result_bytes(head), until))


def receive_burst(ends: BurstEnds) -> BurstSample:
    """Receive until the rate has settled, the time is over or the bytes are, and tell the sender
    what was seen. The connections are used up."""
    ticket = ends.ticket
    meter, lock, stop = BurstMeter(ticket.streams, ticket.rtt_s), threading.Lock(), threading.Event()
    threads = [
        threading.Thread(target=_drain, args=(sock, index, meter, lock, stop), name=f"burst-receive-{index}")
        for index, sock in enumerate(ends.socks)
    ]
    with _running(ends, threads, stop):
        begun = now = time.monotonic()
        reason: str | None = None
        while reason is None:
            stop.wait(_LOOK_S)
            now = time.monotonic()
            with lock:
                reason = _enough(meter, ticket, begun, now, any(thread.is_alive() for thread in threads))
        with lock:
            # Bytes may have run out a moment ago: that silence is not the link's.
            sample = meter.sample(meter.last_at if reason == "bytes" else now, reason)
        if not sample.bytes:
            raise TransferTimeout("the burst's sender sent nothing")
        try:
            ends.socks[0].sendall(pack_result(ticket, sample))
        except OSError as error:
            raise ConnectionClosed(f"the burst's sender has gone: {error.strerror or error}") from None
        # Go on reading until the sender hangs up: closing now would overtake the result.
        until = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return sample


@contextmanager
def _running(ends: BurstEnds, threads: list[threading.Thread], stop: threading.Event) -> Iterator[None]:
    """The threads run inside; afterwards they have ended and the sockets are closed, in this order:
    a socket's number must not be another's while a thread still uses it."""
    for sock in ends.socks:
        sock.settimeout(_TURN_S)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        ends.hang_up()
        for thread in threads:
            thread.join()
        ends.close()


def _enough(meter: BurstMeter, ticket: BurstTicket, begun: float, now: float, alive: bool) -> str | None:
    """Why the burst is over, if it is."""
    if meter.bytes >= ticket.max_bytes:
        return "bytes"
    if meter.seconds(now) >= ticket.seconds:
        return "time"
    if meter.is_stable(now):
        return "stable"
    if not alive:
        return "closed by the sender"
    if not meter.bytes and now - begun >= ticket.lease_s:
        return "nothing came"
    return None


def _pour(sock: socket.socket, payload: bytes, index: int, sent: list[int], limit: int, stop: threading.Event) -> None:
    try:
        while sum(sent) < limit and not stop.is_set():
            with suppress(TimeoutError):
                sent[index] += sock.send(payload)
    except OSError:
        return  # hung up: the result says how much arrived


def _drain(sock: socket.socket, index: int, meter: BurstMeter, lock: threading.Lock, stop: threading.Event) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    try:
        while not stop.is_set():
            try:
                size = sock.recv_into(buffer)
            except TimeoutError:
                continue
            if size == 0:
                return
            with lock:
                meter.add(index, size, time.monotonic())
    except OSError:
        return  # hung up: what came until then counts


def _receive(sock: socket.socket, count: int, until: float) -> bytes:
    """Like `receive_exactly`, but on a socket whose timeout another thread relies on."""
    data = bytearray()
    while len(data) < count:
        if time.monotonic() >= until:
            raise TransferTimeout("the burst's receiver did not say what it saw")
        try:
            read = sock.recv(count - len(data))
        except TimeoutError:
            continue
        except OSError as error:
            raise ConnectionClosed(f"the burst's receiver hung up: {error.strerror or error}") from None
        if not read:
            raise ConnectionClosed("the burst's receiver hung up without a result")
        data += read
    return bytes(data)
