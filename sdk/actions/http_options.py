"""Where HTTP is served and for whom, as it is given to a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...bootstrap import Address, AddressError, parse_address
from ...node.web.access import Access, AdminTokenError
from ...node.web.keys import ApiKey, KeyFault, parse_keys
from ..errors import UsageError


def read_http(text: str) -> Address:
    """Where to listen. Raises UsageError."""
    try:
        return parse_address(text)
    except AddressError as error:
        raise UsageError(f"http: {error}") from error


def read_keys(given: Sequence[str], file: Path | None) -> tuple[ApiKey, ...]:
    """The keys that were given, and those of a file, one in each line (`node.web.keys`). Raises UsageError."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"api_key_file: {file} cannot be read: {reason}") from error
    try:
        read = parse_keys(lines)
        if file is not None and not read:
            raise UsageError(f"api_key_file: {file} holds no key; write one in each line")
        return (*parse_keys((key for key in given if key), "key"), *read)
    except KeyFault as error:
        where = "api_key" if str(error).startswith("key ") else f"api_key_file: {file}"
        raise UsageError(f"{where}: {error}") from error


def read_admin_token(given: str | None, file: Path | None) -> str | None:
    """The token that was given, or the one in a file. Raises UsageError."""
    if given is not None and file is not None:
        raise UsageError("admin_token_file: give either the token or a file that holds it, and not both")
    try:
        token = file.read_text("ascii").strip() if file is not None else given
        Access(token)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise UsageError(f"admin_token_file: {file} cannot be read: {reason}") from error
    except AdminTokenError as error:
        raise UsageError(str(error)) from error
    return token
