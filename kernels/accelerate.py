"""When the codecs' C++ (`native`) is built and used on a CPU, and the threads that build it beside
the plain code.

Three modes, from the environment variable P2PSERVE_KERNELS or `set_mode`:

- `auto` (the default): what was built on this machine before is loaded when it is first needed. Else nothing is built
  until 64 MiB of KV have gone through this process. Both happen in a background thread, and the library takes over
  when it is ready. Both ways give the same bytes, so it may do so at any moment.
- `eager`: only the reference.
- `compiled`: build at the first call and wait for it (some seconds for each codec, once per machine).

Where no C++ compiler is found, or it fails, the reference goes on and one line of the log says why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from enum import StrEnum

from .errors import CodecError

MODE_VARIABLE = "P2PSERVE_KERNELS"

AUTO_AFTER_BYTES = 64 * 2**20
"""16-bit KV that a process codes before it is worth some seconds of one core."""


class KernelMode(StrEnum):
    """Which code runs the codecs on a CPU."""

    AUTO = "auto"
    EAGER = "eager"
    COMPILED = "compiled"


class _Process:
    """What the codecs of a process share. `lock` guards the other fields but `building`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.building = threading.Lock()  # one library at a time: a compiler takes all of a core
        self.mode: KernelMode | None = None
        self.coded_bytes = 0


_PROCESS = _Process()


def mode() -> KernelMode:
    """The mode in force. Raises `CodecError` where the environment names none."""
    with _PROCESS.lock:
        if _PROCESS.mode is None:
            _PROCESS.mode = _named(os.environ.get(MODE_VARIABLE, KernelMode.AUTO))
        return _PROCESS.mode


def set_mode(wanted: KernelMode | str) -> None:
    """Use this mode from now on, in all threads."""
    named = _named(wanted)
    with _PROCESS.lock:
        _PROCESS.mode = named


def restart() -> None:
    """Forget the mode and the count of coded bytes; a build under way goes on."""
    with _PROCESS.lock:
        _PROCESS.mode, _PROCESS.coded_bytes = None, 0


def count_coded(nbytes: int) -> None:
    """A block of `nbytes` of 16-bit KV is coded."""
    with _PROCESS.lock:
        _PROCESS.coded_bytes += nbytes


def is_worth_building() -> bool:
    """Whether to build a library that is not there yet."""
    chosen = mode()
    with _PROCESS.lock:
        return chosen is KernelMode.COMPILED or (chosen is KernelMode.AUTO and _PROCESS.coded_bytes >= AUTO_AFTER_BYTES)


def build_beside(build: Callable[[], None]) -> threading.Thread:
    """A thread that builds or loads while others go on, no two of them at once. The process may end before."""

    def run() -> None:
        with _PROCESS.building:
            build()

    thread = threading.Thread(target=run, name="kernels-build", daemon=True)
    thread.start()
    return thread


def _named(wanted: str) -> KernelMode:
    try:
        return KernelMode(wanted)
    except ValueError:
        known = ", ".join(KernelMode)
        raise CodecError(f"{MODE_VARIABLE}={wanted!r} is not a mode of the kernels; known are {known}") from None
