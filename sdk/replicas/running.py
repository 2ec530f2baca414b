"""`p2pserve join --replicas`: one command that runs several nodes on this box."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol

import trio

from ...bootstrap import JoinToken, parse_join_target
from ...bootstrap.addresses import FoundAddress, find_announced, names_one_place
from ...coordinator.bounds import MAX_GPUS
from ...coordinator.names import name_of
from ...coordinator.regrouping.divisions import CutOffer
from ...node.box.hardware import find_visible
from ...node.box.home import lock_home
from ...node.settings import WAN
from ..actions.greeting import describe_greeting
from ..environment import require_network
from ..errors import UsageError
from ..options.secrets import STDIN
from ..options.values import AUTO, BOX, folder_of_node
from ..printing import printable
from .cuts import CutKeeper
from .dividing import NodePart, check_places, choose_offers, describe_unmapped, divide_box, emulated_cards
from .processes import Greet, Tell
from .running_box import RunningBox, identify

READ_ALREADY: Final = frozenset({"config", "token_file", "admin_token_file", "models", "replicas", "recut_every"})
"""Options that the nodes are not told."""


def join_with_replicas(arguments: SimpleNamespace) -> int:
    """Run the nodes until all of them have left; the exit code. Raises UsageError, AddressError, TokenError, GpuError
    or NodeError."""
    options = {name: value for name, value in vars(arguments).items() if name not in READ_ALREADY}
    if options["api_key_file"] == STDIN:
        raise UsageError("api_key_file: several nodes do not read standard input; give a file")
    where, token = require_network(options["bootstrap"], options["token"])
    replicas, offers = arguments.replicas, tuple[CutOffer, ...]()
    if replicas == AUTO:
        from .choosing import choose_replicas

        replicas, why, offers = choose_replicas(options)
        print(why, file=sys.stderr, flush=True)
        if replicas == 1 and len(offers) < 2:
            from ..actions.node import join

            return join(arguments)
    target = parse_join_target(where, token)
    visible = tuple(find_visible()) if emulated_cards(options) is None else ()
    parts, places = divide_box(options, replicas, visible), MAX_GPUS
    if target.token is not None:  # without one, the first node says what is missing
        grant = JoinToken.parse(target.token).grant
        check_places(grant, replicas)
        places = grant.uses
    announced = find_announced_part(parts[0])
    home: Path = options["home"].expanduser()
    offers = choose_offers(options, offers, visible, announced.mapped, places)
    with lock_home(home / BOX):
        if not options["site"] and not names_one_place(announced.address.host):
            # Boxes at one public address are one site. These have none, and are at one place all the same.
            options["site"] = name_of(identify(home, parts[0]))
        told = (_describe(parts, options), describe_unmapped(parts, announced.mapped), _describe_offers(offers))
        for line in filter(None, told):
            print(line, file=sys.stderr, flush=True)
        keeper = CutKeeper(replicas, offers, arguments.recut_every)
        width = len(folder_of_node(max([replicas, *(offer.replicas for offer in offers)])))
        tell, greet = show_lines(width, arguments.format)
        box = RunningBox(options, visible, keeper, tell=tell, greet=greet, tuning=WAN)
        return trio.run(run_until_signal, box)


class LeavingBox(Protocol):
    """The nodes of a box."""

    def leave(self) -> None:
        """Let all nodes finish their requests and leave; a second time, let them end at once."""

    async def run(self) -> int:
        """Run them until all have left; the exit code."""


async def run_until_signal(box: LeavingBox) -> int:
    """The first signal drains all nodes; a second one, or one before they have joined, ends them."""
    code = 0
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pass_on, signals, box.leave)
            code = await box.run()
            nursery.cancel_scope.cancel()
    return code


def show_lines(width: int, form: str) -> tuple[Tell, Greet]:
    """Show what nodes say, their names in a column of this width."""

    def tell(folder: str, line: str) -> None:
        print(f"{folder:<{width}} | {printable(line)}", file=sys.stderr, flush=True)

    def greet(part: NodePart, greeting: dict[str, Any]) -> None:
        if form == "json":
            print(json.dumps({"node": part.folder, **greeting}), flush=True)
            return
        for line in describe_greeting(greeting):
            print(f"{part.folder:<{width}} | {printable(line)}", flush=True)

    return tell, greet


async def _pass_on(signals: Any, leave: Callable[[], None]) -> None:
    async for _ in signals:
        leave()


def find_announced_part(part: NodePart) -> FoundAddress:
    """What the first node would tell others, and which ports the provider maps. Raises AddressError."""
    return find_announced(part.options["announce"], os.environ, part.listen)


def _describe(parts: tuple[NodePart, ...], options: Mapping[str, Any]) -> str:
    """Which node gets what."""
    first, last = parts[0], parts[-1]
    ports = f"ports {first.listen.port} to {last.listen.port}" if first.listen.port else "any free ports"
    return f"{len(parts)} nodes on this box: {first.folder} to {last.folder} in {options['home']}, {ports}"


def _describe_offers(offers: tuple[CutOffer, ...]) -> str | None:
    """What the network may make of the box; None where nothing."""
    if not offers:
        return None
    cuts = [str(offer.replicas) for offer in offers]
    return f"the network may divide this box anew, among {', '.join(cuts[:-1])} or {cuts[-1]} nodes"
