"""What the commands do that ask a network."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import msgspec
from rich.console import Console

from ...coordinator.names import name_of
from ...node.adverts import plans_of
from ...node.messages import RequestFigures, Status
from ..client import Client
from ..environment import require_network
from ..errors import UsageError
from ..requests import GenerateOptions, build_request
from .links_view import choice_text, explain_path, print_links
from .status_view import open_console, plan_faults, print_prose, print_status

WATCH_S: Final = 2.0


def generate(arguments: SimpleNamespace) -> int:
    """`p2pserve generate`."""
    prompt, messages = _read_input(arguments)
    given = vars(arguments)
    options = cast(GenerateOptions, {name: given[name] for name in GenerateOptions.__optional_keys__ if name in given})
    build_request(prompt, messages, options)  # before the network is asked for anything
    _write_any_text()
    with client_of(arguments) as client:
        if arguments.format == "json":
            print(json.dumps(msgspec.to_builtins(client.generate(prompt, messages=messages, **options))))
            return 0
        with client.generate(prompt, messages=messages, stream=True, **options) as stream:
            for delta in stream:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
            answer = stream.result
        if not answer.text.endswith("\n"):
            print()
        if answer.figures is not None:
            print(figures_line(answer.figures), file=sys.stderr)
    return 0


def status(arguments: SimpleNamespace) -> int:
    """`p2pserve status`."""
    show_network(arguments, _print_status)
    return 0


def show_network(arguments: SimpleNamespace, show: Callable[[Status, SimpleNamespace, Console], None]) -> None:
    """What a network says of itself, once or with --watch again and again, at the top of a terminal."""
    with client_of(arguments) as client:
        while True:
            found = client.status()
            _write_any_text()
            console = open_console(wide=getattr(arguments, "wide", False))
            if arguments.watch and console.is_terminal and arguments.format != "json":
                console.clear()
            show(found, arguments, console)
            sys.stdout.flush()
            if not arguments.watch:
                return
            time.sleep(WATCH_S)


def _print_status(found: Status, arguments: SimpleNamespace, console: Console) -> None:
    if arguments.format == "json":
        faults = {replica: fault for plan in plans_of(found) for replica, fault in plan_faults(found, plan).items()}
        print(json.dumps({**msgspec.to_builtins(found), "not_serving": faults}))
        return
    print_status(found, console, wide=arguments.wide)
    if arguments.links:
        print_links(found, console, wide=arguments.wide)


def path(arguments: SimpleNamespace) -> int:
    """`p2pserve path`."""
    with client_of(arguments) as client:
        found = client.status()
    prices = (arguments.usd_per_s, arguments.max_usd_per_gb)
    choice = explain_path(found, arguments.source, arguments.target, arguments.megabytes, prices)
    if arguments.format == "json":
        print(json.dumps(msgspec.to_builtins(choice)))
    else:
        print_prose(choice_text(choice).splitlines(), open_console())
    return 0


def figures_line(figures: RequestFigures) -> str:
    """One line about a finished request."""
    parts = [
        f"{figures.prompt_tokens} prompt tokens, {figures.completion_tokens} new",
        f"first after {figures.ttft_s:.2f} s, then {figures.tpot_s * 1000:.1f} ms each",
    ]
    if figures.prefill_node is None:
        parts.append(f"computed on {name_of(figures.decode_node)}")
    else:
        parts.append(f"prefill on {name_of(figures.prefill_node)}, decode on {name_of(figures.decode_node)}")
    transfer = figures.transfer
    if transfer is not None:
        sent = f"KV {transfer.raw_bytes / 1e6:.2f} MB sent as {transfer.wire_bytes / 1e6:.2f} MB ({figures.codec})"
        if transfer.mode == "serialised":
            parts.append(f"{sent}, all at once in {transfer.span_s * 1000:.0f} ms after prefill")
        else:
            parts.append(f"{sent}, {transfer.hidden_fraction:.0%} of it hidden behind prefill")
        relays = [name for name in transfer.paths if name != "direct"]
        if relays:
            parts.append("relayed by " + " and ".join(map(name_of, relays)))
        if transfer.usd:
            parts.append(f"traffic ${transfer.usd:.6f}")
    if figures.usd:
        parts.append(f"cost ${figures.usd:.6f}")
    parts += [f"recovered: {what}" for what in figures.recovered]
    if figures.id:
        parts.append(f"request {figures.id}")
    return "; ".join(parts)


def client_of(arguments: SimpleNamespace) -> Client:
    """A client of the network that the options name. Raises InvalidAddress."""
    where, _ = require_network(arguments.bootstrap, arguments.token)
    return Client(where, token=arguments.token, timeout_s=arguments.timeout_s)


def _read_input(arguments: SimpleNamespace) -> tuple[str | None, list[dict[str, str]] | None]:
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
    if str(path) == "-" and sys.stdin is None:
        raise UsageError(f"{name}: standard input is closed")
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
