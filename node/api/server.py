"""The API process of a box, run by its agent: started where HTTP was asked for or when somebody first asks, again when
it dies, and ended when nobody has asked for a while."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final, final

import trio

from ...bootstrap import Address
from ...bootstrap.errors import AddressError, PortInUse
from ..engine.agent_side.engine_link import ApiLink, EngineLost, EngineStarter, EngineStartError
from ..engine.api.protocol import (
    CARRY,
    LISTENER,
    STREAM,
    ApiCancel,
    ApiConfig,
    ApiQuestion,
    ApiReply,
    ApiSubmit,
    FromApi,
    KeyDigest,
    ServiceState,
)
from ..engine.backend import ModelFiles
from ..engine.protocol import EngineMessage
from ..http.answering import ApiUnavailable
from ..requests.gateway import Gateway
from ..requests.local_clients import LocalClients
from ..settings import ApiSettings
from .accounts import KeyAccounts
from .requests import ApiRequests

Answer = Callable[[bytes], Awaitable[bytes]]
"""Answers a question of what is mounted beside vLLM's routes."""
_IN_USE: Final = (errno.EADDRINUSE,)
_BACKLOG: Final = 2048


def api_config(model: ModelFiles, settings: ApiSettings, log: Path) -> ApiConfig:
    """What the API process of a box is started with."""
    return ApiConfig(
        model=str(model.folder),
        names=settings.names or (model.info.name,),
        options=settings.options,
        keys=tuple(KeyDigest(key.name, sha256(key.secret.encode()).digest()) for key in settings.keys),
        is_open=settings.needs_no_key,
        max_body_bytes=settings.max_body_bytes,
        deadline_s=settings.deadline_s,
        admin_token=settings.admin_token,
        log_file=str(log),
    )


