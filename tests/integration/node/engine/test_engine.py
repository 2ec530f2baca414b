"""Real engine processes: KV handed from one to another is the KV the other would have computed, or it is recomputed."""

import os
import random
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
import trio

from p2pserve.kernels.codec import decode, torch_dtype
from p2pserve.kernels.codecs import codec_from_wire
from p2pserve.kernels.format import dtype_from_wire
from p2pserve.kvtransport.link.dialling import DialPath as KvPath
from p2pserve.kvtransport.link.endpoint import Endpoint
from p2pserve.kvtransport.routing.reslice import ShardLayout, reslice
from p2pserve.kvtransport.wire.channel import parse_link_hello
from p2pserve.kvtransport.wire.sockets import read_link_hello
from p2pserve.kvtransport.wire.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node.engine import protocol
from p2pserve.node.replica.engine_link import EngineLink, EngineStartError, ForkServerClient
from p2pserve.node.replica.fork_server import open_fork_server

from .devices import BLOCK, SETTINGS, require_devices

COUNT = 16
ALL = protocol.KvSlice(first_layer=0, last_layer=4, first_head=0, last_head=2)  # of the random model
LENGTHS = (1, 2, 127, 128, 129, 255, 256, 257, 300)


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


@dataclass
class Engine:
    """One engine process and what it has said."""

    link: EngineLink | None = None
    results: dict[str, Result] = field(default_factory=dict)
    reports: dict[tuple[bytes, bytes], protocol.TransferReport] = field(default_factory=dict)
    links: list[protocol.LinkReport] = field(default_factory=list)
    iterations: list[protocol.Iterations] = field(default_factory=list)
    stats: protocol.EngineStats | None = None
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
                    assert (output.finish == "refused") == bool(output.reason)
            case protocol.TransferReport():
                key = (message.transfer, message.link)
                assert key not in self.reports, "a transfer ends once on each of its links"
                self.reports[key] = message
            case protocol.LinkReport():
                self.links.append(message)
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
    ) -> str:
        request = secrets.token_hex(4)
        send, receive = ((ways,) if isinstance(ways, Way) else ways for ways in (send, receive))
        self.send(
            protocol.Submit(
                request=request,
                prompt=prompt,
                sampling=protocol.Sampling(max_tokens=1 if send else count, ignore_eos=True),
                deadline_s=deadline_s,
                send=tuple(way.outlet for way in send),
                receive=tuple(way.inlet for way in receive),
                receive_tokens=(len(prompt) if receive_tokens is None else receive_tokens) if receive else 0,
            )
        )
        return request

    async def generate(self, prompt: tuple[int, ...], *, count: int = COUNT) -> Result:
        """A request without any hand-off."""
        return await self.finished(self.submit(prompt, count=count))

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


async def hand_off(prefill: Engine, decode_: Engine, prompt: tuple[int, ...]) -> Result:
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
        engine.link = await server.start_engine(config, engine.on_message)
    return engine


