"""The default placement: which services share which GPUs, and over how many at once, by a search from the best of
several placements.

    found = search_placement(PeriodReplay(problem), rng=np.random.default_rng(0))
    found.groups, found.cost, found.tried

Sharing is one choice among others: an engine of one service is a group like any other, groups of one box may have
different degrees of tensor parallelism, boxes may be unequal. It begins with each service on GPUs of its own, with
pairs of services of like size, and with SeaLLM's placement, and is never worse than these by the replay; where a
`trial` says what placements cost (engines simulated step by step), the best of each kind are tried, and it is never
worse than these by that.

What a placement costs is its normalized latency, more where services are below the attainment that each is to have
(equation 5), where requests are not served, for the boxes that it needs ($/h), and for what has to be fetched and
loaded until it can serve.

Each group is within a box. Phases, and layers over several boxes, are the planner's business, for services whose boxes
are their own: `planned.py` compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np

from ..costs.loading import LoadRates
from .replay import Judged, PeriodReplay
from .seallm import ATTAINMENT, place_seallm
from .values import SHARED_BY, GpuGroup, Groups, PlacementError, PlacementProblem, find_fault, name_all

Trial = Callable[[Groups], float]
"""What a placement costs, by a simulation of its engines: lower is better."""

ROUNDS: Final = 400
"""Changes that are tried. More: better, and slower by as much."""

VAIN_ROUNDS: Final = 120
"""Changes in a row that are no gain, after which the search ends."""

NEEDY: Final = 0.7
"""Share of changes that are for a service drawn by its unserved index; the others are for any."""

ALPHA: Final = 1e-2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGoals:
    """What a placement is judged by. A cost of 1 is a normalized latency of 1.

    - `attainment`: of each service at least; `shortfall`: cost of each service that has nothing of it.
    - `unserved`: cost of a share of 1 of all requests not being served.
    - `usd_hour`: cost of boxes of 1 $/h that host something.
    - `serves_s`: for how long a placement is to serve: loading that takes as long doubles its cost.
    - `most`: services of an engine.
    """

    attainment: float = ATTAINMENT
    shortfall: float = 10.0
    unserved: float = 100.0
    usd_hour: float = 0.0
    serves_s: float = 600.0
    most: int = SHARED_BY


class FoundPlacement(NamedTuple):
    """Groups, what they cost by whom the choice was made, and costs of all that were compared, by name."""

    groups: Groups
    cost: float
    tried: dict[str, float]


def placement_cost(replay: PeriodReplay, groups: Groups, goals: PlacementGoals, before: Groups = ()) -> float:
    """See `PlacementGoals`. `before`: what the GPUs have in memory."""
    return with_boxes_and_loading(judged_cost(replay.judge(groups), goals), replay.problem, groups, goals, before)


def with_boxes_and_loading(
    cost: float, problem: PlacementProblem, groups: Groups, goals: PlacementGoals, before: Groups = ()
) -> float:
    """What a placement costs by its requests (`judged_cost`), with what its boxes cost, and loading."""
    if goals.usd_hour:
        cost += goals.usd_hour * sum(
            problem.boxes[box].usd_per_hour for box in {group.box for group in groups if group.services}
        )
    if before:
        cost *= 1.0 + lost_share(problem, before, groups, goals.serves_s)
    return cost


def is_short(judged: Judged, goals: PlacementGoals) -> bool:
    """Whether requests are not served, or a service has fewer in time than it is to have."""
    return not judged.is_complete or bool((judged.by_service < goals.attainment).any())


def judged_cost(judged: Judged, goals: PlacementGoals) -> float:
    """Without boxes and loading."""
    normalized = judged.normalized if not judged.unserved.all() else 0.0
    short = np.maximum(0.0, goals.attainment - judged.by_service) / goals.attainment
    unserved = float(judged.unserved.sum()) / float(judged.requests.sum())
    return normalized + goals.shortfall * float(short.sum()) + goals.unserved * unserved


def search_placement(
    replay: PeriodReplay,
    *,
    rng: np.random.Generator,
    goals: PlacementGoals | None = None,
    before: Groups = (),
    trial: Trial | None = None,
    rounds: int = ROUNDS,
    spent: Callable[[], bool] = lambda: False,
) -> FoundPlacement:
    """See the module. `before`: what is there now, and is one of those that it begins with. `spent`: no time is left.
    Raises PlacementError where the services have no room together."""
    aims = goals or PlacementGoals()
    for number, service in enumerate(replay.problem.services):
        if replay.problem.fits_nowhere(number):
            raise PlacementError(f"{service.name} fits on none of the boxes alone")
    starts = start_placements(replay, aims)
    if before and not find_fault(replay.problem, before):
        starts["before"] = before
    if not starts:
        raise PlacementError(f"{name_all(replay.problem)} have no room together on {replay.problem.gpus} GPUs")

    def cost_of(groups: Groups) -> float:
        return placement_cost(replay, groups, aims, before)

    costs = {name: cost_of(groups) for name, groups in starts.items()}
    best = min(costs, key=costs.__getitem__)
    climber = _Climber(replay, aims, cost_of, rng)
    candidates = dict(starts)
    candidates["search"] = climber.climb(starts[best], rounds, spent)
    if trial is None:
        costs["search"] = cost_of(candidates["search"])
    else:
        costs = {name: trial(groups) for name, groups in candidates.items()}
    chosen = min(reversed(costs), key=costs.__getitem__)
    return FoundPlacement(candidates[chosen], costs[chosen], costs)


def start_placements(replay: PeriodReplay, goals: PlacementGoals) -> dict[str, Groups]:
    """By name, those that are possible: every service by itself, with as many GPUs as every other or by what it needs;
    pairs of like size on equal parts; and SeaLLM's."""
    problem = replay.problem
    services = range(len(problem.services))
    by_size = sorted(services, key=lambda each: problem.services[each].model.weight_bytes)
    pairs = [tuple(sorted(by_size[place : place + goals.most])) for place in range(0, len(by_size), goals.most)]
    equal: dict[tuple[int, ...], float] = {(each,): 1.0 for each in services}
    needs: dict[tuple[int, ...], float] = {(each,): gpu_seconds(problem, each) for each in services}
    found = {
        "dedicated": place_apart(replay, equal, goals),
        "dedicated by need": place_apart(replay, needs, goals),
        "shared": place_apart(replay, dict.fromkeys(pairs, 1.0), goals),
    }
    try:
        found["seallm"] = place_seallm(replay, attainment=goals.attainment)
    except PlacementError:
        found["seallm"] = ()
    return {name: keep_held(problem, groups) for name, groups in found.items() if groups}


