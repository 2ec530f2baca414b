"""What a command is given by a command line, without running it."""

from __future__ import annotations

from types import SimpleNamespace

import click

from p2pserve.sdk.cli import PROGRAM_GROUP


def parse(arguments: list[str]) -> SimpleNamespace:
    """The values of a command's options."""
    with PROGRAM_GROUP.make_context("p2pserve", [*arguments]) as context:
        found = PROGRAM_GROUP.get_command(context, arguments[0])
        assert isinstance(found, click.Command)
        with found.make_context(arguments[0], arguments[1:], parent=context) as inner:
            return SimpleNamespace(**inner.params)
