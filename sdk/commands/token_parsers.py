"""The options of `p2pserve token`, and of `bootstrap` what concerns its tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from .option_values import duration, positive

ABOUT_TOKENS: Final = (
    "Make, show, revoke and renew join tokens. They are signed with the network's key, which lies on the box that ran "
    "`bootstrap`: run this there, whether its node runs or not."
)


def add_also_option(parser: argparse.ArgumentParser) -> None:
    """What `bootstrap` lets its tokens name."""
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="another address that join tokens name, of this box or of a member that stays; may be given several times",
    )


def add_token_verbs(add_verb: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """The commands after `token`; `add_verb` makes a parser from a name, what it does and an example."""
    create = add_verb("create", "make a join token", 'create --uses 1 --expires 7d --name "rented on vast.ai"')
    create.add_argument(
        "--role", choices=("worker", "client"), default="worker", help="what its holders are (default: worker)"
    )
    create.add_argument(
        "--uses", type=positive, metavar="N", help="for so many boxes, or clients at a time at each box (default: 256)"
    )
    create.add_argument("--lead", action="store_true", help="its boxes may coordinate: for boxes that you trust")
    create.add_argument("--name", default="", metavar="TEXT", help="what `token list` shows of it")
    create.add_argument(
        "--no-renew",
        dest="renews",
        action="store_false",
        help="do not renew its members before its end: who is away for ten minutes after that must have another token",
    )
    add_verb("list", "show the tokens that were made, and what became of them", "list --format json")
    revoke = add_verb("revoke", "withdraw a token: its boxes are hung up on, and refused everywhere", "revoke 3f2a91c0")
    renew = add_verb("renew", "let a token end later", "renew 3f2a91c0 --expires 30d")
    for each in (revoke, renew):
        each.add_argument("id", metavar="ID", help="as `token list` shows it, or the beginning of it")
    for each in (create, renew):
        each.add_argument(
            "--expires",
            type=duration,
            default=duration("7d"),
            metavar="TIME",
            help="boxes may join until so long from now: 90s, 30m, 12h, 7d, 2w; members stay (default: 7d)",
        )
