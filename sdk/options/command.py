"""How a command is declared: its help, what all commands take, and its options in sections."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Final

import click

from .. import environment
from .arguments import settle_flags
from .catalogue import COMMANDS
from .config import use_config
from .sources import read_secrets, settle_alternatives
from .values import FILE

PROGRAM: Final = "p2pserve"

ENVIRONMENT: Final = "P2PSERVE"
"""What the variables that stand for options begin with, before the command's name and the option's."""

COMPLETION: Final = "_P2PSERVE_COMPLETE"
"""The variable by which a shell asks for completions."""

OPTIONS: Final = "Options"
"""The section of what has no other."""

FOR_PEOPLE: Final = ("table", "text")
"""Names of the format that is not for programs: whoever knows one of them may write it everywhere."""

DEBUG: Final = "p2pserve.debug"
"""Where the root's context says that errors are to be shown with their tracebacks."""

Action = Callable[[SimpleNamespace], int]
Decorated = Callable[[Any], Any]


class _Format(click.Choice[str]):
    """What is printed; `table` and `text`, for people, are the same."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """One of the choices."""
        return super().convert(self.choices[0] if value in FOR_PEOPLE else value, param, ctx)


def _about(formats: tuple[str, str]) -> str:
    other = next(name for name in FOR_PEOPLE if name != formats[0])
    return f"default: {formats[0]}; {other} is the same"


class Option(click.Option):
    """An option that the help shows in a section of its name.

    `shared`: it means the same to every command, and may stand at the top of the config file. `instead_of`: the option,
    by its parameter, that says the same in another way; only the nearer of both counts."""

    def __init__(
        self,
        *declarations: Any,
        section: str = OPTIONS,
        shared: bool = False,
        instead_of: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*declarations, **settings)
        self.section = section
        self.shared = shared
        self.instead_of = instead_of

    @property
    def variable(self) -> str:
        """Its variable, after the command's name: that of its longest flag."""
        return max(self.opts, key=len).lstrip("-").replace("-", "_").upper()

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Also by its flag, where click goes by the parameter alone."""
        found = super().resolve_envvar_value(ctx)
        if found is None and self.allow_from_autoenv and ctx.auto_envvar_prefix is not None:
            found = os.environ.get(f"{ctx.auto_envvar_prefix}_{self.variable}") or None
        return found


class _Helped(click.Command):
    """What has a help with options in sections, and its examples as they are written."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """The option that prints the help."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.help = "show this help"
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", OPTIONS), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write it as it is, line by line."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(f"{self.epilog}\n")


class Command(_Helped):
    """A command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse them, and settle which of several options that say the same counts."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            settle_alternatives(ctx)
            settle_flags(ctx)
        return rest


class CommandGroup(_Helped, click.Group):
    """Commands that follow a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse a command line that ends here."""
        if not args and not ctx.resilient_parsing:
            raise click.UsageError(f"give a COMMAND: {', '.join(self.list_commands(ctx))}", ctx)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of that name; UsageError with those of a name like it."""
        name = args[0]
        found = self.get_command(ctx, name)
        if found is None and not ctx.resilient_parsing:
            raise click.exceptions.NoSuchCommand(name, possibilities=self.list_commands(ctx), ctx=ctx)
        return name, found, args[1:]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options and the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command, and all that it does."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.help or "") for name, each in self.commands.items()])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return list(self.commands)


def option(*declarations: str, **settings: Any) -> Decorated:
    """An option of a command."""
    return click.option(*declarations, cls=Option, **settings)


def combine(*options: Decorated) -> Decorated:
    """Several options as one, in the order of the help."""

    def decorate(function: Any) -> Any:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate


def command(
    name: str,
    *,
    example: str | Iterable[str],
    formats: tuple[str, str] | None,
    about: str | None = None,
    passes_unknown: bool = False,
    reads_config: bool = True,
) -> Callable[[Action], Command]:
    """A command from a function of its options' values that returns the exit code.

    `formats`: what --format takes, the default first. `about`: what it does, where COMMANDS does not say it.
    `passes_unknown`: options that it does not have are left to its last argument. `reads_config`: what the config file
    says are defaults of its options."""
    what = about or COMMANDS[name].about
    examples = [example] if isinstance(example, str) else list(example)

    def declare(function: Action) -> Command:
        def run(debug: bool, **given: Any) -> int:
            set_up_logging(debug)
            return function(SimpleNamespace(debug=debug, **{**given, **read_secrets(click.get_current_context())}))

        common = [
            option(
                "--config",
                type=FILE,
                envvar=environment.CONFIG,
                is_eager=True,  # what it says are defaults of all others
                callback=use_config if reads_config else None,
                metavar="FILE",
                help=f"in place of ~/.config/p2pserve/{environment.CONFIG_NAME} (default: {environment.CONFIG})",
            ),
            option("--debug", shared=True, is_flag=True, callback=_note_debug, help="show tracebacks and the log"),
        ]
        if formats is not None:
            about_format = _about(formats)
            common.insert(
                0, option("--format", type=_Format(formats), shared=True, default=formats[0], help=about_format)
            )
        found = combine(*common)(run)
        found.__click_params__ += getattr(function, "__click_params__", [])  # the help has the last of these first
        return click.command(
            name,
            cls=Command,
            context_settings={"ignore_unknown_options": passes_unknown},
            help=f"{what[:1].upper()}{what[1:]}.",
            epilog="\n".join([f"Example{'s' * (len(examples) > 1)}:", *(f"  {line}" for line in examples)]),
        )(found)

    return declare


def set_up_logging(debug: bool) -> None:
    """Without --debug log only errors: what concerns the user is printed, or ends the command."""
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    else:
        logging.disable(logging.WARNING)


def _note_debug(ctx: click.Context, parameter: click.Parameter, debug: bool) -> bool:
    ctx.meta[DEBUG] = debug  # shared with the root's context
    return debug
