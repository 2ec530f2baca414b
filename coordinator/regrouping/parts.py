"""What boxes say of their parts of a plan, as a regrouping goes by it."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from ..bounds import MAX_STAGES, Layer, Text
from ..plan import GroupStages, Stage
from .divisions import BoxDivision


class PartBeside(msgspec.Struct, frozen=True, kw_only=True):
    """What a box says of a second engine. `room`: layers that it has memory for beside what it serves; `stages`: the
    group for which it loads, if for any; `failed`: why it has not loaded."""

    room: Layer = 0
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)] = ()
    is_loaded: bool = False
    failed: Text = ""


class BoxPart(NamedTuple):
    """What a box says of its part of the plan: the `stages` of the replica that its engine is a part
    of (none: it is alone), whether that is ready, how often in a row it could not be started, and
    how far it is or why not, for people. `leaves`: it wants no work. `division`: of the machine that
    it shares with other nodes, if it does. `beside`: of a second engine."""

    stages: tuple[Stage, ...] = ()
    is_ready: bool = False
    failures: int = 0
    detail: str = ""
    leaves: bool = False
    division: BoxDivision | None = None
    beside: PartBeside = PartBeside()

    def follows(self, group: GroupStages) -> bool:
        """Whether it has taken its part of this group, or tries to."""
        return self.stages == (group if len(group) > 1 else ())
