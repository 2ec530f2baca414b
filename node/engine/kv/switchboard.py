"""Joins the agent with the transfer hubs of the workers on this box, whichever processes vLLM puts those in.

    agent <-> engine's main process: Switchboard <== one Unix socket per worker ==> WorkerLine: TransferHub

vLLM makes worker processes itself and constructs connectors by name, so a worker finds its way back by a name in the
connector's configuration: that of an abstract Unix socket, to which only processes of this user may connect. A worker
in the main process takes the same way as others. Packets are messages of the engine's protocol; a connection that the
agent has accepted travels beside the packet that says whose it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import final

import msgspec

from ....kvtransport.errors import KVProtocolError
from ....kvtransport.wire.channel import parse_link_hello
from ..protocol import AbortTransfer, CloseLink, EngineMessage, LinkReport, SetLinkPaths, TransferReport, pack
from ..settings import TRANSFER_DEFAULTS, TransferSettings
from ..transfers.hub import TransferHub
from ..transfers.open_transfers import Tell

_log = logging.getLogger(__name__)

MAX_PACKET = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


class Attach(EngineMessage, frozen=True, kw_only=True, tag="attach"):
    """To a worker, with a descriptor: a connection of a link, and what was read from it."""

    hello: bytes


class ClaimLinks(EngineMessage, frozen=True, kw_only=True, tag="holds"):
    """From a worker: connections of these links are for it."""

    links: tuple[bytes, ...]


class KvNews(EngineMessage, frozen=True, kw_only=True, tag="news"):
    """From a worker: the engine has something to do for KV that is received."""


_to_worker = msgspec.msgpack.Decoder(Attach | SetLinkPaths | CloseLink | AbortTransfer)
_from_worker = msgspec.msgpack.Decoder(ClaimLinks | KvNews | TransferReport | LinkReport)


def _address(name: str) -> str:
    """In the abstract namespace: no file is left behind."""
    return f"\0{name}"


def _peer(line: socket.socket) -> tuple[int, int]:
    """Process id and user of the other end."""
    pid, user, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


@final
class Switchboard:
    """In the engine's main process; `report` is called by its threads, the rest by any.

    A connection that comes before its link is kept for a while. `news` is set when the engine
    should look at what it receives."""

    def __init__(self, workers: int, report: Tell, settings: TransferSettings = TRANSFER_DEFAULTS) -> None:
        self._settings = settings
        self.name = f"p2pserve-engine-{secrets.token_hex(16)}"
        self.news = threading.Event()  # set by its threads; cleared by whoever waits for it
        self._workers = workers
        self._report = report
        self._lock = threading.Lock()
        self._lines: list[socket.socket] = []
        self._holders: dict[bytes, socket.socket] = {}
        self._early: OrderedDict[bytes, list[tuple[float, bytes, socket.socket]]] = OrderedDict()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_address(self.name))
        self._listener.listen(workers)
        threading.Thread(target=self._accept, name="kv-switchboard", daemon=True).start()

    def __repr__(self) -> str:
        return f"<Switchboard {len(self._lines)} of {self._workers} workers, {len(self._holders)} links>"

    def carry_out(self, order: SetLinkPaths | CloseLink | AbortTransfer) -> None:
        """Pass what the agent wants on to all workers."""
        with self._lock:
            lines = list(self._lines)
            if isinstance(order, CloseLink):
                self._holders.pop(order.link, None)
        for line in lines:
            self._send(line, order)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """Hand an accepted connection to the worker whose link it is of. Takes over the socket."""
        try:
            link = parse_link_hello(hello).link
        except KVProtocolError:
            connection.close()
            return
        unwanted: list[socket.socket] = []
        with self._lock:
            line = self._lines[0] if self._workers == 1 and self._lines else self._holders.get(link)
            if line is None:
                unwanted = self._keep(link, hello, connection)
        for each in unwanted:
            each.close()
        if line is not None:
            self._pass_connection(line, hello, connection)

    def close(self) -> None:
        """Let go of the workers."""
        with self._lock:
            lines = [self._listener, *self._lines]
            kept = [connection for waiting in self._early.values() for _, _, connection in waiting]
            self._early.clear()
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        for connection in kept:
            connection.close()

    # ---- inside ---------------------------------------------------------------------------------------------

    def _keep(self, link: bytes, hello: bytes, connection: socket.socket) -> list[socket.socket]:
        """Under the lock: keep a connection that comes early; return those that have been kept for too long."""
        now = time.monotonic()
        self._early.setdefault(link, []).append((now, hello, connection))
        late = [key for key, waiting in self._early.items() if now - waiting[-1][0] > self._settings.early_connection_s]
        if not late and sum(map(len, self._early.values())) > self._settings.early_connections:
            late = [next(iter(self._early))]
        return [kept for key in late for _, _, kept in self._early.pop(key)]

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:  # closed
                return
            if _peer(line)[1] != os.getuid():
                line.close()
                continue
            with self._lock:
                self._lines.append(line)
            threading.Thread(target=self._listen, args=(line,), name="kv-worker-line", daemon=True).start()

    def _listen(self, line: socket.socket) -> None:
        """Until the worker is gone; vLLM notices that by itself, and ends the engine."""
        while True:
            try:
                packet = line.recv(MAX_PACKET)
            except OSError:
                return
            if not packet:
                return
            message = _from_worker.decode(packet)
            if isinstance(message, ClaimLinks):
                self._route(line, message.links)
            elif isinstance(message, KvNews):
                self.news.set()
            else:
                self._report(message)

    def _route(self, line: socket.socket, links: tuple[bytes, ...]) -> None:
        with self._lock:
            self._holders.update(dict.fromkeys(links, line))
            mine = [each for link in links for each in self._early.pop(link, [])]
        for _, hello, connection in mine:
            self._pass_connection(line, hello, connection)

    def _pass_connection(self, line: socket.socket, hello: bytes, connection: socket.socket) -> None:
        with connection:
            self._send(line, Attach(hello=hello), connection.fileno())

    def _send(self, line: socket.socket, message: EngineMessage, *descriptors: int) -> None:
        try:
            socket.send_fds(line, [pack(message)], descriptors)
        except OSError as error:
            _log.warning("a worker does not take %s: %s", type(message).__name__, error)


@final
class WorkerLine:
    """In a worker: its hub and the connection to the agent. `make_hub` gets both callbacks."""

    def __init__(self, switchboard: str, make_hub: Callable[[Tell, Callable[[], None]], TransferHub]) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(_address(switchboard))
        self._ends_with_main = _peer(self._line)[0] != os.getpid()
        self.hub = make_hub(self._tell, self.tell_news)
        threading.Thread(target=self._listen, name="kv-agent-line", daemon=True).start()

    def __repr__(self) -> str:
        return f"<WorkerLine {self.hub}>"

    def claim_links(self, links: tuple[bytes, ...]) -> None:
        """Connections of these links are for this worker."""
        self._tell(ClaimLinks(links=links))

    def tell_news(self) -> None:
        """Have the engine look at what is received without waiting any longer."""
        self._tell(KvNews())

    def close(self) -> None:
        """The worker ends, in good order."""
        self._ends_with_main = False
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def _tell(self, message: ClaimLinks | KvNews | TransferReport | LinkReport) -> None:
        try:
            self._line.sendall(pack(message))
        except OSError:
            self._on_loss()

    def _listen(self) -> None:
        with self._line:
            while self._carry_out_one():
                pass
        self._on_loss()

    def _carry_out_one(self) -> bool:
        """Wait for what the agent wants next; False when nobody is there to want anything."""
        packet, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            packet, descriptors, _, _ = socket.recv_fds(self._line, MAX_PACKET, 1)
        if packet:
            message = _to_worker.decode(packet)
            if not isinstance(message, Attach):
                self.hub.carry_out(message)
            for descriptor in descriptors:
                assert isinstance(message, Attach)
                self.hub.attach(message.hello, socket.socket(fileno=descriptor))
        return bool(packet)

    def _on_loss(self) -> None:
        if self._ends_with_main:
            os._exit(0)  # the engine's main process is gone, and with it the reason for this one
