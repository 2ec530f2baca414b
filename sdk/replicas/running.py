"""`p2pserve join --replicas`: one command that runs several nodes on this box."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import trio

from ...bootstrap import Identity, JoinToken, parse_join_target
from ...bootstrap.addresses import FoundAddress, find_announced, names_one_place
from ...coordinator.names import name_of
from ...node.box.hardware import find_visible
from ...node.box.home import lock_home
from ...node.settings import WAN
from ..actions.greeting import describe_greeting
from ..environment import require_network
from ..errors import UsageError
from ..options.secrets import STDIN
from ..options.values import AUTO, BOX
from ..printing import printable
from .dividing import NodePart, check_places, describe_unmapped, divide_box, emulated_cards
from .processes import BoxNodes

_READ_ALREADY: Final = frozenset({"config", "token_file", "admin_token_file", "replicas"})
"""Options that the nodes are not told."""


def join_with_replicas(arguments: SimpleNamespace) -> int:
    """Run the nodes until all of them have left; the exit code. Raises UsageError, AddressError, TokenError, GpuError
    or NodeError."""
    options = {name: value for name, value in vars(arguments).items() if name not in _READ_ALREADY}
    if options["api_key_file"] == STDIN:
        raise UsageError("api_key_file: several nodes do not read standard input; give a file")
    where, token = require_network(options["bootstrap"], options["token"])
    replicas = arguments.replicas
    if replicas == AUTO:
        from .choosing import choose_replicas

        replicas, why = choose_replicas(options)
        print(why, file=sys.stderr, flush=True)
        if replicas == 1:
            from ..actions.node import join

            return join(arguments)
    target = parse_join_target(where, token)
    visible = tuple(find_visible()) if emulated_cards(options) is None else ()
    parts = divide_box(options, replicas, visible)
    if target.token is not None:  # without one, the first node says what is missing
        check_places(JoinToken.parse(target.token).grant, replicas)
    announced = _find_announced(parts[0])
    home: Path = options["home"].expanduser()
    with lock_home(home / BOX):
        if not options["site"] and not names_one_place(announced.address.host):
            # Boxes at one public address are one site. These have none, and are at one place all the same.
            options["site"] = name_of(Identity.load_or_create(_made(home / parts[0].folder)).peer_id)
        for line in filter(None, (_describe(parts, options), describe_unmapped(parts, announced.mapped))):
            print(line, file=sys.stderr, flush=True)
        return trio.run(_run_until_signal, parts, options, arguments.format)


async def _run_until_signal(parts: tuple[NodePart, ...], options: Mapping[str, Any], form: str) -> int:
    """The first signal drains all nodes; a second one, or one before they have joined, ends them."""
    width = max(len(part.folder) for part in parts)

    def tell(folder: str, line: str) -> None:
        print(f"{folder:<{width}} | {printable(line)}", file=sys.stderr, flush=True)

    def greet(part: NodePart, greeting: dict[str, Any]) -> None:
        if form == "json":
            print(json.dumps({"node": part.folder, **greeting}), flush=True)
            return
        for line in describe_greeting(greeting):
            print(f"{part.folder:<{width}} | {printable(line)}", flush=True)

    nodes = BoxNodes(parts, options, tell=tell, greet=greet, tuning=WAN)
    code = 0
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pass_on, signals, nodes.leave)
            code = await nodes.run()
            nursery.cancel_scope.cancel()
    return code


async def _pass_on(signals: Any, leave: Callable[[], None]) -> None:
    async for _ in signals:
        leave()


def _find_announced(part: NodePart) -> FoundAddress:
    """What the first node would tell others, and which ports the provider maps. Raises AddressError."""
    return find_announced(part.options["announce"], os.environ, part.listen)


def _describe(parts: tuple[NodePart, ...], options: Mapping[str, Any]) -> str:
    """Which node gets what."""
    first, last = parts[0], parts[-1]
    ports = f"ports {first.listen.port} to {last.listen.port}" if first.listen.port else "any free ports"
    return f"{len(parts)} nodes on this box: {first.folder} to {last.folder} in {options['home']}, {ports}"


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
