"""The config file as defaults of the commands' options: `p2pserve.toml`, checked against what each option takes.

token-file = "worker.token"      # at the top or under [shared]: every command that has the option
site = "fra"

[join]                           # this command alone; counts before the top
model = "Qwen/Qwen3-8B"
vllm = { tool-call-parser = "hermes" }  # flags of `vllm serve`

[token.create]
expires = "30d"
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from click.types import FloatParamType, IntParamType

from ..environment import ConfigFile, read_config, resolve_path
from ..errors import UsageError
from .arguments import VLLM, ConfigArgument
from .secrets import SECRET_OPTIONS, warn_of_others, warn_on_stderr
from .sources import SECTION_DISTANCES
from .values import Parsed

SHARED: Final = "shared"
"""The section that is as good as the top: for `bootstrap` and `token`, where there are sections of those names."""

NAMED: Final = 4  # sections, in an error
KINDS: Final[dict[type, str]] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}

Settable = click.Option | ConfigArgument
"""What of a command a config file may set."""

CommandPath = tuple[str, ...]
"""The names that lead to a command, and to its section."""


def use_config(ctx: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
    """Take the config file's values as the defaults of the command that is parsed; the callback of --config. Raises
    UsageError."""
    if ctx.resilient_parsing or ctx.parent is None:  # completions; a command without its program
        return file
    config = read_config(file)
    found = ConfigReader(config, ctx.find_root()).find_values(path_of(ctx))
    ctx.default_map = {name: each.value for name, each in found.items()}
    ctx.meta[SECTION_DISTANCES] = {name: each.distance for name, each in found.items()}
    if any(each.name in found and SECRET_OPTIONS.intersection(each.opts) for each in ctx.command.params):
        warn_of_others(config.path, warn_on_stderr)
    return file


class ConfigValue(NamedTuple):
    """What a config file says for an option; `distance` is 0 in the command's own section, and more above it."""

    value: str | bool | list[str]
    distance: int


@dataclass(frozen=True, slots=True)
class _Section:
    """A table of the file. Values have no name twice, and sections may have the names of values."""

    path: CommandPath
    values: Mapping[str, object]
    sections: Mapping[str, _Section]


class ConfigReader:
    """What a config file says for the commands of a program; `ctx` is the program's context. Raises UsageError."""

    def __init__(self, config: ConfigFile, ctx: click.Context) -> None:
        self._file = config.path
        self._top = _read_top(config)
        self._ctx = ctx

    def find_values(self, path: CommandPath) -> dict[str, ConfigValue]:
        """The values for a command, by the names of its parameters; the nearest section counts. Raises UsageError for
        what is wrong there. Sections of other commands are not looked into."""
        for fault in self._find_faults(self._top, path):
            raise UsageError(fault)
        found: dict[str, ConfigValue] = {}
        section: _Section | None = self._top
        while section is not None:
            for name, value in section.values.items():
                for option in self._options_set(section, name, path):
                    assert option.name is not None, "every option has a name"
                    found[option.name] = ConfigValue(self._convert(option, value), len(path) - len(section.path))
            depth = len(section.path)
            section = section.sections.get(path[depth]) if depth < len(path) else None
        return found

    def find_faults(self) -> list[str]:
        """All that is wrong with the file, a line each."""
        return list(self._find_faults(self._top, None))

    def _find_faults(self, section: _Section, only: CommandPath | None) -> Iterator[str]:
        """What is wrong with a section and those below it; `only`: as far as it concerns that command."""
        place = f"{self._file}: [{'.'.join(section.path)}] " if section.path else f"{self._file}: "
        keys = [option_key(name) for name in section.values]
        for name, value in section.values.items():
            if keys.count(option_key(name)) > 1:
                yield f"{place}{name}: it is there twice"
                return
            try:
                for option in self._options_set(section, name, only):
                    self._convert(option, value)
            except UsageError as error:
                yield f"{place}{name}: {error}"
        for name, below in section.sections.items():
            fault = self._explain_section(section, name)
            if fault is not None:
                yield f"{self._file}: [{'.'.join(below.path)}] {fault}"
            elif only is None or only[: len(below.path)] == below.path:
                yield from self._find_faults(below, only)

    def _options_set(self, section: _Section, name: str, only: CommandPath | None) -> list[Settable]:
        """The options that a value in a section sets: of `only`, or of all commands. Raises UsageError if it is for
        none."""
        key = option_key(name)

        def pick(command: click.Command) -> Settable | None:
            option = options_of(command).get(key)
            return option if option is not None and (section.path or getattr(option, "shared", False)) else None

        if only is not None and (own := pick(self._command(only))) is not None:
            return [own]
        found = [option for command in self._commands(section).values() if (option := pick(command)) is not None]
        if not found:
            raise UsageError(self._explain_key(section, key))
        return found if only is None else []

    def _convert(self, option: Settable, value: object) -> str | bool | list[str]:
        """A value as click takes it from a map of defaults. Raises UsageError."""
        if isinstance(option, ConfigArgument) and option.key == VLLM:
            return self._write_flags(value)
        if isinstance(option, click.Option) and option.is_flag:
            if not isinstance(value, bool):
                raise UsageError(f"{_shown(value)} is not {KINDS[bool]}")
            return value
        if not isinstance(value, list):
            one = self._convert_one(option, value)
            return [one] if option.multiple else one
        if not option.multiple:
            raise UsageError("it takes one value, and this is a list")
        return [self._convert_one(option, each) for each in value]

    def _write_flags(self, table: object) -> list[str]:
        """A table of vLLM's flags as words of a command line. Raises UsageError."""
        if not isinstance(table, dict):
            raise UsageError(f'it is a table: {VLLM} = {{ tool-call-parser = "hermes" }}')
        from ...node.engine.api.options import FILES, OptionRefused, check_options, write_flag

        words: list[str] = []
        for name, value in table.items():
            key = option_key(name)
            if f"--{key}" in FILES and isinstance(value, str) and "{" not in value:
                value = str(resolve_path(value, self._file))
            try:
                words += check_options(write_flag(key, value))
            except OptionRefused as error:
                raise UsageError(str(error)) from error
        return words

    def _convert_one(self, option: Settable, value: object) -> str:
        kind = _kind_of(option)
        is_word = isinstance(option.type, Parsed) and value in option.type.words
        if not is_word and (isinstance(value, bool) or not isinstance(value, (float, int) if kind is float else kind)):
            raise UsageError(f"{_shown(value)} is not {KINDS[kind]}{_advise_quotes(kind, value)}")
        text = str(value)
        if isinstance(option.type, click.Path):
            text = str(resolve_path(text, self._file))
        try:
            option.type.convert(text, option, self._ctx)
        except click.BadParameter as error:
            raise UsageError(" ".join(error.message.split()).removesuffix(".")) from error
        return text

    def _explain_key(self, section: _Section, key: str) -> str:
        """Why a key sets nothing where it stands, and what to do."""
        commands = self._commands(section)
        elsewhere = [path for path, command in commands.items() if key in options_of(command)]
        if elsewhere:
            named = ", ".join(f"[{'.'.join(path)}]" for path in elsewhere[:NAMED])
            return f"it does not mean the same to every command; write it under {named}"
        command = self._command(section.path)
        if isinstance(command, click.Group) and key in command.list_commands(self._ctx):
            return f"it is a command; write its options under [{'.'.join((*section.path, key))}]"
        if any(isinstance(each, click.Argument) and option_key(each.name or "") == key for each in command.params):
            return "it is no option; give it on the command line"
        known = {each for command in commands.values() for each in options_of(command)}
        return f"there is no such option{_advise_name(key, known, '{}')}"

    def _explain_section(self, section: _Section, name: str) -> str | None:
        """What is wrong with a section below this one; None: nothing."""
        command = self._command(section.path)
        names = command.list_commands(self._ctx) if isinstance(command, click.Group) else []
        if name in names:
            return None
        if option_key(name) in options_of(command):
            return "is a section, and the option takes a value"
        return f"there is no such command{_advise_name(name, names, '[{}]')}"

    def _commands(self, section: _Section) -> dict[CommandPath, click.Command]:
        """The commands that a section is for."""
        return dict(walk_commands(self._ctx, section.path, self._command(section.path)))

    def _command(self, path: CommandPath) -> click.Command:
        command = self._ctx.command
        for name in path:
            found = command.get_command(self._ctx, name) if isinstance(command, click.Group) else None
            assert found is not None, f"{path} has been found"
            command = found
        return command