def keep_held(problem: PlacementProblem, groups: Groups) -> Groups:
    """With what boxes keep in the place of what was put there."""
    kept = {number: GpuGroup(number, box.gpus, box.held) for number, box in enumerate(problem.boxes) if box.held}
    return tuple(sorted([*(group for group in groups if group.box not in kept), *kept.values()]))


def gpu_seconds(problem: PlacementProblem, service: int) -> float:
    """What a service's requests of the period would take alone, times GPUs: its need beside that of others."""
    return max(1, problem.counts[service]) * problem.usual_s[service] * problem.services[service].model.weight_bytes


def place_apart(replay: PeriodReplay, needs: dict[tuple[int, ...], float], goals: PlacementGoals) -> Groups:
    """Each set of services on GPUs of its own, as many as its share of the needs comes to, at least those that it fits
    on; each over as many GPUs at once as is best for it. Empty where they do not fit so."""
    problem = replay.problem
    free = [box.gpus for box in problem.boxes]
    parts: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # services -> (box, GPUs)
    order = sorted(needs, key=lambda each: -min(_least(problem, each)[1:], default=99))
    for services in order:
        box, gpus = _least(problem, services, free)
        if gpus == 0:
            return ()
        parts[services] = [(box, gpus)]
        free[box] -= gpus
    while True:
        # The next GPUs are for whoever has least beside its need, in pieces that it fits on.
        wanting = sorted(needs, key=lambda each: (sum(gpus for _, gpus in parts[each]) / needs[each], each))
        for services in wanting:
            box, gpus = _least(problem, services, free)
            if gpus:
                parts[services].append((box, gpus))
                free[box] -= gpus
                break
        else:
            break
    groups: list[GpuGroup] = []
    for services, pieces in parts.items():
        groups += _best_degree(replay, services, pieces, goals)
    return tuple(sorted(groups))


