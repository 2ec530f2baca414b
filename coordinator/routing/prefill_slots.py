"""How many requests are at a partial-prefill replica at once: at most two, as in Cronus, so that the
split of each is chosen shortly before its prefill begins (`balancer`).

The replica keeps the slots, so they hold whatever number of gateways ask. A gateway asks for a slot
until it is given one, and then sends the request; the slot is free again when the replica's part of
the prompt is computed, whether or not its KV has been transferred. ::

    ask -> waits -> takes a slot -> enters (its prefill begins) -> leaves

First come, first served. Whoever waits and does not ask again within `lease_s` is forgotten, and a
slot that was taken and not entered within it is free again: its gateway may be gone. A request that
enters without a slot is counted like the others, so that gateways with other policies can use the
same replica: it has been accepted, and nobody takes a slot meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import Final, Generic, TypeVar, final

SLOTS: Final = 2
"""One request computes, and the next is ready when that ends. More: splits are chosen by older
statistics; one: the replica waits for the next request's messages."""

MOST_WAITING: Final = 4096
"""Whoever asks beyond that has no turn yet, and asks again: a member may ask for requests that it does not have."""

Key = TypeVar("Key", bound=Hashable)


@final
class PrefillSlots(Generic[Key]):
    """See the module. Keys are requests; times are seconds of one clock that does not go back."""

    def __init__(self, lease_s: float, slots: int = SLOTS) -> None:
        self._lease_s = lease_s
        self._slots = slots
        self._waiting: dict[Key, float] = {}  # in order of arrival; when each has asked last
        self._taken: dict[Key, float] = {}  # when each took its slot
        self._entered: dict[Key, None] = {}

    def __repr__(self) -> str:
        return f"<PrefillSlots waiting={len(self._waiting)} taken={len(self._taken)} entered={len(self._entered)}>"

    @property
    def used(self) -> int:
        """How many requests are here, or are about to come."""
        return len(self._taken) + len(self._entered)

    def ask(self, request: Key, now: float) -> None:
        """It wants a slot, or still does: it keeps its turn."""
        self._forget_expired(now)
        is_known = request in self._taken or request in self._entered
        if not is_known and (request in self._waiting or len(self._waiting) < MOST_WAITING):
            self._waiting[request] = now

    def take(self, request: Key, now: float) -> bool:
        """Whether it has a slot now, having asked: its turn has come and one is free."""
        self._forget_expired(now)
        if request in self._taken or request in self._entered:
            return True
        if self.used >= self._slots or next(iter(self._waiting), None) != request:
            return False
        del self._waiting[request]
        self._taken[request] = now
        return True

    def enter(self, request: Key) -> None:
        """It is here."""
        self._waiting.pop(request, None)
        self._taken.pop(request, None)
        self._entered[request] = None

    def leave(self, request: Key) -> bool:
        """Its part of the prompt is computed, or it is wanted no more; whether it was known."""
        lists = (self._waiting, self._taken, self._entered)
        return any(each.pop(request, self) is not self for each in lists)  # it is in one at most

    def clear(self) -> None:
        """Nobody is here any more; whoever waits goes on waiting."""
        self._taken.clear()
        self._entered.clear()

    def wake_at(self) -> float:
        """When the next of those who wait or have taken a slot is forgotten; infinite: nobody does."""
        return min((*self._waiting.values(), *self._taken.values()), default=inf) + self._lease_s

    def _forget_expired(self, now: float) -> None:
        for each in (self._waiting, self._taken):
            for request in [request for request, since in each.items() if now >= since + self._lease_s]:
                del each[request]
