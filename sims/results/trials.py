"""Plans tried in simulations: what `coordinator.planning.upper.trials` chooses by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...coordinator.planning.model.problem import Problem, Proposal
from ...coordinator.planning.upper.trials import TrialOutcome
from ..scenario import ServiceRun, SimSettings
from ..workloads import Lengths, draw
from ..world import simulate
from .outcomes import ServiceOutcome, attainment

SECONDS: Final = 60.0
"""Of arrivals in a trial: a few times as long as most answers take."""

REQUESTS: Final = 300
"""Of each service at least, however few come: the share of fewer in time is off by more than two
percent."""

MOST: Final = 1.5
"""Up to where the highest rate is looked for, as a multiple of what is expected."""

HALVINGS: Final = 5
"""Of the rates up to there: to 5 % of what is expected. Other draws of requests differ as much."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedTrial:
    """Poisson arrivals with the lengths of each service's workload, routed as the network does. All
    plans that are tried meet the same requests."""

    problem: Problem
    seed: int
    seconds: float = SECONDS

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        """At the rates that are asked for, and where the targets are lost."""
        services = self.problem.services
        asked = self._run(proposals, 1.0)
        rates = np.array([service.workload.rate for service in services])
        shares = [attainment(each.outcomes, each.service.slo) for each in asked]
        expected = min(
            proposal.max_rate / service.workload.rate for proposal, service in zip(proposals, services, strict=True)
        )
        low, high = 0.0, MOST * expected
        for _ in range(HALVINGS if expected > 0.0 else 0):
            middle = (low + high) / 2.0
            met = all(
                attainment(each.outcomes, each.service.slo) >= each.service.slo.target
                for each in self._run(proposals, middle)
            )
            low, high = (middle, high) if met else (low, middle)
        return TrialOutcome(float(rates @ shares / rates.sum()), low)

    def _run(self, proposals: Sequence[Proposal], factor: float) -> Sequence[ServiceOutcome]:
        """At so many times the rates."""
        runs = []
        slowest = min(service.workload.rate for service in self.problem.services)
        seconds = max(self.seconds, REQUESTS / (factor * slowest))
        for number, (service, proposal) in enumerate(zip(self.problem.services, proposals, strict=True)):
            workload = service.workload
            trace = draw(
                Lengths(workload.prompts, workload.outputs, workload.name), rate=factor * workload.rate,
                rng=np.random.default_rng([29, self.seed, number]), cv=workload.arrival_cv, seconds=seconds,
            )  # fmt: skip
            runs.append(ServiceRun(service=service, plan=proposal.plan, trace=trace))
        return simulate(self.problem.cluster, runs, settings=SimSettings(seed=self.seed)).services
