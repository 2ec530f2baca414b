"""The plan that a node follows, on its disk: a network that starts anew goes on from there, and with nothing older."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import trio

from ...bootstrap.trust.kept_file import KeptFile
from ...coordinator import Plan
from ..view import NetworkView

SAVE_EVERY_S: Final = 2.0


@final
class PlanFile:
    """The file of one network in `home`. `say` is told what could not be read or written, in lines for people."""

    def __init__(self, home: Path, network: bytes, say: Callable[[str], None]) -> None:
        self.path = home / f"network-{network.hex()[:16]}.plan"
        self._file = KeptFile(self.path, Plan, b"p2pserve-plan-1\n", say)
        self._say = say
        self._saved: Plan | None = None

    def __repr__(self) -> str:
        return f"<PlanFile {self.path}>"

    def load(self) -> Plan | None:
        """What an earlier run has followed."""
        try:
            plan = self._file.load()
        except OSError as error:
            self._say(f"{self.path} was not read: {error}; the plan of an earlier run is not known")
            return None
        self._saved = plan
        return plan

    async def keep(self, view: NetworkView) -> None:
        """Save the plan that is followed whenever it is another; runs until cancelled."""
        while True:
            if view.plan is not None and view.plan is not self._saved:
                # In a thread: a disk may take its time, and the loop must answer pings.
                await trio.to_thread.run_sync(self._save, view.plan)
            await trio.sleep(SAVE_EVERY_S)

    def _save(self, plan: Plan) -> None:
        self._saved = plan
        try:
            self._file.save(plan)
        except OSError as error:
            self._say(f"{self.path} was not written: {error}; free some space, or mend its permissions")
