"""A relay: any node forwards ciphertext between two others, within the permits that it has given
out.

The rim around `permits.RelayLedger`: two threads per connection move bytes inside the kernel
(`splice`), so nothing is copied to this process, and nothing here could be read: the keys are those
of the two ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from ..errors import ConnectionClosed, RelayRefused, TransferError
from ..wire.permits import Permit, Refusal, RelayLedger, RelayUse, pack_relay_answer
from ..wire.sockets import SMALL_SEGMENT_BYTES, connect, hang_up, tune
from .settings import LinkSettings

_PIPE_BYTES = 1 << 20
_PIECE_BYTES = 256 * 1024
_JOIN_S = 5.0
_MAX_CONNECTIONS = 256


class Relay:
    """Forwards connections with a permit: accepted sockets that begin with a relay hello."""

    def __init__(self) -> None:
        self._ledger = RelayLedger()
        self._authenticate_s = LinkSettings().authenticate_s
        self._lock = threading.Lock()
        self._connects: dict[bytes, Callable[[], socket.socket]] = {}  # permit -> how its other end is reached
        self._sockets: dict[socket.socket, bytes] = {}  # with the permit that each is of; of none yet: empty
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()

    def __repr__(self) -> str:
        return f"<Relay connections={len(self._sockets) // 2} {self._ledger}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def admit(self, permit: Permit, owner: str = "", connect: Callable[[], socket.socket] | None = None) -> None:
        """Let a permit be used, which was given to this owner. Raises TicketError if there are too many. `connect`:
        what to do instead of dialling, where the next box cannot be dialled; it may block, and raise OSError."""
        with self._lock:
            self._ledger.admit(permit, time.monotonic(), owner)
            self._connects = {each: how for each, how in self._connects.items() if self._ledger.knows(each)}
            if connect is not None:
                self._connects[permit.permit] = connect

    def revoke(self, permit: bytes) -> None:
        """Forward nothing more under a permit, and end its connections: one that is silent would keep its place."""
        with self._lock:
            self._ledger.revoke(permit)
            for sock, of in self._sockets.items():
                if of == permit:
                    hang_up(sock)

    def statistics(self) -> tuple[RelayUse, ...]:
        """Bytes and connections of each permit."""
        with self._lock:
            return self._ledger.statistics()

    def attach(self, hello: bytes, sock: socket.socket) -> bool:
        """Take over an accepted socket whose hello was read; whether there is room."""
        with self._lock:
            has_room = not self._closing.is_set() and len(self._sockets) < 2 * _MAX_CONNECTIONS
            if has_room:
                self._sockets[sock] = b""
                self._start(self._serve, sock, hello)
        return has_room

    def close(self) -> None:
        """End every connection and thread."""
        self._closing.set()
        with self._lock:
            for sock in self._sockets:
                hang_up(sock)
            threads = list(self._threads)
        for thread in threads:
            thread.join(_JOIN_S)

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="kv-relay", daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def _serve(self, client: socket.socket, hello: bytes) -> None:
        """One connection, from its hello to its end."""
        onward: socket.socket | None = None
        permit: Permit | None = None
        try:
            tune(client)
            with self._lock:
                permit = self._ledger.enter(hello, time.monotonic())
                self._sockets[client] = permit.permit
            onward = self._dial(permit)
            client.settimeout(self._authenticate_s)
            client.sendall(pack_relay_answer(Refusal.ACCEPTED))
            self._forward(client, onward, permit)
        except RelayRefused as refusal:
            with suppress(OSError):  # the refusal is a courtesy
                client.sendall(pack_relay_answer(Refusal(refusal.code), refusal.reason))
        except (OSError, TransferError):
            pass  # the client has gone, or said nothing
        finally:
            with self._lock:
                if permit is not None:
                    self._ledger.leave(permit.permit)
                self._sockets.pop(client, None)
                if onward is not None:
                    self._sockets.pop(onward, None)
            client.close()
            if onward is not None:
                onward.close()

    def _dial(self, permit: Permit) -> socket.socket:
        try:
            how = self._connects.get(permit.permit)
            if how is None:
                # Small segments: who dialled this relay cannot know what the path from here on carries.
                onward = connect(permit.next_host, permit.next_port, self._authenticate_s, SMALL_SEGMENT_BYTES)
            else:
                onward = how()
        except OSError as error:
            where = f"{permit.next_host}:{permit.next_port}"
            reason = f"{where} does not answer: {error.strerror or error}"
            raise RelayRefused(Refusal.UNREACHABLE, reason) from None
        with self._lock:
            self._sockets[onward] = permit.permit
            is_over = self._closing.is_set() or not self._ledger.knows(permit.permit)
        if is_over:
            raise ConnectionClosed("the relay is closing, or the permit was revoked")
        tune(onward)
        return onward

    def _forward(self, client: socket.socket, onward: socket.socket, permit: Permit) -> None:
        """Both directions, until both have ended."""
        client.settimeout(None)
        onward.settimeout(None)
        with self._lock:
            back = self._start(self._pour, onward, client, permit.permit)
        self._pour(client, onward, permit.permit)
        back.join()

    def _pour(self, source: socket.socket, sink: socket.socket, permit: bytes) -> None:
        """One direction. An end of file is passed on; any other failure ends both directions."""
        reader, writer = os.pipe()
        try:
            with suppress(OSError):  # a smaller pipe serves as well
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            while count := os.splice(source.fileno(), writer, _PIECE_BYTES):
                with self._lock:
                    wait = self._ledger.spend(permit, count, time.monotonic())
                if wait and self._closing.wait(wait):
                    raise ConnectionClosed("the relay is closing")
                while count:
                    count -= os.splice(reader, sink.fileno(), count)
            sink.shutdown(socket.SHUT_WR)
        except (OSError, TransferError):
            hang_up(source)
            hang_up(sink)
        finally:
            os.close(reader)
            os.close(writer)
