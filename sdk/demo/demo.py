"""`p2pserve demo`: a whole network on one machine, beside a single engine.

Real processes, sockets on loopback and engines, forked from one server to share memory."""

from __future__ import annotations

import heapq
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Final, final

import msgspec
import trio
from rich.console import Console

from ...coordinator import Phase
from ...coordinator.names import name_of
from ...node.box.hardware import probe
from ...node.box.start_checks import require_engine
from ...node.engine import protocol
from ...node.engine.agent_side.fork_server import open_fork_server
from ...node.messages import Generate, Status
from ...node.models import BUNDLED, OpenedModel, TerminalProgress, open_model
from ...node.models.errors import PromptError
from ...node.models.text import TextModel
from ...node.requests.acceptance import tokenize
from ..actions.status_view import open_console, shortened
from ..client import AsyncClient
from ..errors import UsageError
from ..options.values import settings_of
from ..requests import Generation, build_request
from .box import KV_CACHE_MIB, DemoBox, open_box
from .report import (
    Asked,
    DemoReport,
    RequestReport,
    Watcher,
    covers,
    figures_of,
    node_reports,
    problems,
    report_request,
    request_table,
)
from .running import run_in_time
from .single_engine import SingleEngine

MAX_NODES: Final = 16
POLL_S: Final = 0.3
CODE_CHARACTERS: Final = 1500
READ_LINES: Final = '''


def read_lines(path):
    """Return the lines of a file."""
    '''
STACK: Final = '''


class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        '''
MEASURE_UNTIL_S: Final = 40.0  # what is measured beside the requests is waited for until then
MEASURED_MODULE: Final = "heapq"  # all five held-out modules would keep both cores busy for as long as the demo runs
PINS: Final = (Phase.DECODE, Phase.PREFILL)  # equal boxes on one machine had better do both: nothing would be shown
MEASUREMENT: Final = "p2pserve.node.bundled.evaluate"
CHAT = [{"role": "user", "content": "Return the n-th Fibonacci number."}]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to show."""

    nodes: int = 4
    prompt: str | None = None
    codec: str = "kv4"
    max_tokens: int = 64
    model: str = "bundled"
    timeout_s: float = 120.0


def run_demo(arguments: SimpleNamespace) -> int:
    """Run the command: 0 when everything worked, 1 when not, 130 when interrupted."""
    logging.disable(logging.CRITICAL if not arguments.debug else logging.NOTSET)
    settings = settings_of(DemoSettings, arguments)
    if not 1 <= settings.nodes <= MAX_NODES:
        raise UsageError(f"nodes: {settings.nodes} is not between 1 and {MAX_NODES}")
    require_engine(probe(), os.environ)
    as_json = arguments.format == "json"
    console = open_console(stderr=as_json)
    model = open_model(settings.model)
    model.fetch(report=TerminalProgress(sys.stderr, time.monotonic))
    demo = Demo(settings, model, prepare(settings, model), console)
    report = trio.run(demo.run)
    if report is None:
        return 130
    if as_json:
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        show_report(report, console)
    return 0 if report.ok else 1


def refuse_options(arguments: SimpleNamespace, names: Sequence[str], flag: str) -> None:
    """Raise UsageError for one of these options of `DemoSettings` that is given: with the flag nothing is chosen by
    it."""
    default = DemoSettings()
    for name in names:
        if getattr(arguments, name) != getattr(default, name):
            option = name.replace("_", "-")
            raise UsageError(f"{option}: {flag} has boxes, models and requests of its own; leave --{option} out")


def describe_timeout(timeout_s: float, stage: str, options: str = "") -> str:
    """What to say of a demo with these options that was not done in time: it may have been nothing but a busy
    machine."""
    more = f"`p2pserve demo {options}--timeout-s {2 * timeout_s:g}`"
    return f"not done after {timeout_s:g} s, while {stage}; a slow or busy machine takes longer: {more}"


def prepare(settings: DemoSettings, model: OpenedModel) -> list[Asked]:
    """The requests of the demo. Raises InvalidRequest or PromptError for one it cannot serve."""
    text = TextModel(model.folder)
    first, second = _code_prompts(text, model.info.max_model_len - settings.max_tokens)
    if settings.prompt is None:
        asked = [_ask("code", first, settings, model, text)]
    else:
        asked = [_ask("prompt", settings.prompt, settings, model, text)]
    try:
        asked.append(_ask("chat", CHAT, settings, model, text))
    except PromptError:  # a model without a chat template
        asked.append(_ask("short", "def fibonacci(n):", settings, model, text))
    asked.append(_ask("more code", second, settings, model, text))
    return asked


def _code_prompts(text: TextModel, room: int) -> tuple[str, str]:
    """Two excerpts of a module outside the model's training set, of the longest prompt length."""
    source = Path(heapq.__file__).read_text("utf-8")
    size = CODE_CHARACTERS
    while size > 16:
        prompts = source[:size] + READ_LINES, source[size : 2 * size] + STACK
        if max(len(text.encode(prompt)) for prompt in prompts) <= room:
            return prompts
        size //= 2
    raise PromptError("max_tokens: they leave no room for a prompt; give fewer")


