"""An engine process's end of the message socket: a thread that takes what the agent wants, one that sends answers."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import TypeVar, final

import msgspec

from . import protocol

_log = logging.getLogger(__name__)

T = TypeVar("T")


def end_process() -> None:
    """At once, from any thread."""
    os._exit(0)


@final
class Outbox:
    """Messages to the agent. What the kernel does not take at once, a thread writes, so that a slow agent cannot stall
    a step; what it does take need not wait until that thread gets its turn beside the model."""

    def __init__(self, messages: socket.socket, on_gone: Callable[[], None] = end_process) -> None:
        """`on_gone`: the agent has hung up; by any thread, and perhaps more than once."""
        self._socket = messages
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._unwritten = 0  # how many are in the queue or being written
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="agent-writer", daemon=True).start()

    def send(self, message: protocol.EngineMessage) -> None:
        """Send a message, or queue it."""
        data = protocol.frame(message)
        with self._lock:
            if not self._unwritten:
                data = data[self._write_now(data) :]
            if data:
                self._unwritten += 1
                self._queue.put(data)

    def tell_weights(self, file: int, files: int) -> None:
        """Which file of the weights is being read, of how many; (0, 0): all have been."""
        self.send(_starting(file, files))

    def tell_worker_weights(self, worker: int, workers: int, file: int, files: int) -> None:
        """The same in one of several worker processes, forked from the one that this was made in: nobody writes here
        what the kernel does not take, and a lock may have been held. Takes it whole or not at all, short as it is."""
        self._write_now(protocol.frame(msgspec.structs.replace(_starting(file, files), worker=worker, workers=workers)))

    def flush(self) -> None:
        """Wait until everything queued so far has been written (at most 5 s)."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(5)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._socket.sendall(item)
            except OSError:
                self._on_gone()  # the agent is gone, and with it the reason for this engine
            with self._lock:
                self._unwritten -= 1

    def _write_now(self, data: bytes) -> int:
        """How many bytes the kernel has taken."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._on_gone()  # as above
            return len(data)


def _starting(file: int, files: int) -> protocol.Starting:
    return protocol.Starting(part="weights", file=file, files=files) if files else protocol.Starting(part="warm-up")


def await_message(inbox: queue.SimpleQueue[T], rest_s: float, on_rest: Callable[[], None]) -> T:
    """The next message, however long it takes to come. `on_rest` is called once, if none has come after `rest_s`."""
    try:
        return inbox.get(timeout=rest_s)
    except queue.Empty:
        on_rest()
        return inbox.get()


def listen(
    messages: socket.socket, take: Callable[[protocol.ToEngine], None], on_gone: Callable[[], None] = end_process
) -> None:
    """Have a thread give each of the agent's messages to `take`. `on_gone` is called when the agent has closed the
    socket."""
    threading.Thread(target=_read, args=(messages, take, on_gone), name="agent-reader", daemon=True).start()


def _read(messages: socket.socket, take: Callable[[protocol.ToEngine], None], on_gone: Callable[[], None]) -> None:
    unframer = protocol.Unframer()
    while True:
        try:
            data = messages.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            on_gone()
            return
        for body in unframer.feed(data):
            try:
                take(protocol.to_engine.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                _log.warning("refused a message of the agent: %s", error)
