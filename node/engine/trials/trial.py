"""Engines that a bench or a self-test starts for itself and drives as an agent would, all on this machine."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, final

import msgspec
import trio

from ....kvtransport.errors import TransferError
from ....kvtransport.wire.dial_path import DialPath
from ....kvtransport.wire.sockets import read_link_hello
from ....kvtransport.wire.tickets import LinkTicket, issue_link, issue_transfer
from .. import protocol
from ..agent_side.engine_link import EngineError, EngineHandle, EngineLost, EngineStarter

LEASE_S = 600.0
DEADLINE_S = 120.0
HELLO_S = 5.0
FAST_GBPS, NEAR_S = 10.0, 0.0001  # what a node would predict of a link inside one machine


SEND_MODES: Final[tuple[protocol.WantedSendMode, ...]] = ("layerwise", "serialised")


class PromptCut(NamedTuple):
    """A prompt of which the first `tokens` are computed elsewhere, and an answer of `answer_tokens` to it."""

    prompt: Sequence[int]
    tokens: int
    answer_tokens: int


@dataclass
class TrialAnswer:
    """What an engine has made of a request so far, with the monotonic times of its first and last tokens."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    finish: str = ""
    reason: str = ""
    logprobs: list[protocol.TopTokens] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0

    def add(self, news: protocol.NewTokens, now: float) -> None:
        """Take in what a step has added."""
        if news.tokens and not self.tokens:
            self.first_at = now
        self.tokens += news.tokens
        self.logprobs += [news.logprobs] if news.logprobs is not None else []
        self.last_at = now
        self.cached = max(self.cached, news.cached_tokens)
        self.finish, self.reason = news.finish or self.finish, news.reason or self.reason


