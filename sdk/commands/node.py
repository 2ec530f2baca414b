"""`p2pserve bootstrap`, `join`, `leave`, `drain`, `price` and `logs`: the node of this box.

Running one imports all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import click

from ..errors import UsageError
from ..options.arguments import FLAGS, VLLM, ConfigArgument
from ..options.command import combine, command, option
from ..options.engine import engine_options, hosting_options, link_options
from ..options.shared import admin_options, api_options, home_option, http_options, network_options, place_options
from ..options.values import (
    AGE,
    COUNT,
    DURATION,
    FIGURE,
    MOMENT,
    OWN_NODE,
    POSITIVE,
    REPLICAS,
    SECONDS,
    WORD,
    duration,
)

vllm_options: Final = click.argument(
    FLAGS, cls=ConfigArgument, key=VLLM, nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS OF vllm serve]"
)


@command(
    "bootstrap",
    example="p2pserve bootstrap --listen 0.0.0.0:4001 --announce 203.0.113.7:40123",
    formats=("text", "json"),
)
@combine(
    place_options(port=4001, folder="bootstrap"),
    option("--model", metavar="MODEL", help="serve a model here as well (default: none)"),
    option(
        "--also",
        multiple=True,
        metavar="HOST:PORT",
        help="another address that join tokens name, of this box or of a member that stays; may be given several times",
    ),
    http_options(None),
    admin_options,
    api_options,
    vllm_options,
    link_options,
    engine_options,
)
def bootstrap(arguments: SimpleNamespace) -> int:
    from ..actions.node import bootstrap as run

    return run(arguments)


def _name_first(ctx: click.Context, parameter: click.Parameter, models: tuple[str, ...]) -> tuple[str, ...]:
    """Most of what looks at the options wants one model, or none."""
    ctx.params["model"] = models[0] if models else None
    return models


@command(
    "join",
    example="p2pserve join --bootstrap p2p_worker_... --model ~/models/llama --port 4002",
    formats=("text", "json"),
)
@combine(
    network_options("p2p_worker_..."),
    option(
        "join_timeout_s",
        "--join-timeout",
        type=SECONDS,
        default=60.0,
        metavar="S",
        help="how long to ask members that do not answer (default: 60)",
    ),
    place_options(port=4002, folder="node"),
    option(
        "--ends-at",
        type=MOMENT,
        metavar="TIME",
        help="when the box ends, as spot boxes do: 2026-12-01T12:00 (UTC), or 2h from now; it gets no request that "
        "would not finish, and leaves --drain-s before (default: it stays)",
    ),
    option(
        "models",
        "--model",
        type=WORD,
        multiple=True,
        callback=_name_first,
        metavar="MODEL",
        help="a folder in Hugging Face format, a Hugging Face id, or a small one that ships with this, `bundled` or "
        "`bundled-prose`; several share the box, with one GPU and --kv-cache-mib for all (default: what the network's "
        "coordinator gives this box, of its catalogue: see `p2pserve models`)",
    ),
    hosting_options,
    http_options(None),
    admin_options,
    api_options,
    vllm_options,
    option(
        "--replicas",
        type=REPLICAS,
        section="Engine",
        default=1,
        metavar="N",
        help="divide the GPUs of this box among so many nodes, each a replica of the model with a port, the next one "
        "up, and a folder of its own; auto: as many as would serve most requests, and others later where the network "
        "plans so (default: 1)",
    ),
    option(
        "--recut-every",
        type=DURATION,
        section="Engine",
        default=duration("30m"),
        metavar="TIME",
        help="with --replicas auto: the network may divide this box anew so often at most (default: 30m)",
    ),
    option("--engine-channel", type=COUNT, hidden=True),
    link_options,
    engine_options,
)
def join(arguments: SimpleNamespace) -> int:
    if len(arguments.models) > 1:
        from ..replicas.sharing import join_with_models

        return join_with_models(arguments, arguments.models)
    if arguments.model is None and arguments.max_services > 1:
        from ..replicas.sharing import join_with_models

        return join_with_models(arguments, (None,) * arguments.max_services)
    if arguments.replicas != 1:
        require_model(arguments)
        from ..replicas.running import join_with_replicas

        return join_with_replicas(arguments)
    from ..actions.node import join as run

    return run(arguments)


def require_model(arguments: SimpleNamespace) -> None:
    """Raise UsageError where several nodes of this box have no model to be divided for."""
    if arguments.model is None:
        raise UsageError("model: --replicas divides this box for one model; say which with --model")


@command("leave", example="p2pserve leave", formats=("text", "json"))
@combine(
    click.argument(
        "node",
        type=OWN_NODE,
        default=None,
        required=False,
        metavar="[NODE]",
        help="`node`, which runs `join`, or of several `node-2` and so on, or `bootstrap` (default: what runs here; of "
        "several nodes of a `join` all)",
    ),
    home_option("the node's own folder is inside it"),
    option("--timeout-s", type=SECONDS, default=60.0, metavar="S", help="give up after this long (default: 60)"),
)
def leave(arguments: SimpleNamespace) -> int:
    from ..box.draining import leave as run

    return run(arguments)


@command(
    "drain",
    example=["p2pserve drain", "p2pserve drain --undo", "p2pserve drain amber-otter"],
    formats=("text", "json"),
)
@combine(
    click.argument(
        "box",
        default=None,
        required=False,
        help="a node of this box, `node` (which runs `join`), `node-2` and so on, or `bootstrap` (default: what runs "
        "here; of several nodes of a `join` all); or, on a box that is an admin of its network as the one that ran "
        "`bootstrap` is, the name or id of another box",
    ),
    option("--undo", is_flag=True, help="take new requests again"),
    option("--no-wait", is_flag=True, help="do not wait until its requests have ended"),
    home_option("the node's own folder is inside it"),
    option(
        "--timeout-s",
        type=SECONDS,
        default=300.0,
        metavar="S",
        help="wait no longer for its requests; it goes on draining (default: 300)",
    ),
)
def drain(arguments: SimpleNamespace) -> int:
    from ..box.draining import drain as run

    return run(arguments)


@command("price", example=["p2pserve price", "p2pserve price 0.35"], formats=("text", "json"))
@combine(
    click.argument(
        "usd",
        type=FIGURE,
        default=None,
        required=False,
        help="dollars per hour from now on, until the node ends; 0: no price (default: only say what it is)",
    ),
    option(
        "--node",
        type=OWN_NODE,
        default=None,
        metavar="NODE",
        help="`node`, which runs `join`, or of several `node-2` and so on, or `bootstrap` (default: what runs here; "
        "several nodes of a `join` have the price together)",
    ),
    home_option("the node's own folder is inside it"),
)
def price(arguments: SimpleNamespace) -> int:
    from ..box.pricing import price as run

    return run(arguments)


@command(
    "logs",
    example=["p2pserve logs --since 10m --level warning", "p2pserve logs --follow --request 5f3a9c..."],
    formats=("table", "json"),
)
@combine(
    click.argument(
        "node",
        type=OWN_NODE,
        default=None,
        required=False,
        metavar="[NODE]",
        help="`node`, which runs `join`, or of several `node-2` and so on, or `bootstrap` (default: what runs, or has "
        "run, here; of several nodes of a `join` all, each line with its node)",
    ),
    option(
        "--of",
        type=click.Choice(("node", "engine", "api")),
        default="node",
        help="what the node has logged (default), or what its engine or API process has printed",
    ),
    option("--follow", is_flag=True, help="go on as lines are written, until Ctrl-C"),
    option("--since", type=AGE, metavar="TIME", help="not older than 90s, 30m, 12h or 7d (default: any age)"),
    option("--lines", type=POSITIVE, default=100, metavar="N", help="the latest so many (default: 100)"),
    option(
        "--level",
        type=click.Choice(("debug", "info", "warning", "error"), case_sensitive=False),
        default="debug",
        help="as bad as this or worse (default: all)",
    ),
    option("--request", default="", metavar="ID", help="of this request alone: its id, or how that begins"),
    home_option("the node's own folder is inside it"),
)
def logs(arguments: SimpleNamespace) -> int:
    from ..box.logs import logs as run

    return run(arguments)
