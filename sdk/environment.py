"""What stands for options beside the command line, for commands and for `Client()`: variables and the config file.

    what is given (a flag, an argument)  >  P2PSERVE_* variables  >  the config file  >  defaults

Folders are where the XDG base directory specification has them.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

from .errors import InvalidAddress, UsageError
from .options.secrets import read_secret_file

BOOTSTRAP: Final = "P2PSERVE_BOOTSTRAP"
TOKEN: Final = "P2PSERVE_TOKEN"
TOKEN_FILE: Final = "P2PSERVE_TOKEN_FILE"
HOME: Final = "P2PSERVE_HOME"
ADMIN_TOKEN: Final = "P2PSERVE_ADMIN_TOKEN"
CONFIG: Final = "P2PSERVE_CONFIG"

CONFIG_NAME: Final = "p2pserve.toml"
EARLIER_HOME: Final = "~/.p2pserve"
"""Where releases before the XDG folders kept everything. It stays in use where it is."""


class ConfigFile(NamedTuple):
    """What a config file says, by key; a section is a value that is a dictionary itself."""

    path: Path
    values: dict[str, Any]


def config_path() -> Path:
    """Where the config file is, if there is one."""
    named = os.environ.get(CONFIG)
    return Path(named).expanduser() if named else _xdg_folder("XDG_CONFIG_HOME", "~/.config") / CONFIG_NAME


def read_config(path: Path | None = None) -> ConfigFile:
    """Read the config file, or that at `path`. None is as an empty one, unless it was named. Raises UsageError."""
    is_named = path is not None or bool(os.environ.get(CONFIG))
    file = config_path() if path is None else path.expanduser()
    try:
        return ConfigFile(file, tomllib.loads(file.read_text("utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        if is_named:
            raise UsageError(f"config: {file} is not there; `p2pserve config path` names the usual place") from None
        return ConfigFile(file, {})
    except OSError as error:
        raise UsageError(f"config: {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"config: {file} is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        fix = "a line is `key = value`, and texts stand in quotes"
        if "overwrite" in str(error):
            fix = "what is an option and a command (bootstrap, token) stands, as an option, under [shared]"
        raise UsageError(f"{file}: {error}; {fix}") from error


def find_home() -> Path:
    """The home folder where nothing says another one: that of earlier releases where it is the only one there."""
    usual, earlier = _xdg_folder("XDG_DATA_HOME", "~/.local/share"), Path(EARLIER_HOME).expanduser()
    return earlier if earlier.is_dir() and not usual.is_dir() else usual


def describe_home() -> str | None:
    """What whoever runs a node should know about the folder that `find_home` found; None: nothing."""
    usual, earlier = _xdg_folder("XDG_DATA_HOME", "~/.local/share"), Path(EARLIER_HOME).expanduser()
    if not earlier.is_dir():
        return None
    if usual.is_dir():
        return f"home: {usual} is used, and not {earlier} of an earlier release; --home {EARLIER_HOME} uses that one"
    return f"home: {earlier} of an earlier release is used; to move it: mv {earlier} {usual}"


def has_token(bootstrap: str) -> bool:
    """Whether a join token is in it, and not addresses alone."""
    return any(part.strip().startswith("p2p_") for part in bootstrap.split(","))


def network_address(bootstrap: str | None, token: str | None) -> tuple[str, str | None]:
    """Address (or join token) and token of a network: given, from the environment or else from the top of the config
    file. Raises InvalidAddress if there is neither, or no text."""
    for name, value in (("bootstrap", bootstrap), ("token", token)):
        if value is not None and not isinstance(value, str):
            raise InvalidAddress(f"{name}: {value!r} is no text; give the line that `p2pserve bootstrap` printed")
    where, secret = bootstrap, token or None
    try:
        for read in (_read_variables, _read_top):
            if where is not None and (secret is not None or read is _read_top):
                break
            further, further_secret = read()
            if where is None and (secret is None or not has_token(further or "")):  # or else it is of another network
                where = further
            secret = secret or further_secret
    except UsageError as error:
        raise InvalidAddress(str(error)) from error
    return require_network(where, secret)


def require_network(bootstrap: str | None, token: str | None) -> tuple[str, str | None]:
    """The same, where it is known already; a token alone is enough, as it names members. Raises InvalidAddress without
    any."""
    if bootstrap is None and token is not None:
        bootstrap, token = token, None
    if not bootstrap or not bootstrap.strip():
        raise InvalidAddress(
            "bootstrap: give the token that `p2pserve bootstrap` printed (--bootstrap, --token-file, Client(...)), or "
            f"set {BOOTSTRAP}"
        )
    return bootstrap.strip(), token or None


def _read_variables() -> tuple[str | None, str | None]:
    """Bootstrap and token of the environment. Raises UsageError."""
    where, token, file = (os.environ.get(name) or None for name in (BOOTSTRAP, TOKEN, TOKEN_FILE))
    if token is None and file is not None:
        token = read_secret_file(Path(file).expanduser(), TOKEN_FILE, _say_nothing)
    return where, token


def _read_top() -> tuple[str | None, str | None]:
    """Bootstrap and token that stand at the top of the config file. Raises UsageError."""
    config = read_config()
    where = config.values.get("bootstrap")
    if isinstance(where, list) and all(isinstance(each, str) for each in where):
        where = ",".join(where)
    token = config.values.get("token")
    file = config.values.get("token-file", config.values.get("token_file"))
    for name, value in (("bootstrap", where), ("token", token), ("token-file", file)):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{config.path}: {name}: {value!r} is no text; write it in quotes")
    if token is None and file is not None:
        token = read_secret_file(resolve_path(file, config.path), f"{config.path}: token-file", _say_nothing)
    return where, token


def resolve_path(text: str, config: Path) -> Path:
    """A path as a config file means it: from its folder on. `-` is stdin."""
    return Path(text) if text == "-" else config.parent / Path(text).expanduser()


def _xdg_folder(variable: str, usual: str) -> Path:
    """p2pserve's folder in one of the XDG base directories, which count where they are absolute."""
    named = Path(os.environ.get(variable, ""))
    return (named if named.is_absolute() else Path(usual).expanduser()) / "p2pserve"


def _say_nothing(text: str) -> None:
    """A library prints nothing."""