def _least(problem: PlacementProblem, services: tuple[int, ...], free: Sequence[int] | None = None) -> tuple[int, int]:
    """Where services fit on the fewest free GPUs (None: all are), of boxes alike the one with most of them; 0 GPUs:
    nowhere."""
    found, best = (0, 0), (0, 0)
    for number, box in enumerate(problem.boxes):
        have = box.gpus if free is None else free[number]
        tp = next((tp for tp in problem.degrees if tp <= have and problem.can_host(number, tp, services)), 0)
        size = tp, 0 if free is None else -have
        if tp and (not found[1] or size < best) and problem.fits_disk(number, services):
            found, best = (number, tp), size
    return found


def _best_degree(
    replay: PeriodReplay, services: tuple[int, ...], pieces: Sequence[tuple[int, int]], goals: PlacementGoals
) -> list[GpuGroup]:
    """These GPUs as groups of one degree where that many are left, by the replay."""
    have = Counter[int]()
    for box, gpus in pieces:
        have[box] += gpus
    choices = []
    for tp in replay.problem.degrees:
        groups = []
        for box, gpus in have.items():
            size = tp
            while gpus and size:
                if size <= gpus and replay.problem.can_host(box, size, services):
                    groups.append(GpuGroup(box, size, services))
                    gpus -= size
                else:
                    size //= 2
        if groups:
            choices.append(groups)
    return min(choices, key=lambda groups: _own_cost(replay, groups, services, goals))


def _own_cost(
    replay: PeriodReplay, groups: Sequence[GpuGroup], services: tuple[int, ...], goals: PlacementGoals
) -> float:
    """Of these services alone."""
    judged = replay.judge(groups).of(services)
    return judged_cost(judged, goals) if judged.requests.any() else 0.0


def lost_share(problem: PlacementProblem, before: Groups, after: Groups, serves_s: float) -> float:
    """GPU seconds that go by until all of a placement is loaded, as a share of all in `serves_s`."""
    kept = Counter(before)
    lost = 0.0
    for group in after:
        if kept[group]:
            kept[group] -= 1
        else:
            lost += group.tp * load_s(problem, group, before)
    return lost / (problem.gpus * serves_s)


def load_s(problem: PlacementProblem, group: GpuGroup, before: Groups = ()) -> float:
    """Until a group can serve: an engine starts, weights are read from the disk, those that are not there are fetched.
    What its box hosts now it has on disk."""
    box, rates = problem.boxes[group.box], problem.rates
    here = box.on_disk.union(each for other in before if other.box == group.box for each in other.services)
    return rates.start_s + sum(_fetch_s(problem, each, rates, is_here=each in here) for each in group.services)


def _fetch_s(problem: PlacementProblem, service: int, rates: LoadRates, *, is_here: bool) -> float:
    size = problem.services[service].model.weight_bytes
    return size / (rates.disk_gb_s * 1e9) + (0.0 if is_here else 8.0 * size / (rates.download_gbps * 1e9))


