"""Which services share which boxes that host what they are given, decided from what clients have asked lately, by the
search that the simulator runs (`placement/`).

    found = task.run(spent, make_judge)           # in the process that plans: it takes seconds
    slots = assign_slots(boxes, given, found.hosts)     # node -> the entry that it is to come to; "": none

Services whose boxes are their own have phases there: where there is time, placements are tried with those, by
simulation. A box counts as one engine, over all of its GPUs, and has as many nodes as it may host services. Rates and
lengths are those that gateways tell; requests of the period are drawn from them, always alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..capacity import KvNetwork
from ..costs.gpus import GpuSpec
from ..costs.model_shape import ModelShape
from ..demand import Demand
from ..placement.replacement import DecidedPlacement, is_worth_it
from ..placement.replay import PeriodReplay
from ..placement.search import PlacementGoals, is_short, placement_cost, search_placement
from ..placement.values import GpuGroup, Groups, Period, PlacementBox, PlacementProblem, PlacementService
from .hosting import HostingBox

if TYPE_CHECKING:
    from ..placement.planned import Judge

    MakeJudge = Callable[[PlacementProblem], Judge]

MAX_DRAWN: Final = 2000
"""Requests that placements are judged by. More: finer, and slower by as much."""

LEAST_DRAWN: Final = 500
"""Requests that are drawn where the period has fewer, over a longer time at the same rates. Fewer: what is decided
hangs on which requests happen to meet, and is another a moment later."""

MAX_GATEWAYS: Final = 16
"""Of a service, those that are asked most."""

MAX_LENGTH: Final = 32_768
"""Tokens of a prompt, or of an answer: who tells of longer ones would leave a service no box that holds them."""

UNKNOWN_LENGTHS: Final = (1024, 128)
"""Tokens of a prompt and an answer of a service that nobody has asked yet: it is to have a place all the same."""

SERVES_S: Final = 600.0
"""For so long at least a placement is to serve. Shorter: what is loaded for it costs more beside what it gains."""

MOST_TRIED: Final = 256
"""Boxes times services, of which placements are tried: the planner takes seconds for 32 boxes and eight services."""

_SEED: Final = 0
_STEADIEST, _WILDEST = 0.1, 8.0  # coefficients of variation of gaps that are drawn


class BoxToPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A box. `card`: all of its GPUs, as one. `most`: services at once, whose weights are `room_bytes` at most (0: not
    told). `able`: entries that it can host; `ready`: those whose files it has; `hosts`: those that it was given, or
    was started with and keeps (`stays`)."""

    id: str
    card: GpuSpec
    most: int
    able: tuple[str, ...]
    ready: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    room_bytes: int = 0
    stays: bool = False


