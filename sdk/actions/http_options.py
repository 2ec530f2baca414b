"""Where HTTP is served and for whom, as it is given to a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...bootstrap import Address, AddressError, parse_address
from ..errors import UsageError

MIN_KEY_CHARS: Final = 8


def read_http(text: str) -> Address:
    """Where to listen. Raises UsageError."""
    try:
        return parse_address(text)
    except AddressError as error:
        raise UsageError(f"http: {error}") from error


def read_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """The keys that were given, and those of a file, one in each line; `#` begins a comment. Raises UsageError."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(f"api_key_file: {file} cannot be read: {reason}") from error
    keys = (*given, *(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")))
    if file is not None and not keys:
        raise UsageError(f"api_key_file: {file} holds no key; write one in each line")
    for key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(f"api_key: a key has at least {MIN_KEY_CHARS} printable ASCII characters and no spaces")
    return keys