def open_listener(listen: Address) -> socket.socket:
    """A socket that listens there; port 0 for any. Raises AddressError or PortInUse."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen.host.strip("[]"), listen.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        kind = PortInUse if error.errno in _IN_USE else AddressError
        raise kind(f"http: cannot listen on {listen}: {error.strerror or error}; give another port") from error
    return listener


@final
@dataclass(slots=True, eq=False)
class _Life:
    """One API process."""

    link: ApiLink
    requests: ApiRequests
    nursery: trio.Nursery
    streams: set[trio.SocketStream] = field(default_factory=set)
    told: ServiceState | None = None


@final
class ApiServer:
    """Runs the API process. `wait_server` is what forks it; `state`, what the network can do now."""

    def __init__(
        self,
        config: ApiConfig,
        *,
        wait_server: Callable[[], Awaitable[EngineStarter]],
        state: Callable[[], ServiceState],
        gateway: Gateway,
        clients: LocalClients,
        accounts: KeyAccounts,
        say: Callable[[str], None],
        settings: ApiSettings,
    ) -> None:
        self.accounts = accounts
        self.answers: dict[str, Answer] = {}  # by what is asked
        self._config = config
        self._wait_server = wait_server
        self._state = state
        self._gateway = gateway
        self._clients = clients
        self._say = say
        self._settings = settings
        self._listener: socket.socket | None = None
        self._life: _Life | None = None
        self._wanted = trio.Event()
        self._changed = trio.Event()  # a life has begun, or could not
        self._failure = ""
        self._failures = 0
        self._used_at = 0.0
        self._carried = 0
        self.carry: Callable[[trio.SocketStream], Awaitable[None]] = _carry_nothing
        """Carries the HTTP request that comes on a stream to a box of the model that it names."""

    def __repr__(self) -> str:
        return f"<ApiServer {'serves' if self._life is not None else 'waits'} failures={self._failures}>"

    @property
    def is_idle(self) -> bool:
        """Whether it waits for no answer."""
        return self._life is None or self._life.requests.is_idle

    def listen(self, listen: Address) -> Address:
        """Serve there too, from the next start on; returns where. The socket stays this process's, so that no caller is
        turned away while the API process is started again. Raises AddressError or PortInUse."""
        self._listener = open_listener(listen)
        self._wanted.set()
        return Address(listen.host, self._listener.getsockname()[1])

    async def connect(self) -> trio.SocketStream:
        """A fresh connection to its HTTP server, which is started for it if need be. Who comes this way needs no key:
        the caller vouches for it, and names it in `X-P2P-Client`. Raises ApiUnavailable."""
        self._used_at = trio.current_time()
        self._wanted.set()
        changed = self._changed
        if self._life is None:
            await changed.wait()
        if (life := self._life) is None:
            raise ApiUnavailable(self._failure or "the API server of this node does not start")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                life.link.attach(STREAM, theirs)
            except EngineLost as error:
                ours.close()
                raise ApiUnavailable(str(error)) from error
        life.streams = {stream for stream in life.streams if stream.socket.fileno() >= 0}
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        life.streams.add(stream)
        return stream

    async def run(self) -> None:
        """Keep it running until cancelled. Raises EngineStartError where it listens and does not start at all: nothing
        has ever worked here, and its owner is watching."""
        try:
            while True:
                await self._wanted.wait()
                await self._live()
        finally:
            if self._listener is not None:
                self._listener.close()

    # ---- one life -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """From a start to an end."""
        settings, began = self._settings, trio.current_time()
        async with trio.open_nursery() as nursery:
            try:
                server = await self._wait_server()
                link = await server.start_api(self._config, self._take)
            except EngineStartError as error:
                self._failure = f"the API server does not start: {error}"
                if self._listener is not None and self._life is None and not self._failures:
                    raise type(error)(self._failure) from error
                link = None
            if link is not None:
                began = trio.current_time()
                await self._serve(link, nursery)
                nursery.cancel_scope.cancel()
        self._tell_changed()
        if self._wanted.is_set():  # it has not ended because it was idle
            self._failures = 0 if trio.current_time() - began > settings.healthy_s else self._failures + 1
            self._say(f"{self._failure}; it is started again")
            await trio.sleep(min(settings.max_backoff_s, settings.first_backoff_s * 2.0 ** (self._failures - 1)))

    async def _serve(self, link: ApiLink, nursery: trio.Nursery) -> None:
        """Until the process is gone."""
        requests = ApiRequests(self._gateway, self._clients, self.accounts, _ignoring_lost(link), nursery)
        life = self._life = _Life(link, requests, nursery)
        self._used_at = trio.current_time()
        try:
            if self._listener is not None:
                link.attach(LISTENER, self._listener)
            self._tell_changed()
            nursery.start_soon(requests.run)
            nursery.start_soon(self._tell_state, life)
            self._failure = f"the API server {await link.wait_gone()}"
        except EngineLost as error:
            self._failure = str(error)
        finally:
            self._life = None
            requests.stop_all()
            link.close()

    async def _tell_state(self, life: _Life) -> None:
        """What the network can do, when it is another; and end what nobody has used for long."""
        while True:
            state = self._state()
            if state != life.told:
                _ignoring_lost(life.link)(state)
                self._say_whether_ready(life.told, state)
                life.told = state
            await trio.sleep(self._settings.state_s)
            if any(stream.socket.fileno() >= 0 for stream in life.streams) or not life.requests.is_idle:
                self._used_at = trio.current_time()
            if self._listener is None and trio.current_time() - self._used_at > self._settings.idle_s:
                self._wanted = trio.Event()
                life.link.close()

    def _say_whether_ready(self, before: ServiceState | None, now: ServiceState) -> None:
        """Whoever waits for the line may ask once it is there: not before an engine can answer."""
        if self._listener is None:
            return
        port = self._listener.getsockname()[1]
        if now.serving and (before is None or not before.serving):
            self._say(f"API server ready on port {port}")
        elif before is None:
            self._say(f"API server listens on port {port}; it answers once the engine is ready")
        elif before.serving and not now.serving:
            self._say(f"API server on port {port}: {now.reason}")

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _take(self, message: FromApi) -> None:
        """What the API process says."""
        life = self._life
        if life is None:
            return
        match message:
            case ApiSubmit():
                life.requests.submit(message)
            case ApiCancel():
                life.requests.cancel(message)
            case ApiQuestion():
                life.nursery.start_soon(self._answer, life, message)
            case _:
                pass  # it has started, which its link knows

    def _carry(self, life: _Life) -> bytes:
        """Take one request of the API process for another box; returns what its socket is called there."""
        self._carried += 1
        name = CARRY + str(self._carried).encode()
        ours, theirs = socket.socketpair()
        with theirs:
            life.link.attach(name, theirs)
        life.nursery.start_soon(self.carry, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
        return name

    async def _answer(self, life: _Life, question: ApiQuestion) -> None:
        if question.what == CARRY.decode():
            with suppress(EngineLost):
                _ignoring_lost(life.link)(ApiReply(number=question.number, body=self._carry(life)))
            return
        answer = self.answers.get(question.what)
        if answer is None:
            reply = ApiReply(number=question.number, error=f"{question.what}: this node has no answer to that")
        else:
            reply = ApiReply(number=question.number, body=await answer(question.body))
        _ignoring_lost(life.link)(reply)


async def _carry_nothing(stream: trio.SocketStream) -> None:
    """Before this node is in a network."""
    await stream.aclose()


def _ignoring_lost(link: ApiLink) -> Callable[[EngineMessage], None]:
    """Sends, or does nothing where the process is gone: what it was told is of no use to anybody then."""

    def send(message: EngineMessage) -> None:
        if link.running:
            link.send(message)

    return send
