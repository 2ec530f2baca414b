"""Real engine processes that send KV to one another, and what stands between them in a test."""

import random
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import trio

from p2pserve.coordinator.prefixes.held import unpack_names
from p2pserve.kvtransport.routing.reslice import ShardLayout, reslice
from p2pserve.kvtransport.wire.dial_path import DialPath as KvPath
from p2pserve.kvtransport.wire.sockets import read_link_hello
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node.engine import protocol
from p2pserve.node.engine.agent_side.engine_link import EngineLink, ForkServerClient
from p2pserve.node.engine.agent_side.fork_server import open_fork_server

from .devices import BLOCK, SETTINGS

COUNT = 16
ALL = protocol.KvSlice(first_layer=0, last_layer=4, first_head=0, last_head=2)  # of the random model


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Noise that starts differently for each length and seed, so that no prompt is another's prefix."""
    rng = random.Random(f"{length} {seed}")
    return tuple(rng.randrange(1, 4096) for _ in range(length))


@dataclass
class Result:
    """What an engine made of a request."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    finish: str = ""
    reason: str = ""
    stop_reason: int | None = None
    logprobs: list[protocol.TopTokens] = field(default_factory=list)
    prompt_logprobs: protocol.TopTokens | None = None


@dataclass
class Engine:
    """One engine process and what it has said."""

    link: EngineLink | None = None
    results: dict[str, Result] = field(default_factory=dict)
    reports: dict[tuple[bytes, bytes], protocol.TransferReport] = field(default_factory=dict)
    links: list[protocol.LinkReport] = field(default_factory=list)
    iterations: list[protocol.Iterations] = field(default_factory=list)
    starting: list[protocol.Starting] = field(default_factory=list)
    stats: protocol.EngineStats | None = None
    held: set[int] = field(default_factory=set)  # names of prefixes in its cache
    _news: trio.Event = field(default_factory=trio.Event)

    def on_message(self, message: protocol.FromEngine) -> None:
        match message:
            case protocol.Step(outputs=outputs, stats=stats, iterations=iterations):
                self.stats = stats
                if iterations is not None:
                    self.iterations.append(iterations)
                for output in outputs:
                    result = self.results.setdefault(output.request, Result())
                    result.tokens += output.tokens
                    result.cached = max(result.cached, output.cached_tokens)
                    result.finish = output.finish or result.finish
                    result.reason = output.reason or result.reason
                    result.stop_reason = output.stop_reason
                    result.prompt_logprobs = output.prompt_logprobs or result.prompt_logprobs
                    if output.logprobs is not None:
                        result.logprobs.append(output.logprobs)
                    assert (output.finish == "refused") == bool(output.reason)
            case protocol.TransferReport():
                key = (message.transfer, message.link)
                assert key not in self.reports, "a transfer ends once on each of its links"
                self.reports[key] = message
            case protocol.LinkReport():
                self.links.append(message)
            case protocol.HeldBlocks(held=held, lost=lost):
                self.held = (self.held - set(unpack_names(lost))) | set(unpack_names(held))
            case _:
                raise AssertionError(f"not expected of a running engine: {message}")
        self._news.set()
        self._news = trio.Event()

    def send(self, message: protocol.EngineMessage) -> None:
        assert self.link is not None
        self.link.send(message)

    def attach(self, hello: bytes, connection: socket.socket) -> None:
        assert self.link is not None
        with connection:
            self.link.attach(hello, connection)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what the engine has said makes it true."""
        with trio.fail_after(30):
            while not condition():
                await self._news.wait()

    async def report(self, way: "Way") -> protocol.TransferReport:
        """How a transfer that it sends has ended."""
        await self.until(lambda: way.key in self.reports)
        return self.reports[way.key]

    async def finished(self, request: str) -> Result:
        await self.until(lambda: request in self.results and self.results[request].finish != "")
        return self.results[request]

    def submit(
        self,
        prompt: tuple[int, ...],
        *,
        count: int = COUNT,
        deadline_s: float = 60.0,
        send: "Ways" = (),
        receive: "Ways" = (),
        receive_tokens: int | None = None,
        sampling: protocol.Sampling | None = None,
        awaits_first_token: bool = False,
        cache_salt: str = "",
    ) -> str:
        request = secrets.token_hex(4)
        send, receive = ((ways,) if isinstance(ways, Way) else ways for ways in (send, receive))
        self.send(
            protocol.Submit(
                request=request,
                prompt=prompt,
                sampling=sampling or protocol.Sampling(max_tokens=1 if send else count, ignore_eos=True),
                deadline_s=deadline_s,
                send=tuple(way.outlet for way in send),
                receive=tuple(way.inlet for way in receive),
                receive_tokens=(len(prompt) if receive_tokens is None else receive_tokens) if receive else 0,
                awaits_first_token=awaits_first_token,
                cache_salt=cache_salt,
            )
        )
        return request

    async def generate(self, prompt: tuple[int, ...], *, count: int = COUNT, cache_salt: str = "") -> Result:
        """A request without any KV transfer."""
        return await self.finished(self.submit(prompt, count=count, cache_salt=cache_salt))

    @property
    def prefilled(self) -> int:
        """How many positions of prompts it has computed."""
        return sum(each.prefill_tokens for each in self.iterations)

    @property
    def free(self) -> int:
        assert self.stats is not None
        return self.stats.kv_free_tokens


