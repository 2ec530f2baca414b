"""What a solution of the upper level is worth (ThunderServe section 3.3): the lower level of the
planner.

For every group the best parallel configuration, for all groups of a service together the
orchestration, and the value

    objective = attainment + HEADROOM * capacity / (1 + capacity) - price_weight * dollars per hour

`attainment` is the share of all requests, of all services, that meet every deadline of theirs.
Requests beyond what the replicas can serve in time count as missed, as if a gateway turned them
away: so the objective keeps a slope in overload. `capacity` is the highest rate at which every
replica still has the service's target share in time, over the rate that is asked for; of several
services, the lowest of theirs, in the formula their mean by rate. Of plans that are equally good
now, the one that carries more wins. Of several services, each that no replica serves costs
UNSERVED: else one with few requests would have none in overload. Dollars are those of every box
that is used, whole, and of the KV between boxes.

A solution of mixed replicas only is a solution like any other: whoever looks for the best one and
starts there never does worse than colocated serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...plan import Phase
from ..model.kv_cost import kv_gigabits
from ..model.link_share import LinkShares
from ..model.problem import Component, Group, PhaseCounts, Problem, Proposal, Score, Slice, Solution, split_components
from ..model.workload import Service
from .flow import FlowProblem, RequestFlow, flow_from_rates, solve_exact, solve_greedy, solve_quick
from .orchestration import Orchestration, Solver, carried_rate, orchestrate
from .parallel import Stages
from .proposals import Proposer
from .replica_pairs import ClusterLinks
from .replicas import (
    REFERENCE_LOAD,
    ConfigurationCache,
    ConfiguredReplica,
    LoadCurve,
    LoadedStages,
    ReplicaCatalogue,
    count_phases,
    needs_of_service,
)
from .upper_bound import PREFILL_SHARES, TOTAL_PRICES, bound_components, bound_served_rate

Array = NDArray[np.float64]

FULL_LOADS: Final = (0.6, 0.8, 0.9, 1.0, 1.1, 1.25, inf)
"""What shares are made for, as multiples of what is carried in time: for less, the best replicas
alone; for more, whatever helps."""

HEADROOM: Final = 0.01
"""What unlimited capacity is worth, in shares of attainment."""

UNSERVED: Final = 2.0
"""More than all requests of the others are worth, prices aside."""


class LowerLevel:
    """Implements `problem.Evaluator`. Groups with weights in `stages_of` keep their stages."""

    def __init__(
        self, problem: Problem, stages_of: LoadedStages = MappingProxyType({}), memory: ConfigurationCache | None = None
    ) -> None:
        self.problem = problem
        service_needs = [needs_of_service(service) for service in problem.services]
        self._links = ClusterLinks(
            problem.cluster, LinkShares([(needs.service, needs.classes) for needs in service_needs])
        )
        self._memory = ConfigurationCache() if memory is None else memory
        self._catalogue = ReplicaCatalogue(problem, service_needs, self._links, stages_of, self._memory)
        rates = [service.workload.rate for service in problem.services]
        self._shares = [rate / sum(rates) for rate in rates]
        self._scores: dict[Solution, Score] = {}
        self._gbps: dict[frozenset[int], tuple[float, float]] = {}
        self._values: dict[tuple[Component, tuple[PhaseCounts, ...]], Array] = {}
        self._price_grid = (len(service_needs), len(TOTAL_PRICES), len(PREFILL_SHARES))

    def can_hold(self, slices: tuple[Slice, ...], service: int) -> bool:
        """Whether these GPUs hold the model and its long requests, in a shape that can run."""
        return self._catalogue.can_hold(slices, service)

    def for_subproblem(self, problem: Problem) -> LowerLevel:
        """Shares the configurations of groups."""
        return LowerLevel(problem, memory=self._memory)

    def copy_configurations(self, services: Sequence[Service]) -> ConfigurationCache | None:
        """A copy of what it knows of groups, where these are the services that it knows it of."""
        same = [id(service) for service in services] == [id(service) for service in self.problem.services]
        return self._memory.copy() if same else None

    def stages_of(self, solution: Solution) -> dict[tuple[Slice, ...], tuple[Stages, ...]]:
        """The stages of a running solution's groups, for an evaluator that keeps them."""
        found: dict[tuple[Slice, ...], tuple[Stages, ...]] = {}
        for group in solution:
            replica = self._catalogue.replica(group)
            if replica is not None:
                found[group.slices] = (*found.get(group.slices, ()), replica.configuration.stages)
        return found

    def max_rates(self, group: Group, replicas: int) -> tuple[float, float]:
        """Up to the load at which the service's target share is still in time."""
        replica = self._catalogue.replica(group)
        if replica is None:
            return 0.0, 0.0
        usable_load = self._catalogue.curves([replica], (replicas, replicas))[0].usable_load
        prefill_rate = 0.0 if group.phase is Phase.DECODE else usable_load * replica.behaviour.prefill_rate
        return prefill_rate, 0.0 if group.phase is Phase.PREFILL else usable_load * replica.behaviour.decode_rate

    def largest_batch(self, group: Group) -> float:
        """Requests that a group holds at once; 0 where it lacks the model."""
        replica = self._catalogue.replica(group)
        return replica.behaviour.max_batch if replica is not None else 0.0

    def component_values(self, components: Sequence[Component], phase_counts: Sequence[PhaseCounts]) -> Array:
        """By replicas at the loads that suit them best, and by links that nobody else takes."""
        keys = [(component, tuple(phase_counts)) for component in components]
        missing = [key for key in keys if key not in self._values]
        if missing:
            found = [
                self._component_values([key[0] for key in missing], *service) for service in enumerate(phase_counts)
            ]
            self._values.update(zip(missing, np.stack(found, axis=1), strict=True))
        return np.array([self._values[key] for key in keys]).reshape(-1, *self._price_grid)

    def score(self, solution: Solution) -> Score:
        """By the exact orchestration where that is quick (`flow.solve_quick`)."""
        if solution not in self._scores:
            found = self.orchestrate(solution, solver=solve_quick)
            self._scores[solution] = self._score(solution, found, [item.capacity for item in found])
        return self._scores[solution]

    def upper_bound(self, solution: Solution) -> float:
        """Upper bound of the objective per component, without its link capacity and traffic cost."""
        total = -self.problem.price_weight * self._boxes_usd(solution)
        replicas = [self._replicas_of(solution, number) for number in range(len(self._shares))]
        phase_counts = [count_phases(replica.group.phase for replica in those) for those in replicas]
        together = self.component_values(split_components(solution), phase_counts).sum(axis=0)
        for number, share in enumerate(self._shares):
            curves = self._catalogue.curves(replicas[number], phase_counts[number])
            rate = self.problem.services[number].workload.rate
            served = min(
                1.0, bound_served_rate(together[number], rate, _largest_worth(replicas[number], curves)) / rate
            )
            capacity = carried_rate(replicas[number], [curve.usable_load for curve in curves]) / rate
            total += share * (served + HEADROOM * capacity / (1.0 + capacity))
        return total

    def propose(
        self, solution: Solution, *, epoch: int, version: int, solvers: Sequence[Solver] = ()
    ) -> tuple[Proposal, ...]:
        """The finished plan of each service, by the best of several orchestrations: each for another
        full load, and with or without replicas that help each other out. The choice does not depend
        on the rate that is asked for, so attainment falls with it. `solvers`: to choose among what
        these find instead.

        Where no request would be in time, those that there are are served all the same. Raises
        UnservedError.
        """
        if solvers:
            candidates = [self.orchestrate(solution, solver=solver) for solver in solvers]
        else:
            candidates = list(self._share_out(solution))
        best = self._choose_shares(candidates)
        if not all(item.flow.served > 0.0 for item in best):
            best = self.orchestrate(solution, solver=_serve_anyway)
        rates = self._highest_rates(best)
        rooms = [most / item.service.workload.rate for item, most in zip(best, rates, strict=True)]
        proposer = Proposer(self.problem.cluster, self._catalogue, best, self._score(solution, best, rooms))
        return tuple(
            proposer.proposal(item, most, epoch=epoch, version=version) for item, most in zip(best, rates, strict=True)
        )

    def _share_out(self, solution: Solution) -> Iterator[tuple[Orchestration, ...]]:
        """In several ways. The fast solver and the two exact ones may differ where several shares
        are best."""
        for planned, alone in product(FULL_LOADS, (False, True)):
            yield self.orchestrate(solution, solver=solve_quick, planned=planned, alone=alone)
        for solver in (solve_greedy, solve_exact):
            yield self.orchestrate(solution, solver=solver, planned=1.0)

    def _choose_shares(self, candidates: Sequence[tuple[Orchestration, ...]]) -> tuple[Orchestration, ...]:
        """Of shares for the same replicas, whatever rate is asked for: those that carry most, of
        the service where that is least beside its rate. Where no shares reach the target, those
        with most requests in time."""
        targets = [
            service.slo.target
            if any(found[number].served_share.reaches(service.slo.target) for found in candidates)
            else None
            for number, service in enumerate(self.problem.services)
        ]

        def rank(found: tuple[Orchestration, ...]) -> float:
            return min(
                item.served_share.value(target) / item.service.workload.rate
                for item, target in zip(found, targets, strict=True)
            )

        return max(candidates, key=rank)

    def _highest_rates(self, orchestrations: Sequence[Orchestration]) -> list[float]:
        """Of each service, with the links that the others leave."""
        capacities = self._links.capacities.less(np.sum([item.flow.used_gbps for item in orchestrations], axis=0))
        return [item.highest_rate(capacities.more(item.flow.used_gbps)) for item in orchestrations]

    def orchestrate(
        self, solution: Solution, *, solver: Solver = solve_greedy, planned: float | None = None, alone: bool = False
    ) -> tuple[Orchestration, ...]:
        """Every service in turn, on what the ones before leave of the links. `planned`: see
        `orchestration.orchestrate`. `alone`: the shares are made as if replicas did not help each
        other out, as where links keep some of them from being as busy as others."""
        capacities, found = self._links.capacities, []
        for number, service in enumerate(self.problem.services):
            replicas = self._replicas_of(solution, number)
            counts = (1, 1) if alone else count_phases(replica.group.phase for replica in replicas)
            curves = self._catalogue.curves(replicas, counts)
            found.append(
                orchestrate(
                    service,
                    self._catalogue.service_needs[number].classes,
                    replicas,
                    curves,
                    self._links,
                    capacities,
                    solver,
                    planned=planned,
                )
            )
            capacities = capacities.less(found[-1].flow.used_gbps)
        return tuple(found)

    def _replicas_of(self, solution: Solution, service: int) -> list[ConfiguredReplica]:
        """The service's replicas; groups that do not hold the model are none."""
        replicas = [self._catalogue.replica(group) for group in solution if group.service == service]
        return [replica for replica in replicas if replica is not None]

    def _component_values(self, components: Sequence[Component], service: int, counts: PhaseCounts) -> Array:
        """[component, total price, prefill share] of one service."""
        replicas = [
            (place, replica)
            for place, component in enumerate(components)
            for replica in self._replicas_of(component, service)
        ]
        curves = self._catalogue.curves([replica for _, replica in replicas], counts)
        gained = np.zeros((len(components), *self._price_grid[1:]))
        for (place, _), curve in zip(replicas, curves, strict=True):
            gained[place] += curve.replica_values
        boxes = [frozenset(box for group in component for box, _ in group.slices) for component in components]
        limits = np.array([self._component_gbps(those) for those in boxes])
        needs = self._catalogue.service_needs[service]
        gigabits = kv_gigabits(needs.service.model, needs.classes.prompt, needs.service.kv_bits)
        out, into = limits.T / float(needs.classes.share @ gigabits)
        return bound_components(gained, out, into)

    def _component_gbps(self, boxes: frozenset[int]) -> tuple[float, float]:
        """Gb/s of KV that may leave these boxes for others, and come from others."""
        if boxes not in self._gbps:
            capacities, inside = self._links.capacities, sorted(boxes)
            others = np.array([box not in boxes for box in range(len(capacities.out))])
            out = np.minimum(capacities.out[inside], capacities.between[inside][:, others].sum(axis=1))
            into = np.minimum(capacities.into[inside], capacities.between[others][:, inside].sum(axis=0))
            self._gbps[boxes] = float(out.sum()), float(into.sum())
        return self._gbps[boxes]

    def _score(self, solution: Solution, orchestrations: Sequence[Orchestration], capacities: Sequence[float]) -> Score:
        """`capacities`: of each service, over the rate that is asked for."""
        shared = list(zip(self._shares, orchestrations, strict=True))
        attainment = sum(share * item.attainment for share, item in shared)
        headroom = sum(share * room / (1.0 + room) for share, room in zip(self._shares, capacities, strict=True))
        objective = attainment + HEADROOM * headroom
        if len(orchestrations) > 1:
            objective -= UNSERVED * sum(not _is_served(item) for item in orchestrations)
        if self.problem.price_weight:
            objective -= self.problem.price_weight * (self._boxes_usd(solution) + self._traffic_usd(orchestrations))
        return Score(objective, attainment, min(capacities))

    def _boxes_usd(self, solution: Solution) -> float:
        used_boxes = {part.box for group in solution for part in group.slices}
        return sum(self.problem.cluster.boxes[box].usd_per_hour for box in used_boxes)

    def _traffic_usd(self, orchestrations: Sequence[Orchestration]) -> float:
        gbps = np.sum([item.flow.used_gbps for item in orchestrations], axis=0)
        return float((gbps * self.problem.cluster.usd_per_gb).sum()) * 3600.0 / 8.0


