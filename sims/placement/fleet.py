"""Engines of several services, and the requests that go to them: each to the engine of its service with the fewest, or
by another `routing`.

    fleet = Fleet(traces)
    fleet.add(0, host_group(problem, group, "db"))
    served = fleet.run()             # by the service's number

Engines may come and go while it runs (`Fleet.run(changes)`). Requests of one that goes are submitted again, with the
tokens that they have, to others of their service; where there is none they wait until one comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, Protocol, final

import numpy as np

from ...coordinator.placement.values import GpuGroup, Groups, Period, PlacementProblem
from ...coordinator.routing.interface import WorkBeside
from ...coordinator.sharing.orders import TURN_ORDERS
from ...coordinator.sharing.service_profile import ServiceProfile, expect_service
from ..engine.engine import Engine
from ..engine.sequence import Sequence as EngineSequence
from ..engine.shared_engine import SharedEngine, SharedService
from ..engine.values import SignalKind, SimEngineSettings
from ..records import Outcomes, Trace
from .engines import FleetEngine, FleetRequest
from .routing import FewestRequests, FleetRouting

ENGINE: Final = SimEngineSettings(max_batched_tokens=2048, max_sequences=256)

PROFILED: Final = 400
"""Requests of a service that its profile is made of."""


class FleetChanges(Protocol):
    """What comes and goes while a fleet runs."""

    @property
    def wake_at(self) -> float:
        """When it is to be woken; infinite: never."""
        ...

    def wake(self, fleet: Fleet, now: float) -> None:
        """It is time."""
        ...


@final
class Fleet:
    """See the module. `traces` by the service's number; one run each."""

    def __init__(self, traces: Mapping[int, Trace], routing: FleetRouting | None = None) -> None:
        self._routing = routing if routing is not None else FewestRequests()
        self.engines: dict[int, FleetEngine] = {}
        self.hosted: dict[int, dict[EngineSequence, int]] = {}
        """By engine, its requests and their services."""
        self.replayed = 0  # requests that went on elsewhere
        self.waited = 0  # that had no engine when they came
        self.ttft_s = {number: np.full(len(trace), np.nan) for number, trace in traces.items()}
        self.e2e_s = {number: np.full(len(trace), np.nan) for number, trace in traces.items()}
        self._traces = traces
        self._coming = sorted(
            ((float(at), number, row) for number, trace in traces.items() for row, at in enumerate(trace.arrival_s)),
            reverse=True,
        )
        self._owners: dict[EngineSequence, tuple[int, int]] = {}
        self._waiting: dict[int, list[EngineSequence]] = {}  # by service, without an engine

    def __repr__(self) -> str:
        return f"<Fleet {len(self.engines)} engines, {len(self._coming)} requests to come>"

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return not self._coming and not self._owners

    def add(self, id_: int, engine: FleetEngine, now: float = 0.0) -> None:
        """An engine is ready; those that wait for it go there."""
        self.engines[id_] = engine
        self.hosted[id_] = {}
        for service in engine.names:
            for sequence in self._waiting.pop(service, []):
                self._submit(service, sequence, now)

    def remove(self, ids: Sequence[int], now: float) -> None:
        """Engines end together; their requests go on elsewhere."""
        moved = [sequence for id_ in ids for sequence in self.engines[id_].stop(now)]
        for id_ in ids:
            del self.engines[id_], self.hosted[id_]
        for sequence in moved:
            owner = self._owners.pop(sequence)
            again = EngineSequence(sequence.key, sequence.known, sequence.left, fresh=sequence.fresh)
            self._owners[again] = owner
            self.replayed += 1
            self._submit(owner[0], again, now)

    def count_work(self, id_: int) -> dict[int, WorkBeside]:
        """Of an engine, by service: requests, and tokens of prompts of which no token of an answer has come."""
        found: dict[int, WorkBeside] = {}
        for sequence, service in self.hosted[id_].items():
            requests, tokens = found.get(service, WorkBeside())
            found[service] = WorkBeside(requests + 1, tokens + (sequence.known if sequence.fresh else 0))
        return found

    def run(self, changes: FleetChanges | None = None) -> dict[int, Outcomes]:
        """Until every request has ended. NaN where one never does, for want of an engine."""
        while not self.is_done:
            first = min(self.engines, key=self._wakes, default=-1)
            now = self._wakes(first) if self.engines else inf
            change_at = changes.wake_at if changes is not None else inf
            comes_at = self._coming[-1][0] if self._coming else inf
            self._routing.look(self, min(now, change_at, comes_at))
            if comes_at <= min(now, change_at) and comes_at < inf:
                self._begin(*self._coming.pop())
            elif changes is not None and change_at <= now and change_at < inf:
                changes.wake(self, change_at)
            elif now < inf:
                self._advance(first, now)
            else:
                break
        return {
            number: Outcomes(trace=trace, ttft_s=self.ttft_s[number], e2e_s=self.e2e_s[number])
            for number, trace in self._traces.items()
        }

    def _wakes(self, id_: int) -> float:
        return self.engines[id_].engine.wake_at

    def _begin(self, at: float, number: int, row: int) -> None:
        trace = self._traces[number]
        sequence = EngineSequence(row, int(trace.prompt[row]), int(trace.output[row]))
        self._owners[sequence] = number, row
        self._submit(number, sequence, at)

    def _submit(self, service: int, sequence: EngineSequence, now: float) -> None:
        hosts = [id_ for id_, engine in self.engines.items() if engine.can_fit(service, sequence)]
        if not hosts:
            self.waited += 1
            self._waiting.setdefault(service, []).append(sequence)
            return
        chosen = self._routing.choose(self, self._request(sequence), hosts, now)
        self.hosted[chosen][sequence] = service
        self.engines[chosen].submit(service, sequence, now)

    def _advance(self, id_: int, now: float) -> None:
        for signal in self.engines[id_].engine.advance(now):
            number, row = self._owners[signal.sequence]
            came = self._traces[number].arrival_s[row]
            if signal.kind is SignalKind.FIRST_TOKEN:
                self.ttft_s[number][row] = signal.at - came
            elif signal.kind is SignalKind.DONE:
                self.e2e_s[number][row] = signal.at - came
                self._routing.end(self._request(signal.sequence))
                del self._owners[signal.sequence], self.hosted[id_][signal.sequence]

    def _request(self, sequence: EngineSequence) -> FleetRequest:
        number, row = self._owners[sequence]
        return FleetRequest(number, row, int(self._traces[number].output[row]), sequence)


