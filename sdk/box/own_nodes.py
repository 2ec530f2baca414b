"""Which nodes of this box a command is for, where its user has not said so."""

from __future__ import annotations

from pathlib import Path

from ...node.box.home import running_pid
from ..options.values import JOINED, MADE, number_of_node


def find_own_nodes(home: Path, chosen: str | None) -> tuple[str, ...]:
    """The chosen one, else those that run, else those that have run. What runs `join`, all of it, comes before what
    runs `bootstrap`. Raises NodeError for a folder that cannot be read."""
    if chosen is not None:
        return (chosen,)
    joined = _list_joined(home)
    for names in (joined, (MADE,)):
        running = tuple(name for name in names if running_pid(home / name) is not None)
        if running:
            return running
    return joined or ((MADE,) if (home / MADE).is_dir() else (JOINED,))


def _list_joined(home: Path) -> tuple[str, ...]:
    """The folders of nodes that run `join`, by number."""
    numbers = {number_of_node(folder.name): folder.name for folder in home.glob(f"{JOINED}*") if folder.is_dir()}
    return tuple(numbers[number] for number in sorted(numbers) if number)
