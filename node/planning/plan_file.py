"""The plans that a node follows, on its disk: a network that starts anew goes on from there, and with nothing older."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import msgspec
import trio

from ...bootstrap.trust.kept_file import KeptFile
from ...coordinator import Plan
from ...coordinator.plan import MorePlans
from ..view import NetworkView

SAVE_EVERY_S: Final = 2.0


class _MorePlans(msgspec.Struct, frozen=True):
    plans: MorePlans = ()


@final
class PlanFile:
    """The files of one network in `home`: one plan in a file that earlier releases read too, those of more services in
    another. `say` is told what could not be read or written, in lines for people."""

    def __init__(self, home: Path, network: bytes, say: Callable[[str], None]) -> None:
        self.path = home / f"network-{network.hex()[:16]}.plan"
        self._file = KeptFile(self.path, Plan, b"p2pserve-plan-1\n", say)
        self._more = KeptFile(self.path.with_suffix(".plans"), _MorePlans, b"p2pserve-plans-1\n", say)
        self._say = say
        self._saved: tuple[Plan, ...] = ()

    def __repr__(self) -> str:
        return f"<PlanFile {self.path}>"

    def load(self) -> tuple[Plan, ...]:
        """What an earlier run has followed, of each service."""
        try:
            first, more = self._file.load(), self._more.load()
        except OSError as error:
            self._say(f"{self.path} was not read: {error}; the plan of an earlier run is not known")
            return ()
        self._saved = (*([first] if first is not None else []), *(more.plans if more is not None else ()))
        return self._saved

    async def keep(self, view: NetworkView) -> None:
        """Save the plans that are followed whenever they are others; runs until cancelled."""
        while True:
            first = view.plan
            plans = () if first is None else (first, *(each for each in view.plans.values() if each is not first))
            if plans and plans != self._saved:
                # In a thread: a disk may take its time, and the loop must answer pings.
                await trio.to_thread.run_sync(self._save, plans)
            await trio.sleep(SAVE_EVERY_S)

    def _save(self, plans: tuple[Plan, ...]) -> None:
        had_more, self._saved = len(self._saved) > 1, plans
        try:
            self._file.save(plans[0])
            if had_more or plans[1:]:
                self._more.save(_MorePlans(plans[1:]))
        except OSError as error:
            self._say(f"{self.path} was not written: {error}; free some space, or mend its permissions")
