"""How much of a KV transfer between two real engines is hidden behind prefill: `python -m p2pserve.node.bench`.

The link is held to the rate at which the KV takes as long as the prefill itself, the hardest case for hiding it: a
faster one leaves less to hide, a slower one cannot be hidden. Layer by layer and at once are measured in turn,
in one run, on prompts that no cache has seen; then the engine is asked what it would choose for prompts of several
lengths on an unthrottled link, from what it has measured of itself.

Visible: from the end of prefill until the decode engine has the KV in its cache and the prefill side knows.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Literal, final

import trio

from ...kvtransport.errors import TransferError
from ...kvtransport.wire.dial_path import DialPath
from ...kvtransport.wire.sockets import read_link_hello
from ...kvtransport.wire.tickets import LinkTicket, issue_link, issue_transfer
from ..engine import protocol
from ..engine.agent_side.engine_link import EngineError, EngineLink, ForkServerClient
from ..engine.agent_side.fork_server import open_fork_server
from ..models import ModelError, ModelInfo, open_model

Mode = Literal["auto", "layerwise", "serialised"]

LEASE_S = 600.0
DEADLINE_S = 120.0
FAST_GBPS = 10.0
AUTO_TOKENS = (16, 64, 256, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One way of sending, medians over its repeats. `visible_part`: of the time the bytes need on the link."""

    mode: str
    visible_s: float
    visible_part: float
    span_s: float
    hidden_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReport:
    """All figures of a run. `auto`: prompt tokens -> what the engine chose on the unthrottled link."""

    model: str
    codec: str
    prompt_tokens: int
    prefill_s: float
    wire_bytes: int
    link_mbit_s: float
    throttle: str
    layerwise: Overlap
    serialised: Overlap
    auto: dict[int, str]


@final
class _Engine:
    """One engine process, and what it has said."""

    def __init__(self) -> None:
        self.link: EngineLink | None = None
        self.finished: dict[str, float] = {}
        self.reports: dict[bytes, protocol.TransferReport] = {}
        self._news = trio.Event()

    def on_message(self, message: protocol.FromEngine) -> None:
        match message:
            case protocol.Step(outputs=outputs):
                self.finished |= {each.request: time.monotonic() for each in outputs if each.finish is not None}
            case protocol.TransferReport():
                self.reports[message.transfer] = message
            case _:
                pass
        self._news.set()
        self._news = trio.Event()

    def send(self, message: protocol.EngineMessage) -> None:
        assert self.link is not None
        self.link.send(message)

    async def until_finished(self, request: str) -> float:
        while request not in self.finished:
            await self._news.wait()
        return self.finished[request]

    async def report(self, transfer: bytes) -> protocol.TransferReport:
        while transfer not in self.reports:
            await self._news.wait()
        report = self.reports[transfer]
        if not report.delivered:
            raise TransferError(report.reason)
        return report


@final
class _Bench:
    """Two engines on this machine, and the link from the first to the second."""

    def __init__(self, prefill: _Engine, decode: _Engine, port: int, codec: str, model: ModelInfo) -> None:
        self._prefill, self._decode = prefill, decode
        self._port = port
        self._codec = codec
        self._vocabulary = model.shape.vocabulary
        self._rng = random.Random(1)
        self._all = protocol.KvSlice(first_layer=0, last_layer=model.layers, first_head=0, last_head=model.kv_heads)
        self._link: LinkTicket = issue_link(LEASE_S, secrets.token_bytes)

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """Tokens that no cache has seen."""
        return tuple(self._rng.randrange(self._vocabulary) for _ in range(tokens))

    async def prefill_s(self, tokens: int) -> float:
        """Seconds for a prompt alone, without any transfer."""
        request = secrets.token_hex(4)
        begun = time.monotonic()
        self._prefill.send(_submit(request, self.prompt(tokens)))
        return await self._prefill.until_finished(request) - begun

    async def transfer(self, tokens: int, mode: Mode, bytes_s: int) -> protocol.TransferReport:
        """One prompt's KV from the first engine to the second, at most `bytes_s` (0: unthrottled)."""
        prompt = self.prompt(tokens)
        ticket = issue_transfer(self._link.link, self._codec, DEADLINE_S, secrets.token_bytes)
        request = secrets.token_hex(4)
        outlet = protocol.Outlet(
            slice=self._all,
            ticket=ticket,
            link=self._link,
            paths=(DialPath("127.0.0.1", self._port, pace_bytes_s=bytes_s),),
            gbps=bytes_s / 1.25e8 if bytes_s else FAST_GBPS,
            rtt_s=0.0001,
            pacing=mode,
        )
        inlet = protocol.Inlet(slice=self._all, ticket=ticket, link=self._link)
        self._decode.send(_submit(f"d{request}", prompt, receive=(inlet,), receive_tokens=tokens))
        self._prefill.send(_submit(f"p{request}", prompt, send=(outlet,)))
        report = await self._prefill.report(ticket.transfer)
        await self._decode.until_finished(f"d{request}")
        return report


def _submit(request: str, prompt: tuple[int, ...], **transfer: object) -> protocol.Submit:
    sampling = protocol.Sampling(max_tokens=1, ignore_eos=True)
    values = {"request": request, "prompt": prompt, "sampling": sampling, "deadline_s": DEADLINE_S, **transfer}
    return protocol.Submit(**values)  # type: ignore[arg-type]