@dataclass(frozen=True)
class Way:
    """A transfer, the link it takes, and where that is dialled: what one worker sends to one other."""

    ticket: TransferTicket
    link: LinkTicket
    port: int
    pacing: Literal["auto", "layerwise", "serialised"] = "auto"
    slice: protocol.KvSlice = ALL
    source: int = 0  # the tensor-parallel ranks at both ends
    target: int = 0
    pace_bytes_s: int = 0

    @property
    def key(self) -> tuple[bytes, bytes]:
        """What its report is known by."""
        return self.ticket.transfer, self.ticket.link

    @property
    def outlet(self) -> protocol.Outlet:
        path = KvPath("127.0.0.1", self.port, pace_bytes_s=self.pace_bytes_s)
        return protocol.Outlet(
            rank=protocol.WorkerRank(tp=self.source),
            slice=self.slice,
            ticket=self.ticket,
            link=self.link,
            paths=(path,),
            gbps=10.0,
            rtt_s=0.0001,
            pacing=self.pacing,
        )

    @property
    def inlet(self) -> protocol.Inlet:
        return protocol.Inlet(
            rank=protocol.WorkerRank(tp=self.target), slice=self.slice, ticket=self.ticket, link=self.link
        )

    def again(self) -> "Way":
        """Another transfer on the same link."""
        return replace(self, ticket=issue_transfer(self.link.link, "raw", 30.0, secrets.token_bytes))


Ways = Way | Sequence[Way]


def ways_between(source_tp: int, target_tp: int, port: int) -> list[Way]:
    """One prompt's KV from every worker of an engine to every worker of another that shares heads with it."""
    transfer = secrets.token_bytes(16)
    ways = []
    for piece in reslice(ShardLayout.uniform(source_tp, (4,), 2), ShardLayout.uniform(target_tp, (4,), 2)):
        link = issue_link(600.0, secrets.token_bytes)
        ticket = TransferTicket(transfer=transfer, link=link.link, codec="raw", deadline_s=30.0)
        part = protocol.KvSlice(
            first_layer=piece.layers.start,
            last_layer=piece.layers.stop,
            first_head=piece.heads.start,
            last_head=piece.heads.stop,
        )
        ways.append(Way(ticket, link, port, slice=part, source=piece.source.tp, target=piece.target.tp))
    return ways


@contextmanager
def listening(deadline_s: float = 30.0) -> Iterator[tuple[Way, socket.socket]]:
    """A transfer on a link of its own, and the listener that its sender will dial."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = issue_link(600.0, secrets.token_bytes)
        ticket = issue_transfer(link.link, "raw", deadline_s, secrets.token_bytes)
        yield Way(ticket, link, listener.getsockname()[1]), listener


async def accepted(listener: socket.socket) -> tuple[bytes, socket.socket]:
    """What an agent does with a connection of a link: accept it and read whose it is."""

    def accept() -> tuple[bytes, socket.socket]:
        listener.settimeout(20)
        connection, _ = listener.accept()
        return read_link_hello(connection, 5).pack(), connection

    return await trio.to_thread.run_sync(accept)


async def transfer_prompt(prefill: Engine, decode_: Engine, prompt: tuple[int, ...]) -> Result:
    """Prefill on one engine, decode on the other."""
    with listening() as (way, listener):
        request = decode_.submit(prompt, receive=way)
        prefill.submit(prompt, send=way)
        decode_.attach(*await accepted(listener))
        return await delivered(prefill, decode_, way, request)


async def delivered(prefill: Engine, decode_: Engine, way: Way, request: str) -> Result:
    """What the second engine made of it, once the first has reported success."""
    result = await decode_.finished(request)
    report = await prefill.report(way)
    assert report.delivered, report.reason
    return result


Start = Callable[..., Awaitable[Engine]]


@asynccontextmanager
async def engines(channels: list[int], model: Path, **config: object) -> AsyncIterator[Start]:
    """A function that starts engines with this configuration, through the session's fork server."""
    settings = {"model": str(model), "kv_cache_mib": 64, "max_batched_tokens": BLOCK, **SETTINGS, **config}
    async with open_fork_server(log=None, threads=1, channel=channels.pop()) as server:
        yield lambda **changes: start(server, protocol.EngineConfig(**{**settings, **changes}))


async def start(server: ForkServerClient, config: protocol.EngineConfig) -> Engine:
    engine = Engine()
    with trio.fail_after(100):
        engine.link = await server.start_engine(config, engine.on_message, engine.starting.append)
    return engine


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection, as `socketpair` gives them, but such as a link may tune."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def copy(source: socket.socket, target: socket.socket, limit: int) -> int:
    """Pass bytes on, at most so many; returns how many."""
    source.settimeout(20)
    done = 0
    while done < limit and (data := source.recv(min(limit - done, 1 << 16))):
        target.sendall(data)
        done += len(data)
    return done


def forward(source: socket.socket, target: socket.socket, size: int) -> None:
    """Pass on exactly so many bytes of a connection."""
    assert copy(source, target, size) == size


@contextmanager
def pumping(source: socket.socket, target: socket.socket) -> Iterator[None]:
    """Copy everything from one connection to the other: what a receiver says to its sender."""

    def pump() -> None:
        with suppress(OSError):
            copy(source, target, 1 << 40)

    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    yield
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    thread.join(20)
