"""`p2pserve config` and the commands after it."""

from __future__ import annotations

from types import SimpleNamespace

import click
from click.shell_completion import CompletionItem

from ..options.catalogue import COMMANDS
from ..options.command import CommandGroup, command


@click.group(cls=CommandGroup)
def config() -> None:
    """Show which settings hold and where each comes from, and check the config file.

    What the command line says counts first, then variables (P2PSERVE_...), then the file, then defaults.
    """


def _complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]


@command(
    "show",
    about="show the settings that a variable or the file changes; of one COMMAND all, with its defaults",
    example=["p2pserve config show", "p2pserve config show join", "p2pserve config show token create --format json"],
    formats=("table", "json"),
    reads_config=False,
)
@click.argument("command", nargs=-1, metavar="[COMMAND]", shell_complete=_complete)
def show(arguments: SimpleNamespace) -> int:
    from ..box.config import show as run

    return run(arguments)


@command(
    "path",
    about="print where the config file is, or would be",
    example="p2pserve config path",
    formats=("text", "json"),
    reads_config=False,
)
def path(arguments: SimpleNamespace) -> int:
    from ..box.config import path as run

    return run(arguments)


@command(
    "check",
    about="say all that is wrong with the config file and with variables; exit code 2 if anything is",
    example="p2pserve config check",
    formats=("text", "json"),
    reads_config=False,
)
def check(arguments: SimpleNamespace) -> int:
    from ..box.config import check as run

    return run(arguments)


for _each in (show, path, check):
    config.add_command(_each)
