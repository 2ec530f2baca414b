"""A discrete-event queue: what happens next, in an order that never depends on the machine.

    queue = EventQueue()
    queue.push(0.0, Arrival(request))
    queue.run(until=60.0)

An event's `happen(now)` returns the events that follow from it; nothing else can schedule. Events
are ordered by `(time, sequence)`: at equal times the one pushed first happens first, and one that
follows from another "at once" happens after all that already waited for that moment, never inside
it. Time belongs to the queue and only moves forward; it is a plain float in seconds.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple, Protocol


class EventOrderError(ValueError):
    """An event was scheduled for a moment that has passed or is no moment."""


class RunawayError(RuntimeError):
    """More events happened than the caller allowed."""


class Event(Protocol):
    """Something that happens at a moment; it changes the world and says what follows."""

    def happen(self, now: float) -> "Iterable[Scheduled]":
        """Do it. The events returned must not lie before `now`."""
        ...


class Scheduled(NamedTuple):
    """An event and when it is due, in seconds."""

    at: float
    event: Event


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """`happened` events so far, `waiting` events, and the moment the queue stands at."""

    now: float
    happened: int
    waiting: int


class EventQueue:
    """Events in order of `(time, sequence)`, and the moment they have reached."""

    def __init__(self, start: float = 0.0) -> None:
        if not isfinite(start):
            raise EventOrderError(f"a queue cannot start at {start}")
        self._now = start
        self._sequence = 0
        self._happened = 0
        self._heap: list[tuple[float, int, Event]] = []

    def __repr__(self) -> str:
        return f"<EventQueue at {self._now:g} s: {self._happened} happened, {len(self._heap)} waiting>"

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def now(self) -> float:
        """The moment of the latest event, or the `until` of the latest run."""
        return self._now

    def wake_at(self) -> float | None:
        """When the next event is due; None when nothing waits."""
        return self._heap[0][0] if self._heap else None

    def statistics(self) -> QueueStatistics:
        """The figures that `repr` shows."""
        return QueueStatistics(now=self._now, happened=self._happened, waiting=len(self._heap))

    def push(self, at: float, event: Event) -> None:
        """Let `event` happen at `at`, after everything that is already due then."""
        if not self._now <= at < inf:
            raise EventOrderError(f"{event!r} is due at {at} s, but it is {self._now} s already")
        heapq.heappush(self._heap, (at, self._sequence, event))
        self._sequence += 1

    def step(self) -> bool:
        """Let the next event happen; False when none waits."""
        if not self._heap:
            return False
        self._now, _, event = heapq.heappop(self._heap)
        self._happened += 1
        for at, following in event.happen(self._now):
            self.push(at, following)
        return True

    def run(self, until: float = inf, *, max_events: int | None = None) -> int:
        """Let everything up to and including `until` happen; returns how many events that were.

        Afterwards `now` is `until`, or, without one, the moment of the last event. With
        `max_events`, a chain that never ends raises `RunawayError` instead of running for ever.
        """
        if not until >= self._now:
            raise EventOrderError(f"cannot run until {until} s: it is {self._now} s already")
        before = self._happened
        limit = inf if max_events is None else before + max_events
        heap = self._heap
        while heap and heap[0][0] <= until:
            if self._happened >= limit:
                raise RunawayError(f"{max_events} events happened and {len(heap)} still wait: {self!r}")
            self.step()
        if isfinite(until):
            self._now = until
        return self._happened - before