@final
class _Climber:
    """A search that takes any change that costs less."""

    def __init__(self, replay: PeriodReplay, goals: PlacementGoals, cost_of: Trial, rng: np.random.Generator) -> None:
        self._replay = replay
        self._problem = replay.problem
        self._goals = goals
        self._cost_of = cost_of
        self._rng = rng

    def climb(self, groups: Groups, rounds: int, spent: Callable[[], bool]) -> Groups:
        """From these."""
        groups = self._fill(groups)
        cost, idle = self._cost_of(groups), 0
        for _ in range(rounds):
            if spent() or idle >= VAIN_ROUNDS:
                break
            changed = self._change(groups)
            new_cost = cost if changed is None else self._cost_of(changed)
            if changed is not None and new_cost < cost:
                groups, cost, idle = changed, new_cost, 0
            else:
                idle += 1
        return tuple(group for group in groups if group.services)

    def _fill(self, groups: Groups) -> Groups:
        """With the GPUs that are free as idle groups, as large as can be."""
        left = [box.gpus for box in self._problem.boxes]
        for group in groups:
            left[group.box] -= group.tp
        found = list(groups)
        for box, gpus in enumerate(left):
            for tp in reversed(self._problem.degrees):
                while gpus >= tp:
                    found.append(GpuGroup(box, tp))
                    gpus -= tp
        return tuple(sorted(found))

    def _change(self, groups: Groups) -> Groups | None:
        """One of the changes, or None where it is none or not possible."""
        service = self._draw_service(groups)
        place = int(self._rng.integers(len(groups)))
        change = self._CHANGES[int(self._rng.integers(len(self._CHANGES)))]
        changed = change(self, list(groups), place, service)
        if changed is None:
            return None
        found = tuple(sorted(changed))
        return None if found == groups or find_fault(self._problem, found) else found

    def _draw_service(self, groups: Groups) -> int:
        """Mostly by need."""
        size = len(self._problem.services)
        if self._rng.random() < NEEDY:
            index = self._replay.judge(groups).unserved_index(ALPHA)
            if index.sum() > 0.0:
                return int(self._rng.choice(size, p=index / index.sum()))
        return int(self._rng.integers(size))

    def _give(self, groups: list[GpuGroup], place: int, service: int) -> list[GpuGroup] | None:
        """A group to one service alone."""
        groups[place] = groups[place]._replace(services=(service,))
        return groups

    def _add(self, groups: list[GpuGroup], place: int, service: int) -> list[GpuGroup] | None:
        """A service to a group that keeps the others."""
        group = groups[place]
        if service in group.services or len(group.services) >= self._goals.most:
            return None
        groups[place] = group.with_service(service)
        return groups

    def _drop(self, groups: list[GpuGroup], place: int, service: int) -> list[GpuGroup] | None:
        """A service of a group, that others host."""
        held = groups[place].services
        if not held:
            return None
        out = held[int(self._rng.integers(len(held)))]
        if sum(out in group.services for group in groups) < 2:
            return None
        groups[place] = groups[place].without(out)
        return groups

    def _swap(self, groups: list[GpuGroup], place: int, service: int) -> list[GpuGroup] | None:
        """What two groups host."""
        other = int(self._rng.integers(len(groups)))
        one, two = groups[place], groups[other]
        groups[place], groups[other] = one._replace(services=two.services), two._replace(services=one.services)
        return groups

    def _merge(self, groups: list[GpuGroup], place: int, service: int) -> list[GpuGroup] | None:
        """A group with another of its size and box; what the first hosts, or the other."""
        one = groups[place]
        twins = [each for each, two in enumerate(groups) if each != place and two[:2] == one[:2]]
        if not twins or 2 * one.tp > max(self._problem.degrees):
            return None
        other = groups[twins[int(self._rng.integers(len(twins)))]]
        services = one.services if self._rng.random() < 0.5 else other.services
        groups.remove(one)
        groups.remove(other)
        return [*groups, GpuGroup(one.box, 2 * one.tp, services)]

    def _split(self, groups: list[GpuGroup], place: int, service: int) -> list[GpuGroup] | None:
        """A group into two: the second one hosts the same, or the needy service."""
        one = groups[place]
        if one.tp == 1:
            return None
        half = one._replace(tp=one.tp // 2)
        groups[place] = half
        return [*groups, half if self._rng.random() < 0.5 else half._replace(services=(service,))]

    def _vacate(self, groups: list[GpuGroup], place: int, service: int) -> list[GpuGroup] | None:
        """A box hosts nothing; what is hosted by no other goes to any group that has room."""
        box = groups[place].box
        gone = {each for group in groups if group.box == box for each in group.services}
        found = [group._replace(services=()) if group.box == box else group for group in groups]
        for each in sorted(gone - {each for group in found for each in group.services}):
            room = [
                number for number, group in enumerate(found)
                if group.box != box and len(group.services) < self._goals.most
                and self._problem.can_host(group.box, group.tp, group.with_service(each).services)
            ]  # fmt: skip
            if not room:
                return None
            chosen = room[int(self._rng.integers(len(room)))]
            found[chosen] = found[chosen].with_service(each)
        return found

    _CHANGES = (_give, _add, _drop, _swap, _merge, _split, _vacate)
