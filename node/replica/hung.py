"""Whether the boxes and engines of this box's replica get on with its work, and who is to be told. No I/O, no clock.

The head of a replica knows of its own engine and whether its other boxes answer; each of these tells it of its engine.
Gateways are told by the head, while it works for them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, final

from ...bootstrap import NetworkSettings, PeerId
from ...bootstrap.members.watch import AnswerWatch

_ENGINE: Final = PeerId("engine")
_WORK: Final = "work"


@final
class ReplicaWatch:
    """Kept by the worker. Times are seconds of one clock."""

    def __init__(self, own: PeerId, settings: NetworkSettings) -> None:
        self._own = own
        self._engine = AnswerWatch(settings)
        self._heard_at = 0.0
        self._has_spoken = True
        self._hung: set[PeerId] = set()
        self._told: set[PeerId] = set()

    def __repr__(self) -> str:
        return f"<ReplicaWatch hung={len(self._hung)} told={len(self._told)}>"

    @property
    def wake_at(self) -> float:
        """When to look at the engine again at the latest."""
        return self._engine.wake_at

    @property
    def is_engine_hung(self) -> bool:
        """Whether the engine here does not answer, though it has work."""
        return self._own in self._hung

    def on_engine_message(self) -> None:
        """It has said something."""
        self._has_spoken = True

    def look(self, now: float, *, has_work: bool) -> bool:
        """See whether the engine answers; whether it is to be asked for a sign of life now."""
        if self._has_spoken:
            self._heard_at, self._has_spoken = now, False
        self._engine.expect(_WORK, (_ENGINE,) if has_work else ())
        is_asked = bool(self._engine.tick(now, {_ENGINE: self._heard_at}, {}, {}))
        self.note(self._own, bool(self._engine.hung))
        return is_asked

    def note(self, box: PeerId, hung: bool) -> None:
        """A box of the replica does not get on, or does again."""
        (self._hung.add if hung else self._hung.discard)(box)

    def forget(self) -> None:
        """There is another engine, or none: what was known is of no use."""
        self._hung.clear()
        self._has_spoken = True

    def take_news(self, listeners: Collection[PeerId]) -> tuple[tuple[PeerId, bool], ...]:
        """Whom to tell now, and whether the replica is hung: those who listen, and those who have been told so."""
        if not self._hung:
            told, self._told = self._told, set()
            return tuple((peer, False) for peer in sorted(told))
        new = sorted(set(listeners) - self._told)
        self._told.update(new)
        return tuple((peer, True) for peer in new)
