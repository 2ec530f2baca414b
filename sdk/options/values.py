"""Parsers of option values, for `argparse` and, as types, for `click`. Each function raises ArgumentTypeError or
ValueError for bad text."""

from __future__ import annotations

import argparse
import inspect
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import click

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


def port(text: str) -> int:
    """From 0, for any that is free, to 65535."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port; take one from 1 to 65535")
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


def above_zero(text: str) -> float:
    """Above 0, and below a billion."""
    value = float(text)
    if not 0.0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
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


def throttle(text: str) -> tuple[float, float]:
    """`60:1.5`: after 60 s steps take 1.5 times as long."""
    after, colon, factor = text.partition(":")
    try:
        after_s, slower = float(after), float(factor)
    except ValueError:
        after_s, slower = -1.0, 0.0
    if not (colon and 0.0 <= after_s < 1e6 and 0.0 < slower <= 1e3):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no throttling; write seconds and how many times as long steps take from then on, like 60:1.5"
        )
    return after_s, slower


def ttft_limit(text: str) -> tuple[float, float]:
    """`2x`: twice the plan's deadline for the first token, as (2, 0); `8s` or `8`: eight seconds, as (0, 8)."""
    number, is_multiple = text.rstrip("xs"), text.endswith("x")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1e6 or text.removesuffix("x" if is_multiple else "s") != number:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no limit for the first token; write multiples of the plan's deadline, like 2x, or seconds"
        )
    return (value, 0.0) if is_multiple else (0.0, value)


class UnixMoment(float):
    """Unix seconds that are shown as the time that they are."""

    def __str__(self) -> str:
        return f"{datetime.fromtimestamp(self, UTC):%Y-%m-%dT%H:%M} UTC"


def moment(text: str) -> UnixMoment:
    """A time like `2026-12-01T12:00`, UTC unless it says another zone, or `2h` from now."""
    now = time.time()
    try:
        named = datetime.fromisoformat(text.removesuffix(" UTC"))
    except ValueError:
        try:
            return UnixMoment(now + duration(text))
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no time; write 2026-12-01T12:00 (UTC, or with +02:00 behind it), or from now: 90s, 30m, "
                "12h or 7d"
            ) from None
    at = UnixMoment((named if named.tzinfo is not None else named.replace(tzinfo=UTC)).timestamp())
    if at <= now:
        raise argparse.ArgumentTypeError(f"{text!r} has passed; it is {UnixMoment(now)}")
    return at


JOINED: Final = "node"
"""The folder in a home of the node that runs `join`; of several on one box, the first one's."""

MADE: Final = "bootstrap"
"""The folder of what runs `bootstrap` or `serve`."""

BOX: Final = "box"
"""The folder of what runs several nodes: its lock."""

_FURTHER: Final = re.compile(rf"{JOINED}-([2-9]|[1-9]\d{{1,3}})")


def folder_of_node(number: int) -> str:
    """The folder of the node with this number, from 1 on, of those that one `join` runs."""
    return JOINED if number == 1 else f"{JOINED}-{number}"


def number_of_node(folder: str) -> int:
    """The other way; 0 for what is no folder of such a node."""
    further = _FURTHER.fullmatch(folder)
    return int(further[1]) if further is not None else int(folder == JOINED)


def is_own_node(text: str) -> bool:
    """Whether a node of a box has a folder of this name."""
    return text == MADE or number_of_node(text) > 0


def own_node(text: str) -> str:
    """The folder of a node of this box."""
    if not is_own_node(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no node of a box; take node, node-2 and so on, or bootstrap")
    return text


AUTO: Final = "auto"


def replicas(text: str) -> int | str:
    """How many nodes a box is divided among."""
    if text == AUTO:
        return text
    try:
        return positive(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of nodes nor {AUTO}") from None


def settings_of(kind: type[Settings], arguments: argparse.Namespace | SimpleNamespace) -> Settings:
    """Settings from the options that are called as their fields are; the other fields keep their defaults."""
    given = vars(arguments)
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters if name in given})


def check_writable(field: str, path: Path | None) -> None:
    """Raise UsageError if there is no folder for a file that is to be written."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{field}: {path.parent} is no folder; make it first")


class WholeText(click.types.StringParamType):
    """Text that a variable has one of, also with spaces in it."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """As it is."""
        return [rv]


class Parsed(click.ParamType[Any]):
    """A value that one of the functions above makes of a text. `kind`: what it is in a config file, where `words` may
    stand as well."""

    def __init__(
        self, name: str, parse: Callable[[str], object], kind: type = str, words: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.kind = kind
        self.words = words
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; what is wrong with the text otherwise."""
        if not isinstance(value, str):
            return value  # a default
        try:
            return self._parse(value)
        except argparse.ArgumentTypeError as error:
            return self.fail(str(error), param, ctx)
        except ValueError:
            return self.fail(f"{value!r} is not a {self.name}", param, ctx)


POSITIVE = Parsed("whole number", positive, int)
COUNT = Parsed("whole number", count, int)
PORT = Parsed("port", port, int)
FIGURE = Parsed("number", figure, float)
SECONDS = Parsed("number of seconds", seconds, float)
ABOVE_ZERO = Parsed("number", above_zero, float)
DURATION = Parsed("time from now", duration)
AGE = Parsed("length of time", duration)
MOMENT = Parsed("time", moment)
THROTTLE = Parsed("throttling", throttle)
OWN_NODE = Parsed("node", own_node)
REPLICAS = Parsed("number of nodes", replicas, int, (AUTO,))
WORD = WholeText()
FILE = click.Path(path_type=Path)


# argparse names the function in its message when it raises ValueError.
positive.__name__ = count.__name__ = "whole number"
seconds.__name__ = "number of seconds"
figure.__name__ = above_zero.__name__ = "number"
