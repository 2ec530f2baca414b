"""Doing to boxes what is planned, and waiting until they serve again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import trio

from ..errors import ClientError, DemoFailed
from ..session import Session
from .boxes import ChaosBox, ChaosNetwork, Say
from .disks import fill_disk
from .links import ChaosLinks
from .looking import POLL_S, NetworkLook
from .schedule import ENDING, MOST_AWAY, OF_LINKS, FaultKind, PlannedFault, choose_victims

ORDER_S: Final = 60.0  # until the network is in a state in which an admin's order is taken


@dataclass(frozen=True, slots=True)
class DoneFault:
    """A fault that has happened, in seconds of the run."""

    at: float
    planned: PlannedFault


@final
class FaultInjector:
    """Does what is planned. `away`: numbers of the boxes that are not back from it; `away_s`: how long those were away
    whose agent had ended; `troubles`: boxes that did not come back."""

    def __init__(
        self,
        network: ChaosNetwork,
        links: ChaosLinks | None,
        look: NetworkLook,
        admin: Session,
        now: Callable[[], float],
        say: Say,
    ) -> None:
        self.done: list[DoneFault] = []
        self.away: set[int] = set()
        self.away_s: list[float] = []
        self.troubles: list[str] = []
        self.kept = network.serving[-1]  # its agent never ends: what it holds at last tells of the whole run
        self._turn = trio.Lock()
        self._network = network
        self._links = links
        self._look = look
        self._admin = admin
        self._now = now
        self._say = say

    def __repr__(self) -> str:
        return f"<FaultInjector done={len(self.done)} away={sorted(self.away)}>"

    async def inflict(self, fault: PlannedFault, watchers: trio.Nursery) -> None:
        """Do it, as soon as not too many boxes are away, until those that it hits are back. `watchers` is where agents
        that are started again are watched."""
        async with self._turn:  # in their order: one that needs two boxes would otherwise wait for all that need one
            if fault.kind is FaultKind.REGROUP:
                victims = await self._regroup(fault)
            else:
                while not (victims := self._choose(fault)):  # noqa: ASYNC110 (of other processes)
                    await trio.sleep(POLL_S)
            self.away |= {box.number for box in victims}
        if not victims:
            return
        self.done.append(DoneFault(self._now(), fault))
        names = " and ".join(f"box {box.number}" for box in victims)
        self._say(f"fault {fault.number}: {fault.kind.value}, {fault.victim.value}: {names}, {fault.lasts_s:.1f} s")
        if fault.kind in OF_LINKS and self._links is not None:
            harms = {
                FaultKind.CUT: self._links.cut,
                FaultKind.SLOW: self._links.slow,
                FaultKind.SPLIT: self._links.split,
            }
            await harms[fault.kind]([box.number for box in victims], fault.lasts_s)
        async with trio.open_nursery() as nursery:
            for box in victims:
                nursery.start_soon(self._harm, fault, box, watchers)

    def _choose(self, fault: PlannedFault) -> list[ChaosBox]:
        boxes = {box.number: box for box in self._network.boxes if box.number not in self.away}
        roles = [self._look.roles_of(box, is_kept=box is self.kept) for box in boxes.values()]
        return [boxes[number] for number in choose_victims(fault, roles, MOST_AWAY - len(self.away))]

    async def _regroup(self, fault: PlannedFault) -> list[ChaosBox]:
        """Order it, as an admin does, once nothing is wrong with the network; returns the boxes that load anew. None
        where no two can be ordered to for too long: boxes that failed often have no part in the plan."""
        why = "no two boxes could join"
        with trio.move_on_after(ORDER_S):
            while True:
                here = {box.peer: box for box in self._network.boxes if box.number not in self.away}
                change = self._look.choose_groups(here, fault.pick) if not self.away else None
                if change is not None:
                    try:
                        await self._look.order(self._admin, change.groups)
                        return [here[peer] for peer in change.boxes]
                    except ClientError as error:
                        why = str(error)
                await trio.sleep(POLL_S)
        self._say(f"fault {fault.number}: {fault.kind.value} was left out: {why}")
        return []

    async def _harm(self, fault: PlannedFault, box: ChaosBox, watchers: trio.Nursery) -> None:
        began = self._now()
        try:
            await self._do(fault, box)
            if fault.kind in ENDING:
                watchers.start_soon(box.watch)
            await self._look.wait_back(box)
            if fault.kind in ENDING:
                self.away_s.append(self._now() - began)
        except DemoFailed as error:
            self.troubles.append(f"fault {fault.number} ({fault.kind.value}): {error}")
            self._say(self.troubles[-1])
        self.away.discard(box.number)

    async def _do(self, fault: PlannedFault, box: ChaosBox) -> None:
        """Do it to its processes, until the box may go on. Raises DemoFailed where it does not start again."""
        token = self._network.token_of(box)
        match fault.kind:
            case FaultKind.KILL | FaultKind.FLAP:
                await box.kill()
                await trio.sleep(fault.lasts_s)
                for pause_s in fault.pauses_s:
                    with trio.move_on_after(pause_s):
                        await box.run(token)
                        await trio.sleep_forever()
                    await box.kill()
                await box.run(token)
            case FaultKind.LEAVE:
                status = await box.leave()
                if status != 0:
                    self.troubles.append(f"box {box.number} left with status {status}{box.read_last_line()}")
                    await box.kill()
                await trio.sleep(fault.lasts_s)
                await box.run(token)
            case FaultKind.STOP:
                box.send_signal(signal.SIGSTOP)
                await trio.sleep(fault.lasts_s)
                box.send_signal(signal.SIGCONT)
            case FaultKind.REGROUP:
                await self._look.wait_regrouped()
            case FaultKind.FILL_DISK:
                await fill_disk(box.home, fault.lasts_s)
            case FaultKind.KILL_ENGINE:
                box.signal_engine(signal.SIGKILL, self._look.engine_pid(box))
            case FaultKind.STOP_ENGINE:
                pid = self._look.engine_pid(box)
                box.signal_engine(signal.SIGSTOP, pid)
                await trio.sleep(fault.lasts_s)
                box.signal_engine(signal.SIGCONT, pid)
