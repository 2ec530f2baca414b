"""Where HTTP is served and for whom, as it is given to a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...bootstrap import Address, AddressError, parse_address
from ...node.web.access import Access, AdminTokenError
from ...node.web.keys import ApiKey, KeyFault, parse_keys
from ..errors import UsageError
from ..options.secrets import read_secret_file, warn_on_stderr


def read_http(text: str) -> Address:
    """Where to listen. Raises UsageError."""
    try:
        return parse_address(text)
    except AddressError as error:
        raise UsageError(f"http: {error}") from error


def read_keys(given: Sequence[str], file: Path | None) -> tuple[ApiKey, ...]:
    """The keys that were given, and those of a file, one in each line (`node.web.keys`). Raises UsageError."""
    lines = read_secret_file(file, "api_key_file", warn_on_stderr).splitlines() if file is not None else []
    try:
        read = parse_keys(lines)
        if file is not None and not read:
            raise UsageError(f"api_key_file: {file} holds no key; write one in each line")
        return (*parse_keys((key for key in given if key), "key"), *read)
    except KeyFault as error:
        where = "api_key" if str(error).startswith("key ") else f"api_key_file: {file}"
        raise UsageError(f"{where}: {error}") from error


def read_admin_token(given: str | None) -> str | None:
    """The token, if it is one. Raises UsageError."""
    try:
        Access(given)
    except AdminTokenError as error:
        raise UsageError(str(error)) from error
    return given
