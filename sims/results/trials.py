"""Plans tried in simulations: what `coordinator.planning.upper.trials` chooses by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...coordinator.planning.model.problem import Problem, Proposal
from ...coordinator.planning.upper.trials import TrialOutcome
from ...coordinator.routing.interface import RoutingSettings
from ..scenario import ServiceRun, SimSettings
from ..workloads import Lengths, draw
from ..world import simulate
from .outcomes import ServiceOutcome, attainment

SECONDS: Final = 60.0
"""Of arrivals in a trial: a few times as long as most answers take."""

REQUESTS: Final = 600
"""Of each service at least, however few come. Drawn evenly, so many tell the highest rate to 7 % where deadlines are
three times a lone request's; 300 that are drawn by chance to 20 %."""

MOST_REQUESTS: Final = 3000
"""Of all services together: where one is asked far more than another, there are fewer of the other."""

LEAST_REQUESTS: Final = 30
"""Of each service then, over as long as they take."""

STRIDE: Final = 1.15
"""The highest rate is looked for from the expected one, up or down, by this factor at a time: no
further than estimates are mostly off."""

STRIDES: Final = 12
"""At most: to a fifth of what is expected, or five times that."""

HALVINGS: Final = 3
"""Of the last stride, as a factor: to 2 %. Other draws of requests differ by as much."""


AS_NETWORK: Final = SimSettings(routing=RoutingSettings())
"""Requests are routed by the running network's default policy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedTrial:
    """Arrivals with the lengths of each service's workload. All plans that are tried meet the same
    requests: a draw of them for each of `seeds`, for `seconds` at least, with `requests` of each
    service at least, or MOST_REQUESTS of all and LEAST_REQUESTS of each. `is_even`: with as many
    long ones as there are among the workload's."""

    problem: Problem
    seeds: tuple[int, ...]
    seconds: float = SECONDS
    requests: int = REQUESTS
    is_even: bool = False
    settings: SimSettings = AS_NETWORK

    def __call__(self, proposals: Sequence[Proposal]) -> TrialOutcome:
        """At the rates that are asked for, and where the targets are lost."""
        return TrialOutcome(self.share(proposals, 1.0), self.find_capacity(proposals))

    def carries(self, proposals: Sequence[Proposal], factor: float) -> bool:
        """Whether every service has its target at so many times the rates."""
        targets = [service.slo.target for service in self.problem.services]
        return bool((self._shares(proposals, factor) >= targets).all())

    def share(self, proposals: Sequence[Proposal], factor: float) -> float:
        """Of all requests in time, at so many times the rates."""
        rates = np.array([service.workload.rate for service in self.problem.services])
        return float(rates @ self._shares(proposals, factor) / rates.sum())

    def find_capacity(self, proposals: Sequence[Proposal], near: float | None = None) -> float:
        """The highest factor with the targets in time; 0 where even the lowest that is tried has
        fewer. Looked for from `near` on, or from what is expected."""
        factor = near or min(
            proposal.max_rate / service.workload.rate
            for proposal, service in zip(proposals, self.problem.services, strict=True)
        )
        factor = factor or 1.0
        met = self.carries(proposals, factor)
        low, high = (factor, inf) if met else (0.0, factor)
        for _ in range(STRIDES):
            if low > 0.0 and high < inf:
                break
            factor = factor * STRIDE if met else factor / STRIDE
            low, high = (factor, high) if self.carries(proposals, factor) else (low, factor)
        for _ in range(HALVINGS if low > 0.0 and high < inf else 0):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.carries(proposals, middle) else (low, middle)
        return low

    def _shares(self, proposals: Sequence[Proposal], factor: float) -> NDArray[np.float64]:
        """Of each service's requests in time, at so many times the rates."""
        found = [
            [attainment(each.outcomes, each.service.slo) for each in self.run(proposals, factor, seed)]
            for seed in self.seeds
        ]
        return np.asarray(np.mean(found, axis=0))

    def run(self, proposals: Sequence[Proposal], factor: float, seed: int) -> Sequence[ServiceOutcome]:
        """Every service at so many times its rate, until all that is not late has ended."""
        runs = []
        rates = [factor * service.workload.rate for service in self.problem.services]
        seconds = max(self.seconds, min(self.requests / min(rates), MOST_REQUESTS / sum(rates)))
        for number, (service, proposal) in enumerate(zip(self.problem.services, proposals, strict=True)):
            workload, are_few = service.workload, rates[number] * seconds < LEAST_REQUESTS
            trace = draw(
                Lengths(workload.prompts, workload.outputs, workload.name), rate=rates[number],
                rng=np.random.default_rng([29, seed, number]), cv=workload.arrival_cv, is_even=self.is_even,
                requests=LEAST_REQUESTS if are_few else None, seconds=None if are_few else seconds,
            )  # fmt: skip
            runs.append(ServiceRun(service=service, plan=proposal.plan, trace=trace))
        # who has not ended by then is late anyway, and of a plan that is overloaded those are most
        until = max(float(run.trace.arrival_s[-1]) + run.service.slo.e2e_s for run in runs)
        return simulate(self.problem.cluster, runs, settings=replace(self.settings, seed=seed, until_s=until)).services
