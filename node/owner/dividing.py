"""A node of several on its machine, whose owner lets the network choose among how many they are.

    coordinator -- plan --> the first node -- a line --> the command that runs the nodes: `join --replicas auto`

Of a plan's word the first node makes a wish, at most one for each step of a plan, and only for a cut that the owner
offers, not too soon after the last change. The command looks at it again, and ends its nodes. A step that the node
does not follow it refuses with the reason, which all members hear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import msgspec

from ...coordinator.plan import BoxRecut, Plan
from ...coordinator.regrouping.divisions import BoxDivision

WANTS: Final = "recut"
READY: Final = "ready"
"""What a node tells the command that has started it: that the network wants so many nodes; that its engine serves."""

Tell = Callable[[dict[str, Any]], None]


def tell_nobody(told: dict[str, Any]) -> None:
    """No command runs several nodes."""


class DividedBox(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told of its machine when it starts: what it is to tell others, and from when on (unix seconds) the
    machine may be divided anew."""

    division: BoxDivision
    not_before: float = 0.0


def find_wanted(plan: Plan | None, own: str, division: BoxDivision) -> BoxRecut | None:
    """What a plan wants of the machine whose head this node is; None where that is nothing, or done."""
    step = plan.regrouping.steps[0] if plan is not None and plan.regrouping is not None else None
    recut = step.recut if step is not None else None
    if recut is None or recut.head != own or division.head != own or recut.replicas == len(division.nodes):
        return None
    return recut


def refuse_cut(box: DividedBox, replicas: int, now: float) -> str:
    """Why the machine does not take a cut at `now` (unix seconds), for people; "" where it does."""
    if box.division.offer(replicas) is None:
        return f"its owner does not offer {replicas} nodes"
    if now < box.not_before:
        return f"it was divided anew a short while ago, and may be again in {box.not_before - now:.0f} s"
    return ""


@final
class DivisionDesk:
    """Of a node whose machine may be divided anew. `tell` reaches the command that runs its nodes; `on_news`: what
    others are told is another."""

    def __init__(self, own: str, box: DividedBox, tell: Tell, on_news: Callable[[], None]) -> None:
        self._own = own
        self._box = box
        self._tell = tell
        self._on_news = on_news
        self._asked: BoxRecut | None = None
        self._is_ready = False

    def __repr__(self) -> str:
        return f"<DivisionDesk nodes={len(self.division.nodes)} asked={self._asked}>"

    @property
    def division(self) -> BoxDivision:
        """What others are told."""
        return self._box.division

    def follow(self, plan: Plan | None, now: float) -> None:
        """This is the plan at `now` (unix seconds)."""
        if plan is None:
            return
        wanted = find_wanted(plan, self._own, self.division)
        if wanted is None:
            self._asked = None
            self._note_refusal(0, "")  # of a step that is over
        elif wanted != self._asked and wanted.replicas != self.division.refused:
            self._asked = wanted
            why = refuse_cut(self._box, wanted.replicas, now)
            if why:
                self._note_refusal(wanted.replicas, why)
            else:
                self._tell({WANTS: wanted.replicas})

    def note_ready(self) -> None:
        """The engine serves."""
        if not self._is_ready:
            self._is_ready = True
            self._tell({READY: True})

    def _note_refusal(self, replicas: int, why: str) -> None:
        division = msgspec.structs.replace(self.division, refused=replicas, why=why)
        if division != self.division:
            self._box = msgspec.structs.replace(self._box, division=division)
            self._on_news()
