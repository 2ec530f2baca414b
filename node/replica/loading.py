"""How far an engine is while it loads: as far as the slowest of its worker processes."""

from __future__ import annotations

from typing import final

from ..engine import protocol


@final
class LoadingWorkers:
    """Of one start of an engine. Workers of one box read the same files, each its share of every tensor."""

    def __init__(self) -> None:
        self._files = 0
        self._reached: dict[int, int] = {}  # by worker, the file that it reads; beyond the last one, it has read all

    def __repr__(self) -> str:
        return f"<LoadingWorkers reached={self._reached} files={self._files}>"

    def take(self, said: protocol.Starting) -> protocol.Starting:
        """What holds for the engine, now that one of its workers has said this."""
        self._files = said.files or self._files
        self._reached[said.worker] = said.file if said.part == "weights" else self._files + 1
        slowest = min(self._reached.values())
        if len(self._reached) < said.workers:
            slowest = min(slowest, 1)  # the others have not begun
        if slowest > self._files:
            return protocol.Starting(part="warm-up")
        return protocol.Starting(part="weights", file=slowest, files=self._files)


def describe_starting(progress: protocol.Starting) -> str:
    """For people: `weights 3/8`; of a single file only that it is being read."""
    if progress.part == "warm-up":
        return "warms up"
    return f"weights {progress.file}/{progress.files}" if progress.files > 1 else "weights"