def option_key(name: str) -> str:
    """What an option is called in a config file: its flag without the dashes before it; underscores are dashes."""
    return name.lstrip("-").replace("_", "-")


def options_of(command: click.Command) -> dict[str, Settable]:
    """The options and arguments of a command that a config file may set, by key."""
    found: dict[str, Settable] = {}
    for each in command.params:
        if isinstance(each, ConfigArgument):
            found[each.key] = each
        elif isinstance(each, click.Option) and not each.hidden and each.name != "config":
            found[option_key(each.opts[-1])] = each
    return found


def walk_commands(
    ctx: click.Context, path: CommandPath, command: click.Command
) -> Iterator[tuple[CommandPath, click.Command]]:
    """The commands below one that have none below them, or that one itself."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(ctx):
        found = command.get_command(ctx, name)
        assert found is not None, "a group has what it lists"
        yield from walk_commands(ctx, (*path, name), found)


def path_of(ctx: click.Context) -> CommandPath:
    """The names that lead to the command of a context."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    return tuple(names)


def _read_top(config: ConfigFile) -> _Section:
    """The whole file, with what stands under [shared] at the top. Raises UsageError."""
    top = _read_section((), {name: value for name, value in config.values.items() if name != SHARED})
    shared: Any = config.values.get(SHARED, {})
    if not isinstance(shared, dict):
        raise UsageError(f"{config.path}: {SHARED}: it is a section: [{SHARED}]")
    for name, value in shared.items():
        if isinstance(value, dict) and name != VLLM:
            raise UsageError(f"{config.path}: [{SHARED}.{name}] a section of a command is not below another: [{name}]")
        if name in top.values:
            raise UsageError(f"{config.path}: {name}: it is there twice, at the top and under [{SHARED}]")
    return _Section((), {**top.values, **shared}, top.sections)


def _read_section(path: CommandPath, table: Mapping[str, Any]) -> _Section:
    tables = {name: value for name, value in table.items() if isinstance(value, dict) and name != VLLM}
    values = {name: value for name, value in table.items() if name not in tables}
    return _Section(path, values, {name: _read_section((*path, name), value) for name, value in tables.items()})


def _kind_of(option: Settable) -> type:
    """What an option's value is in a config file."""
    if isinstance(option.type, Parsed):
        return option.type.kind
    if isinstance(option.type, IntParamType):
        return int
    return float if isinstance(option.type, FloatParamType) else str


def _shown(value: object) -> str:
    """A value as the file has it, if it is short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else "this"


def _advise_quotes(kind: type, value: object) -> str:
    if kind is str and isinstance(value, int | float):
        return "; write it in quotes"
    return "; write it without quotes" if isinstance(value, str) else ""


def _advise_name(name: str, known: Collection[str], form: str) -> str:
    near = get_close_matches(option_key(name), known, 1)
    return f"; did you mean {form.format(near[0])}?" if near else ""
