"""`p2pserve doctor`: looks at this box and its network, and says what keeps it from joining."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import msgspec
import trio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...bootstrap import Address, PeerId, parse_address
from ...bootstrap.addresses import default_route_address
from ...node.box.errors import NodeError
from ...node.box.hardware import Hardware, probe
from ...node.box.prerequisites import inspect_box
from ...node.box.start_checks import installed_build
from ...node.engine.trials.selftest import PINNED
from ..actions.status_view import open_console
from ..options.values import folder_of_node
from ..replicas.dividing import list_ports
from . import checks, probing
from .checks import Diagnosis, Fitness, ModelFound

STYLES: Final = {Fitness.OK: "green", Fitness.WARNING: "yellow", Fitness.FAILED: "bold red"}


def run_doctor(arguments: SimpleNamespace) -> int:
    """Make all checks, and print them. Returns the exit code."""
    found = list(_examine(arguments))
    if arguments.format == "json":
        print(json.dumps({"fit": checks.is_fit(found), "checks": msgspec.to_builtins(found)}))
    else:
        print_found(found, open_console())
    return 0 if checks.is_fit(found) else 1


def print_found(found: Sequence[Diagnosis], console: Console) -> None:
    """A line for each check, the fix under it, and what it comes to."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for each in found:
        says = each.found + (f"\n-> {each.fix}" if each.fix else "")
        table.add_row(Text(each.fitness, STYLES[each.fitness]), each.check, says)
    console.print(table)
    counts = {fitness: sum(each.fitness is fitness for each in found) for fitness in Fitness}
    verdict = "this box is fit to join" if checks.is_fit(found) else "this box is not fit to join"
    console.print(f"{verdict}: {', '.join(f'{count} {fitness}' for fitness, count in counts.items() if count)}")


def _examine(arguments: SimpleNamespace) -> Iterator[Diagnosis]:
    yield checks.check_python(sys.version_info[:3], sys.platform, platform.machine())
    try:
        hardware = probe()
    except NodeError as error:
        yield checks.fail("gpu", str(error))
        return
    if arguments.replicas > 1:
        cut = checks.check_cut(hardware, arguments.replicas)
        yield cut
        if cut.fitness is Fitness.OK:
            hardware = checks.part_of(hardware, arguments.replicas)
    model = probing.find_model(arguments.model, hardware) if arguments.model is not None else None
    yield from _examine_box(arguments, hardware, model)
    where = arguments.bootstrap or arguments.token
    if where:
        yield from _examine_network(arguments, where, model)


def _examine_box(arguments: SimpleNamespace, hardware: Hardware, model: ModelFound | str | None) -> Iterator[Diagnosis]:
    known = None if isinstance(model, str) else model
    tp = max(1, len(hardware.gpus))
    if known is not None and not isinstance(known.share, str):
        tp = known.share.tp
    yield checks.check_engine(installed_build(), hardware, os.environ, PINNED)
    yield checks.check_gpus(hardware, inspect_box())
    yield checks.check_shared_memory(hardware, tp, probing.free_shared_memory())
    homes: list[Path] = [
        arguments.home.expanduser() / folder_of_node(number + 1) for number in range(arguments.replicas)
    ]
    home = homes[0]
    for each in homes:
        yield checks.check_home(each, *probing.find_home(each))
    if model is not None:
        yield checks.check_model(model)
    folder = probing.nearest_folder(_cache() if known is not None and known.missing_bytes else home)
    missing = known.missing_bytes if known is not None else 0
    yield checks.check_disk(shutil.disk_usage(folder).free, missing, str(folder))
    yield checks.check_memory(hardware, probing.available_memory(), known)
    first = parse_address(f"0.0.0.0:{arguments.port}")
    flags: Sequence[Address | None] = [None] * arguments.replicas
    if arguments.announce is not None:
        flags = list_ports(parse_address(arguments.announce), arguments.replicas, "announce")
    has_ipv6 = ":" in default_route_address("::")
    for flag, listen in zip(flags, list_ports(first, arguments.replicas, "port"), strict=True):
        yield checks.check_port(listen, trio.run(probing.find_port_problem, listen))
        announced = probing.find_address(None if flag is None else str(flag), os.environ, listen)
        yield checks.check_announced(announced, listen, has_ipv6=has_ipv6)


def _examine_network(arguments: SimpleNamespace, where: str, model: ModelFound | str | None) -> Iterator[Diagnosis]:
    token, members = probing.read_token(where, arguments.token)
    now = time.time()
    yield checks.check_token(token, now, arguments.replicas)
    if isinstance(token, str) and not members:
        return
    yield from checks.check_members(trio.run(probing.ask_members, members, arguments.timeout_s))
    if isinstance(token, str):
        return
    listen = parse_address(f"0.0.0.0:{arguments.port}")
    announced = probing.find_address(arguments.announce, os.environ, listen)
    is_free = listen.port and trio.run(probing.find_port_problem, listen) is None
    known = announced if is_free and not isinstance(announced, str) else None
    peer = probing.find_own_peer(arguments.home.expanduser() / folder_of_node(1))
    lookout = probing.Lookout(listen, known.address if known is not None else None, peer)
    around = trio.run(probing.look_around, where, arguments.token, arguments.timeout_s, lookout)
    if isinstance(around, str):
        yield checks.check_refusal(token, around)
        return
    if around.places is not None:
        yield checks.check_places(token, around.places, arguments.replicas)
    yield from checks.check_network(around.status, None if isinstance(model, str) else model)
    yield checks.check_clock(around.clocks)
    if known is not None:
        yield from checks.check_reach(known, listen, default_route_address(), around.answers)
    if isinstance(around.bandwidth, str):
        yield checks.note_unseen("bandwidth", around.bandwidth, "let members run the same p2pserve release")
    else:
        member, carried = around.bandwidth
        yield checks.check_bandwidth(member, *carried)
        is_lost = trio.run(probing.find_black_hole, where, arguments.token, arguments.timeout_s, PeerId(member))
        yield checks.check_packets(member, is_lost=is_lost)


def _cache() -> Path:
    from huggingface_hub import constants  # half a second, which only a model of a hub pays

    return Path(constants.HF_HUB_CACHE)
