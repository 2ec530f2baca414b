"""The agent's end of engine processes: the fork server, and one link per engine. Lifetimes are
sockets: an engine ends with its message socket, the server with its last channel, however the agent
ends."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, final

import msgspec
import trio

from .. import protocol
from ..api import protocol as api

Ready = TypeVar("Ready", protocol.EngineReady, api.ApiReady)

EXIT_STATUS_WAIT_S = 1.0


class EngineError(Exception):
    """An engine process failed. The text is one line for the user."""


class EngineStartError(EngineError):
    """An engine could not be started."""


class EngineRefused(EngineStartError):
    """The engine process says itself why it cannot serve this model with these settings: its owner can mend that."""


class EngineLost(EngineError):
    """A running engine is gone."""


class EngineHandle(Protocol):
    """One engine process for those who give it work: an `EngineLink`, or in tests a value."""

    @property
    def ready(self) -> protocol.EngineReady | None:
        """What it says of itself, once it has started."""

    @property
    def running(self) -> bool:
        """Whether requests may be submitted."""

    def send(self, message: protocol.EngineMessage) -> None:
        """Queue a message. Raises EngineLost."""

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        """Give it an accepted socket whose `hello` has been read; the caller closes its copy. Raises EngineLost when
        the engine does not take it."""

    async def wait_gone(self) -> str:
        """Wait until the process is gone and return how it ended, for people."""

    def exit_text(self) -> str:
        """How the process ended."""

    @property
    def ended_by_other(self) -> bool:
        """Whether it ended in another engine that shared it, so that this one need not be to blame."""

    def close(self) -> None:
        """Hang up: the process ends."""


def ignore_starting(progress: protocol.Starting) -> None:
    """For who waits for an engine without telling anybody how far it is."""


class EngineStarter(Protocol):
    """What starts engines: a `ForkServerClient`, or in tests a value."""

    @property
    def gone(self) -> bool:
        """Whether no engine can be started on it any more."""

    @property
    def version(self) -> str:
        """Of what it has imported, once it is ready."""

    async def wait_ready(self) -> None:
        """Wait until engines can be forked. Raises EngineStartError."""

    async def start_engine(
        self,
        config: protocol.EngineConfig,
        on_message: Callable[[protocol.FromEngine], None],
        on_starting: Callable[[protocol.Starting], None] = ignore_starting,
    ) -> EngineHandle:
        """Start an engine and wait until its model is loaded; `on_message` is called for everything it says later,
        `on_starting` for how far it is. Raises EngineStartError."""

    async def start_api(self, config: api.ApiConfig, on_message: Callable[[api.FromApi], None]) -> ApiLink:
        """Start an API process and wait until it serves, as `start_engine` does."""


@final
class ForkServerClient:
    """Connection to a fork server, this node's own or one shared by the nodes of a box: an `EngineStarter`."""

    def __init__(self, channel: trio.socket.SocketType, nursery: trio.Nursery, log: Path | None) -> None:
        self._channel = channel
        self._nursery = nursery
        self._log = log
        self._next = 0
        self._exits: dict[int, ProcessLink[Any]] = {}
        self._ready = trio.Event()
        self._ended = trio.Event()
        self._failure: str | None = None
        self.preload_s: float | None = None
        self.version = ""  # of what it has imported, once it is ready

    @property
    def gone(self) -> bool:
        return self._failure is not None

    async def wait_ready(self) -> None:
        await self._ready.wait()
        if self._failure is not None:
            raise EngineStartError(self._failure)

    async def wait_ended(self) -> None:
        """Wait until it has ended."""
        await self._ended.wait()

    async def start_engine(
        self,
        config: protocol.EngineConfig,
        on_message: Callable[[protocol.FromEngine], None],
        on_starting: Callable[[protocol.Starting], None] = ignore_starting,
    ) -> EngineLink:
        await self.wait_ready()
        engine = self._number()
        link, theirs = open_link(EngineLink, on_message)
        link.on_starting = on_starting
        await self._start(engine, protocol.Spawn(engine=engine, config=config), link, theirs, self._log)
        return link

    async def start_api(self, config: api.ApiConfig, on_message: Callable[[api.FromApi], None]) -> ApiLink:
        await self.wait_ready()
        engine = self._number()
        link, theirs = open_link(ApiLink, on_message)
        await self._start(engine, api.SpawnApi(engine=engine, config=config), link, theirs, config.log_file)
        return link

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    async def _start(
        self,
        engine: int,
        spawn: protocol.EngineMessage,
        link: ProcessLink[Any],
        theirs: list[socket.socket],
        log: Path | str | None,
    ) -> None:
        """Have a process forked for the far ends of a link, and wait until it has started."""
        self._exits[engine] = link
        try:
            # send_fds wants the standard library's socket; the duplicate shares the connection.
            with socket.fromfd(self._channel.fileno(), socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
                socket.send_fds(channel, [protocol.pack(spawn)], [end.fileno() for end in theirs])
        except OSError as error:
            link.close()
            raise EngineStartError(f"the fork server is gone: {error.strerror}") from error
        finally:
            for end in theirs:
                end.close()
        self._nursery.start_soon(link.serve)
        try:
            await link.wait_started(log)
        except trio.Cancelled:
            link.close()
            raise

    async def serve(self) -> None:
        """Read the server's reports until it is gone."""
        while True:
            try:
                packet = await self._channel.recv(1 << 16)
            except (OSError, trio.ClosedResourceError):
                packet = b""
            if not packet:
                self._failure = self._failure or f"the fork server ended{_refer_to(self._log)}"
                self._ready.set()
                self._ended.set()
                return
            match protocol.fork_server_event.decode(packet):
                case protocol.Preloaded(version=version, seconds=seconds):
                    self.preload_s, self.version = seconds, version
                    self._ready.set()
                case protocol.PreloadFailed(reason=reason):
                    self._failure = reason
                    self._ready.set()
                case protocol.EngineExited(engine=engine, status=status, culprit=culprit):
                    link = self._exits.pop(engine, None)
                    if link is not None:
                        link.note_exit(status, culprit)


class ProcessLink(Generic[Ready]):
    """The sockets of one forked process: `decoder` reads what it says, and it says `ready_type` once it has started."""

    starting: ClassVar = "the engine process {how} while it was loading the model"

    def __init__(
        self,
        messages: trio.socket.SocketType,
        sockets: socket.socket,
        on_message: Callable[[Any], None],
        decoder: msgspec.msgpack.Decoder[Any],
        ready_type: type[Ready],
    ) -> None:
        self._messages = messages
        sockets.setblocking(False)  # the event loop waits for no engine
        self._sockets = sockets
        self._on_message = on_message
        self._decoder = decoder
        self._ready_type: type[Ready] = ready_type
        self._outbox_send, self._outbox = trio.open_memory_channel[protocol.EngineMessage](float("inf"))
        self._started = trio.Event()
        self._gone = trio.Event()
        self._exited = trio.Event()
        self._failure: str | None = None
        self._refusal: str | None = None  # said by the engine itself, while it was starting
        self._status: int | None = None
        self._culprit = ""
        self.ready: Ready | None = None
        self.on_starting: Callable[[protocol.Starting], None] = ignore_starting

    def __repr__(self) -> str:
        state = "gone" if self._gone.is_set() else "ready" if self.ready else "starting"
        return f"<ProcessLink {state} {self.ready or ''}>"

    @property
    def running(self) -> bool:
        return self.ready is not None and not self._gone.is_set()

    def send(self, message: protocol.EngineMessage) -> None:
        if self._gone.is_set():
            raise EngineLost("the engine process is gone")
        self._outbox_send.send_nowait(message)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        try:
            socket.send_fds(self._sockets, [hello], [connection.fileno()])
        except OSError as error:
            raise EngineLost(f"the engine process takes no connections: {error.strerror}") from error

    async def wait_started(self, log: Path | str | None) -> None:
        """Wait for the model. Raises EngineStartError."""
        await self._started.wait()
        if self.ready is not None:
            return
        if self._refusal is not None:
            raise EngineRefused(self._refusal)
        if self._failure is None:
            await self._wait_exit()
            self._failure = f"{self.starting.format(how=self.exit_text())}{_refer_to(log)}"
        raise EngineStartError(self._failure)

    async def wait_gone(self) -> str:
        await self._gone.wait()
        await self._wait_exit()
        return self.exit_text()

    async def _wait_exit(self) -> None:
        with trio.move_on_after(EXIT_STATUS_WAIT_S):
            await self._exited.wait()

    def exit_text(self) -> str:
        if self.ready is not None and self._failure is not None:
            return f"ended: {self._failure}"
        where = f", in the engine of {self._culprit}" if self._culprit else ""
        if self._status is None:
            return "ended"
        if self._status < 0:
            name = signal.Signals(-self._status).name
            return f"was killed by {name}{where}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"ended with status {self._status}{where}"

    @property
    def ended_by_other(self) -> bool:
        return bool(self._culprit)

    def note_exit(self, status: int, culprit: str = "") -> None:
        """The fork server has seen the process end. `culprit`: in another engine that shared it."""
        self._status, self._culprit = status, culprit
        self._exited.set()

    def close(self) -> None:
        self._messages.close()
        self._sockets.close()

    async def serve(self) -> None:
        """Carry messages both ways until the process is gone or the task is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_messages)
            try:
                await self._read_messages()
            finally:
                self._gone.set()
                self._started.set()
                self.close()
                nursery.cancel_scope.cancel()

    async def _write_messages(self) -> None:
        async for message in self._outbox:
            data = memoryview(protocol.frame(message))
            try:
                while data:
                    data = data[await self._messages.send(data) :]
            except (OSError, trio.ClosedResourceError):
                return  # the reader sees the end of the stream and says so

    async def _read_messages(self) -> None:
        unframer = protocol.Unframer()
        while True:
            try:
                data = await self._messages.recv(1 << 16)
            except (OSError, trio.ClosedResourceError):
                return
            if not data:
                return
            try:
                for body in unframer.feed(data):
                    self._dispatch(body)
            except protocol.EngineProtocolError as error:
                self._failure = f"the engine process sent what is no message: {error}"
                return

    def _dispatch(self, body: bytes) -> None:
        try:
            message = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._failure = f"the engine process sent a message that is none: {error}"
            self.close()
            return
        match message:
            case self._ready_type():
                self.ready = message
                self._started.set()
            case protocol.Starting():
                self.on_starting(message)
            case protocol.StartFailed(reason=reason):
                self._failure = self._refusal = reason
                self._started.set()
            case protocol.EngineFailed(reason=reason):
                self._failure = reason  # its end follows at once
            case _:
                self._on_message(message)


@final
class EngineLink(ProcessLink[protocol.EngineReady]):
    """The sockets of one engine process: an `EngineHandle`."""

    def __init__(
        self,
        messages: trio.socket.SocketType,
        sockets: socket.socket,
        on_message: Callable[[protocol.FromEngine], None],
    ) -> None:
        super().__init__(messages, sockets, on_message, protocol.from_engine, protocol.EngineReady)


@final
class ApiLink(ProcessLink[api.ApiReady]):
    """The sockets of an API process."""

    starting: ClassVar = "its process {how}"

    def __init__(
        self, messages: trio.socket.SocketType, sockets: socket.socket, on_message: Callable[[api.FromApi], None]
    ) -> None:
        super().__init__(messages, sockets, on_message, api.from_api, api.ApiReady)


Link = TypeVar("Link", EngineLink, ApiLink)


def open_link(kind: type[Link], on_message: Callable[[Any], None]) -> tuple[Link, list[socket.socket]]:
    """A link, and the two sockets that its process is to be given."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    our_sockets, their_sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return kind(trio.socket.from_stdlib_socket(ours), our_sockets, on_message), [theirs, their_sockets]


def _refer_to(log: Path | str | None) -> str:
    return f"; see {log}" if log is not None else ""
