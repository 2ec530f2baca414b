"""Parsers of option values. Each raises ArgumentTypeError or ValueError for bad text."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import TypeVar

from ..errors import UsageError

Settings = TypeVar("Settings")


def positive(text: str) -> int:
    """At least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def count(text: str) -> int:
    """At least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def figure(text: str) -> float:
    """From 0 to a million."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to a million")
    return value


def seconds(text: str) -> float:
    """Above 0."""
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_LONGEST_S = 10 * 365 * 86400.0


def duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `12h`, `7d` or `2w`."""
    number, unit = text[:-1], _UNITS.get(text[-1:])
    try:
        value = float(number) * (unit or 0.0)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time from now; write a number and its unit: 90s, 30m, 12h, 7d or 2w, at most ten years"
        )
    return value


def settings_of(kind: type[Settings], arguments: argparse.Namespace) -> Settings:
    """Settings from the options that are called as their fields are; the other fields keep their defaults."""
    given = vars(arguments)
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters if name in given})


def check_writable(field: str, path: Path | None) -> None:
    """Raise UsageError if there is no folder for a file that is to be written."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{field}: {path.parent} is no folder; make it first")


class Listed(argparse.Action):
    """An option that may be given several times: its values joined by commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Add a value; the first one replaces the default."""
        given: list[str] = [*getattr(namespace, f"_{self.dest}", ()), str(values)]
        setattr(namespace, f"_{self.dest}", given)
        setattr(namespace, self.dest, ",".join(given))


# argparse names the function in its message when it raises ValueError.
positive.__name__ = count.__name__ = "whole number"
seconds.__name__ = "number of seconds"
figure.__name__ = "number"
