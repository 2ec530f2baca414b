"""`p2pserve token` and the commands after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

import click

from ..options.command import CommandGroup, combine, command, option
from ..options.shared import home_option
from ..options.values import DURATION, POSITIVE, duration

FORMATS: Final = ("text", "json")

key_option: Final = home_option("the key lies in `bootstrap` in this folder")

id_argument: Final = click.argument("id", metavar="ID", help="as `token list` shows it, or the beginning of it")

expires_option: Final = option(
    "--expires",
    type=DURATION,
    default=duration("7d"),
    metavar="TIME",
    help="boxes may join until so long from now: 90s, 30m, 12h, 7d, 2w; members stay (default: 7d)",
)


@click.group(cls=CommandGroup)
def token() -> None:
    """Make, show, revoke and renew join tokens.

    They are signed with the network's key, which lies on the box that ran `bootstrap`: run this there, whether its
    node runs or not.
    """


def _run(verb: str, arguments: SimpleNamespace) -> int:
    from ..actions.token import TOKEN_COMMANDS  # the network's key, and no node

    return TOKEN_COMMANDS[verb](arguments)


@command(
    "create",
    about="make a join token",
    example='p2pserve token create --uses 1 --expires 7d --name "rented on vast.ai"',
    formats=FORMATS,
)
@combine(
    key_option,
    option(
        "--role",
        type=click.Choice(("worker", "client", "admin")),
        default="worker",
        help="what its holders are; an admin sees the whole network, and its API keys' costs (default: worker)",
    ),
    option(
        "--uses",
        type=POSITIVE,
        metavar="N",
        help="for so many boxes, or clients at a time at each box (default: 256)",
    ),
    option("--lead", is_flag=True, help="its boxes may coordinate: for boxes that you trust"),
    option("--name", default="", metavar="TEXT", help="what `token list` shows of it"),
    option(
        "no_renew",
        "--no-renew",
        is_flag=True,
        help="do not renew its members before its end: who is away for ten minutes after that must have another token",
    ),
    expires_option,
)
def create(arguments: SimpleNamespace) -> int:
    return _run("create", arguments)


@command(
    "list",
    about="show the tokens that were made, and what became of them",
    example="p2pserve token list --format json",
    formats=FORMATS,
)
@key_option
def show(arguments: SimpleNamespace) -> int:
    return _run("list", arguments)


@command(
    "revoke",
    about="withdraw a token: its boxes are hung up on, and refused everywhere",
    example="p2pserve token revoke 3f2a91c0",
    formats=FORMATS,
)
@combine(key_option, id_argument)
def revoke(arguments: SimpleNamespace) -> int:
    return _run("revoke", arguments)


@command("renew", about="let a token end later", example="p2pserve token renew 3f2a91c0 --expires 30d", formats=FORMATS)
@combine(key_option, id_argument, expires_option)
def renew(arguments: SimpleNamespace) -> int:
    return _run("renew", arguments)


for _verb in (create, show, revoke, renew):
    token.add_command(_verb)