async def _measure(bench: _Bench, model: str, codec: str, tokens: int, repeats: int) -> OverlapReport:
    await bench.prefill_s(tokens)  # both engines warm, the link dialled
    whole = await bench.transfer(tokens, "layerwise", 0)
    prefill_s = statistics.median([await bench.prefill_s(tokens) for _ in range(repeats)])
    bytes_s = max(1, round(whole.wire_bytes / prefill_s))
    found: dict[Mode, list[protocol.TransferReport]] = {"layerwise": [], "serialised": []}
    for _ in range(repeats):
        for mode, reports in found.items():
            reports.append(await bench.transfer(tokens, mode, bytes_s))
    auto = {}
    for length in AUTO_TOKENS:
        if length <= tokens:
            auto[length] = (await bench.transfer(length, "auto", 0)).mode
    return OverlapReport(
        model=model,
        codec=codec,
        prompt_tokens=tokens,
        prefill_s=prefill_s,
        wire_bytes=whole.wire_bytes,
        link_mbit_s=bytes_s * 8 / 1e6,
        throttle="pacing by the kernel (SO_MAX_PACING_RATE) on loopback: no round-trip time, no loss",
        layerwise=_overlap(found["layerwise"], whole.wire_bytes / bytes_s),
        serialised=_overlap(found["serialised"], whole.wire_bytes / bytes_s),
        auto=auto,
    )


def _overlap(reports: list[protocol.TransferReport], link_s: float) -> Overlap:
    visible = statistics.median(report.visible_s for report in reports)
    return Overlap(
        mode=reports[0].mode,
        visible_s=visible,
        visible_part=visible / link_s,
        span_s=statistics.median(report.span_s for report in reports),
        hidden_fraction=statistics.median(report.hidden_fraction for report in reports),
    )


@asynccontextmanager
async def _listener(decode: _Engine) -> AsyncIterator[int]:
    """The port that the prefill engine dials; what arrives is handed to the decode engine as an agent does it."""
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        accepting = trio.socket.from_stdlib_socket(listener)
        while True:
            accepted, _ = await accepting.accept()
            with socket.socket(fileno=accepted.detach()) as sock:
                sock.setblocking(True)
                hello = await trio.to_thread.run_sync(read_link_hello, sock, 5.0)
                assert decode.link is not None
                decode.link.attach(hello.pack(), sock)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield int(listener.getsockname()[1])
        nursery.cancel_scope.cancel()


async def _start(server: ForkServerClient, config: protocol.EngineConfig) -> _Engine:
    engine = _Engine()
    engine.link = await server.start_engine(config, engine.on_message)
    return engine


async def run(model: str, codec: str, tokens: int, repeats: int) -> OverlapReport:
    """Start two engines and measure. Raises ModelError, EngineError or TransferError."""
    opened = open_model(model)
    with tempfile.TemporaryDirectory(prefix="p2pserve-bench-", ignore_cleanup_errors=True) as folder:
        log = FilePath(folder) / "engine.log"
        config = protocol.EngineConfig(model=str(opened.fetch()), kv_cache_mib=256, threads=1, log_file=str(log))
        async with open_fork_server(log=log, threads=1) as server:
            prefill, decode = await _start(server, config), await _start(server, config)
            async with _listener(decode) as port:
                bench = _Bench(prefill, decode, port, codec, opened.info)
                return await _measure(bench, model, codec, tokens, repeats)


def table(report: OverlapReport) -> str:
    """For people."""
    lines = [
        f"{report.model}, {report.prompt_tokens} tokens, {report.codec}: prefill {report.prefill_s:.3f} s",
        f"{report.wire_bytes / 1e6:.2f} MB on a link held to {report.link_mbit_s:.0f} Mb/s",
        f"({report.throttle})",
        f"{'':12} {'visible':>9} {'of link time':>13} {'span':>9} {'hidden':>8}",
    ]
    for each in (report.layerwise, report.serialised):
        visible = f"{each.visible_s:8.3f}s {each.visible_part:12.1%}"
        lines.append(f"{each.mode:12} {visible} {each.span_s:8.3f}s {each.hidden_fraction:8.1%}")
    chosen = ", ".join(f"{tokens} tokens {mode}" for tokens, mode in report.auto.items())
    return "\n".join([*lines, f"chosen by measurement on an unthrottled link: {chosen}"])


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m p2pserve.node.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled", help="a folder, or bundled (the default)")
    parser.add_argument("--codec", default="kv4", help="raw, fp8, kv4 (the default) or kivi4")
    parser.add_argument("--tokens", type=int, default=1500, help="length of the prompts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.repeats < 1:
        parser.error("--tokens must be at least 2 and --repeats at least 1")
    report: OverlapReport | None = None
    try:
        report = trio.run(run, options.model, options.codec, options.tokens, options.repeats)
    except* (ModelError, EngineError, TransferError, ValueError) as errors:
        sys.stderr.write(f"bench: {_first(errors)}\n")
    if report is None:
        return 1
    sys.stdout.write(json.dumps(asdict(report), indent=2) if options.format == "json" else table(report))
    sys.stdout.write("\n")
    return 0


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
