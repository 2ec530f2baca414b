"""`p2pserve models` and the commands after it: the services of a network, and its catalogue of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import click

from ..options.command import CommandGroup, combine, command, option
from ..options.shared import network_options, timeout_option
from ..options.values import FIGURE
from .network import watch_option

FORMATS: Final = ("text", "json")
HELP: Final = ("--help",)

name_argument: Final = click.argument("name", metavar="NAME", help="as `models list` shows it: a service or a model")


class _ModelsGroup(CommandGroup):
    """What is asked for without a command is the list."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Options alone are those of `list`."""
        is_bare = not args or (args[0].startswith("-") and args[0] not in HELP)
        return super().parse_args(ctx, ["list", *args] if is_bare and not ctx.resilient_parsing else args)


@click.group(cls=_ModelsGroup)
def models() -> None:
    """Show which models a network serves, and say which it is to serve.

    Without a command: `list`. Adding and removing take an admin's token; the catalogue is kept by every box.
    """


def _run(verb: str, arguments: SimpleNamespace) -> int:
    from ..actions.models import MODEL_COMMANDS

    return MODEL_COMMANDS[verb](arguments)


@command(
    "list",
    about="show the models of a network: those of its boxes, and those of its catalogue",
    example=["p2pserve models list", "p2pserve models list --format json"],
    formats=("table", "json"),
)
@combine(network_options("p2p_client_..."), watch_option, timeout_option)
def show_list(arguments: SimpleNamespace) -> int:
    return _run("list", arguments)


@command(
    "show",
    about="say all that is known of one model: deadlines, weight, boxes, lengths of requests",
    example="p2pserve models show chat",
    formats=FORMATS,
)
@combine(name_argument, network_options("p2p_client_..."), timeout_option)
def show_one(arguments: SimpleNamespace) -> int:
    return _run("show", arguments)


@command(
    "add",
    about="have the network serve a model under a name",
    example=[
        "p2pserve models add chat --model Qwen/Qwen3-0.6B",
        "p2pserve models add code --model /srv/models/coder --slo ttft=2,tpot=0.1",
    ],
    formats=FORMATS,
)
@combine(
    click.argument("name", metavar="NAME", help="what requests are to call it"),
    option(
        "--model",
        required=True,
        metavar="MODEL",
        help="a Hugging Face id, a folder that boxes have under this whole path, `bundled` or `bundled-prose`",
    ),
    option(
        "--slo",
        metavar="SLO",
        help="its deadlines: multiples of a lone request on the fastest replica, like 5x, or seconds: "
        "ttft=2,tpot=0.1,e2e=60 (default: those that the network plans for)",
    ),
    option(
        "--weight",
        type=FIGURE,
        default=1.0,
        metavar="W",
        help="its part of the boxes that take any model, beside the others' (default: 1)",
    ),
    network_options("p2p_admin_..."),
    timeout_option,
)
def add(arguments: SimpleNamespace) -> int:
    return _run("add", arguments)


@command(
    "remove",
    about="have the network serve a model no more: it gets no new requests, and those that run come to their end",
    example="p2pserve models remove chat",
    formats=FORMATS,
)
@combine(name_argument, network_options("p2p_admin_..."), timeout_option)
def remove(arguments: SimpleNamespace) -> int:
    return _run("remove", arguments)


for _verb in (show_list, show_one, add, remove):
    models.add_command(_verb)
