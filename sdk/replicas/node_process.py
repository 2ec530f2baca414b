"""One of several nodes of a box, as a process: `p2pserve join` with the options that its parent writes to its input.

The input stays open for as long as the parent lives: when it ends, whatever ended it, the node leaves, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from ...node.owner.dividing import DividedBox
from ..cli import run_explained
from ..options.command import DEBUG, PROGRAM, set_up_logging

PATHS: Final = ("home", "api_key_file", "engine_socket")
"""Options that are paths."""

DIVIDED: Final = "divided"
"""What no option says: that the network may divide the box anew."""

_STDIN: Final = 0


def write_options(options: dict[str, Any]) -> bytes:
    """Options of `join` as a line."""
    plain = {name: str(each) if isinstance(each, Path) else each for name, each in options.items()}
    return json.dumps(plain, default=msgspec.to_builtins).encode()


def read_options(line: bytes) -> SimpleNamespace:
    """The other way."""
    found: dict[str, Any] = json.loads(line)
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = tuple(value)
        elif name in PATHS and value is not None:
            found[name] = Path(value)
    if DIVIDED in found:
        found[DIVIDED] = msgspec.convert(found[DIVIDED], DividedBox)
    return SimpleNamespace(**found)


def main() -> int:
    """Run the node; its exit code."""
    # Not by sys.stdin: a thread that waits in its buffer would hold a lock that Python wants when it ends.
    raw = bytearray()
    while not raw.endswith(b"\n"):
        more = os.read(_STDIN, 1 << 16)
        if not more:
            return 1  # the parent has ended already
        raw += more
    arguments = read_options(bytes(raw))
    set_up_logging(arguments.debug)
    _set_title(f"{PROGRAM} join ({arguments.folder})")
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    from ..actions.node import join

    return run_explained(lambda: join(arguments), {DEBUG: arguments.debug})


def _leave_with_parent() -> None:
    while os.read(_STDIN, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _set_title(title: str) -> None:
    """What `ps` shows; what it finds the process by stays."""
    import setproctitle

    thread = setproctitle.getthreadtitle()
    setproctitle.setproctitle(title)
    setproctitle.setthreadtitle(thread)


if __name__ == "__main__":
    sys.exit(main())
