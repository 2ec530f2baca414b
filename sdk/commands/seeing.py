"""`p2pserve topology`, `events` and `inspect`: what looks at a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import click

from ..options.command import CommandGroup, combine, command, option
from ..options.planning import explain_option
from ..options.shared import network_options, price_options, timeout_option
from ..options.values import ABOVE_ZERO, FIGURE, FILE, POSITIVE

FORMATS: Final = ("text", "json")
FIGURES: Final = ("rate", "rtt", "loss", "price", "age")

network: Final = combine(network_options("p2p_client_..."), timeout_option)

logs_option: Final = option(
    "files",
    "--from",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="read event logs (`events.msgpack` in a node's home folder) in place of asking a network; may be given "
    "several times",
)


@command(
    "topology",
    example=[
        "p2pserve topology",
        "p2pserve topology --watch --site fra",
        "p2pserve topology --svg network.svg --json network.json",
    ],
    formats=("table", "json"),
)
@combine(
    option("sites", "--site", multiple=True, metavar="NAME", help="only this site; may be given several times"),
    option("boxes", "--box", multiple=True, metavar="BOX", help="only this box; may be given several times"),
    option(
        "--fold/--no-fold",
        default=None,
        help="one row for each site in place of its boxes (default: from 40 boxes on, in tables)",
    ),
    option(
        "--show",
        type=click.Choice(FIGURES),
        default="rate",
        help="what the matrix of links has: Gb/s (default), round trips, loss, dollars per GB, or age",
    ),
    option("--watch", is_flag=True, help="stay, and show what changes; q leaves"),
    option("--interval-s", type=ABOVE_ZERO, default=2.0, metavar="S", help="between two looks of --watch (default: 2)"),
    option("--svg", type=FILE, metavar="FILE", help="draw it there"),
    option("--png", type=FILE, metavar="FILE", help="the same as pixels; needs p2pserve[plots]"),
    option(
        "--json",
        type=FILE,
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        help="all of it, for programs; without FILE as --format json",
    ),
    network,
)
def topology(arguments: SimpleNamespace) -> int:
    from ..seeing.actions import topology as run

    return run(arguments)


@command(
    "events",
    example=["p2pserve events --follow --kind request --kind transfer", "p2pserve events --from node/events.msgpack"],
    formats=FORMATS,
)
@combine(
    option("--follow", is_flag=True, help="stay, and show what happens; Ctrl-C leaves"),
    option(
        "kinds",
        "--kind",
        multiple=True,
        metavar="KIND",
        help="only this kind (engine.state) or group of kinds (engine); may be given several times",
    ),
    option("--request", default="", metavar="ID", help="only of this request"),
    option("--box", metavar="BOX", help="of this box (default: the nearest)"),
    option("--count", type=POSITIVE, default=100, metavar="N", help="at most so many of the past (default: 100)"),
    logs_option,
    network,
)
def events(arguments: SimpleNamespace) -> int:
    from ..seeing.actions import events as run

    return run(arguments)


@click.group(cls=CommandGroup)
def inspect() -> None:
    """Say all that is known of one thing, and why.

    A box, a link, a path, the plan, or one request across all boxes that had a part in it.
    """


@command("node", about="say all that is known of a box", example="p2pserve inspect node amber-otter", formats=FORMATS)
@combine(click.argument("box", help="its id, or the end of it as `p2pserve status` shows it"), network)
def inspect_node(arguments: SimpleNamespace) -> int:
    from ..seeing.actions import inspect_node as run

    return run(arguments)


@command(
    "link",
    about="say what is known of the link from one box to another, and from what",
    example="p2pserve inspect link amber-otter calm-heron",
    formats=FORMATS,
)
@combine(
    click.argument("source", help="a box: its id, or the end of it as `p2pserve status` shows it"),
    click.argument("target", help="the other box"),
    network,
)
def inspect_link(arguments: SimpleNamespace) -> int:
    from ..seeing.actions import inspect_link as run

    return run(arguments)


@command(
    "path",
    about="explain by which path KV would go from one node to another, and why",
    example="p2pserve inspect path amber-otter calm-heron --megabytes 80",
    formats=("table", "json"),
)
@combine(
    click.argument("source", help="a node: its id, or the end of it as `p2pserve status` shows it"),
    click.argument("target", help="the other node"),
    option(
        "--megabytes", type=FIGURE, default=80.0, metavar="MB", help="how much to move (default: 80, a long prompt)"
    ),
    price_options(),
    network,
)
def inspect_path(arguments: SimpleNamespace) -> int:
    from ..actions.network import path as run

    return run(arguments)


@command(
    "plan",
    about="say what the running plan is, and why",
    example=["p2pserve inspect plan", "p2pserve inspect plan --explain"],
    formats=FORMATS,
)
@combine(explain_option, network)
def inspect_plan(arguments: SimpleNamespace) -> int:
    from ..live.running_plan import inspect_plan as run

    return run(arguments)


@command(
    "request",
    about="show one request across boxes: queue, prefill, KV, decode, replays",
    example=[
        "p2pserve inspect request 5f3a9c... --trace request.json",
        "p2pserve inspect request 5f3a9c... --from a.msgpack --from b.msgpack",
    ],
    formats=FORMATS,
)
@combine(
    click.argument("request", metavar="ID", help="as `generate` prints it"),
    option("--trace", type=FILE, metavar="FILE", help="write it for ui.perfetto.dev and chrome://tracing (JSON)"),
    option("--layers", is_flag=True, help="a line for every layer's KV"),
    logs_option,
    network,
)
def inspect_request(arguments: SimpleNamespace) -> int:
    from ..seeing.actions import inspect_request as run

    return run(arguments)


for _each in (inspect_request, inspect_node, inspect_link, inspect_path, inspect_plan):
    inspect.add_command(_each)
