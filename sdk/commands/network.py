"""`p2pserve generate`, `status`, `path` and `gateway`: what asks a network. Running one imports the client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import click

from ..options.command import combine, command, option
from ..options.shared import admin_options, http_options, network_options, price_options, timeout_option
from ..options.values import FIGURE, FILE

watch_option: Final = option("--watch", is_flag=True, help="again every two seconds, until Ctrl-C")


def _none_if_empty(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    return list(values) or None


@command("generate", example='p2pserve generate --max-tokens 40 "def fibonacci(n):"', formats=("text", "json"))
@combine(
    click.argument("prompt", required=False, help="the text to continue; `-` reads it from stdin (UTF-8)"),
    option(
        "--messages",
        type=FILE,
        metavar="FILE",
        help='a conversation instead: JSON, a list of {"role": ..., "content": ...}; `-` is stdin',
    ),
    network_options("p2p_client_..."),
    option("--max-tokens", type=int, metavar="N", help="at most this many new tokens (default: what fits, up to 256)"),
    option("--temperature", type=float, default=0.0, metavar="T", help="0 (default) takes the likeliest token"),
    option(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from this share of likely tokens (default: 1)"
    ),
    option("--top-k", type=int, default=0, metavar="K", help="sample from so many likely tokens (default: 0, all)"),
    option("--seed", type=int, metavar="N", help="the same seed gives the same answer"),
    option(
        "--stop",
        multiple=True,
        callback=_none_if_empty,
        metavar="TEXT",
        help="end before this text; may be given several times",
    ),
    option("--deadline-s", type=float, default=300.0, metavar="S", help="for the whole answer (default: 300)"),
    option("--service", metavar="NAME", help="which of several models of the network"),
    option("--priority", type=int, default=0, metavar="N", help="below 0 urgent, above 0 batch (default: 0)"),
    timeout_option,
)
def generate(arguments: SimpleNamespace) -> int:
    from ..actions.network import generate as run

    return run(arguments)


@command("status", example="p2pserve status --format json", formats=("table", "json"))
@combine(
    network_options("p2p_client_..."),
    option("--links", is_flag=True, help="also what is known of each link between two nodes"),
    option("--wide", is_flag=True, help="all columns; without it, what fits 80"),
    watch_option,
    timeout_option,
)
def status(arguments: SimpleNamespace) -> int:
    from ..actions.network import status as run

    return run(arguments)


@command("chat", example='p2pserve chat --system "You answer in one sentence."', formats=("text", "json"))
@combine(
    option("--system", metavar="TEXT", help="what the conversation begins with"),
    option("--max-tokens", type=int, metavar="N", help="at most this many new tokens of each answer"),
    option("--temperature", type=float, default=0.7, metavar="T", help="0 takes the likeliest token (default: 0.7)"),
    option("--service", metavar="NAME", help="which of several models of the network"),
    network_options("p2p_client_..."),
    timeout_option,
)
def chat(arguments: SimpleNamespace) -> int:
    from ..actions.chat import chat as run

    return run(arguments)


@command("path", example="p2pserve path amber-otter calm-heron --megabytes 80", formats=("table", "json"))
@combine(
    click.argument("source", help="a node: its id, or the end of it as `p2pserve status` shows it"),
    click.argument("target", help="the other node"),
    option(
        "--megabytes", type=FIGURE, default=80.0, metavar="MB", help="how much to move (default: 80, a long prompt)"
    ),
    price_options(),
    network_options("p2p_client_..."),
    timeout_option,
)
def path(arguments: SimpleNamespace) -> int:
    from ..actions.network import path as run

    return run(arguments)


@command(
    "gateway",
    example=[
        "p2pserve gateway --bootstrap p2p_client_...",
        "p2pserve gateway --http 0.0.0.0:8000 --api-key-file keys.txt",
        "p2pserve gateway --bootstrap p2p_admin_... --admin-token-file admin.txt",
    ],
    formats=("text", "json"),
)
@combine(network_options("p2p_client_..."), http_options("127.0.0.1:8000"), admin_options, timeout_option)
def gateway(arguments: SimpleNamespace) -> int:
    from ..actions.gateway import gateway as run

    return run(arguments)
