"""What every engine process does, whatever computes in it: its log, its signals, its sockets to the agent, its end.

    fork server --fork--> enter_process, EngineBackend.run --> serve_agent --> an EngineProgram

One thread owns the engine and runs `EngineProgram.serve`. A reader and a writer serve the message socket, and a fourth
thread takes over connections that the agent has accepted. When the agent closes the message socket, or dies, the
process ends (`mailbox`).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from ..box.heap import release_library_pages, return_freed_memory
from . import protocol
from .mailbox import Outbox, end_process, listen

_log = logging.getLogger(__name__)

MAX_REASON: Final = 400  # characters of an error that are shown; the log has all of it
_MAX_HELLO = 64  # bytes that a connection says first


def explain(error: BaseException) -> str:
    """An error in one line of bounded length."""
    return " ".join(str(error).split())[:MAX_REASON] or type(error).__name__


class StartError(Exception):
    """The engine cannot start; the text is one line for the user."""


class AgentSockets(NamedTuple):
    """An engine's ends of its two socket pairs with the agent: messages, and connections that come as descriptors."""

    messages: socket.socket
    connections: socket.socket

    def close(self) -> None:
        """In this process."""
        self.messages.close()
        self.connections.close()


class DescribedEngine(Protocol):
    """An engine whose model is loaded, for the main thread."""

    def ready(self, load_s: float) -> protocol.EngineReady:
        """Describe the engine, which took so long to load."""

    def close(self) -> None:
        """All has been said: let go of other processes."""


class LoadedEngine(DescribedEngine, Protocol):
    """An engine that has its process for itself."""

    def serve(self) -> None:
        """Serve until the agent sends `Stop`."""


Engine = TypeVar("Engine", bound=DescribedEngine, covariant=True)


class Program(Protocol[Engine]):
    """An engine in its process: `take`, `attach` by any thread, `load` by the main one."""

    def take(self, message: protocol.ToEngine) -> None:
        """The agent wants this; `serve` is to deal with it."""

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """The agent has accepted a connection, which has said `hello`. Takes over the socket."""

    def load(self) -> Engine:
        """Load the model. Raises StartError."""


EngineProgram = Program[LoadedEngine]


def enter_process(log_file: str | None) -> None:
    """First of all in a forked process: Ctrl-C is for the agent, SIGTERM ends it, and output goes to its log; so does
    where it was when a fault in C++ code ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if log_file:
        redirect_output(Path(log_file))
    faulthandler.enable()


def redirect_output(log: Path) -> None:
    """Send stdout and stderr, C++ code's included, to the end of a file: the terminal is the user's."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def serve_agent(sockets: AgentSockets, make_program: Callable[[Outbox], EngineProgram]) -> int:
    """Load an engine and serve until told to stop. Returns the exit status."""
    outbox = Outbox(sockets.messages)
    program = make_program(outbox)
    connect(sockets, outbox, program)
    engine = load(program, outbox)
    if engine is None:
        return 1
    engine.serve()
    outbox.flush()
    engine.close()
    return 0


def connect(
    sockets: AgentSockets, outbox: Outbox, program: Program[DescribedEngine], on_gone: Callable[[], None] = end_process
) -> None:
    """Have threads give a program what its agent sends, until that hangs up (`on_gone`)."""

    def take(message: protocol.ToEngine) -> None:
        if isinstance(message, protocol.AskBeat):
            outbox.send(protocol.Beat())  # by this thread: the others may compute for long
        else:
            program.take(message)

    listen(sockets.messages, take, on_gone)
    accept = (sockets.connections, program.attach)
    threading.Thread(target=_accept, args=accept, name="kv-acceptor", daemon=True).start()


def load(program: Program[Engine], outbox: Outbox) -> Engine | None:
    """Load the model, and tell the agent what came of it; None: it cannot be."""
    started = time.monotonic()
    try:
        engine = program.load()
    except StartError as error:
        _log.exception("the engine does not start")
        outbox.send(protocol.StartFailed(reason=str(error)))
        outbox.flush()
        return None
    ready = engine.ready(time.monotonic() - started)
    return_freed_memory()
    release_library_pages()  # loading has used other parts of them than serving will
    outbox.send(ready)
    return engine


def _accept(connections: socket.socket, attach: Callable[[bytes, socket.socket], None]) -> None:
    """Take over accepted sockets; each packet is what the connection said first, with the descriptor beside it."""
    while True:
        try:
            hello, descriptors, _, _ = socket.recv_fds(connections, _MAX_HELLO, 1)
        except OSError:
            return
        if not hello:
            return
        for descriptor in descriptors:
            attach(hello, socket.socket(fileno=descriptor))
