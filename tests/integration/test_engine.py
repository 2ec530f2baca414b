"""Real engine processes: KV handed from one to another is the KV the other would have computed, or it is recomputed."""

import os
import random
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
import trio

from p2pserve.kernels.codec import codec_from_wire, decode, dtype_from_wire, torch_dtype
from p2pserve.kvtransport.channel import parse_link_hello
from p2pserve.kvtransport.dialling import Path as KvPath
from p2pserve.kvtransport.endpoint import Endpoint
from p2pserve.kvtransport.sockets import read_link_hello
from p2pserve.kvtransport.tickets import LinkTicket, TransferTicket, issue_link, issue_transfer
from p2pserve.node.engine import protocol
from p2pserve.node.engine_link import EngineLink, EngineStartError, ForkServer, open_fork_server

BLOCK = 128  # vLLM's on a CPU
COUNT = 16
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
    reports: dict[bytes, protocol.TransferReport] = field(default_factory=dict)
    links: list[protocol.LinkReport] = field(default_factory=list)
    stats: protocol.EngineStats | None = None
    _news: trio.Event = field(default_factory=trio.Event)

    def on_message(self, message: protocol.FromEngine) -> None:
        match message:
            case protocol.Step(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    result = self.results.setdefault(output.request, Result())
                    result.tokens += output.tokens
                    result.cached = max(result.cached, output.cached_tokens)
                    result.finish = output.finish or result.finish
                    assert (output.finish == "refused") == bool(output.reason)
            case protocol.TransferReport():
                assert message.transfer not in self.reports, "a transfer ends once"
                self.reports[message.transfer] = message
            case protocol.LinkReport():
                self.links.append(message)
            case _:
                raise AssertionError(f"not expected of a running engine: {message}")
        self._news.set()
        self._news = trio.Event()

    def send(self, message: protocol.Message) -> None:
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

    async def finished(self, request: str) -> Result:
        await self.until(lambda: request in self.results and self.results[request].finish != "")
        return self.results[request]

    def submit(
        self,
        prompt: tuple[int, ...],
        *,
        count: int = COUNT,
        deadline_s: float = 60.0,
        send: "Way | None" = None,
        receive: "Way | None" = None,
        receive_tokens: int | None = None,
    ) -> str:
        request = secrets.token_hex(4)
        self.send(
            protocol.Submit(
                request=request,
                prompt=prompt,
                sampling=protocol.Sampling(max_tokens=1 if send else count, ignore_eos=True),
                deadline_s=deadline_s,
                send=send.ticket if send else None,
                outlet=send.outlet if send else None,
                receive=receive.ticket if receive else None,
                inlet=receive.link if receive else None,
                receive_tokens=(len(prompt) if receive_tokens is None else receive_tokens) if receive else 0,
            )
        )
        return request

    async def generate(self, prompt: tuple[int, ...], *, count: int = COUNT) -> Result:
        """A request without any hand-off."""
        return await self.finished(self.submit(prompt, count=count))

    @property
    def free(self) -> int:
        assert self.stats is not None
        return self.stats.kv_free_tokens


@dataclass(frozen=True)
class Way:
    """A transfer, the link it takes, and where that is dialled."""

    ticket: TransferTicket
    link: LinkTicket
    port: int
    pacing: Literal["auto", "layerwise", "serialised"] = "auto"

    @property
    def outlet(self) -> protocol.Outlet:
        path = KvPath("127.0.0.1", self.port)
        return protocol.Outlet(link=self.link, paths=(path,), gbps=10.0, rtt_s=0.0001, pacing=self.pacing)

    def again(self) -> "Way":
        """Another transfer on the same link."""
        return replace(self, ticket=issue_transfer(self.link.link, "raw", 30.0, secrets.token_bytes))


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
    await prefill.until(lambda: way.ticket.transfer in prefill.reports)
    report = prefill.reports[way.ticket.transfer]
    assert report.delivered, report.reason
    return result


Start = Callable[..., Awaitable[Engine]]


@asynccontextmanager
async def engines(channels: list[int], model: Path, **config: object) -> AsyncIterator[Start]:
    """A function that starts engines with this configuration, through the session's fork server."""
    settings = {"model": str(model), "kv_cache_mib": 64, "max_batched_tokens": BLOCK, **config}
    async with open_fork_server(log=None, threads=1, channel=channels.pop()) as server:
        yield lambda **changes: start(server, protocol.EngineConfig(**{**settings, **changes}))


async def start(server: ForkServer, config: protocol.EngineConfig) -> Engine:
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
                    await prefill.until(lambda: transfer in prefill.reports)
                assert not prefill.reports[transfer].delivered
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
                    report = prefill.reports[way_.ticket.transfer]
                    assert pacing in (report.mode, "auto")
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
                prefill.send(protocol.SetPaths(link=way.link.link, paths=(other,)))
                for _ in range(2):
                    decode_.attach(*await accepted(listener))
                result = await delivered(prefill, decode_, way, request)
            report = prefill.reports[way.ticket.transfer]
            assert {label for label, size in report.paths.items() if size} == {"other"}
            assert result.tokens == (await prefill.generate(prompt)).tokens

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
                    await prefill.until(lambda: way.ticket.transfer in prefill.reports)
                    assert not prefill.reports[way.ticket.transfer].delivered
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
                    receive = way if ticket_s else None
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
            incoming = endpoint.receiving(way.link).expect(way.ticket)
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
        await engine.until(lambda: way.ticket.transfer in engine.reports)
        assert engine.reports[way.ticket.transfer].delivered
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
