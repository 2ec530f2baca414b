"""Where the value of an option comes from, and which of two that say the same in different ways counts."""

from __future__ import annotations

from typing import Final

import click
from click.core import ParameterSource

from ..environment import Given, choose_network
from .secrets import read_secret_file, warn_on_stderr

SECTION_DISTANCES: Final = "p2pserve.section_distances"
"""Where the context keeps how far from the command's own section of the config file each value of it stands."""

_DISTANCES: Final = {ParameterSource.COMMANDLINE: 0, ParameterSource.ENVIRONMENT: 1, ParameterSource.DEFAULT_MAP: 2}


def distance_of(ctx: click.Context, name: str) -> int | None:
    """How near to the user an option was given: 0 on the command line, then variables, then the config file, its own
    section first. None: nowhere, it has its default."""
    source = ctx.get_parameter_source(name)
    if source is None or source not in _DISTANCES:
        return None
    further: int = ctx.meta.get(SECTION_DISTANCES, {}).get(name, 0) if source is ParameterSource.DEFAULT_MAP else 0
    return _DISTANCES[source] + further


def settle_alternatives(ctx: click.Context) -> None:
    """Drop what another option says otherwise and nearer to the user; read files that stand for a value. Raises
    UsageError where two are as near."""
    for option in ctx.command.params:
        other = getattr(option, "instead_of", None)
        if other is None or option.name is None or (mine := distance_of(ctx, option.name)) is None:
            continue
        theirs = distance_of(ctx, other)
        if mine == theirs:
            flag = f"--{other.replace('_', '-')}"
            raise click.UsageError(f"{flag}: give either {flag} or {option.opts[-1]}, and not both", ctx)
        if theirs is not None and theirs < mine:
            ctx.params[option.name] = None
        elif option.name == f"{other}_file":
            ctx.params[other] = read_secret_file(ctx.params[option.name], option.name, warn_on_stderr)
    if {"bootstrap", "token", "token_file"} <= ctx.params.keys():
        _settle_network(ctx)


def _settle_network(ctx: click.Context) -> None:
    where, token = ctx.params["bootstrap"], ctx.params["token"]
    at = distance_of(ctx, "token" if ctx.params["token_file"] is None else "token_file")
    ctx.params["bootstrap"], ctx.params["token"] = choose_network(
        Given(distance_of(ctx, "bootstrap") or 0, where) if where else None,
        Given(at or 0, token) if token else None,
    )