def test_kv_handed_over_gives_the_same_tokens(engine_channels: list[int], random_model: Path) -> None:
    """Around block boundaries and over several chunks of a prefill; twice, the second time beside cached blocks."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            for length in LENGTHS:
                prompt = prompt_of(length)
                first = await hand_off(prefill, decode_, prompt)
                expected = await prefill.generate(prompt)
                assert first.tokens == expected.tokens, f"prompt of {length} tokens"
                assert len(first.tokens) == COUNT
                assert first.cached >= length - 1, f"prompt of {length} tokens was computed again"
                again = await hand_off(prefill, decode_, prompt)
                assert again.tokens == expected.tokens, f"second prompt of {length} tokens"

    trio.run(main)


def test_workers_that_share_heads_exchange_their_parts(engine_channels: list[int], random_model: Path) -> None:
    """One worker to two, two to one, and two to two."""
    require_devices(2)

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            one, two, other = await start(), await start(tp=2), await start(tp=2)
            for source, source_tp, target, target_tp in ((one, 1, two, 2), (two, 2, one, 1), (two, 2, other, 2)):
                for length in (1, 129, 300):
                    prompt = prompt_of(length, seed=10 * source_tp + target_tp)
                    with socket.create_server(("127.0.0.1", 0)) as listener:
                        ways = ways_between(source_tp, target_tp, listener.getsockname()[1])
                        assert len(ways) == 2
                        request = target.submit(prompt, receive=ways)
                        source.submit(prompt, send=ways)
                        for _ in ways:
                            target.attach(*await accepted(listener))
                        result = await target.finished(request)
                        for way in ways:
                            await delivered(source, target, way, request)
                            assert source.reports[way.key].raw_bytes == length * 4 * 2 * 64 * 4  # one head
                    assert result.cached >= length - 1
                    fresh = target if source is one else one
                    assert result.tokens == (await fresh.generate(prompt)).tokens

    trio.run(main)


# Of a prompt of 300 in blocks of 32 there and 128 here: none of a block, part of one, around its end, all but a little.
PARTS = (1, 17, 77, 127, 128, 130, 200, 256, 299, 300)


def test_any_part_of_a_prompt_may_be_handed_over_and_what_is_there_already_is_not_sent(
    engine_channels: list[int], random_model: Path
) -> None:
    """Whatever the blocks on both sides; the rest is computed here. Again, the blocks that are cached stay at home."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(block_size=32), await start()
            with listening() as (way, listener):
                for number, part in enumerate(PARTS):
                    prompt = prompt_of(300, seed=part)
                    for again in (False, True):
                        way = way.again()
                        request = decode_.submit(prompt, receive=way, receive_tokens=part)
                        prefill.submit(prompt[:part], send=way)
                        if not number and not again:
                            decode_.attach(*await accepted(listener))
                        if again and part <= 2 * BLOCK:  # the whole prompt's blocks were cached when it was answered
                            result = await decode_.finished(request)
                            assert (await prefill.report(way)).raw_bytes == 0
                        else:
                            result = await delivered(prefill, decode_, way, request)
                            sent = part - 2 * BLOCK if again else part
                            assert prefill.reports[way.key].raw_bytes == sent * 4 * 2 * 2 * 64 * 4
                        assert result.tokens == (await prefill.generate(prompt)).tokens, f"{part} of 300, {again=}"
                        assert result.cached >= min(part, 299)

    trio.run(main)


def test_engines_change_roles_while_they_serve(engine_channels: list[int], random_model: Path) -> None:
    """Each prefills for the other, decodes for it and serves alone, all at the same time: nothing is loaded again, and
    no request is dropped."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            pair = await start(), await start()
            prompts = [prompt_of(length, seed=7) for length in (9, 140, 300, 64, 200, 33, 256, 129)]
            asked: list[tuple[Engine, str]] = []
            links: list[Way] = []
            with ExitStack() as stack:
                for role, prompt in enumerate(prompts):
                    prefill, decode_ = pair if role % 2 else pair[::-1]
                    asked.append((prefill, prefill.submit(prompt, count=48)))  # alone, meanwhile
                    way, listener = stack.enter_context(listening())
                    links.append(way)
                    asked.append((decode_, decode_.submit(prompt, receive=way, count=48)))
                    prefill.submit(prompt, send=way)
                    decode_.attach(*await accepted(listener))
                results = [await engine.finished(request) for engine, request in asked]
                for role, way in enumerate(links):
                    assert (await pair[1 - role % 2].report(way)).delivered
            for alone, handed in zip(results[::2], results[1::2], strict=True):
                assert alone.finish == handed.finish == "length"
                assert alone.tokens == handed.tokens
                assert len(alone.tokens) == 48

    trio.run(main)


@pytest.mark.parametrize("how", ["stalled", "slow"])
def test_kv_that_comes_too_slowly_is_computed_as_far_as_it_is_missing(
    engine_channels: list[int], random_model: Path, how: str
) -> None:
    """Long before its deadline: as soon as computing the rest is clearly sooner."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            await decode_.generate(prompt_of(300, seed=1))  # it knows how fast it is
            prompt = prompt_of(300)
            with listening(deadline_s=300.0) as (way, listener):
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=replace(way, pace_bytes_s=0 if how == "stalled" else 40_000))
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                decode_.attach(hello, far)
                with near, connection, pumping(near, connection):
                    if how == "stalled":  # one block of 128 tokens in all 4 layers, and something of the next
                        await trio.to_thread.run_sync(forward, connection, near, 800 << 10)
                        result = await decode_.finished(request)
                    else:
                        with pumping(connection, near):
                            result = await decode_.finished(request)
                await prefill.until(lambda: way.key in prefill.reports)
            assert "computing the rest takes" in prefill.reports[way.key].reason
            kept = BLOCK if how == "stalled" else 0
            await decode_.until(lambda: decode_.prefilled == 300 + 300 - kept)
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


