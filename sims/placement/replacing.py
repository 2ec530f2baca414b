"""Services placed anew while requests come, by the code that decides it on a network (`coordinator/placement`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from ...coordinator.placement.replacement import (
    FIRST_S,
    EngineSwitch,
    ReplacementPace,
    is_worth_it,
    plan_switches,
    running_after,
)
from ...coordinator.placement.replay import PeriodReplay
from ...coordinator.placement.search import PlacementGoals, placement_cost
from ...coordinator.placement.values import Groups, Period, PlacementError, PlacementProblem
from ..records import Trace
from .fleet import Fleet, host_group, join_periods, period_of

Placer = Callable[[PeriodReplay, Groups], Groups]
"""A policy: what it places, where these groups are there now."""

LOOKED_BACK: Final = 6000
"""Requests that placements are judged by: a sample, where there are more."""

UNKNOWN_TOKENS: Final = 128
"""Of an answer, where none has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacingSettings:
    """What a placement is to be good for, the first interval in seconds, by how much is looked back at least where that
    is longer than an interval, and the last arrival, after which nothing is moved."""

    goals: PlacementGoals = field(default_factory=PlacementGoals)
    interval_s: float = FIRST_S
    looks_back_s: float = 0.0
    until_s: float = inf


@dataclass(slots=True)
class ReplacementCounts:
    """What replacing has come to: intervals that ended, those after which services moved, engines that came, those of
    them loaded beside what served, and intervals in seconds."""

    intervals: int = 0
    moves: int = 0
    engines: int = 0
    beside: int = 0
    interval_s: list[float] = field(default_factory=list)


@final
class Replacing:
    """See the module; a `FleetChanges`. `problem` has the period that the first placement was made by."""

    def __init__(
        self,
        problem: PlacementProblem,
        groups: Groups,
        order: str,
        traces: Mapping[int, Trace],
        *,
        place: Placer,
        settings: ReplacingSettings | None = None,
    ) -> None:
        self.counts = ReplacementCounts()
        self.problem = problem
        self._engines = running_after((), plan_switches(problem, (), groups, 0))
        self._next_id = len(groups)
        self._order = order
        self._traces = traces
        self._period = period_of(traces)
        self._place = place
        self._settings = settings or ReplacingSettings()
        self._pace = ReplacementPace(now=0.0, interval_s=self._settings.interval_s)
        self._since = 0.0
        self._steps: list[tuple[float, int, int, EngineSwitch]] = []  # heap: when, in order, 0 ends or 1 begins
        self._order_of_steps = count()
        self._pace.expect(PeriodReplay(problem).judge(groups).normalized)

    @property
    def wake_at(self) -> float:
        """See `FleetChanges`."""
        step = self._steps[0][0] if self._steps else inf
        return min(step, self._pace.next_at if self._pace.next_at <= self._settings.until_s else inf)

    def begin(self, fleet: Fleet) -> None:
        """The first engines, ready at once."""
        for engine in self._engines:
            fleet.add(engine.id, host_group(self.problem, engine.group, self._order))

    def wake(self, fleet: Fleet, now: float) -> None:
        """See `FleetChanges`."""
        if self._steps and self._steps[0][0] <= now:
            _, _, begins, switch = heappop(self._steps)
            if begins:
                for engine in switch.begins:
                    fleet.add(engine.id, host_group(self.problem, engine.group, self._order), now)
            else:
                fleet.remove(switch.ends, now)
            return
        self._end_interval(fleet, now)

    def _end_interval(self, fleet: Fleet, now: float) -> None:
        self.counts.intervals += 1
        self.counts.interval_s.append(now - self._since)
        self._pace.note(self._measure(fleet, self._since, now), now)
        period, self._since = self._seen(fleet, now), now
        longest = dict(enumerate(self.problem.longest_tokens))
        self.problem = replace(self.problem, period=period, longest=longest)
        if self._steps:  # while engines come and go nothing else is moved
            return
        running = tuple(sorted(engine.group for engine in self._engines))
        replay = PeriodReplay(self.problem)
        goals = self._settings.goals
        goals = replace(goals, serves_s=max(goals.serves_s, self._pace.interval_s))
        try:
            found = self._place(replay, running)
        except PlacementError:
            found = running
        running_cost = placement_cost(replay, running, goals)
        if found != running and is_worth_it(running_cost, placement_cost(replay, found, goals, running)):
            self._move(found, now)
        else:
            found = running
        self._pace.expect(replay.judge(found).normalized)

    def _move(self, groups: Groups, now: float) -> None:
        switches = plan_switches(self.problem, self._engines, groups, self._next_id)
        self._next_id += sum(len(switch.begins) for switch in switches)
        for switch in switches:
            if switch.ends:
                heappush(self._steps, (now + switch.ends_s, next(self._order_of_steps), 0, switch))
            if switch.begins:
                heappush(self._steps, (now + switch.ready_s, next(self._order_of_steps), 1, switch))
            self.counts.engines += len(switch.begins)
            self.counts.beside += len(switch.begins) if switch.is_beside else 0
        self._engines = running_after(self._engines, switches)
        self.counts.moves += 1

    def _seen(self, fleet: Fleet, now: float) -> Period:
        """Requests of the last interval, and of what is looked back to before it, as they are known: answers that have
        not ended are taken to be as long as those that have on average. Of a service that nobody has asked its latest
        request stands for it."""
        began = max(0.0, min(self._since, now - self._settings.looks_back_s))
        rows, before = self._period.between(began, now), self.problem.period
        known = None if rows is None else replace(rows, output=self._known_outputs(fleet, rows, now))
        parts = [] if known is None else [known.sampled(LOOKED_BACK)]
        asked = set() if rows is None else set(rows.service.tolist())
        for number in self._traces:
            old = np.flatnonzero(before.service == number)[-1:]
            if number not in asked and len(old):
                one = np.array([number]), np.array([began]), before.prompt[old], before.output[old]
                parts.append(Period(service=one[0], arrival_s=one[1], prompt=one[2], output=one[3]))
        return join_periods(parts)

    def _known_outputs(self, fleet: Fleet, period: Period, now: float) -> NDArray[np.int64]:
        output = period.output.copy()
        for number, trace in self._traces.items():
            rows = np.flatnonzero(period.service == number)
            if not len(rows):
                continue
            first = int(np.searchsorted(trace.arrival_s, period.arrival_s[rows[0]]))
            own = slice(first, first + len(rows))
            ended = trace.arrival_s[own] + fleet.e2e_s[number][own] <= now
            mean = max(1, round(float(trace.output[own][ended].mean()))) if ended.any() else UNKNOWN_TOKENS
            output[rows] = np.where(ended, output[rows], mean)
        return output

    def _measure(self, fleet: Fleet, began: float, now: float) -> float | None:
        """Normalized latency of what has ended in the interval."""
        found = []
        for number, trace in self._traces.items():
            ends = trace.arrival_s + fleet.e2e_s[number]
            rows = (ends > began) & (ends <= now)
            found.append(fleet.e2e_s[number][rows] / self.problem.usual_s[number])
        every = np.concatenate(found)
        return float(every.mean()) if len(every) else None
