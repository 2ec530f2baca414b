"""Arguments of commands that the config file may set, too: the model of `serve`, and flags of vLLM."""

from __future__ import annotations

from typing import Any, Final, final

import click
from click.core import ParameterSource

VLLM: Final = "vllm"
"""The key of a table with flags of `vllm serve`."""

FLAGS: Final = "vllm_options"
"""The parameter of those flags."""

MODEL: Final = "model"


@final
class ConfigArgument(click.Argument):
    """An argument that a config file sets by `key`."""

    def __init__(self, *declarations: Any, key: str, **settings: Any) -> None:
        super().__init__(*declarations, **settings)
        self.key = key


def settle_flags(ctx: click.Context) -> None:
    """Put the file's flags of vLLM before those of the command line, without those that are named there, too."""
    if FLAGS not in ctx.params:
        return
    from ...node.engine.api.options import flag_of

    defaults = ctx.default_map or {}
    given: tuple[str, ...] = ctx.params[FLAGS]
    if ctx.get_parameter_source(FLAGS) is not ParameterSource.COMMANDLINE:
        given = ()
    model = ctx.params.get(MODEL)
    is_argument = any(isinstance(each, ConfigArgument) and each.key == MODEL for each in ctx.command.params)
    if is_argument and MODEL in defaults and isinstance(model, str) and model.startswith("-"):
        # `serve --tool-call-parser hermes`: what stands where a model may stand is the first of the flags.
        ctx.params[MODEL], given = defaults[MODEL], (model, *given)
    named = {flag_of(word) for word in given}
    ctx.params[FLAGS] = (*(word for word in defaults.get(FLAGS) or () if flag_of(word) not in named), *given)