def test_requests_that_lose_their_blocks_are_computed_again(engine_channels: list[int], random_model: Path) -> None:
    """More requests than the cache has room for: those whose KV has come are preempted like any other."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start(kv_cache_mib=5)  # ten blocks
            prompts = [prompt_of(250, seed=seed) for seed in range(5)]
            with listening() as (way, listener):
                ways = [way.again() for _ in prompts]
                asked = [decode_.submit(p, receive=w, count=100) for p, w in zip(prompts, ways, strict=True)]
                for prompt, each in zip(prompts, ways, strict=True):
                    prefill.submit(prompt, send=each)
                decode_.attach(*await accepted(listener))
                results = [await decode_.finished(request) for request in asked]
            for prompt, result in zip(prompts, results, strict=True):
                assert result.tokens == (await prefill.generate(prompt, count=100)).tokens
            assert sum(each.preemptions for each in decode_.iterations) > 0

    trio.run(main)


def test_an_engine_whose_worker_is_killed_ends(engine_channels: list[int], random_model: Path) -> None:
    require_devices(2)

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start(tp=2)
            await engine.generate(prompt_of(5))
            assert engine.link is not None
            assert engine.link.ready is not None
            main_process = psutil.Process(engine.link.ready.pid)
            workers = [child for child in main_process.children() if child.name() != "python"]
            request = engine.submit(prompt_of(9), count=400)
            await engine.until(lambda: request in engine.results)
            workers[0].kill()
            with trio.fail_after(60):
                assert "status 1" in await engine.link.wait_gone()
            for worker in workers:
                await trio.to_thread.run_sync(worker.wait, 30)

    trio.run(main)


def test_kv_that_the_prefix_cache_has_is_not_waited_for(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            prompt = prompt_of(300)
            expected = await engine.generate(prompt)
            free = engine.free
            with listening(deadline_s=60) as (way, _), trio.fail_after(10):
                result = await engine.finished(engine.submit(prompt, receive=way, receive_tokens=200))
            assert result.tokens == expected.tokens
            assert engine.free == free

    trio.run(main)


def test_a_connection_that_comes_before_its_request_is_used(engine_channels: list[int], random_model: Path) -> None:
    """The agent may be faster than an engine in the middle of a step."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompt = prompt_of(200)
            with listening() as (way, listener):
                prefill.submit(prompt, send=way)
                decode_.attach(*await accepted(listener))
                await decode_.generate(prompt_of(5))  # its engine has had time to look
                result = await delivered(prefill, decode_, way, decode_.submit(prompt, receive=way))
            assert result.cached >= len(prompt) - 1
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


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


# In float32 a block of 128 tokens takes 128 KiB in each of 4 layers: a layer and a bit; all of a block and a bit.
@pytest.mark.parametrize("limit", [140 << 10, 800 << 10], ids=["first block", "second block"])
@pytest.mark.parametrize("how", ["cut", "aborted", "link closed"])
def test_a_broken_transfer_is_computed_again(
    engine_channels: list[int], random_model: Path, how: str, limit: int
) -> None:
    """The connection ends in the middle of a layer and nobody answers any more, or it stalls there until the gateway
    gives the prefill up, or until its node is lost."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            await decode_.generate(prompt_of(5))
            free = decode_.free
            prompt = prompt_of(300)
            with listening(deadline_s=2.0 if how == "cut" else 30.0) as (way, listener):
                transfer = way.ticket.transfer
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=way)
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                decode_.attach(hello, far)
                listener.close()  # nobody answers when it is dialled again
                with near, connection, pumping(near, connection):
                    await trio.to_thread.run_sync(forward, connection, near, limit)
                    if how == "cut":
                        near.close()
                        connection.close()
                    elif how == "aborted":
                        await trio.sleep(0.2)
                        decode_.send(protocol.AbortTransfer(transfer=transfer, reason="the prefill node was lost"))
                    else:
                        decode_.send(protocol.CloseLink(link=way.link.link, reason="the prefill node was lost"))
                    result = await decode_.finished(request)
                    await prefill.until(lambda: way.key in prefill.reports)
                assert not prefill.reports[way.key].delivered
            assert result.tokens == (await prefill.generate(prompt)).tokens
            await decode_.until(lambda: decode_.free == free)

    trio.run(main)


def test_a_connection_that_is_cut_is_dialled_again(engine_channels: list[int], random_model: Path) -> None:
    """In the middle of a layer: what was lost is sent again, and nothing is computed twice."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompt = prompt_of(300)
            with listening() as (way, listener):
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=way)
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                decode_.attach(hello, far)
                with near, connection, pumping(near, connection):
                    await trio.to_thread.run_sync(forward, connection, near, 140 << 10)
                decode_.attach(*await accepted(listener))
                result = await delivered(prefill, decode_, way, request)
            assert result.cached >= len(prompt) - 1
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


