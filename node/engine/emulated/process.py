"""The main program of an emulated engine's process: its clock, its threads and its sockets."""

from __future__ import annotations

import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Final

import psutil

from .. import protocol
from ..logfile import redirect_output
from ..mailbox import Outbox, listen
from .engine import EmulatedEngine, EmulationError, KvEnded, KvSent
from .transfers import EmulatedTransfers

__all__ = ["run_emulated_engine"]

AWAIT_S: Final = 0.05  # between looks at deadlines while no step runs and KV is awaited

SWITCH_S: Final = 0.0005
"""For so long a thread that moves KV may keep a step waiting; ten times less than by default."""

Letter = tuple[float, protocol.ToEngine | KvEnded | KvSent]
"""When it came, and what."""

Inbox = queue.SimpleQueue[Letter]


def run_emulated_engine(config: protocol.EngineConfig, messages: socket.socket, sockets: socket.socket) -> int:
    """Serve until told to stop. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if config.log_file:
        redirect_output(Path(config.log_file))
    sys.setswitchinterval(SWITCH_S)
    assert config.emulation is not None
    model = config.emulation.model
    outbox = Outbox(messages)
    inbox: Inbox = queue.SimpleQueue()

    def take(message: protocol.ToEngine | KvEnded | KvSent) -> None:
        inbox.put((time.monotonic(), message))

    listen(messages, take)
    started = time.monotonic()
    transfers = EmulatedTransfers(
        layers=model.layers,
        head_dim=model.head_dim,
        limit_bytes=protocol.transfer_buffer_bytes(config, psutil.virtual_memory().total),
        report=outbox.send,
    )
    threading.Thread(target=_accept, args=(sockets, transfers), name="kv-acceptor", daemon=True).start()
    try:
        engine = EmulatedEngine(config, transfers, tell=outbox.send, wake=take)
    except EmulationError as error:
        outbox.send(protocol.StartFailed(reason=str(error)))
        outbox.flush()
        return 1
    outbox.send(engine.ready(time.monotonic() - started))
    _loop(engine, inbox)
    outbox.flush()
    return 0


def _loop(engine: EmulatedEngine, inbox: Inbox) -> None:
    """Serve until `Stop`."""
    computing = True
    while True:
        wait_s = 0.0 if computing else None if engine.idle else AWAIT_S
        while (letter := _next(inbox, wait_s)) is not None:
            came_at, message = letter
            if isinstance(message, protocol.Stop):
                return
            engine.handle(message, came_at)
            wait_s = 0.0
        ends = engine.begin_step(time.monotonic())
        computing = ends is not None
        if ends is not None:
            time.sleep(max(0.0, ends - time.monotonic()))
            engine.end_step(time.monotonic())
        engine.check_deadlines(time.monotonic())


def _next(inbox: Inbox, wait_s: float | None) -> Letter | None:
    """The next message, if one comes in time; None: in whatever time."""
    try:
        return inbox.get(block=wait_s != 0.0, timeout=wait_s or None)
    except queue.Empty:
        return None


def _accept(sockets: socket.socket, transfers: EmulatedTransfers) -> None:
    """Take over accepted sockets; each comes with the bytes that were read from it."""
    while True:
        try:
            hello, descriptors, _, _ = socket.recv_fds(sockets, 64, 1)
        except OSError:
            return
        if not hello:
            return
        for descriptor in descriptors:
            transfers.attach(hello, socket.socket(fileno=descriptor))
