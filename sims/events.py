"""A discrete-event queue: what happens next, in an order that never depends on the machine.

    queue = EventQueue()
    queue.push(0.0, Arrival(request))
    queue.run()

An event's `happen(now)` returns the events that follow from it; nothing else can schedule. Events
are ordered by `(time, sequence)`: at equal times the one pushed first happens first, and one that
follows from another "at once" happens after all that already waited for that moment, never inside
it. Time belongs to the queue and only moves forward; it is a plain float in seconds.
"""

import heapq
from collections.abc import Iterable
from math import inf
from typing import Protocol

import msgspec


class EventOrderError(ValueError):
    """An event was scheduled for a moment that has passed or is no moment."""


class Event(Protocol):
    """Something that happens at a moment; it changes the world and says what follows."""

    def happen(self, now: float) -> "Iterable[Scheduled]":
        """Do it. The events returned must not lie before `now`."""
        ...


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """An event and when it is due, in seconds."""

    at: float
    event: Event


class EventQueue:
    """Events in order of `(time, sequence)`, and the moment they have reached."""

    def __init__(self) -> None:
        self.now = 0.0
        """The moment of the latest event."""
        self.happened = 0
        """Events so far."""
        self._sequence = 0
        self._heap: list[tuple[float, int, Event]] = []

    def __repr__(self) -> str:
        return f"<EventQueue at {self.now:g} s: {self.happened} happened, {len(self._heap)} waiting>"

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at: float, event: Event) -> None:
        """Let `event` happen at `at`, after everything that is already due then."""
        if not self.now <= at < inf:
            raise EventOrderError(f"{event!r} is due at {at} s, but it is {self.now} s already")
        heapq.heappush(self._heap, (at, self._sequence, event))
        self._sequence += 1

    def run(self, until: float = inf) -> None:
        """Let everything happen that is due by then, or until no event waits."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, event = heapq.heappop(heap)
            self.happened += 1
            for following in event.happen(self.now):
                self.push(following.at, following.event)