@pytest.mark.parametrize("pacing", ["layerwise", "serialised", "auto"])
def test_a_link_stays_warm_for_the_next_transfer(engine_channels: list[int], random_model: Path, pacing: Any) -> None:
    """One connection serves one after the other and several at once, however the layers leave."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompts = [prompt_of(length, seed=1) for length in (3, 130, 300)]
            with listening() as (way, listener):
                way = replace(way, pacing=pacing)
                request = decode_.submit(prompts[0], receive=way)
                prefill.submit(prompts[0], send=way)
                decode_.attach(*await accepted(listener))
                await delivered(prefill, decode_, way, request)
                listener.close()  # from here on nothing can be dialled
                ways = [way.again() for _ in prompts]
                asked = [decode_.submit(p, receive=w) for p, w in zip(prompts, ways, strict=True)]
                for each, way_ in zip(prompts, ways, strict=True):
                    prefill.submit(each, send=way_)
                for prompt, way_, request in zip(prompts, ways, asked, strict=True):
                    result = await delivered(prefill, decode_, way_, request)
                    assert result.tokens == (await prefill.generate(prompt)).tokens
                    assert result.cached >= len(prompt) - 1
                    report = prefill.reports[way_.key]
                    assert pacing in (report.mode, "auto")
                    assert (
                        report.mode == "layerwise" or report.hidden_fraction == 0.0
                    )  # nothing leaves before its token
                    assert list(report.paths) == ["direct"]
                    assert report.paths["direct"] >= report.raw_bytes == len(prompt) * 4 * 2 * 2 * 64 * 4
            assert {report.link for report in prefill.links} <= {way.link.link}

    trio.run(main)


def test_a_transfer_goes_on_over_other_paths(engine_channels: list[int], random_model: Path) -> None:
    """The first path leads nowhere; the agent names another one."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(), await start()
            prompt = prompt_of(200)
            with listening() as (way, listener), socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                request = decode_.submit(prompt, receive=way)
                prefill.submit(prompt, send=replace(way, port=nobody.getsockname()[1]))
                await prefill.until(lambda: any(report.waiting_bytes for report in prefill.links))
                other = KvPath("127.0.0.1", way.port, label="other", streams=2)
                prefill.send(protocol.SetLinkPaths(link=way.link.link, paths=(other,)))
                for _ in range(2):
                    decode_.attach(*await accepted(listener))
                result = await delivered(prefill, decode_, way, request)
            report = prefill.reports[way.key]
            assert {label for label, size in report.paths.items() if size} == {"other"}
            assert result.tokens == (await prefill.generate(prompt)).tokens

    trio.run(main)


