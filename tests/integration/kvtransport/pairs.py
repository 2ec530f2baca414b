"""Two endpoints over loopback, with listeners, relays and paths that can be cut between them."""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from p2pserve.kvtransport.errors import TransferError
from p2pserve.kvtransport.link.endpoint import Endpoint
from p2pserve.kvtransport.link.receive_link import IncomingTransfer, ReceiveLink
from p2pserve.kvtransport.link.relay import Relay
from p2pserve.kvtransport.link.send_link import OutgoingTransfer, SendLink
from p2pserve.kvtransport.link.settings import LinkSettings
from p2pserve.kvtransport.link.transfers import EndState
from p2pserve.kvtransport.wire.dial_path import DialPath
from p2pserve.kvtransport.wire.frames import KVFrame
from p2pserve.kvtransport.wire.permits import Permit
from p2pserve.kvtransport.wire.sockets import read_link_hello, read_relay_hello
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer

WINDOW = 16 << 20
SETTINGS = LinkSettings(chunk_bytes=64 * 1024, ping_s=0.2, hedge_s=0.4, limit_bytes=32 << 20)
WAIT_LIMIT_S = 30.0  # for what comes at once, unless the machine is very busy


class Listener:
    """Accepts on loopback and hands every connection over; counts what it accepts."""

    def __init__(self, handle: Callable[[socket.socket], object]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._handle = handle
        self.accepted = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.accepted += 1
            self._handle(connection)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(WAIT_LIMIT_S)


def until(condition: Callable[[], object]) -> None:
    """Wait for what threads do without a word."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


class Forwarder:
    """A path that can be cut, or freezes after `limit` bytes: forwards each connection to `port`, in threads."""

    def __init__(self, port: int, limit: float = math.inf) -> None:
        self._port = port
        self._limit = limit
        self._ending = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.listener = Listener(self._serve)
        self.port = self.listener.port
        self.carried = 0

    def _serve(self, client: socket.socket) -> None:
        onward = socket.create_connection(("127.0.0.1", self._port))
        self._sockets += [client, onward]
        for pair in ((client, onward), (onward, client)):
            self._threads.append(threading.Thread(target=self._pour, args=pair))
            self._threads[-1].start()

    def _pour(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(16 * 1024):
                if self.frozen:
                    self._ending.wait()
                sink.sendall(data)
                self.carried += len(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    @property
    def frozen(self) -> bool:
        """Whether nothing passes any more."""
        return self.carried >= self._limit

    def cut(self, count: int | None = None) -> None:
        """Break the oldest `count` connections, or all."""
        for each in self._sockets[: None if count is None else 2 * count]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ending.set()
        self.listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(WAIT_LIMIT_S)
        for each in self._sockets:
            each.close()


@dataclass
class Pair:
    """A sending and a receiving process in one, with the listener of the receiving box."""

    sender: Endpoint = field(default_factory=lambda: Endpoint(settings=SETTINGS))
    receiver: Endpoint = field(default_factory=lambda: Endpoint(settings=SETTINGS))
    ticket: LinkTicket = field(default_factory=lambda: issue_link(60, secrets.token_bytes))
    others: list[Listener | Forwarder | Relay] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = Listener(self._accept)
        self.others.append(self.listener)

    def _accept(self, connection: socket.socket) -> None:
        try:
            self.receiver.attach(read_link_hello(connection, WAIT_LIMIT_S), connection)
        except TransferError:
            connection.close()

    def links(self, *paths: DialPath, streams: int = 2) -> tuple[SendLink, ReceiveLink]:
        receiving = self.receiver.open_receiver(self.ticket)
        sending = self.sender.open_sender(self.ticket, paths or [self.direct(streams)])
        count = sum(path.streams for path in paths) or streams
        assert sending.wait_connected(count, WAIT_LIMIT_S), sending.statistics()
        assert receiving.wait_connected(count, WAIT_LIMIT_S), receiving.statistics()
        return sending, receiving

    def direct(self, streams: int = 1, pace: int = 0) -> DialPath:
        return DialPath("127.0.0.1", self.listener.port, streams=streams, pace_bytes_s=pace)

    def forwarder(self, limit: float = math.inf) -> Forwarder:
        found = Forwarder(self.listener.port, limit)
        self.others.append(found)
        return found

    def relay(self, *, budget: int = 1 << 30, rate: float = 1e9, expires_s: float = 60) -> tuple[Relay, DialPath]:
        relay = Relay()
        listener = Listener(lambda sock: relay.attach(read_relay_hello(sock, WAIT_LIMIT_S), sock))
        self.others += [listener, relay]
        where = ("127.0.0.1", self.listener.port)
        permit = Permit(
            secrets.token_bytes(16), secrets.token_bytes(32), *where, budget, rate, time.monotonic() + expires_s
        )
        relay.admit(permit)
        return relay, DialPath("127.0.0.1", listener.port, label="relay", relay=permit)

    def transfer(self, deadline_s: float = 60) -> TransferTicket:
        return issue_transfer(self.ticket.link, "raw", deadline_s, secrets.token_bytes)

    def begin(
        self, links: tuple[SendLink, ReceiveLink], deadline_s: float = 60
    ) -> tuple[OutgoingTransfer, IncomingTransfer]:
        ticket = self.transfer(deadline_s)
        return links[0].open(ticket), links[1].expect(ticket)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        for other in self.others:
            other.close()


def open_files() -> int:
    return len(list(FilePath("/proc/self/fd").iterdir()))


def frame(layer: int, payload: bytes | memoryview) -> KVFrame:
    return KVFrame(layer, 0, 1, 0, 1, 0, 0, 64, payload)


def payloads(count: int, size: int) -> list[bytes]:
    return [os.urandom(size) for _ in range(count)]


def send_all(outgoing: OutgoingTransfer, data: list[bytes]) -> threading.Thread:
    def run() -> None:
        with suppress(TransferError):
            for layer, payload in enumerate(data):
                outgoing.send(frame(layer, payload), timeout=WAIT_LIMIT_S)
            outgoing.finish(1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def receive_all(incoming: IncomingTransfer, data: list[bytes]) -> None:
    incoming.grant(WINDOW)
    seen = set()
    for each in incoming:
        assert each.payload == data[each.layer]
        assert each.layer not in seen
        seen.add(each.layer)
    assert len(seen) == len(data)
    incoming.acknowledge()


DELIVERED = EndState("delivered")
