"""What a node does while it is the elected coordinator: it plans, in a process beside everything else, and takes an
admin's orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import trio

from ...bootstrap import PeerId, RemoteError, Role
from ...coordinator import Plan, PlanError
from ...coordinator.names import count_of, name_of
from ...coordinator.routing.policies import lends_replicas
from ..joined import Joined
from ..methods import PLAN_REGROUP
from ..observing.values import EventKind
from .coordination import PlanningTask
from .messages import RegroupBegun, RegroupOrder
from .planner import Planner, PlannerFailed, open_planner
from .services import Coordinator


@final
class PlanningDesk:
    """One per node. `publish` tells all members of a new plan."""

    def __init__(self, joined: Joined, publish: Callable[[Plan], None]) -> None:
        self._joined = joined
        self._publish = publish
        settings = joined.settings
        self._coordinator = Coordinator(
            joined.own,
            settings.codec,
            settings.tuning.quiet_s,
            settings.slo,
            lends_replicas=lends_replicas(settings.routing.policy),
        )
        self._looked = trio.Event()  # set when the view of the network is another
        self._on_look: Callable[[], None] = _ignore_look  # while a plan is made, which may be out of date by then
        joined.network.handle(PLAN_REGROUP, self._on_order)
        joined.network.on_hung(self._note_hung)

    def __repr__(self) -> str:
        return f"<PlanningDesk {self._coordinator!r}>"

    def look(self) -> None:
        """The view of the network is another."""
        self._looked.set()
        self._on_look()

    async def run(self) -> None:
        """Plan while this node is the elected coordinator: it takes seconds. Until cancelled."""
        joined, coordinator = self._joined, self._coordinator
        led = False
        async with open_planner(joined.settings.tuning) as planner:
            while True:
                leads = joined.leader is not None and joined.leader[0] == joined.own
                if leads is not led:  # while it leads, no plan waits for the planner's imports
                    await (planner.start() if leads else planner.end())
                led = leads
                task = coordinator.next(joined.view, joined.leader, trio.current_time())
                if task is None:
                    self._looked = trio.Event()
                    seeking = coordinator.seek(joined.view, joined.leader, trio.current_time())
                    if seeking is not None:
                        await self._seek_groups(planner, seeking)
                        continue
                    with trio.move_on_at(coordinator.wake_at(trio.current_time())):
                        await self._looked.wait()
                    continue
                await self._plan(planner, task)

    async def _plan(self, planner: Planner, task: PlanningTask) -> None:
        """Make a plan of a task, and publish it; what goes wrong is said."""
        joined, coordinator = self._joined, self._coordinator
        self._on_look = partial(self._hurry_outdated, planner, task)
        try:
            found = await planner.plan(task)
        except PlanError as error:
            joined.record(EventKind.PLAN_FAILED, service=task.service, why=str(error))
            joined.say(f"no new plan for {task.service}: {error}")
            return
        except PlannerFailed as error:
            helps = coordinator.on_failed(task, str(error), trio.current_time())
            joined.record(EventKind.PLAN_FAILED, service=task.service, why=str(error))
            joined.say(f"planning for {task.service} failed: {error}" + "; trying without some boxes" * helps)
            return
        finally:
            self._on_look = _ignore_look
        plan = coordinator.settle(task, found, joined.view, joined.leader, trio.current_time())
        if plan is not None:
            self._publish(plan)

    async def _seek_groups(self, planner: Planner, task: PlanningTask) -> None:
        """Look for other groups of boxes, and begin with them where that is worth it."""
        joined, coordinator, found = self._joined, self._coordinator, None
        self._on_look = partial(self._hurry_outdated, planner, task)
        try:
            found = await planner.seek_groups(task)
        except (PlanError, PlannerFailed) as error:
            joined.say(f"no other groups of boxes were looked for: {error}")
        finally:
            self._on_look = _ignore_look
        try:
            begun = coordinator.consider(task.service, found, joined.view, joined.leader, trio.current_time())
        except PlanError as error:
            joined.say(f"boxes are not regrouped: {error}")
            return
        if begun is not None:
            steps = count_of(len(begun.steps), "step")
            joined.say(
                f"regroups boxes in {steps}: {begun.before:.3g} -> {begun.after:.3g} requests/s of those asked for are "
                "expected to be in time"
            )

    def _hurry_outdated(self, planner: Planner, task: PlanningTask) -> None:
        """A box that is lost does not wait until the search for another reason is over."""
        joined = self._joined
        if self._coordinator.is_outdated(task, joined.view, joined.leader, trio.current_time()):
            planner.hurry()

    def _note_hung(self, peer: PeerId, hung: bool) -> None:
        if hung:
            self._coordinator.on_fault(peer, "it did not answer", trio.current_time())

    def note_stalled(self, peer: PeerId) -> None:
        """A box did not get on with a request of this node's gateway. Others are not told: they had only our word."""
        self._coordinator.on_fault(peer, "it stalled with a request", trio.current_time())

    async def _on_order(self, peer: PeerId, role: Role, body: RegroupOrder) -> RegroupBegun:
        """An admin of the network wants other groups of boxes."""
        joined = self._joined
        try:
            found = self._coordinator.order(body, joined.view, joined.leader)
        except PlanError as error:
            raise RemoteError("invalid", f"groups: {error}") from error
        boxes = sum(len(step.boxes) for step in found.steps)
        steps = count_of(len(found.steps), "step")
        joined.say(f"regroups {count_of(boxes, 'box')} in {steps}, as {name_of(peer)} wants, an admin of the network")
        self.look()
        return RegroupBegun(steps=len(found.steps), boxes=boxes)


def _ignore_look() -> None:
    """No plan is being made."""
