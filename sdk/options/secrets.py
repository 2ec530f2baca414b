"""Tokens and keys: read from files, told by their kind alone, and taken out of what `ps` shows of this process."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ..errors import UsageError

SECRET_OPTIONS: Final = frozenset({"--bootstrap", "--token", "--api-key", "--admin-token", "--hf-token"})
"""Options whose values nobody else is to see; the last is vLLM's."""

MASK: Final = "..."
STDIN: Final = Path("-")
MAX_BYTES: Final = 1 << 20  # of a file of keys

_TOKEN: Final = re.compile(r"(p2p_[a-z]+_)[\w=-]+")  # a join token, wherever it stands
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def mask_tokens(text: str) -> str:
    """The text with each join token cut to its kind."""
    return _TOKEN.sub(rf"\1{MASK}", text)


def mask_value(option: str, text: str) -> str:
    """What others may see of a secret option's value: the kind of a join token, and addresses beside it."""
    masked = mask_tokens(text)
    return masked if masked != text or (option == "--bootstrap" and ":" in text) else MASK


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line as others may see it."""
    found, before = [], ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if before in SECRET_OPTIONS:
            found.append(mask_value(before, argument))
        elif equals and name in SECRET_OPTIONS:
            found.append(f"{name}={mask_value(name, value)}")
        else:
            found.append(mask_tokens(argument))
        before = "" if before in SECRET_OPTIONS else argument
    return found


def hide_secrets() -> None:
    """Take secrets out of this process's command line as `ps` and /proc show it, from now on."""
    masked = mask_arguments(sys.orig_argv)
    if masked != sys.orig_argv:
        import setproctitle  # only where there is something to hide

        thread = setproctitle.getthreadtitle()
        setproctitle.setproctitle(" ".join(masked))
        setproctitle.setthreadtitle(thread)  # what `ps -C` and `pgrep` look for


def read_secret_file(path: Path, field: str, warn: Callable[[str], None]) -> str:
    """What a file holds, or stdin for `-`, without space around it. `warn` hears of a file that others may read.
    Raises UsageError that begins with `field`."""
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise UsageError(f"{field}: standard input is closed")
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
            warn_of_others(path, warn)
        text = raw.decode().strip()
    except OSError as error:
        raise UsageError(f"{field}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{field}: {path} is not UTF-8 text (byte {error.start})") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{field}: {path} is larger than {MAX_BYTES >> 20} MiB, and should hold a secret")
    if not text:
        raise UsageError(f"{field}: {path} is empty")
    return text


def warn_of_others(path: Path, warn: Callable[[str], None]) -> None:
    """Say it where other users of this machine may read or change a file of secrets."""
    if sys.platform == "win32":
        return  # which has no such bits
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & _OTHERS:
        warn(f"warning: {path} holds secrets, and other users of this machine may open it: chmod 600 {path}")


def warn_on_stderr(text: str) -> None:
    """For commands."""
    print(f"p2pserve: {text}", file=sys.stderr)
