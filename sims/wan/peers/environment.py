"""A Python environment for the peers alone, in a cache folder: what runs this is never touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INSTALL_S: Final = 600.0
TRY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PeerPackage:
    """What pip installs for a peer (without what it depends on, which transfers do not need), the module by which one
    sees that it works, and what may be missing on the system."""

    requirements: tuple[str, ...]
    module: str
    hint: str = ""


PACKAGES: Final = {
    "nixl": PeerPackage(("nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"), "nixl_cu12._api"),
    "mooncake": PeerPackage(
        ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
        "mooncake.engine",
        "Debian, Ubuntu: apt-get install libibverbs1 libnuma1",
    ),
}

Run = Callable[[Sequence[str], float], str]
"""Runs a command for so many seconds at most; returns why it failed, in one line, or nothing."""


def default_folder() -> Path:
    """Where the environment is, unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "p2pserve" / "peers"


def run_command(command: Sequence[str], seconds: float) -> str:
    """Run it; why it failed: the last line that it wrote as an error."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} has not ended within {seconds:g} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if done.returncode == 0:
        return ""
    return last_line(done.stderr) or f"{Path(command[0]).name} ended with exit code {done.returncode}"


def last_line(text: str) -> str:
    """The last line of a program's errors that says something, short enough for a table."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


class PeerEnvironment:
    """The environment in `folder`; made, and filled, when it is asked for."""

    def __init__(self, folder: Path, *, install: bool = True, run: Run = run_command) -> None:
        self._folder = folder
        self._install = install
        self._run = run

    @property
    def python(self) -> str:
        """The interpreter that has the peers."""
        return str(self._folder / "bin" / "python")

    def prepare(self, name: str) -> str:
        """Install a peer unless it is there; returns why it does not work, or nothing."""
        package = PACKAGES[name]
        reason = self._try(package)
        if not reason:
            return ""
        if not self._install:
            return f"not installed, and installing was not allowed: {reason}"
        reason = self._make() or self._run(
            [self.python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--no-input",
             *package.requirements],
            INSTALL_S,
        )  # fmt: skip
        if reason:
            return f"pip: {reason}"
        reason = self._try(package)
        return " ".join(filter(None, (reason, f"({package.hint})" if reason and package.hint else "")))

    def _make(self) -> str:
        if Path(self.python).exists():
            return ""
        return self._run([sys.executable, "-m", "venv", str(self._folder)], INSTALL_S)

    def _try(self, package: PeerPackage) -> str:
        return self._run([self.python, "-c", f"import {package.module}"], TRY_S)
