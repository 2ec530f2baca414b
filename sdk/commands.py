"""What the commands of the command line do, apart from `demo`."""

from __future__ import annotations

import json
import logging
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from ..bootstrap import parse_address
from ..coordinator import Phase
from ..kvtransport.figures import BoxFigures
from ..node.agent import EngineKnobs, NodeSettings, Started, leave_node, run_node
from ..node.engine.selftest import check_installation, selftest_log
from ..node.kv_ways import WaySettings
from ..node.messages import RequestFigures
from .client import Client
from .errors import UsageError
from .links_view import choice_text, explain_path, print_links
from .requests import GenerateOptions, build_request
from .status_view import print_status

__all__ = ["COMMANDS", "figures_line", "network_target", "set_up_logging"]

SWITCH_S: Final = 0.0005
"""For so long a thread that plans or measures may keep a node's event loop waiting; ten times less than by default."""


def bootstrap(arguments: Namespace) -> int:
    """`p2pserve bootstrap`."""
    return _run_node(_settings(arguments, arguments.home.expanduser() / "bootstrap", None), arguments)


def join(arguments: Namespace) -> int:
    """`p2pserve join`."""
    where = network_target(arguments)
    return _run_node(_settings(arguments, arguments.home.expanduser() / "node", where), arguments)


def leave(arguments: Namespace) -> int:
    """`p2pserve leave`."""
    leave_node(arguments.home.expanduser() / arguments.node, arguments.timeout_s)
    return 0


def generate(arguments: Namespace) -> int:
    """`p2pserve generate`."""
    prompt, messages = _read_input(arguments)
    options = GenerateOptions(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=arguments.stop,
        deadline_s=arguments.deadline_s,
        service=arguments.service,
    )
    build_request(prompt, messages, options)  # before the network is asked for anything
    where = network_target(arguments)
    _write_any_text()
    with Client(where, token=arguments.token, timeout_s=arguments.timeout_s) as client:
        if arguments.format == "json":
            print(json.dumps(msgspec.to_builtins(client.generate(prompt, messages=messages, **options))))
            return 0
        with client.generate(prompt, messages=messages, stream=True, **options) as stream:
            for piece in stream:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            answer = stream.result
        if not answer.text.endswith("\n"):
            print()
        if answer.figures is not None:
            print(figures_line(answer.figures), file=sys.stderr)
    return 0


def status(arguments: Namespace) -> int:
    """`p2pserve status`."""
    with Client(network_target(arguments), token=arguments.token, timeout_s=arguments.timeout_s) as client:
        found = client.status()
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        _write_any_text()
        print_status(found)
        if arguments.links:
            print_links(found)
    return 0


def path(arguments: Namespace) -> int:
    """`p2pserve path`."""
    with Client(network_target(arguments), token=arguments.token, timeout_s=arguments.timeout_s) as client:
        found = client.status()
    prices = (arguments.usd_per_s, arguments.max_usd_per_gb)
    choice = explain_path(found, arguments.source, arguments.target, arguments.megabytes, prices)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(choice)))
    else:
        print(choice_text(choice))
    return 0


def selftest(arguments: Namespace) -> int:
    """`p2pserve selftest`."""
    verdict = trio.run(check_installation)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(verdict)))
    elif verdict.passed:
        print(f"vLLM {verdict.versions.vllm} works with p2pserve ({verdict.seconds:.1f} s)")
    else:
        print(f"vLLM {verdict.versions.vllm} does not work with p2pserve: {verdict.reason}; see {selftest_log()}")
    return 0 if verdict.passed else 1


COMMANDS: Final[dict[str, Callable[[Namespace], int]]] = {
    "bootstrap": bootstrap,
    "join": join,
    "leave": leave,
    "generate": generate,
    "status": status,
    "path": path,
    "selftest": selftest,
}


def figures_line(figures: RequestFigures) -> str:
    """One line about a finished request."""
    short = {peer: f"..{peer[-6:]}" for peer in (figures.prefill_node, figures.decode_node) if peer}
    parts = [
        f"{figures.prompt_tokens} prompt tokens, {figures.completion_tokens} new",
        f"first after {figures.ttft_s:.2f} s, then {figures.tpot_s * 1000:.1f} ms each",
    ]
    if figures.prefill_node is None:
        parts.append(f"computed on {short[figures.decode_node]}")
    else:
        parts.append(f"prefill on {short[figures.prefill_node]}, decode on {short[figures.decode_node]}")
    transfer = figures.transfer
    if transfer is not None:
        parts.append(
            f"KV {transfer.raw_bytes / 1e6:.2f} MB sent as {transfer.wire_bytes / 1e6:.2f} MB ({figures.codec}),"
            f" {transfer.hidden_fraction:.0%} of it hidden behind prefill"
        )
        ways = [name for name in transfer.paths if name != "direct"]
        if ways:
            parts.append("by way of " + " and ".join(f"..{name[-6:]}" for name in ways))
        if transfer.usd:
            parts.append(f"traffic ${transfer.usd:.6f}")
    parts += [f"recovered: {what}" for what in figures.recovered]
    return "; ".join(parts)


