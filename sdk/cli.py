"""The command line. Commands are imported when one runs, so that `--help` is instant."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem, shell_complete

from .. import __version__
from .options.catalogue import COMMANDS
from .options.command import COMPLETION, DEBUG, ENVIRONMENT, PROGRAM, CommandGroup
from .options.secrets import hide_secrets

DESCRIPTION = "A peer-to-peer network that serves large language models from GPU boxes rented in different places."
EPILOG = """\
Examples:
  p2pserve demo                  a whole network on this machine, in a minute
  p2pserve bootstrap --listen 0.0.0.0:4001
                                 start a network; prints the lines to join it
  p2pserve join --bootstrap p2p_worker_... --model Qwen/Qwen3-0.6B
  p2pserve generate --bootstrap p2p_client_... "def fibonacci(n):"
  p2pserve status --bootstrap p2p_client_... --format json
  p2pserve token create --uses 1 --expires 7d
                                 a join token for one box, on the box that ran
                                 bootstrap
  p2pserve leave                 drain and stop the node of this box

Environment and config file:
  P2PSERVE_HOME, P2PSERVE_BOOTSTRAP, P2PSERVE_TOKEN and P2PSERVE_TOKEN_FILE
  stand for the options of that name, P2PSERVE_JOIN_MAX_MODEL_LEN for
  `join --max-model-len`, and so on for every option. After them counts
  ~/.config/p2pserve/p2pserve.toml, with the same options as keys; `p2pserve
  config show` says where each setting comes from.
  CUDA_VISIBLE_DEVICES names the GPUs to serve from, as nvidia-smi counts them,
  and hides all when it is empty.

Exit codes:
  0 done; 1 it failed at run time (unreachable, port in use, engine died);
  2 wrong input (option, address, token, prompt, model); 3 not ready (nobody
  serves the model yet); 4 refused (the network does not let us in);
  130 interrupted."""

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What writing to a file that has no room, or to a terminal that is gone, ends with."""


class _Program(CommandGroup):
    """All commands, each imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        found = getattr(importlib.import_module(f".commands.{entry.module}", __package__), cmd_name.replace("-", "_"))
        assert isinstance(found, click.Command), f"{cmd_name} is not declared as a command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.about) for name, entry in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name or an option, without importing the commands."""
        names = [
            CompletionItem(name, help=about) for name, (_, about) in COMMANDS.items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


def _print_version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        print(f"p2pserve {__version__}")
        ctx.exit()


PROGRAM_GROUP: Final = _Program(
    PROGRAM,
    help=DESCRIPTION,
    epilog=EPILOG,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_print_version,
            help="show the version",
        )
    ],
    context_settings={"auto_envvar_prefix": ENVIRONMENT},
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if sys.stderr is None:
        # Or else the next file that is opened would be descriptor 2, and what libraries say would go there.
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
    if sys.stdout is None:
        print("p2pserve: error: output: standard output is closed; send it to a file or /dev/null", file=sys.stderr)
        return 1
    if argv is None:
        hide_secrets()
    settings: dict[str, object] = {}
    return run_explained(lambda: _run(sys.argv[1:] if argv is None else argv, settings), settings)


def run_explained(run: Callable[[], int], settings: Mapping[str, object]) -> int:
    """Run something and return its exit code; an error that is meant for users is one line and a code. `settings`:
    whether it is shown with its traceback, known when it is raised."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        if settings.get(DEBUG):
            raise
        explained = _explain(error)
        if explained is None:
            raise
        return explained


def _run(argv: list[str], settings: dict[str, object]) -> int:
    """Run a command; `settings` is told what holds for the errors that it raises. (`click.Command.main` would make
    aborts of interruptions, and exit.)"""
    asked = os.environ.get(COMPLETION)
    if asked:
        return shell_complete(PROGRAM_GROUP, {}, PROGRAM, COMPLETION, asked)
    try:
        with PROGRAM_GROUP.make_context(PROGRAM, list(argv)) as context:
            try:
                code: int = PROGRAM_GROUP.invoke(context)
            finally:
                settings.update(context.meta)
    except click.exceptions.Exit as ended:  # after --help and --version
        return ended.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else PROGRAM
        print(f"p2pserve: error: {_usage_line(error)} (see `{where} --help`)", file=sys.stderr)
        return 2
    return code


def _usage_line(error: click.UsageError) -> str:
    """What is wrong with the command line, the option first."""
    text = error.format_message()
    if type(error) is click.BadParameter and error.param is not None:
        name = error.param.opts[-1] if isinstance(error.param, click.Option) else error.param.human_readable_name
        text = f"{name}: {error.message}"
    return " ".join(text.split()).removesuffix(".")


def _explain(error: BaseException) -> int | None:
    """Say in one line what went wrong, wherever it is in a group of errors; None for a bug of ours."""
    from .errors import first_of

    if first_of(error, (KeyboardInterrupt,)) is not None:
        return 130
    if first_of(error, (BrokenPipeError,)) is not None:  # whoever read our output has had enough
        _discard_output()
        return 0
    failed = first_of(error, (OSError,))
    if failed is not None and failed.errno in UNWRITABLE and failed.filename is None:
        _discard_output()
        print(f"p2pserve: error: output: it cannot be written: {failed.strerror}", file=sys.stderr)
        return 1
    from .failures import explain  # takes half a second, and only failures need it
    from .printing import printable

    found = explain(error)
    if found is None:
        return None
    code, line = found
    print(f"p2pserve: error: {printable(line)}", file=sys.stderr)
    return code


def _discard_output() -> None:
    """Discard unwritten output: flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
