"""When services are placed anew, and how a network gets from one placement to the next (SeaLLM, section 4.3). Pure.

    pace = ReplacementPace(now=0.0)
    ...                                            # at pace.next_at
    pace.note(real, now)                           # adapts the interval (equation 8)
    if is_worth_it(running_cost, found_cost): switches = plan_switches(problem, engines, groups, first_id)
    pace.expect(estimate)

Weights are fetched while everything serves. Where GPUs have memory for them beside what is there, they are loaded while
it serves, too, and it ends when they are ready; elsewhere it ends first. Requests of an engine that ends go on
elsewhere with the tokens that they have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Final, NamedTuple, final

from ..costs.replica import GIB
from .values import GpuGroup, Groups, PlacementError, PlacementProblem

BETA: Final = 0.1
"""Of equation 8, as in section 6.1."""

FIRST_S: Final = 60.0
"""I_0, which the paper leaves to the manager of a cluster."""

SHORTEST_S: Final = 60.0
"""Longer than an engine takes to start. The paper has no bounds: an interval that only shrinks ends at nothing."""

LONGEST_S: Final = 3600.0
GAIN: Final = 0.1
"""Services move only for so much of what they cost now. Higher: fewer moves; 0: at every chance difference."""

ENGINE_SHARE: Final = 0.9
"""Of a GPU's memory, an engine's."""

KV_LEFT: Final = 0.1
"""Of that, what requests keep for their KV while weights come beside it."""


@final
class ReplacementPace:
    """After which times services are placed anew."""

    def __init__(
        self, *, now: float, interval_s: float = FIRST_S, shortest_s: float = SHORTEST_S, beta: float = BETA
    ) -> None:
        if not (isfinite(interval_s) and interval_s > 0.0 and 0.0 < beta < 1.0):
            raise PlacementError(f"an interval of {interval_s:g} s that adapts by {beta:g} cannot be")
        self.interval_s = interval_s
        self.next_at = now + interval_s
        self._shortest_s = shortest_s
        self._beta = beta
        self._expected: float | None = None

    def __repr__(self) -> str:
        return f"<ReplacementPace every {self.interval_s:.0f} s, next at {self.next_at:.0f}>"

    def note(self, real: float | None, now: float) -> None:
        """An interval has ended, with this figure (None: nobody was served). Far from what was expected: the next one
        is shorter, for traffic is not what it was; near it: longer. Equation 8 leaves out equality: it stays."""
        if real is not None and self._expected is not None and self._expected > 0.0:
            off = abs(real - self._expected) / self._expected
            factor = 1.0 - self._beta if off > self._beta else 1.0 + self._beta if off < self._beta else 1.0
            self.interval_s = max(self._shortest_s, min(self.interval_s * factor, LONGEST_S))
        self.next_at = now + self.interval_s

    def expect(self, estimate: float) -> None:
        """What the placement is to do in the next interval, if its traffic is that of the last."""
        self._expected = estimate if isfinite(estimate) else None


class DecidedPlacement(NamedTuple):
    """What is to run, as engines within boxes, its cost with what loading takes, and its normalized latency; and those
    of what runs. `is_short`: what runs leaves requests unserved, or has fewer in time than it is to have. `untried`:
    why these are of the replay; "": they are of a simulation."""

    groups: Groups
    cost: float
    normalized: float
    running_cost: float
    running_normalized: float
    is_short: bool
    untried: str


def is_worth_it(running_cost: float, found_cost: float, gain: float = GAIN) -> bool:
    """Whether services are to move: `found_cost` has what loading takes in it."""
    return found_cost < (1.0 - gain) * running_cost


class PlacedEngine(NamedTuple):
    """A group on GPUs of its box."""

    id: int
    group: GpuGroup
    gpus: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSwitch:
    """Engines that end and those that come in their places, in this order: after `ends_s` the former end, after
    `ready_s` the latter are ready. `is_beside`: they are loaded while the former serve, and both are one moment."""

    ends: tuple[int, ...]
    begins: tuple[PlacedEngine, ...]
    ends_s: float
    ready_s: float
    is_beside: bool


def plan_switches(
    problem: PlacementProblem, running: Sequence[PlacedEngine], groups: Groups, first_id: int
) -> tuple[EngineSwitch, ...]:
    """From the engines that run to these groups; what is in both stays as it is. New engines are numbered from
    `first_id`, and are put where most of their weights are."""
    kept, wanted = _keep(running, groups)
    begins = _assign(problem, [engine for engine in running if engine not in kept], kept, wanted, first_id)
    out = [engine for engine in running if engine not in kept]
    switches = [_switch(problem, ends, comes) for ends, comes in _connect(out, begins)]
    return _in_waves(running, switches)


def running_after(running: Sequence[PlacedEngine], switches: Iterable[EngineSwitch]) -> tuple[PlacedEngine, ...]:
    """When all of these are done."""
    switches = tuple(switches)
    ended = {id_ for switch in switches for id_ in switch.ends}
    new = [engine for switch in switches for engine in switch.begins]
    return (*(engine for engine in running if engine.id not in ended), *new)


def _keep(running: Sequence[PlacedEngine], groups: Groups) -> tuple[set[PlacedEngine], list[GpuGroup]]:
    """Engines that stay, and groups that have none yet."""
    left = Counter(group for group in groups if group.services)
    kept = set[PlacedEngine]()
    for engine in running:
        if left[engine.group]:
            left[engine.group] -= 1
            kept.add(engine)
    return kept, list(left.elements())


def _assign(
    problem: PlacementProblem,
    out: Sequence[PlacedEngine],
    kept: Iterable[PlacedEngine],
    wanted: Sequence[GpuGroup],
    first_id: int,
) -> list[PlacedEngine]:
    """GPUs for each group: those of an engine of its size with most of its weights, before any that are free."""
    taken = {(engine.group.box, gpu) for engine in kept for gpu in engine.gpus}
    found: list[PlacedEngine] = []
    waiting = sorted(wanted, key=lambda group: (-group.tp, group))
    for engine in sorted(out, key=lambda each: -each.group.tp):
        alike = [group for group in waiting if group[:2] == engine.group[:2]]
        best = max(alike, key=lambda group: _common_bytes(problem, group, engine.group), default=None)
        if best is not None and _common_bytes(problem, best, engine.group):
            waiting.remove(best)
            found.append(PlacedEngine(first_id + len(found), best, engine.gpus))
            taken.update((best.box, gpu) for gpu in engine.gpus)
    for group in waiting:
        free = [gpu for gpu in range(problem.boxes[group.box].gpus) if (group.box, gpu) not in taken]
        if len(free) < group.tp:
            raise PlacementError(f"{problem.boxes[group.box].id} has {len(free)} GPUs left, not {group.tp}")
        found.append(PlacedEngine(first_id + len(found), group, tuple(free[: group.tp])))
        taken.update((group.box, gpu) for gpu in free[: group.tp])
    return found


def _common_bytes(problem: PlacementProblem, one: GpuGroup, two: GpuGroup) -> int:
    return sum(problem.services[each].model.weight_bytes for each in one.services if each in two.services)


def _connect(
    out: Sequence[PlacedEngine], begins: Sequence[PlacedEngine]
) -> list[tuple[list[PlacedEngine], list[PlacedEngine]]]:
    """Engines that have GPUs in common, directly or through others."""
    sets: list[tuple[set[tuple[int, int]], list[PlacedEngine], list[PlacedEngine]]] = []
    for engine, is_new in [*((each, False) for each in out), *((each, True) for each in begins)]:
        gpus = {(engine.group.box, gpu) for gpu in engine.gpus}
        joined = (gpus, [], [engine]) if is_new else (gpus, [engine], [])
        for other in [each for each in sets if each[0] & gpus]:
            sets.remove(other)
            joined = (joined[0] | other[0], [*other[1], *joined[1]], [*other[2], *joined[2]])
        sets.append(joined)
    return [(ends, comes) for _, ends, comes in sets]


def _switch(problem: PlacementProblem, ends: list[PlacedEngine], comes: list[PlacedEngine]) -> EngineSwitch:
    fetch_s = load_s = 0.0
    for engine in comes:
        old = {each for other in ends if other.gpus == engine.gpus for each in other.group.services}
        sizes = {each: problem.services[each].model.weight_bytes for each in engine.group.services if each not in old}
        box = problem.boxes[engine.group.box]
        missing = sum(size for each, size in sizes.items() if each not in box.on_disk)
        fetch_s = max(fetch_s, 8.0 * missing / (problem.rates.download_gbps * 1e9))
        read_s = sum(sizes.values()) / (problem.rates.disk_gb_s * 1e9)
        start_s = 0.0 if old.intersection(engine.group.services) else problem.rates.start_s
        load_s = max(load_s, start_s + read_s)
    is_beside = _has_memory(problem, ends, comes)
    ready_s = fetch_s + load_s
    return EngineSwitch(
        ends=tuple(engine.id for engine in ends),
        begins=tuple(comes),
        ends_s=ready_s if is_beside or not comes else fetch_s,
        ready_s=ready_s,
        is_beside=is_beside,
    )


def _in_waves(running: Sequence[PlacedEngine], switches: Sequence[EngineSwitch]) -> tuple[EngineSwitch, ...]:
    """Those that would leave a service without an engine wait until others are ready, where that helps."""
    engines = {engine.id: engine for engine in running}
    alive = Counter(each for engine in running for each in engine.group.services)
    waiting, done, at = list(switches), list[EngineSwitch](), 0.0
    while waiting:
        wave = list[EngineSwitch]()
        for switch in list(waiting):
            lost = Counter(each for id_ in switch.ends for each in engines[id_].group.services)
            if all(alive[each] > lost[each] for each in lost):
                alive -= lost
                waiting.remove(switch)
                wave.append(switch)
        if not wave:  # nothing helps: the quickest is over soonest
            wave = [min(waiting, key=lambda switch: switch.ready_s)]
            waiting.remove(wave[0])
            alive -= Counter(each for id_ in wave[0].ends for each in engines[id_].group.services)
        done += [replace(each, ends_s=at + each.ends_s, ready_s=at + each.ready_s) for each in wave]
        at += max(each.ready_s for each in wave)
        alive += Counter(each for switch in wave for engine in switch.begins for each in engine.group.services)
    return tuple(done)


def _has_memory(problem: PlacementProblem, ends: Sequence[PlacedEngine], comes: Sequence[PlacedEngine]) -> bool:
    """Whether each GPU holds the weights of both, and some KV."""
    used: defaultdict[tuple[int, int], float] = defaultdict(float)
    for engine in ends:
        _add_weights(problem, used, engine, engine.group.services)
    for engine in comes:
        old = {each for other in ends if other.gpus == engine.gpus for each in other.group.services}
        _add_weights(problem, used, engine, [each for each in engine.group.services if each not in old])
    room = inf
    for (box, _), size in used.items():
        whole = problem.boxes[box].gpu.memory_gib * GIB * ENGINE_SHARE
        room = min(room, 1.0 - size / whole)
    return room >= KV_LEFT


def _add_weights(
    problem: PlacementProblem, used: defaultdict[tuple[int, int], float], engine: PlacedEngine, services: Iterable[int]
) -> None:
    size = sum(problem.services[each].model.weight_bytes for each in services) / engine.group.tp
    for gpu in engine.gpus:
        used[engine.group.box, gpu] += size
