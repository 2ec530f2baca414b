"""`p2pserve completion`: commands, options and their choices, completed by the shell."""

from __future__ import annotations

from types import SimpleNamespace

import click
from click.shell_completion import get_completion_class

from ..options.command import COMPLETION, PROGRAM, command


@command("completion", example='eval "$(p2pserve completion bash)"', formats=None)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")), help="put what is printed into its start file")
def completion(arguments: SimpleNamespace) -> int:
    kind = get_completion_class(arguments.shell)
    assert kind is not None, "click knows all of the choices"
    found = click.get_current_context().find_root().command
    print(kind(found, {}, PROGRAM, COMPLETION).source())
    return 0
