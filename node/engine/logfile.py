"""Where an engine process's output goes: a file in the node's folder, not the user's terminal."""

from __future__ import annotations

import os
from pathlib import Path


def redirect_output(log: Path) -> None:
    """Send stdout and stderr, C++ code's included, to the end of a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
