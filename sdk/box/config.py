"""What `p2pserve config` does: which settings hold, where each comes from, and what is wrong with the file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import environment
from ..actions.status_view import open_console
from ..errors import UsageError
from ..options.command import ENVIRONMENT
from ..options.config import CommandPath, ConfigReader, Settable, option_key, options_of, walk_commands
from ..options.secrets import MASK, SECRET_OPTIONS, mask_value
from ..options.sources import SECTION_DISTANCES, find_overruled

_ELSEWHERE: Final = frozenset(
    {environment.CONFIG, environment.HOME, environment.BOOTSTRAP, environment.TOKEN, environment.TOKEN_FILE}
    | {environment.ADMIN_TOKEN, "P2PSERVE_ENGINE_LOG", "P2PSERVE_KERNELS", "P2PSERVE_KERNEL_CACHE"}
    | {"P2PSERVE_DRY_RUN", "P2PSERVE_PORT", "P2PSERVE_SOURCE"}  # of the scripts of `rent`
)
"""Variables that no command has of its own."""


class Setting(NamedTuple):
    """An option of a command as it holds where the command line says nothing. `source`: file, variable or default;
    `where`: the file's path or the variable's name. `overruled_by`: the option that counts instead."""

    command: str
    setting: str
    value: Any
    source: str
    where: str | None
    overruled_by: str | None = None


def show(arguments: SimpleNamespace) -> int:
    """`p2pserve config show`: of one command all settings, of all commands those that somebody has set."""
    program = click.get_current_context().find_root()
    config = environment.read_config(arguments.config)
    reader = ConfigReader(config, program)
    wanted = tuple(arguments.command)
    assert isinstance(program.command, click.Group)
    commands = dict(walk_commands(program, (), program.command))
    chosen = {path: each for path, each in commands.items() if path[: len(wanted)] == wanted}
    if not chosen:
        raise UsageError(f"command: there is no `{' '.join(wanted)}`{_advise(wanted, commands)}")
    found = [
        each for path, command in chosen.items() for each in _settings_of(program, path, command, reader, config.path)
    ]
    if not wanted:
        found = [each for each in found if each.source != "default"]
    if arguments.format == "json":
        rows = [each._asdict() for each in found]
        print(json.dumps({"file": str(config.path), "exists": config.path.exists(), "settings": rows}))
        return 0
    console = open_console()
    console.print(f"{config.path}{'' if config.path.exists() else ' (there is none)'}", soft_wrap=True, highlight=False)
    if found:
        _print(found, console)
    if not wanted:
        console.print("all settings of a command, with their defaults: p2pserve config show COMMAND", highlight=False)
    return 0


def path(arguments: SimpleNamespace) -> int:
    """`p2pserve config path`."""
    file = environment.config_path() if arguments.config is None else arguments.config
    print(json.dumps({"file": str(file), "exists": file.exists()}) if arguments.format == "json" else file)
    return 0


def check(arguments: SimpleNamespace) -> int:
    """`p2pserve config check`: 2 where something is wrong with the file or with a variable."""
    program = click.get_current_context().find_root()
    assert isinstance(program.command, click.Group)
    config = environment.read_config(arguments.config)
    faults = [*ConfigReader(config, program).find_faults(), *find_unknown_variables(program, dict(os.environ))]
    if arguments.format == "json":
        print(json.dumps({"file": str(config.path), "exists": config.path.exists(), "faults": faults}))
    else:
        exists = config.path.exists()
        print("\n".join(faults) or f"{config.path}: {'no faults' if exists else 'there is none, and none is needed'}")
    return 2 if faults else 0


def find_unknown_variables(program: click.Context, variables: dict[str, str]) -> Iterator[str]:
    """Variables that look like settings of ours, and stand for none."""
    assert isinstance(program.command, click.Group)
    known = set(_ELSEWHERE)
    for path, command in walk_commands(program, (), program.command):
        for parameter in command.params:
            names = {parameter.name or "", getattr(parameter, "variable", "")} - {""}
            known |= {"_".join([ENVIRONMENT, *path, name]).upper() for name in names}
    for name in sorted(variables):
        if name.startswith(f"{ENVIRONMENT}_") and name not in known:
            near = get_close_matches(name, known, 1)
            yield f"{name}: no option has this variable{f'; did you mean {near[0]}?' if near else ''}"


def _settings_of(
    program: click.Context, path: CommandPath, command: click.Command, reader: ConfigReader, file: Path
) -> Iterator[Setting]:
    """What click takes for each option when the command line says nothing. Raises UsageError for a variable that is
    none of what its option takes."""
    found = reader.find_values(path)
    prefix = "_".join([ENVIRONMENT, *path]).upper()
    values = {name: each.value for name, each in found.items()}
    ctx = click.Context(command, program, path[-1], auto_envvar_prefix=prefix, default_map=values)
    ctx.meta[SECTION_DISTANCES] = {name: each.distance for name, each in found.items()}
    settings: dict[str, Setting] = {}
    for key, option in options_of(command).items():
        assert option.name is not None, "every option has a name"
        value, source = option.consume_value(ctx, {})
        ctx.set_parameter_source(option.name, source)
        ctx.params[option.name] = ",".join(value) if isinstance(value, tuple | list) else value
        origin: tuple[str, str | None] = ("default", None)
        if source is ParameterSource.ENVIRONMENT:
            origin = ("variable", _variable_of(option, prefix))
        elif source is ParameterSource.DEFAULT_MAP:
            origin = ("file", str(file))
        elif option.name == "home":
            value = environment.find_home()
        try:
            shown = _shown(option, value if isinstance(value, Enum | None) else option.type_cast_value(ctx, value))
        except click.BadParameter as error:
            raise UsageError(f"{origin[1]}: {error.message.removesuffix('.')}") from error
        settings[option.name] = Setting(" ".join(path), key, shown, *origin)
    for name, other in find_overruled(ctx).items():
        settings[name] = settings[name]._replace(overruled_by=option_key(other))
    yield from settings.values()


def _variable_of(option: Settable, prefix: str) -> str:
    """The variable that an option has its value from."""
    named = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    named += [f"{prefix}_{name}" for name in (getattr(option, "variable", ""), (option.name or "").upper()) if name]
    return next((each for each in named if os.environ.get(each)), named[-1])


def _shown(option: Settable, value: object) -> object:
    """A value as JSON can have it; of a secret its kind alone."""
    if value is None or isinstance(value, Enum):  # click's word for what has no default
        return None
    if isinstance(value, tuple | list):
        return [_shown(option, each) for each in value] or None
    if SECRET_OPTIONS.intersection(option.opts):
        kind = mask_value(option.opts[-1], str(value))
        return "set" if kind == MASK else f"set ({kind})"
    return value if isinstance(value, bool | int | float | str) else str(value)


def _print(found: list[Setting], console: Console) -> None:
    """A row for each setting, those that several commands have alike as one."""
    groups: dict[str, list[Setting]] = {}
    for each in found:
        groups.setdefault(each.setting, []).append(each)
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    for setting, rows in groups.items():
        if (len({json.dumps(each[2:]) for each in rows}) == 1 and len(rows) > 1) or len(
            {each.command for each in found}
        ) == 1:
            _add_row(table, setting, rows[0])
        else:
            for each in rows:
                _add_row(table, f"{each.command.replace(' ', '.')}.{setting}", each)
    console.print(table)


def _add_row(table: Table, name: str, found: Setting) -> None:
    value = "" if found.value is None else str(found.value)
    if isinstance(found.value, bool):
        value = str(found.value).lower()
    if isinstance(found.value, list):
        value = ", ".join(map(str, found.value))
    source = found.where if found.source == "variable" else found.source
    overruled = f" (not used: {found.overruled_by})" if found.overruled_by is not None else ""
    table.add_row(name, Text(value), f"{source}{overruled}")


def _advise(wanted: CommandPath, commands: Collection[CommandPath]) -> str:
    names = {" ".join(each[:depth]) for each in commands for depth in range(1, len(each) + 1)}
    near = get_close_matches(" ".join(wanted), names, 1)
    return f"; did you mean {near[0]}?" if near else ""