class ServiceToPlace(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the catalogue, its model, and what its gateways are asked. `lengths`: of its requests on average, as
    they are remembered."""

    name: str
    shape: ModelShape
    demands: tuple[Demand, ...] = ()
    lengths: tuple[int, int] = UNKNOWN_LENGTHS


class FoundSharing(msgspec.Struct, frozen=True, kw_only=True):
    """`hosts`: by box what it is to host; empty: services stay where they are. `running`: normalized latency of what
    runs now under the requests of the period, `expected` of what is to run, and what both cost. `untried`: why
    these are of the replay; "": they are of a simulation."""

    hosts: dict[str, tuple[str, ...]]
    running: float
    expected: float
    running_cost: float
    found_cost: float
    untried: str = ""


class SharingTask(msgspec.Struct, frozen=True, kw_only=True):
    """Something to decide. `period_s`: the period looked back at, and for how long a placement is to serve. `network`:
    between the boxes."""

    boxes: tuple[BoxToPlace, ...]
    services: tuple[ServiceToPlace, ...]
    period_s: float
    network: KvNetwork = KvNetwork()

    def run(
        self,
        spent: Callable[[], bool],
        make_judge: MakeJudge | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> FoundSharing:
        """What is found until `spent()`. `make_judge`: by what placements are tried until `given_up()`; without it, and
        for more than MOST_TRIED, a replay decides, which knows no phases. Where there was no time to try, services move
        by the replay only if what runs is short: it would undo what was tried. Raises PlacementError where the services
        have no room together."""
        problem, running = self._pose()
        goals = PlacementGoals(serves_s=max(SERVES_S, self.period_s))
        decided = self._replay(problem, running, goals, spent)
        are_too_many = len(self.boxes) * len(self.services) > MOST_TRIED
        if are_too_many:
            decided = decided._replace(untried=f"there are more than {MOST_TRIED} boxes times services")
        elif make_judge is not None:
            decided = self._try(problem, running, decided, goals, make_judge(problem), given_up)
        moves = decided.groups != running and is_worth_it(decided.running_cost, decided.cost)
        moves = moves and (not decided.untried or decided.is_short or make_judge is None or are_too_many)
        names = [service.name for service in self.services]
        hosts: dict[str, tuple[str, ...]] = {box.id: () for box in self.boxes} if moves else {}
        for group in decided.groups if moves else ():
            hosts[self.boxes[group.box].id] = tuple(names[each] for each in group.services)
        return FoundSharing(
            hosts=hosts,
            running=_finite(decided.running_normalized),
            expected=_finite(decided.normalized if moves else decided.running_normalized),
            running_cost=decided.running_cost,
            found_cost=decided.cost,
            untried=decided.untried,
        )

    def _try(
        self,
        problem: PlacementProblem,
        running: Groups,
        replayed: DecidedPlacement,
        goals: PlacementGoals,
        judge: Judge,
        given_up: Callable[[], bool],
    ) -> DecidedPlacement:
        from ..planning.upper.trials import TrialsOver  # the planner, that only the coordinator pays for
        from .trying import try_placements  # likewise

        rates = [
            max(1.0 / self.period_s, sum(demand.requests_s for demand in busiest_of(service)))
            for service in self.services
        ]
        try:
            if given_up():
                raise TrialsOver
            return try_placements(
                problem, rates, self.network, running, replayed.groups, goals, judge=judge, spent=given_up
            )
        except TrialsOver:
            return replayed._replace(untried="there was no time")
        except (ValueError, ArithmeticError) as error:  # by what somebody tells; the replay can do with it
            return replayed._replace(untried=f"{type(error).__name__}: {error}"[:200])

    def _replay(
        self, problem: PlacementProblem, running: Groups, goals: PlacementGoals, spent: Callable[[], bool]
    ) -> DecidedPlacement:
        replay, rng = PeriodReplay(problem), np.random.default_rng(_SEED)
        found = search_placement(replay, rng=rng, goals=goals, before=running, spent=spent).groups
        return DecidedPlacement(
            groups=found,
            cost=placement_cost(replay, found, goals, running),
            normalized=replay.judge(found).normalized,
            running_cost=placement_cost(replay, running, goals),
            running_normalized=replay.judge(running).normalized,
            is_short=is_short(replay.judge(running), goals),
            untried="a replay was asked for",
        )

    def _pose(self) -> tuple[PlacementProblem, Groups]:
        numbers = {service.name: number for number, service in enumerate(self.services)}
        boxes = [
            PlacementBox(
                id=box.id,
                gpu=box.card,
                gpus=1,
                link_gbps=1.0,  # to no other: it counts as one card
                disk_bytes=box.room_bytes or inf,
                on_disk=frozenset(numbers[name] for name in box.ready),
                able=frozenset(numbers[name] for name in box.able),
                most=box.most,
                held=tuple(sorted(numbers[name] for name in box.hosts)) if box.stays else (),
            )
            for box in self.boxes
        ]
        services = [PlacementService(name=each.name, model=each.shape) for each in self.services]
        period = draw_period(self.services, self.period_s, np.random.default_rng(_SEED))
        running = (
            GpuGroup(number, 1, tuple(sorted(numbers[name] for name in box.hosts)))
            for number, box in enumerate(self.boxes)
            if box.hosts
        )
        return PlacementProblem(boxes=boxes, services=services, period=period), tuple(running)


def draw_period(services: Sequence[ServiceToPlace], period_s: float, rng: np.random.Generator) -> Period:
    """Requests as gateways tell of them, by their rates, the variation of gaps, and lengths, for so long, but at least
    LEAST_DRAWN and at most MAX_DRAWN. Of a service that nobody asks one stands for it."""
    asked = [
        (number, demand)
        for number, service in enumerate(services)
        for demand in busiest_of(service)
        if demand.requests_s > 0.0
    ]
    rate = sum(demand.requests_s for _, demand in asked)
    span_s = min(max(period_s, LEAST_DRAWN / rate), MAX_DRAWN / rate) if rate else period_s
    found = [_draw(number, demand, span_s, rng) for number, demand in asked]
    seen = {number for number, _ in asked}
    for number, service in enumerate(services):
        if number not in seen:
            prompt, output = (min(each, MAX_LENGTH) for each in service.lengths)
            found.append(np.array([[number, 0.0, prompt, output]]))
    rows = np.concatenate(found)
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    whole = rows.astype(np.int64)
    return Period(service=whole[:, 0], arrival_s=rows[:, 1].copy(), prompt=whole[:, 2], output=whole[:, 3])


def busiest_of(service: ServiceToPlace) -> list[Demand]:
    """What the gateways that are asked most tell."""
    return sorted(service.demands, key=lambda each: -each.requests_s)[:MAX_GATEWAYS]


def _draw(number: int, demand: Demand, span_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    count = max(1, round(demand.requests_s * span_s))
    cv = min(max(_STEADIEST, demand.arrival_cv), _WILDEST)
    gaps = rng.gamma(1.0 / cv**2, cv**2, count)
    arrivals = np.cumsum(gaps)
    if arrivals[-1] > 0.0:
        arrivals *= span_s / arrivals[-1]  # as many in this time as are told
    lengths = np.minimum(np.array(demand.lengths, dtype=np.float64), float(MAX_LENGTH))
    pairs = lengths[rng.integers(len(lengths), size=count)]
    return np.column_stack([np.full(count, float(number)), arrivals, pairs])


def assign_slots(
    boxes: Iterable[HostingBox], given: Mapping[str, str], hosts: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """What each node of these boxes is to come to: what it has where it is wanted; what is new in a node that has
    nothing, so that it loads beside what serves, or else in one whose service goes."""
    nodes: defaultdict[str, list[HostingBox]] = defaultdict(list)
    for box in boxes:
        nodes[box.machine].append(box)
    found: dict[str, str] = {}
    for machine, wanted in hosts.items():
        own = nodes.get(machine, [])
        has = {box.id: given.get(box.id, "") for box in own}
        kept = {id_: name for id_, name in has.items() if name in wanted}
        new = [name for name in wanted if name not in kept.values()]
        left = [box for box in own if box.id not in kept]
        for name in new:
            there = [each for each in has.values() if each]
            is_beside = bool(own) and own[0].has_room_for({*there, name})
            left.sort(key=lambda box: ((not has[box.id]) != is_beside, box.id))
            if left:
                kept[left.pop(0).id] = name
        found |= {box.id: kept.get(box.id, "") for box in own}
    return found


def _finite(figure: float) -> float:
    return figure if np.isfinite(figure) else 0.0