@final
class TrialEngine:
    """One engine process, and what it has said. `link` is set once it has started."""

    def __init__(self) -> None:
        self.link: EngineHandle | None = None
        self.answers: dict[str, TrialAnswer] = {}
        self.reports: dict[bytes, protocol.TransferReport] = {}
        self.iterations: list[protocol.Iterations] = []
        self.stats: protocol.EngineStats | None = None
        self._news = trio.Event()

    @property
    def ready(self) -> protocol.EngineReady:
        """How it has described itself."""
        assert self.link is not None
        assert self.link.ready is not None
        return self.link.ready

    def on_message(self, message: protocol.FromEngine) -> None:
        """What the engine says after it has started."""
        now = time.monotonic()
        match message:
            case protocol.Step(outputs=outputs, iterations=iterations):
                self.stats = message.stats
                for news in outputs:
                    self.answers.setdefault(news.request, TrialAnswer()).add(news, now)
                if iterations is not None:
                    self.iterations.append(iterations)
            case protocol.TransferReport():
                self.reports[message.transfer] = message
            case _:
                pass
        self._wake()

    async def watch(self) -> None:
        """Let nobody wait for an engine that is gone."""
        assert self.link is not None
        await self.link.wait_gone()
        self._wake()

    def stop(self) -> None:
        """Hang up: the process ends."""
        assert self.link is not None
        self.link.close()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def submit(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        send: tuple[protocol.Outlet, ...] = (),
        receive: tuple[protocol.Inlet, ...] = (),
        receive_tokens: int = 0,
        awaits_first_token: bool = False,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> str:
        """Ask for exactly `count` tokens, the likeliest ones unless a temperature is given. Raises EngineLost."""
        assert self.link is not None
        request = secrets.token_hex(8)
        self.link.send(
            protocol.Submit(
                request=request,
                prompt=tuple(prompt),
                sampling=protocol.Sampling(max_tokens=count, temperature=temperature, seed=seed, ignore_eos=True),
                deadline_s=DEADLINE_S,
                send=send,
                receive=receive,
                receive_tokens=receive_tokens,
                awaits_first_token=awaits_first_token,
            )
        )
        return request

    def send_first_token(self, request: str, token: int) -> None:
        """The token that the sender of its KV has written first. Raises EngineLost."""
        assert self.link is not None
        self.link.send(protocol.SetFirstToken(request=request, token=token))

    async def answer(self, request: str) -> TrialAnswer:
        """Wait for the end of a request. Raises EngineError when it ends in any other way than with its tokens."""
        await self.until(lambda: request in self.answers and self.answers[request].finish != "")
        answer = self.answers.pop(request)
        if answer.finish not in ("length", "stop"):
            raise EngineError(f"a request ended with {answer.finish!r} {answer.reason}".rstrip())
        return answer

    async def generate(self, prompt: Sequence[int], count: int) -> TrialAnswer:
        """A request of its own. Raises EngineError."""
        return await self.answer(self.submit(prompt, count))

    async def report(self, transfer: bytes) -> protocol.TransferReport:
        """Wait for the end of a transfer. Raises TransferError when it was not delivered."""
        await self.until(lambda: transfer in self.reports)
        report = self.reports.pop(transfer)
        if not report.delivered:
            raise TransferError(report.reason)
        return report

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what the engine has said makes it true. Raises EngineLost."""
        assert self.link is not None
        while not condition():
            if not self.link.running:
                raise EngineLost(f"the engine process {await self.link.wait_gone()}")
            await self._news.wait()


@final
class Trial:
    """Starts engines and joins them by links, over loopback unless told otherwise. Made by `open_trial`."""

    def __init__(self, server: EngineStarter, nursery: trio.Nursery, address: tuple[str, int]) -> None:
        self._server = server
        self._nursery = nursery
        self.path = DialPath(*address)  # to all of them
        self._listeners: dict[bytes, TrialEngine] = {}  # link -> the engine that its connections are for

    def serving(self, link: bytes) -> TrialEngine | None:
        """The engine that is dialled on this link."""
        return self._listeners.get(link)

    async def start(self, config: protocol.EngineConfig) -> TrialEngine:
        """An engine on one box. Raises EngineStartError."""
        engine = TrialEngine()
        await self.start_as(engine, config)
        return engine

    async def start_pipeline(self, config: protocol.EngineConfig, partition: tuple[int, ...]) -> TrialEngine:
        """A replica, one process per stage of so many layers; its head. Raises EngineStartError."""
        return (await self.start_stages(config, partition))[0]

    async def start_stages(
        self,
        config: protocol.EngineConfig,
        partition: tuple[int, ...],
        models: Sequence[str] = (),
        tp: Sequence[int] = (),
    ) -> list[TrialEngine]:
        """The same; all stages, the head first. `models`: folders, `tp`: workers, by stage."""
        ends: dict[int, list[protocol.PipeEnd]] = {stage: [] for stage in range(len(partition))}
        engines = {stage: TrialEngine() for stage in ends}
        last = len(partition) - 1
        pairs: list[tuple[Literal["control", "data"], int, int]] = []
        pairs += [("control", 0, stage) for stage in range(1, last + 1)]
        pairs += [("data", stage, stage + 1) for stage in range(last)]
        for kind, low, high in pairs:
            ticket = self.join(engines[high])
            ends[low].append(protocol.PipeEnd(stage=high, kind=kind, ticket=ticket, dial=self.path))
            ends[high].append(protocol.PipeEnd(stage=low, kind=kind, ticket=ticket))
        for stage in reversed(ends):  # the head last: it dials the others, and it alone waits for the model
            own = msgspec.structs.replace(config, partition=partition, stage=stage, pipes=tuple(ends[stage]))
            if models:
                own = msgspec.structs.replace(own, model=models[stage])
            if tp:
                own = msgspec.structs.replace(own, tp=tp[stage])
            await self.start_as(engines[stage], own)
        return list(engines.values())

    async def start_as(self, engine: TrialEngine, config: protocol.EngineConfig) -> None:
        """Start the process of an engine which may be dialled already. Raises EngineStartError."""
        engine.link = await self._server.start_engine(config, engine.on_message)
        self._nursery.start_soon(engine.watch)

    def join(self, receiver: TrialEngine) -> LinkTicket:
        """A link to this engine, for whoever has the ticket."""
        ticket = issue_link(LEASE_S, secrets.token_bytes)
        self.listen(ticket, receiver)
        return ticket

    def listen(self, ticket: LinkTicket, receiver: TrialEngine) -> None:
        """Let this engine be dialled by whoever has that ticket."""
        self._listeners[ticket.link] = receiver

    def transfer_ends(
        self, link: LinkTicket, codec: str, shape: protocol.EngineReady, *, pacing: protocol.WantedSendMode = "auto"
    ) -> tuple[tuple[protocol.Outlet, ...], tuple[protocol.Inlet, ...]]:
        """Both ends of one transfer between two engines of one worker each."""
        ticket = issue_transfer(link.link, codec, DEADLINE_S, secrets.token_bytes)
        whole = protocol.KvSlice(first_layer=0, last_layer=shape.layers, first_head=0, last_head=shape.kv_heads)
        outlet = protocol.Outlet(
            slice=whole,
            ticket=ticket,
            link=link,
            paths=(self.path,),
            gbps=FAST_GBPS,
            rtt_s=NEAR_S,
            pacing=pacing,
        )
        return (outlet,), (protocol.Inlet(slice=whole, ticket=ticket, link=link),)

    async def transfer_prompt(
        self,
        prefill: TrialEngine,
        decode: TrialEngine,
        cut: PromptCut,
        *,
        codec: str = "raw",
        pacing: protocol.WantedSendMode = "auto",
    ) -> TrialAnswer:
        """The prompt's first part on one engine, the rest and the answer on the other. Raises EngineError or
        TransferError."""
        send, receive = self.transfer_ends(self.join(decode), codec, decode.ready, pacing=pacing)
        request = decode.submit(cut.prompt, cut.answer_tokens, receive=receive, receive_tokens=cut.tokens)
        begun = prefill.submit(cut.prompt[: cut.tokens], 1, send=send)
        await prefill.answer(begun)
        answer = await decode.answer(request)
        await prefill.report(send[0].ticket.transfer)
        return answer


@asynccontextmanager
async def open_trial(server: EngineStarter, address: tuple[str, int] = ("127.0.0.1", 0)) -> AsyncIterator[Trial]:
    """A trial that listens there. The engines end with the fork server."""
    listener = trio.socket.from_stdlib_socket(socket.create_server(address))
    with listener:
        async with trio.open_nursery() as nursery:
            host, port = listener.getsockname()
            trial = Trial(server, nursery, (host, port))
            nursery.start_soon(_accept, listener, trial)
            yield trial
            nursery.cancel_scope.cancel()


async def _accept(listener: trio.socket.SocketType, trial: Trial) -> None:
    """Hand each connection to the engine that it is for, as an agent does it."""
    while True:
        accepted, _ = await listener.accept()
        with socket.socket(fileno=accepted.detach()) as connection:
            connection.setblocking(True)
            hello = await trio.to_thread.run_sync(read_link_hello, connection, HELLO_S)
            engine = trial.serving(hello.link)
            if engine is not None and engine.link is not None:
                with suppress(EngineLost):  # who dials an engine that is gone is hung up on
                    engine.link.attach(hello.pack(), connection)
