"""Which node of this box a command is for, where its user has not said so."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...node.box.home import running_pid

OWN: Final = ("node", "bootstrap")
"""The folders of nodes in a home: what runs `join`, and what runs `bootstrap` or `serve`."""


def find_own_node(home: Path, chosen: str | None) -> str:
    """The chosen one, else the one that runs, else the one that has run; of two, the one that runs `join`."""
    if chosen is not None:
        return chosen
    running = [name for name in OWN if running_pid(home / name) is not None]
    return (running or [name for name in OWN if (home / name).is_dir()] or OWN)[0]
