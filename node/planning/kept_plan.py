"""The plan that a node follows, kept in its home: after a restart it goes on by that plan until its coordinator has
another, and a whole network that restarts goes back to no older one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import final

from ...bootstrap.trust.kept_file import KeptFile
from ...coordinator import Plan


@final
class KeptPlan:
    """The file of one network in `folder`. `say` is told what could not be read or written, in lines for people."""

    def __init__(self, folder: Path, network: bytes, say: Callable[[str], None]) -> None:
        self.path = folder / f"network-{network.hex()[:16]}.plan"
        self._file = KeptFile(self.path, Plan, b"p2pserve-plan-1\n", say)
        self._say = say

    def __repr__(self) -> str:
        return f"KeptPlan({self.path})"

    def load(self) -> Plan | None:
        """What an earlier run followed; None where there is none, or it is damaged."""
        try:
            return self._file.load()
        except OSError as error:
            self._say(f"{self.path} was not read: {error}; the plan of an earlier run is not known")
            return None

    def save(self, plan: Plan) -> None:
        """Replace the file; a failure is told, and costs nothing else."""
        try:
            self._file.save(plan)
        except OSError as error:
            self._say(f"{self.path} was not written: {error}; free some space, or mend its permissions")