def _ask(
    name: str, what: str | list[dict[str, str]], settings: DemoSettings, model: OpenedModel, text: TextModel
) -> Asked:
    prompt, messages = (what, None) if isinstance(what, str) else (None, what)
    body: Generate = build_request(prompt, messages, {"max_tokens": settings.max_tokens})
    tokens, _ = tokenize(body, text, model.info.max_model_len)
    return Asked(name=name, prompt=prompt, messages=messages, tokens=tokens)


@final
class Demo:
    """One run. `stage` says what it is doing, for the error when time runs out."""

    def __init__(self, settings: DemoSettings, model: OpenedModel, asked: list[Asked], console: Console) -> None:
        self._settings = settings
        self._model = model
        self._asked = asked
        self._console = console
        self._stage = "starting"
        self._started = time.monotonic()

    async def run(self) -> DemoReport | None:
        """Run to the end; None when interrupted. Raises DemoFailed and what the network raises."""
        timeout_s = self._settings.timeout_s
        return await run_in_time(
            self._run, timeout_s, say=self._say, explain=lambda: describe_timeout(timeout_s, self._stage)
        )

    async def _run(self) -> DemoReport:
        settings = self._settings
        async with open_box() as box:
            self._stage = "the fork server and the bootstrap start"
            await box.start_fork_server(settings.nodes + 1)  # one channel is for the single engine
            # At the lowest priority beside everything else: by itself it would take as long as the rest of the demo.
            measurement = await self._start_measurement(box)
            bootstrap = await box.start_bootstrap(settings.codec)
            self._say(f"bootstrap: {name_of(bootstrap.peer)} at {bootstrap.address}")
            async with AsyncClient(bootstrap.tokens["client"]) as client:
                status, peers = await self._start_nodes(box, client, bootstrap.tokens["leader"])
                engines_ready_s = self._elapsed()
                answers = await self._ask_all(client)
                status = await client.status()
            # Not beside the network: the two would slow each other down, and the network's times are shown.
            singles = await self._ask_single(box)
            bits, source = await self._bits_per_byte(measurement)
            self._stage = "the nodes leave"
            left = await box.leave()
            dtype = node_reports(status, peers)[0].dtype
            requests = tuple(
                report_request(asked, answer, single, self._model.info, dtype)
                for asked, answer, single in zip(self._asked, answers, singles, strict=True)
            )
            found = problems(requests, nodes=settings.nodes, codec=settings.codec)
            if not left:
                found = (*found, "not every node left in order")
            return DemoReport(
                ok=not found,
                problems=found,
                bootstrap=bootstrap.peer,
                nodes=node_reports(status, peers),
                coordinator=status.coordinator,
                plan=msgspec.to_builtins(status.plan),
                requests=requests,
                model=self._model.info.service,
                model_bits_per_byte=bits,
                model_bits_per_byte_source=source,
                engines_ready_s=engines_ready_s,
                elapsed_s=self._elapsed(),
                peak_memory_mib=box.peak_memory_mib,
            )

    async def _start_nodes(self, box: DemoBox, client: AsyncClient, token: str) -> tuple[Status, frozenset[str]]:
        """Start the nodes and wait until all of them are in the plan."""
        self._stage = "the nodes join"
        if self._settings.nodes > 1:
            self._say("nodes are pinned to prefill and decode in turn: left to the planner, each might do both")
        settings = self._settings
        options = ["--model", str(self._model.folder), "--codec", settings.codec, "--threads", "1"]
        options += ["--kv-cache-mib", str(KV_CACHE_MIB)]
        joined: list[frozenset[str]] = []

        async def start() -> None:
            peers = await box.join_all(settings.nodes, token, options, PINS if settings.nodes > 1 else ())
            self._say("the engines start: each imports vLLM and loads the model, which takes the longest")
            joined.append(frozenset(peers.values()))

        watcher = Watcher()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(start)
            while True:
                status = await client.status()
                for line in watcher.on_status(status):
                    self._say(line)
                for peers in joined:
                    self._stage = "the engines start and the coordinator makes its plan"
                    if covers(status, peers):
                        return status, peers
                await trio.sleep(POLL_S)

    async def _ask_all(self, client: AsyncClient) -> list[Generation]:
        """The first request by itself, to be watched and timed; the others at the same time."""
        self._stage = "the network answers"
        answers: dict[str, Generation] = {}
        first, rest = self._asked[0], self._asked[1:]
        self._say(f"asking for {first.name}: {len(first.tokens)} tokens, the answer as it comes:")
        answers[first.name] = await self._ask(client, first, shown=True)
        async with trio.open_nursery() as nursery:

            async def ask(asked: Asked) -> None:
                answers[asked.name] = await self._ask(client, asked, shown=False)

            self._say(f"asking for {' and '.join(asked.name for asked in rest)} at the same time")
            for asked in rest:
                nursery.start_soon(ask, asked)
        return [answers[asked.name] for asked in self._asked]

    async def _ask(self, client: AsyncClient, asked: Asked, *, shown: bool) -> Generation:
        stream = client.generate(
            asked.prompt, messages=asked.messages, stream=True, max_tokens=self._settings.max_tokens
        )
        async with stream:
            async for delta in stream:
                if shown:
                    self._console.file.write(delta.text)
                    self._console.file.flush()
            answer = stream.result
        if shown:
            self._console.file.write("\n")
        if answer.figures is not None:
            self._say(f"{asked.name}: {figures_of(answer.figures)}")
        return answer

    async def _ask_single(self, box: DemoBox) -> list[tuple[int, ...]]:
        """The same requests on one engine, one after the other, without any network."""
        self._stage = "a single engine answers"
        self._say("asking a single engine, without a network, for the same")
        config = protocol.EngineConfig(model=str(self._model.folder), kv_cache_mib=KV_CACHE_MIB, threads=1)
        channel = box.take_channel()
        async with open_fork_server(log=None, threads=1, channel=channel.detach()) as server:
            single = SingleEngine()
            link = await server.start_engine(config, single.on_message)
            sampling = protocol.Sampling(max_tokens=self._settings.max_tokens)
            return [await single.ask(link, asked.tokens, sampling) for asked in self._asked]

    async def _start_measurement(self, box: DemoBox) -> trio.Process | None:
        if self._model.folder != BUNDLED or self._settings.timeout_s <= MEASURE_UNTIL_S:
            return None
        return await box.start_measurement(MEASUREMENT, "--modules", MEASURED_MODULE)

    async def _bits_per_byte(self, measurement: trio.Process | None) -> tuple[float | None, str]:
        """The bundled model's figure on five held-out modules, and one of them measured now."""
        if self._model.folder != BUNDLED:
            return None, "not measured: only the bundled model has held-out text"
        self._stage = "bits per byte are measured"
        recorded = json.loads((BUNDLED / "metrics.json").read_bytes())
        source = "measured on the five held-out modules after training"
        measured = await self._measured(measurement)
        if measured is not None:
            before = recorded["bits_per_byte_by_module"][MEASURED_MODULE]
            source += f"; {MEASURED_MODULE} alone in this run: {measured:.3f}, after training: {before:.3f}"
        return float(recorded["bits_per_byte"]), source

    async def _measured(self, measurement: trio.Process | None) -> float | None:
        """What the measurement found, if it is done in time."""
        if measurement is None or measurement.stdout is None:
            return None
        output = b""
        with trio.move_on_after(max(0.0, MEASURE_UNTIL_S - self._elapsed())):
            async for data in measurement.stdout:
                output += data
            return _bits(output) if await measurement.wait() == 0 else None
        return None

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _say(self, line: str) -> None:
        self._console.print(f"{self._elapsed():5.1f} s  {line}")


