"""What a solution of the upper level is worth (ThunderServe section 3.3): the lower level of the planner.

For every group the best parallel configuration, for all groups of a service together the orchestration, and the value

    objective = attainment + HEADROOM * capacity / (1 + capacity) - price_weight * dollars per hour

`attainment` is the share of all requests, of all services, that meet every deadline of theirs. Requests beyond what
the replicas can serve in time count as missed, as if a gateway turned them away: so the objective keeps a slope in
overload. `capacity` is the highest rate at which every replica still has the service's target share in time, over the
rate that is asked for; of several services, the lowest of theirs, in the formula their mean by rate. Of plans that are
equally good now, the one that carries more wins. Dollars are those of every box that is used, whole, and of the KV
between boxes.

A solution of mixed replicas only is a solution like any other: whoever looks for the best one and starts there never
does worse than colocated serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..model.kv_cost import kv_gigabits
from ..model.link_share import LinkShares
from ..model.problem import Crowd, Group, Island, Problem, Proposal, Score, Slice, Solution, islands
from ..model.workload import Service
from ..upper.proposals import Proposer
from .flow import Flow, Network, fill, flow_of, route, solve
from .handover import Links
from .members import REFERENCE_LOAD, Curve, Loaded, Member, Members, Memory, crowd_of, demand_of
from .orchestration import Orchestration, Solver, carried, highest_rate, orchestrate
from .parallel import Stages
from .promise import LEVELS, PARTS, earned, promised

__all__ = ["HEADROOM", "LowerLevel"]

Array = NDArray[np.float64]

HEADROOM: Final = 0.01
"""What unlimited capacity is worth, in shares of attainment."""


class LowerLevel:
    """Implements `problem.Evaluator`. Groups whose weights are `loaded` keep their stages whatever they do."""

    def __init__(self, problem: Problem, loaded: Loaded = MappingProxyType({}), memory: Memory | None = None) -> None:
        self.problem = problem
        demands = [demand_of(service) for service in problem.services]
        self._links = Links(problem.cluster, LinkShares([(demand.service, demand.classes) for demand in demands]))
        self._memory = Memory() if memory is None else memory
        self._members = Members(problem, demands, self._links, loaded, self._memory)
        rates = [service.workload.rate for service in problem.services]
        self._shares = [rate / sum(rates) for rate in rates]
        self._scores: dict[Solution, Score] = {}
        self._ways: dict[frozenset[int], tuple[float, float]] = {}
        self._earnings: dict[tuple[Island, tuple[Crowd, ...]], Array] = {}
        self._priced = (len(demands), len(LEVELS), len(PARTS))

    def holds(self, slices: tuple[Slice, ...], service: int) -> bool:
        """Whether these GPUs have the memory for the model and its long requests, in a shape that can be run."""
        return self._members.holds(slices, service)

    def part(self, problem: Problem) -> LowerLevel:
        """Shares the configurations of groups."""
        return LowerLevel(problem, memory=self._memory)

    def known(self, services: Sequence[Service]) -> Memory | None:
        """A copy of what it knows of groups, where these are the services that it knows it of."""
        same = [id(service) for service in services] == [id(service) for service in self.problem.services]
        return self._memory.copy() if same else None

    def loaded(self, solution: Solution) -> dict[tuple[Slice, ...], tuple[Stages, ...]]:
        """The stages of a solution's groups, for an evaluator that has to keep them: as a solution is running."""
        found: dict[tuple[Slice, ...], tuple[Stages, ...]] = {}
        for group in solution:
            member = self._members.member(group)
            if member is not None:
                found[group.slices] = (*found.get(group.slices, ()), member.configuration.stages)
        return found

    def rates(self, group: Group, crowd: int) -> tuple[float, float]:
        """Up to the load at which the service's target share is still in time."""
        member = self._members.member(group)
        if member is None:
            return 0.0, 0.0
        usable = self._members.curves([member], (crowd, crowd))[0].usable
        read = 0.0 if group.phase is Phase.DECODE else usable * member.behaviour.read
        return read, 0.0 if group.phase is Phase.PREFILL else usable * member.behaviour.write

    def earnings(self, apart: Sequence[Island], crowds: Sequence[Crowd]) -> Array:
        """By replicas at the loads that suit them best, and by links that nobody else takes."""
        keys = [(island, tuple(crowds)) for island in apart]
        missing = [key for key in keys if key not in self._earnings]
        if missing:
            found = [self._earned([key[0] for key in missing], *service) for service in enumerate(crowds)]
            self._earnings.update(zip(missing, np.stack(found, axis=1), strict=True))
        return np.array([self._earnings[key] for key in keys]).reshape(-1, *self._priced)

    def score(self, solution: Solution) -> Score:
        """By the exact orchestration where that is quick (`flow.route`)."""
        if solution not in self._scores:
            self._scores[solution] = self._score(solution, self.orchestrate(solution, solver=route))
        return self._scores[solution]

    def promise(self, solution: Solution) -> float:
        """By islands, which have their links for themselves, and traffic for nothing."""
        total = -self.problem.price_weight * self._boxes_usd(solution)
        members = [self._of(solution, number) for number in range(len(self._shares))]
        crowds = [crowd_of(member.group.phase for member in those) for those in members]
        together = self.earnings(islands(solution), crowds).sum(axis=0)
        for number, share in enumerate(self._shares):
            curves = self._members.curves(members[number], crowds[number])
            rate = self.problem.services[number].workload.rate
            served = min(1.0, promised(together[number], rate, _most_worth(members[number], curves)) / rate)
            capacity = carried(members[number], [curve.usable for curve in curves]) / rate
            total += share * (served + HEADROOM * capacity / (1.0 + capacity))
        return total

    def propose(
        self, solution: Solution, *, epoch: int, version: int, solvers: Sequence[Solver] = (fill, route, solve)
    ) -> tuple[Proposal, ...]:
        """The finished plan of each service, by the best of these orchestrations: the fast one, and the two exact
        ones, which may differ where several are best.

        Where no request would be in time, those that there are are served all the same. Raises UnservedError.
        """
        ways = [self.orchestrate(solution, solver=solver) for solver in solvers]
        best = max(ways, key=lambda found: self._score(solution, found).objective)
        if not all(item.flow.served > 0.0 for item in best):
            best = self.orchestrate(solution, solver=_anyway)
        score = self._score(solution, best)
        proposer = Proposer(self.problem.cluster, self._members, best, score)
        roads = self._links.roads.less(np.sum([item.flow.used for item in best], axis=0))
        proposals = []
        for item in best:
            most = highest_rate(item, self._links, roads.more(item.flow.used), route)
            proposals.append(proposer.proposal(item, most, epoch=epoch, version=version))
        return tuple(proposals)

    def orchestrate(self, solution: Solution, *, solver: Solver = fill) -> tuple[Orchestration, ...]:
        """Every service in turn, on what the ones before leave of the links."""
        roads, found = self._links.roads, []
        for number, service in enumerate(self.problem.services):
            members = self._of(solution, number)
            curves = self._members.curves(members, crowd_of(member.group.phase for member in members))
            found.append(
                orchestrate(
                    service, self._members.demands[number].classes, members, curves, self._links, roads, solver,
                )
            )  # fmt: skip
            roads = roads.less(found[-1].flow.used)
        return tuple(found)

    def _of(self, solution: Solution, service: int) -> list[Member]:
        """The service's replicas; groups that do not hold the model are none."""
        members = [self._members.member(group) for group in solution if group.service == service]
        return [member for member in members if member is not None]

    def _earned(self, apart: Sequence[Island], service: int, crowd: Crowd) -> Array:
        """[island, level, part] of one service."""
        members = [(place, member) for place, island in enumerate(apart) for member in self._of(island, service)]
        curves = self._members.curves([member for _, member in members], crowd)
        gained = np.zeros((len(apart), *self._priced[1:]))
        for (place, _), curve in zip(members, curves, strict=True):
            gained[place] += curve.gains
        boxes = [frozenset(box for group in island for box, _ in group.slices) for island in apart]
        ways = np.array([self._through(those) for those in boxes])
        demand = self._members.demands[service]
        gigabits = kv_gigabits(demand.service.model, demand.classes.prompt, demand.service.kv_bits)
        out, into = ways.T / float(demand.classes.share @ gigabits)
        return earned(gained, out, into)

    def _through(self, boxes: frozenset[int]) -> tuple[float, float]:
        """Gb/s of KV that may leave these boxes for others, and come from others."""
        if boxes not in self._ways:
            roads, inside = self._links.roads, sorted(boxes)
            others = np.array([box not in boxes for box in range(len(roads.out))])
            out = np.minimum(roads.out[inside], roads.between[inside][:, others].sum(axis=1))
            into = np.minimum(roads.into[inside], roads.between[others][:, inside].sum(axis=0))
            self._ways[boxes] = float(out.sum()), float(into.sum())
        return self._ways[boxes]

    def _score(self, solution: Solution, orchestrations: Sequence[Orchestration]) -> Score:
        shared = list(zip(self._shares, orchestrations, strict=True))
        attainment = sum(share * item.attainment for share, item in shared)
        capacities = [item.capacity for item in orchestrations]
        headroom = sum(share * room / (1.0 + room) for share, room in zip(self._shares, capacities, strict=True))
        objective = attainment + HEADROOM * headroom
        if self.problem.price_weight:
            objective -= self.problem.price_weight * (self._boxes_usd(solution) + self._traffic_usd(orchestrations))
        return Score(objective, attainment, min(capacities))

    def _boxes_usd(self, solution: Solution) -> float:
        used = {part.box for group in solution for part in group.slices}
        return sum(self.problem.cluster.boxes[box].usd_per_hour for box in used)

    def _traffic_usd(self, orchestrations: Sequence[Orchestration]) -> float:
        gbps = np.sum([item.flow.used for item in orchestrations], axis=0)
        return float((gbps * self.problem.cluster.usd_per_gb).sum()) * 3600.0 / 8.0


def _most_worth(members: Sequence[Member], curves: Sequence[Curve]) -> float:
    """What a request on the best pair may be worth, whose replicas' losses are counted both: those of one of them may
    be among those of the other."""
    handing = {member.group.phase for member in members} - {Phase.MIXED}
    if not handing:
        return 1.0
    met = [(member.group.phase, curve.met[REFERENCE_LOAD]) for member, curve in zip(members, curves, strict=True)]
    reads = min((share for phase, share in met if phase is not Phase.DECODE), default=1.0)
    writes = min((share for phase, share in met if phase is not Phase.PREFILL), default=1.0)
    return float(2.0 - max(reads, writes))


def _anyway(network: Network) -> Flow:
    """As many requests as there is room for, whether in time or not; all of them in the same shares if that is less."""
    carried = solve(network.unlimited(network.rate, [1.0] * len(network.read))).pairs
    return flow_of(network, carried)
