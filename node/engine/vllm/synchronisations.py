"""Where a step waits for the device: what vLLM's check warns of, with the stack, and whose it is.

With `VLLM_GPU_SYNC_CHECK=warn`, torch warns of each call that waits, vLLM of each copy that would.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

SWITCH: Final = "VLLM_GPU_SYNC_CHECK"
_MARK: Final = "p2pserve-synchronisation "
_WARNINGS: Final = ("called a synchronizing CUDA operation", "Implicit GPU<->CPU sync detected")
_REPORTING: Final = ("warnings.py", "gpu_sync_debug.py")
_WATCHED_FROM: Final = ("gpu_sync_debug.py", "wrapper")  # vLLM's function around each call that it watches


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


class FoundSync(NamedTuple):
    """One call that waits for the device. `own`: our lines above it, outermost first, if any."""

    message: str
    where: str
    own: tuple[str, ...]


def record_if_asked(write: Callable[[str], object] = sys.stderr.write) -> None:
    """In an engine's process, if SWITCH is set: write each synchronisation's stack once."""
    if SWITCH not in os.environ:
        return
    from vllm.utils import gpu_sync_debug

    write(f"{_MARK}{json.dumps({'armed': gpu_sync_debug._SYNC_CHECK_MODE is not None})}\n")  # noqa: SLF001 (no other way to know)
    warnings.showwarning = record_stacks(write, warnings.showwarning)


def record_stacks(write: Callable[[str], object], otherwise: Callable[..., None]) -> Callable[..., None]:
    """A `warnings.showwarning` that writes each synchronisation's stack once, and leaves others to `otherwise`."""
    seen: set[tuple[Frame, ...]] = set()

    def show(message: Warning | str, *arguments: Any, **named: Any) -> None:
        text = str(message)
        if not any(known in text for known in _WARNINGS):
            otherwise(message, *arguments, **named)
            return
        stack = tuple(_stack())
        if stack not in seen:
            seen.add(stack)
            write(f"{_MARK}{json.dumps({'message': text, 'stack': stack})}\n")

    return show


def _stack() -> list[Frame]:
    """Of whoever synchronised, outermost first: without what turns a warning into a call of ours."""
    walk = traceback.walk_stack(inspect.currentframe())
    frames = [Frame(at.f_code.co_filename, line, at.f_code.co_name) for at, line in walk][2:]
    while frames and Path(frames[0].file).name in _REPORTING and frames[0].function != _WATCHED_FROM[1]:
        del frames[0]
    return frames[::-1]


def own_frames(stack: Sequence[Frame], package: str) -> list[Frame]:
    """The stack's lines in the folder `package`, below what vLLM watches."""
    starts = [at for at, frame in enumerate(stack) if (Path(frame.file).name, frame.function) == _WATCHED_FROM]
    watched = stack[starts[0] + 1 :] if starts else stack
    return [frame for frame in watched if frame.file.startswith(f"{package}{os.sep}")]


def read_log(lines: Iterable[str], package: str) -> tuple[bool, list[FoundSync]]:
    """Whether vLLM watched in every engine that wrote this log, and all that it found."""
    armed: list[bool] = []
    found: list[FoundSync] = []
    for line in lines:
        _, mark, text = line.partition(_MARK)
        if not mark:
            continue
        told = json.loads(text)
        if "armed" in told:
            armed.append(told["armed"])
            continue
        stack = [Frame(*frame) for frame in told["stack"]]
        own = tuple(_shown(frame, package) for frame in own_frames(stack, package))
        found.append(FoundSync(" ".join(told["message"].split()), _shown(stack[-1], package), own))
    return bool(armed) and all(armed), found


def _shown(frame: Frame, package: str) -> str:
    return f"{frame.file.removeprefix(package + os.sep)}:{frame.line} {frame.function}"