def _bits(raw: bytes) -> float | None:
    """The figure in a JSON object, or None."""
    try:
        return float(json.loads(raw)["bits_per_byte"])
    except (ValueError, KeyError, TypeError):
        return None


def show_report(report: DemoReport, console: Console) -> None:
    """The figures for people."""
    console.print()
    width = max((len(name_of(node.peer_id)) for node in report.nodes), default=0)
    for node in report.nodes:
        console.print(f"{name_of(node.peer_id):{width}}  {node.role:7}  {node.engine} on {node.device} in {node.dtype}")
    if report.coordinator is not None:
        console.print(f"coordinator: {name_of(report.coordinator)}")
    for reason in report.plan["why"]:
        console.print(f"plan: {shortened(reason, (node.peer_id for node in report.nodes))}")
    console.print()
    console.print(request_table(report.requests))
    if any(request.kv_send_mode == "serialised" for request in report.requests):
        console.print("all at once: an engine tries both ways first, then keeps to the better one")
    _show_agreement(report.requests, console)
    if report.model_bits_per_byte is not None:
        console.print(f"model: {report.model_bits_per_byte:.3f} bits per byte, {report.model_bits_per_byte_source}")
    console.print(f"took {report.elapsed_s:.1f} s and {report.peak_memory_mib / 1024:.2f} GiB at most")
    for problem in report.problems:
        console.print(f"PROBLEM: {problem}")
    console.print("everything worked" if report.ok else "not everything worked")


def _show_agreement(requests: tuple[RequestReport, ...], console: Console) -> None:
    same = sum(request.identical_to_single_engine for request in requests)
    console.print(f"{same} of {len(requests)} answers are identical to those of the single engine")