def test_a_prompt_waits_for_blocks_in_which_kv_is_held(engine_channels: list[int], random_model: Path) -> None:
    """Its receiver has no place for the first one's KV: nothing is given up, and nothing is read in its blocks' place
    until it is called off. The cache has room for one prompt at a time."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, decode_ = await start(kv_cache_mib=3), await start()
            first, second = prompt_of(300), prompt_of(320)
            expected = [(await decode_.generate(prompt)).tokens for prompt in (first, second)]
            with listening() as (way, _), listening() as (other, listener):
                held = await prefill.finished(prefill.submit(first, send=way))
                assert held.tokens == expected[0][:1]  # nobody waits for the KV to leave
                waiting = prefill.submit(second, send=other)
                receiving = decode_.submit(second, receive=other)
                decode_.attach(*await accepted(listener))
                await prefill.until(lambda: prefill.stats is not None and prefill.stats.waiting == 1)
                await trio.sleep(0.5)
                assert waiting not in prefill.results
                assert way.key not in prefill.reports
                prefill.send(protocol.AbortTransfer(transfer=way.ticket.transfer, reason="nobody wants it"))
                assert (await prefill.report(way)).reason == "nobody wants it"
                result = await delivered(prefill, decode_, other, receiving)
                assert result.tokens == expected[1]
                await prefill.until(lambda: prefill.stats is not None and prefill.stats.kv_usage == 0.0)

    trio.run(main)


def test_kv_that_does_not_come_is_computed(engine_channels: list[int], random_model: Path) -> None:
    """The ticket's deadline passes; meanwhile another request is served."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            prompt = prompt_of(200)
            with listening(deadline_s=1.0) as (way, _):
                begun = trio.current_time()
                request = engine.submit(prompt, receive=way)
                await engine.generate(prompt_of(5))
                assert trio.current_time() - begun < 1.0
                assert request not in engine.results
                result = await engine.finished(request)
                assert 1.0 <= trio.current_time() - begun < 5.0
            fresh = await start()
            assert result.tokens == (await fresh.generate(prompt)).tokens

    trio.run(main)