def host_group(
    problem: PlacementProblem, group: GpuGroup, order: str, settings: SimEngineSettings = ENGINE
) -> FleetEngine:
    """A group's engine: of one service by vLLM's rules, of several by a turn order. Profiles are those of the problem's
    period."""
    kind, names = problem.boxes[group.box].kind, {each: problem.services[each].name for each in group.services}
    room = problem.kv_room(kind, group.tp, group.services)
    if len(names) == 1:
        (service,) = names
        tokens = int(room // problem.services[service].model.kv_bytes_per_token)
        return FleetEngine(Engine(problem.times(kind, group.tp, service), settings, kv_tokens=tokens), names)
    hosted = {name: _host(problem, group, service) for service, name in names.items()}
    return FleetEngine(SharedEngine(hosted, TURN_ORDERS[order], settings, kv_bytes=int(room)), names)


def _host(problem: PlacementProblem, group: GpuGroup, service: int) -> SharedService:
    times = problem.times(problem.boxes[group.box].kind, group.tp, service)
    rows = np.flatnonzero(problem.period.service == service)[-PROFILED:]
    prompts, outputs = problem.period.prompt[rows], problem.period.output[rows]
    if not len(rows):  # nobody has asked: like the average request of all
        prompts = np.array([max(1, round(float(problem.period.prompt.mean())))])
        outputs = np.array([max(1, round(float(problem.period.output.mean())))])
    profile = ServiceProfile(expect_service(times, prompts, outputs))
    return SharedService(times, problem.services[service].model.kv_bytes_per_token, profile)


def serve_groups(
    problem: PlacementProblem, groups: Groups, order: str, traces: Mapping[int, Trace]
) -> dict[int, Outcomes]:
    """All requests under a placement that stays as it is."""
    fleet = Fleet(traces)
    for number, group in enumerate(groups):
        if group.services:
            fleet.add(number, host_group(problem, group, order))
    return fleet.run()


def period_of(traces: Mapping[int, Trace]) -> Period:
    """All requests, as what was asked of the services lately."""
    return join_periods([
        Period(service=np.full(len(trace), number), arrival_s=trace.arrival_s, prompt=trace.prompt, output=trace.output)
        for number, trace in traces.items()
    ])  # fmt: skip


def join_periods(parts: Sequence[Period]) -> Period:
    """All of them, in order of arrival."""
    service, arrival, prompt, output = (
        np.concatenate([getattr(part, column) for part in parts])
        for column in ("service", "arrival_s", "prompt", "output")
    )
    order = np.argsort(arrival, kind="stable")
    return Period(service=service[order], arrival_s=arrival[order], prompt=prompt[order], output=output[order])