def set_up_logging(arguments: Namespace) -> None:
    """Without --debug only our own mistakes are logged: what concerns the user is said, or ends the command."""
    if arguments.debug:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    else:
        logging.disable(logging.WARNING)


def network_target(arguments: Namespace) -> str:
    """The address or token of --bootstrap. Raises UsageError."""
    if not arguments.bootstrap:
        raise UsageError(
            "bootstrap: give --bootstrap with the token that `p2pserve bootstrap` printed, or set P2PSERVE_BOOTSTRAP"
        )
    where: str = arguments.bootstrap.strip()
    return where


def _settings(arguments: Namespace, home: Path, where: str | None) -> NodeSettings:
    listen = f"0.0.0.0:{arguments.port}" if arguments.port is not None else arguments.listen
    return NodeSettings(
        home=home,
        listen=parse_address(listen),
        announce=arguments.announce,
        bootstrap=where,
        token=arguments.token if where is not None else None,
        model=arguments.model,
        codec=arguments.codec,
        ways=WaySettings(
            site=arguments.site,
            box=BoxFigures(
                up_gbps=arguments.up_gbps,
                down_gbps=arguments.down_gbps,
                up_usd_per_gb=arguments.usd_per_gb_up,
                down_usd_per_gb=arguments.usd_per_gb_down,
                relay_gbps=arguments.relay_gbps,
            ),
            usd_per_s=arguments.usd_per_s,
            max_usd_per_gb=arguments.max_usd_per_gb,
        ),
        engine=EngineKnobs(
            dtype=arguments.dtype,
            kv_cache_mib=arguments.kv_cache_mib,
            max_batched_tokens=arguments.max_batched_tokens,
            max_model_len=arguments.max_model_len,
            threads=arguments.threads,
            tp=arguments.tp,
            memory_gib=arguments.memory_gib,
            emulate=arguments.emulate,
            emulate_specs=arguments.emulate_specs,
        ),
        drain_s=arguments.drain_s,
        phase=Phase(arguments.phase) if arguments.phase is not None else None,
        usd_per_hour=arguments.usd_per_hour,
        engine_channel=getattr(arguments, "engine_channel", None),
    )


def _run_node(settings: NodeSettings, arguments: Namespace) -> int:
    greet = _greet_json if arguments.format == "json" else _greet
    sys.setswitchinterval(SWITCH_S)
    return trio.run(_serve_until_signal, settings, greet)


async def _serve_until_signal(settings: NodeSettings, greet: Callable[[Started], None]) -> int:
    """Run a node. The first signal drains it, a second one ends it at once; so does one before it has joined."""
    stop = trio.Event()
    code = 0
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            joined = False

            async def watch() -> None:
                nonlocal code
                async for _ in signals:
                    if not joined or stop.is_set():
                        code = 130
                        nursery.cancel_scope.cancel()
                    else:
                        stop.set()
                        _say("leaving; once more to leave at once")

            async def serve(*, task_status: trio.TaskStatus[Started]) -> None:
                await run_node(settings, say=_say, stop=stop, task_status=task_status)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            started: Started = await nursery.start(serve)
            joined = True
            greet(started)
    return code


def _greet(started: Started) -> None:
    print(f"node {started.peer} at {started.address}")
    worker, client = started.tokens.get("worker"), started.tokens.get("client")
    if worker is not None:
        print(f"nodes join with:   p2pserve join --bootstrap {worker}")
    if client is not None:
        print(f'clients ask with:  p2pserve generate --bootstrap {client} "def fibonacci(n):"')
    sys.stdout.flush()


def _greet_json(started: Started) -> None:
    greeting = {"peer": started.peer, "address": str(started.address), "tokens": started.tokens}
    print(json.dumps(greeting), flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _read_input(arguments: Namespace) -> tuple[str | None, list[dict[str, str]] | None]:
    """Prompt or messages as the arguments name them. Raises UsageError."""
    if arguments.messages is None:
        if arguments.prompt is None:
            raise UsageError("prompt: give a text, `-` for stdin, or --messages FILE")
        return (_read(Path("-"), "prompt") if arguments.prompt == "-" else arguments.prompt), None
    if arguments.prompt is not None:
        raise UsageError("prompt: give either a text or --messages, and not both")
    text = _read(arguments.messages, "messages")
    try:
        messages = json.loads(text)
    except ValueError as error:
        raise UsageError(f"messages: {arguments.messages} is not JSON: {error}") from error
    if not isinstance(messages, list):
        raise UsageError(f'messages: {arguments.messages} holds no list; write [{{"role": ..., "content": ...}}]')
    return None, messages


def _read(path: Path, name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: {path} cannot be read: {error.strerror}") from error
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        where = "stdin" if str(path) == "-" else str(path)
        raise UsageError(f"{name}: {where} is not UTF-8 text (byte {error.start}); convert it first") from error


def _write_any_text() -> None:
    """Write what the terminal cannot show as `?` instead of failing on it."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