def test_cancelling_gives_all_memory_back(engine_channels: list[int], random_model: Path) -> None:
    """While KV is awaited, while it arrives, and while tokens are made."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            prefill, engine = await start(), await start()
            expected = await engine.generate(prompt_of(40))
            free = engine.free
            prompt = prompt_of(300)
            with listening() as (way, listener):
                request = engine.submit(prompt, receive=way)
                await engine.until(lambda: engine.free < free)
                engine.send(protocol.Cancel(request=request))
                await engine.until(lambda: engine.free == free)
            with listening() as (way, listener):
                request = engine.submit(prompt, receive=way)
                prefill.submit(prompt, send=way)
                hello, connection = await accepted(listener)
                near, far = tcp_pair()
                engine.attach(hello, far)
                with near, connection, pumping(near, connection):
                    await trio.to_thread.run_sync(forward, connection, near, 300 << 10)
                    await engine.until(lambda: engine.free < free)
                    engine.send(protocol.Cancel(request=request))
                    await engine.until(lambda: engine.free == free)
                    await prefill.until(lambda: way.key in prefill.reports)
                    assert not prefill.reports[way.key].delivered
            request = engine.submit(prompt, count=200)
            await engine.until(lambda: request in engine.results)
            engine.send(protocol.Cancel(request=request))
            await engine.until(lambda: engine.free == free)
            assert engine.stats is not None
            assert (engine.stats.running, engine.stats.waiting) == (0, 0)
            assert engine.results[request].finish == ""
            assert (await engine.generate(prompt_of(40))).tokens == expected.tokens

    trio.run(main)


def test_a_request_ends_at_its_deadline(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            await engine.generate(prompt_of(5))
            free = engine.free
            for ticket_s in (None, 30.0):
                with listening(ticket_s or 1.0) as (way, _):
                    receive = way if ticket_s else ()
                    request = engine.submit(prompt_of(9), count=480, deadline_s=0.1, receive=receive)
                    result = await engine.finished(request)
                assert result.finish == "deadline"
                assert len(result.tokens) < 480
                await engine.until(lambda: engine.free == free)
            assert (await engine.generate(prompt_of(9))).finish == "length"

    trio.run(main)


@pytest.mark.parametrize(
    "prompt",
    [(), (1 << 20,), prompt_of(600)],
    ids=["empty", "outside the vocabulary", "too long"],
)
def test_a_request_that_the_engine_refuses_costs_no_other(
    engine_channels: list[int], random_model: Path, prompt: tuple[int, ...]
) -> None:
    """One bad request must not take an engine from everybody, and then the next engine, where it is tried again."""

    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            engine = await start()
            other = engine.submit(prompt_of(9), count=200)
            with listening() as (way, _):
                refused = [engine.submit(prompt), engine.submit(prompt, receive=way)]
                refused.append(engine.submit(prompt, send=way.again()))
                for request in refused:
                    assert (await engine.finished(request)).finish == "refused"
            assert len((await engine.finished(other)).tokens) == 200

    trio.run(main)


async def read_kv(engine: Engine, prompt: tuple[int, ...]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """K and V of every layer, as the engine sends them."""
    parts: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def receive(way: Way, hello: bytes, connection: socket.socket) -> None:
        with Endpoint() as endpoint:
            endpoint.attach(parse_link_hello(hello), connection)
            incoming = endpoint.open_receiver(way.link).expect(way.ticket)
            incoming.grant()
            for frame in incoming:
                parts.setdefault(frame.layer, {})[frame.start] = decode(
                    codec_from_wire(frame.codec),
                    frame.payload,
                    tokens=frame.tokens,
                    heads=frame.head_last,
                    head_dim=frame.head_dim,
                    dtype=torch_dtype(dtype_from_wire(frame.dtype)),
                    start=frame.start,
                    layer=frame.layer,
                )
            incoming.acknowledge()

    with listening() as (way, listener):
        engine.submit(prompt, send=way)
        hello, connection = await accepted(listener)
        await trio.to_thread.run_sync(receive, way, hello, connection)
        await engine.until(lambda: way.key in engine.reports)
        assert engine.reports[way.key].delivered
    layers = {}
    for layer, pieces in parts.items():
        ordered = [pieces[first] for first in sorted(pieces)]
        layers[layer] = (torch.cat([k for k, _ in ordered]), torch.cat([v for _, v in ordered]))
    return layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_reads_back_what_was_written_into_it(
    engine_channels: list[int], random_model: Path, dtype: str
) -> None:
    """Whole blocks that came from another engine leave again bit for bit, in whatever way this backend packs them."""

    async def main() -> None:
        async with engines(engine_channels, random_model, dtype=dtype) as start:
            first, second = await start(), await start()
            prompt = prompt_of(300)
            computed = await read_kv(first, prompt)
            await hand_off(first, second, prompt)
            passed_on = await read_kv(second, prompt)
            assert sorted(computed) == sorted(passed_on) == [0, 1, 2, 3]
            for layer, (k, v) in computed.items():
                assert k.shape == v.shape == (300, 2, 64)
                assert str(k.dtype) == f"torch.{dtype}"
                assert k.abs().sum() > 0
                assert torch.equal(k[: 2 * BLOCK], passed_on[layer][0][: 2 * BLOCK])
                assert torch.equal(v[: 2 * BLOCK], passed_on[layer][1][: 2 * BLOCK])
                assert not torch.equal(k, v)

    trio.run(main)


# ---- starting ---------------------------------------------------------------------------------------------


def engine_pids() -> set[int]:
    """Processes that a fork server of this run has forked."""
    servers = [
        process
        for process in psutil.Process().children(recursive=True)
        if "p2pserve.node.engine.forkserver" in process.cmdline()
    ]
    return {child.pid for server in servers for child in server.children()}


def test_an_engine_killed_while_it_loads_is_named(engine_channels: list[int], random_model: Path) -> None:
    async def main() -> None:
        async with engines(engine_channels, random_model) as start:
            await (await start()).generate(prompt_of(5))  # so that vLLM has been imported
            before = engine_pids()
            assert len(before) == 1

            async def kill() -> None:
                while not (born := engine_pids() - before):  # noqa: ASYNC110 (nobody tells of a fork)
                    await trio.sleep(0.002)
                for pid in born:
                    os.kill(pid, signal.SIGKILL)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with pytest.raises(EngineStartError, match=r"was killed by SIGKILL.* while it was loading") as caught:
                    await start()
                assert "\n" not in str(caught.value)
            assert (await (await start()).generate(prompt_of(5))).finish == "length"

    trio.run(main)


@pytest.mark.parametrize("case", ["no folder", "garbage weights", "unknown architecture", "no room"])
def test_a_model_that_cannot_be_loaded_is_one_line(
    engine_channels: list[int], random_model: Path, tmp_path: Path, case: str
) -> None:
    model = tmp_path / "broken"
    changes: dict[str, object] = {}
    if case != "no folder":
        shutil.copytree(random_model, model)
    if case == "garbage weights":
        (model / "model.safetensors").write_bytes(b"garbage")
    elif case == "unknown architecture":
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(config.replace("LlamaForCausalLM", "NobodysForCausalLM"))
    elif case == "no room":
        changes["max_model_len"] = 1 << 20

    async def main() -> None:
        async with engines(engine_channels, model) as start:
            with pytest.raises(EngineStartError, match=r"^vLLM cannot load .*broken: .+") as caught:
                await start(**changes)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 1000

    trio.run(main)