def _is_served(found: Orchestration) -> bool:
    """Whether replicas do both phases of a service."""
    phases = {replica.group.phase for replica in found.replicas}
    return bool(phases - {Phase.DECODE}) and bool(phases - {Phase.PREFILL})


def _largest_worth(replicas: Sequence[ConfiguredReplica], curves: Sequence[LoadCurve]) -> float:
    """What a request on the best pair may be worth, whose replicas' losses are counted both: those
    of one of them may be among those of the other."""
    single_phases = {replica.group.phase for replica in replicas} - {Phase.MIXED}
    if not single_phases:
        return 1.0
    in_time_share = [
        (replica.group.phase, curve.in_time_share[REFERENCE_LOAD])
        for replica, curve in zip(replicas, curves, strict=True)
    ]
    prefill = min((share for phase, share in in_time_share if phase is not Phase.DECODE), default=1.0)
    decode = min((share for phase, share in in_time_share if phase is not Phase.PREFILL), default=1.0)
    return float(2.0 - max(prefill, decode))


def _serve_anyway(network: FlowProblem) -> RequestFlow:
    """As many requests as there is room for, late or not; all, in equal shares, if fewer."""
    rates = solve_exact(network.without_losses(network.rate, [1.0] * len(network.prefill_rate))).pair_rates
    return flow_from_rates(network, rates)
