"""What is expected of a plan: its figures by simulated requests, in the place of the planner's estimate.

The estimate ranks thousands of plans in a second, so it knows queues by formulas only: whom a router sends where, and
how KV that waits for room or links holds up what comes after it, it takes to be as in theory. That is near enough to
choose by. For the one plan that is chosen there is time to see what comes of requests under the routing policy that
the network has.

The requests are others than those that plans are tried with: who is the best of several with some carries a little less
with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from ...coordinator.planning.lower.proposals import state_expectation
from ...coordinator.planning.model.problem import Percentiles, Problem, Proposal
from ...coordinator.planning.model.workload import Service
from ..scenario import SimSettings
from .outcomes import PERCENTILES, Floats, ServiceOutcome
from .trials import AS_NETWORK, SimulatedTrial

REQUESTS: Final = 2000
"""Of each service at least: a share of 90 % of them is off by less than one percent."""

DRAW: Final = 500
"""Added to the seed that plans are tried with."""


def expect_by_simulation(
    problem: Problem, proposals: Sequence[Proposal], seed: int, *, requests: int = REQUESTS,
    settings: SimSettings = AS_NETWORK, near: float | None = None,
) -> tuple[Proposal, ...]:  # fmt: skip
    """The same plans with simulated figures: attainment, times of the requests that end, and the highest rate. Of more
    requests than keep the target in time those beyond count as missed, as by the estimate. Where no request ends the
    estimate stays. `near`: multiple of the rates at which targets are lost, as far as that is known."""
    trial = SimulatedTrial(
        problem=problem, seeds=(DRAW + seed,), seconds=0.0, requests=requests, is_even=True, settings=settings
    )
    rates = [service.workload.rate for service in problem.services]
    capacity = trial.find_capacity(proposals, near)
    served, outcomes = max(
        ((part, trial.run(proposals, part, DRAW + seed)) for part in dict.fromkeys((1.0, min(1.0, capacity or 1.0)))),
        key=lambda run: run[0] * sum(outcome.met().mean() * rate for outcome, rate in zip(run[1], rates, strict=True)),
    )
    return tuple(
        _by_outcome(service, proposal, outcome, served, capacity * service.workload.rate)
        for service, proposal, outcome in zip(problem.services, proposals, outcomes, strict=True)
    )


def _by_outcome(
    service: Service, proposal: Proposal, outcome: ServiceOutcome, served: float, max_rate: float
) -> Proposal:
    """`served`: the share of the requests that is asked for which was simulated."""
    found = outcome.outcomes
    done, attainment = found.completed, served * float(outcome.met().mean())
    if not done.any():
        return proposal
    said = state_expectation(service, attainment, max_rate)
    several = done & (found.trace.output > 1)
    return replace(
        proposal, plan=msgspec.structs.replace(proposal.plan, why=(said, *proposal.plan.why[1:])),
        attainment=attainment, ttft_s=_percentiles(found.ttft_s[done]), e2e_s=_percentiles(found.e2e_s[done]),
        tpot_s=_percentiles(found.tpot_s[several if several.any() else done]),
        max_rate=max_rate, simulated_requests=len(done),
    )  # fmt: skip


def _percentiles(seconds: Floats) -> Percentiles:
    return Percentiles(*(float(value) for value in np.percentile(seconds, PERCENTILES)))
