"""Where the value of an option comes from, and which of two that say the same in different ways counts."""

from __future__ import annotations

from typing import Final

import click
from click.core import ParameterSource

from ..environment import has_token
from .secrets import read_secret_file, warn_on_stderr

SECTION_DISTANCES: Final = "p2pserve.section_distances"
"""Where the context keeps how far from the command's own section of the config file each value of it stands."""

_DISTANCES: Final = {ParameterSource.COMMANDLINE: 0, ParameterSource.ENVIRONMENT: 1, ParameterSource.DEFAULT_MAP: 2}


def distance_of(ctx: click.Context, name: str) -> int | None:
    """How near to the user an option was given: 0 on the command line, then variables, then the config file, its own
    section first. None: nowhere, it has its default."""
    source = ctx.get_parameter_source(name)
    if source not in _DISTANCES:
        return None
    further: int = ctx.meta.get(SECTION_DISTANCES, {}).get(name, 0) if source is ParameterSource.DEFAULT_MAP else 0
    return _DISTANCES[source] + further


def find_overruled(ctx: click.Context) -> dict[str, str]:
    """Options that were given and do not count, by their parameters, each with the one that says otherwise and nearer
    to the user. Raises UsageError where two are as near."""
    found: dict[str, str] = {}
    for option in ctx.command.params:
        other = getattr(option, "instead_of", None)
        if other is None or (mine := distance_of(ctx, option.name)) is None:
            continue
        theirs = distance_of(ctx, other)
        if mine == theirs:
            flag = f"--{other.replace('_', '-')}"
            raise click.UsageError(f"{flag}: give either {flag} or {option.opts[-1]}, and not both", ctx)
        if theirs is not None and theirs < mine:
            found[option.name] = other
        elif theirs is not None and option.name == f"{other}_file":
            found[other] = option.name
    if has_token(str(ctx.params.get("bootstrap") or "")):
        at = distance_of(ctx, "bootstrap")
        for name in ("token", "token_file"):
            nearer = distance_of(ctx, name)
            if nearer is not None and name not in found and at is not None:
                found |= {"bootstrap": name} if nearer < at else {name: "bootstrap"}
    return found


def settle_alternatives(ctx: click.Context) -> None:
    """Drop what is overruled. Raises UsageError."""
    for name in find_overruled(ctx):
        ctx.params[name] = None


def read_secrets(ctx: click.Context) -> dict[str, str]:
    """The secrets that files hold, by the options that they stand for. Raises UsageError."""
    found: dict[str, str] = {}
    for option in ctx.command.params:
        other = getattr(option, "instead_of", None)
        if other is not None and option.name == f"{other}_file" and (file := ctx.params[option.name]) is not None:
            found[other] = read_secret_file(file, option.name, warn_on_stderr)
    return found
