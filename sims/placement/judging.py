"""Placements judged by simulation: the period's requests, with engines that run step by step and routes as on the
network.

    judged = SimulatedPlacements(problem)(Placement(groups))

Services that are planned have boxes of their own, so these and the others are simulated one after the other.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np

from ...coordinator.placement.planned import Placement, PlannedServices
from ...coordinator.placement.replay import Judged
from ...coordinator.placement.values import PlacementProblem
from ...coordinator.sharing.orders import DOUBLING_BUDGET
from ..records import Outcomes, Trace
from ..results.trials import AS_NETWORK
from ..scenario import ServiceRun, SimSettings
from ..world import simulate
from .fleet import Fleet, host_group
from .routing import GatewayRouting

LENGTHS: Final = "of the period"


@final
class SimulatedPlacements:
    """See the module."""

    def __init__(self, problem: PlacementProblem, settings: SimSettings = AS_NETWORK) -> None:
        self._problem = problem
        self._settings = settings  # of what is planned
        self._rows = {
            number: np.flatnonzero(problem.period.service == number) for number in range(len(problem.services))
        }
        period = problem.period
        self._traces = {
            number: Trace(
                ids=np.arange(len(rows)), arrival_s=period.arrival_s[rows], prompt=period.prompt[rows],
                output=period.output[rows], lengths=LENGTHS, arrivals=LENGTHS,
            )
            for number, rows in self._rows.items()
            if len(rows)
        }  # fmt: skip

    def __call__(self, placement: Placement) -> Judged:
        """What becomes of the requests. Engines that have no room for their services serve nobody."""
        planned = placement.planned
        found: dict[int, Outcomes] = {} if planned is None else self._serve_planned(planned)
        fleet = Fleet(
            {number: trace for number, trace in self._traces.items() if number not in found}, GatewayRouting()
        )
        for number, group in enumerate(placement.groups):
            if group.services and self._problem.can_host(*group):
                fleet.add(number, host_group(self._problem, group, DOUBLING_BUDGET))
        return self._judge(found | fleet.run())

    def _serve_planned(self, planned: PlannedServices) -> dict[int, Outcomes]:
        """Of those of its services that are asked for something."""
        asked = [
            (number, ServiceRun(service=service, plan=proposal.plan, trace=self._traces[number]))
            for number, service, proposal in zip(
                planned.services, planned.problem.services, planned.proposals, strict=True
            )
            if number in self._traces
        ]
        if not asked:
            return {}
        served = simulate(planned.problem.cluster, [run for _, run in asked], settings=self._settings).services
        return {number: each.outcomes for (number, _), each in zip(asked, served, strict=True)}

    def _judge(self, served: dict[int, Outcomes]) -> Judged:
        problem, size = self._problem, len(self._problem.services)
        late, unserved, total = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64), np.zeros(size)
        for number, outcomes in served.items():
            in_time = outcomes.e2e_s <= problem.slo_scale * problem.alone_s[self._rows[number]]
            late[number] = len(in_time) - np.count_nonzero(in_time)
            unserved[number] = len(in_time) - np.count_nonzero(outcomes.completed)
            total[number] = np.nansum(outcomes.e2e_s) / problem.usual_s[number]
        return Judged(np.array(problem.counts), late, unserved, total)
