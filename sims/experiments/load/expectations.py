"""Whether what is expected of plans comes: expected figures beside simulations of other requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import nan
from typing import Final

import numpy as np

from ....coordinator.costs.gpus import Specs
from ....coordinator.planning.model.problem import Problem, Proposal
from ...replanning import describe_phases
from ...results.expectations import REQUESTS, expect_by_simulation
from ...results.trials import SimulatedTrial
from ..deployments import RATES
from ..page import Page, PageTable, ResultRow
from ..setting import CLOUD, WORKLOADS, Deployed, PlannedCase, Scope, at_rate, most, searched
from ..systems import TRIALS

WITHIN: Final = "Within 10 %"
PLANS: Final = "By plan"
NEAR: Final = 0.1
SCALES: Final = (3.0, 5.0, 10.0)
GBPS: Final = 10.0
LOAD: Final = 0.8
"""Of what the plan is estimated to carry: the rate that it is asked for."""
LENGTH: Final = 2
"""A run's requests, as a multiple of the scope's. Expected and simulated runs are equally long: in a shorter one queues
have less time to grow, and higher rates keep the deadlines."""
FIGURES: Final = ("attainment", "highest rate", "TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")


class WithinRow(ResultRow, frozen=True):
    """One figure: of how many plans it is within 10 % of the simulation, and where what was expected is furthest off
    (over simulated)."""

    figure: str
    estimated: str
    expected: str
    least_expected: float
    most_expected: float


class ExpectationRow(ResultRow, frozen=True):
    """A plan at a rate, in requests/s. Each figure as simulated, in seconds where it is a time, and then the estimate
    and expected over that."""

    workload: str
    deadline: str
    plan: str
    rate: float
    attainment: str
    highest_rate: str
    ttft_p50: str
    ttft_p90: str
    tpot_p50: str
    tpot_p90: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptExpectation:
    """A plan's figures by name (FIGURES): as the search estimates, as expected, and as other requests had them."""

    case: PlannedCase
    plan: str
    rate: float
    estimated: Mapping[str, float]
    expected: Mapping[str, float]
    simulated: Mapping[str, float]

    def row(self) -> ExpectationRow:
        """For the page."""
        cells = [
            f"{self.simulated[name]:.3g} ({_over(self.estimated, self.simulated, name):.2f}, "
            f"{_over(self.expected, self.simulated, name):.2f})"
            for name in FIGURES
        ]
        attainment, highest_rate, ttft_p50, ttft_p90, tpot_p50, tpot_p90 = cells
        return ExpectationRow(
            workload=self.case.workload, deadline=f"{self.case.scale:g} x",
            plan=self.plan, rate=self.rate, attainment=attainment, highest_rate=highest_rate, ttft_p50=ttft_p50,
            ttft_p90=ttft_p90, tpot_p50=tpot_p50, tpot_p90=tpot_p90,
        )  # fmt: skip


@cache
def kept_expectations(scope: Scope) -> tuple[KeptExpectation, ...]:
    """Of the best colocated plan that is found and of the best at all, for each case."""
    found = []
    for workload, scale in product(WORKLOADS, SCALES):
        case = PlannedCase(specs=Specs.MEASURED, workload=workload, rate=RATES[workload], scale=scale, gbps=GBPS)
        colocated = most(replace(case, mixed_only=True), scope.steps)
        case = replace(case, rate=float(f"{colocated.at().max_rate:.2g}"))
        solutions = dict.fromkeys((colocated.solution, searched(case, scope.steps).solution))
        found += [look_at(case, Deployed(case.problem(), solution), scope) for solution in solutions]
    return tuple(found)


def look_at(case: PlannedCase, deployed: Deployed, scope: Scope) -> KeptExpectation:
    """At LOAD of what it is estimated to carry, or where that is nothing, of what the case asks for."""
    rate = LOAD * (deployed.at().max_rate or case.rate)
    problem, estimated = at_rate(deployed.problem, rate), deployed.at(rate)
    (expected,) = expect_by_simulation(problem, (estimated,), seed=0, requests=LENGTH * scope.requests)
    return KeptExpectation(
        case=case, plan=describe_phases(estimated.plan), rate=rate, estimated=_figures(estimated),
        expected=_figures(expected), simulated=_simulate(problem, estimated, scope),
    )  # fmt: skip


def _figures(proposal: Proposal) -> dict[str, float]:
    times = (proposal.ttft_s.p50, proposal.ttft_s.p90, proposal.tpot_s.p50, proposal.tpot_s.p90)
    return dict(zip(FIGURES, (proposal.attainment, proposal.max_rate, *times), strict=True))


def _simulate(problem: Problem, proposal: Proposal, scope: Scope) -> dict[str, float]:
    """Of all seeds' requests together."""
    seeds = tuple(TRIALS + seed for seed in scope.seeds)
    trial = SimulatedTrial(problem=problem, seeds=seeds, seconds=0.0, requests=LENGTH * scope.requests)
    (service,) = problem.services
    highest = trial.find_capacity((proposal,)) * service.workload.rate
    runs = [trial.run((proposal,), 1.0, seed)[0] for seed in seeds]
    attainment = float(np.mean(np.concatenate([run.met() for run in runs])))
    ended = [(run.outcomes, run.outcomes.completed) for run in runs]
    ttft_s = np.concatenate([outcomes.ttft_s[done] for outcomes, done in ended])
    tpot_s = np.concatenate([outcomes.tpot_s[done & (outcomes.trace.output > 1)] for outcomes, done in ended])
    times = (float(np.percentile(seconds, share)) for seconds in (ttft_s, tpot_s) for share in (50, 90))
    return dict(zip(FIGURES, (attainment, highest, *times), strict=True))


def _over(figures: Mapping[str, float], simulated: Mapping[str, float], name: str) -> float:
    return figures[name] / simulated[name] if simulated[name] else nan


def _within_row(name: str, kept: tuple[KeptExpectation, ...]) -> WithinRow:
    estimated, expected = (
        np.array([_over(figures, each.simulated, name) for each, figures in those])
        for those in ([(each, each.estimated) for each in kept], [(each, each.expected) for each in kept])
    )
    count = len(kept)
    return WithinRow(
        figure=name, estimated=f"{_near(estimated)} of {count}", expected=f"{_near(expected)} of {count}",
        least_expected=float(expected.min()), most_expected=float(expected.max()),
    )  # fmt: skip


def _near(ratios: np.ndarray) -> int:
    return int((np.abs(ratios - 1.0) <= NEAR).sum())


def expectations(scope: Scope) -> Page:
    """The page."""
    kept = kept_expectations(scope)
    seeds = len(scope.seeds)
    return Page(
        name="expectations",
        title="What is expected of plans, and what comes of it",
        assumes=(
            f"LLaMA-30B on {CLOUD} by measured figures, {GBPS:g} Gb/s between boxes, Azure's lengths, Poisson "
            "arrivals; deadlines as multiples of what a lone request takes on an A100. Of each case the best plan "
            "that the search finds at the rate that colocated serving is estimated to carry, and the best colocated "
            f"one, each at {LOAD:g} of what it is estimated to carry.\n\n*Estimated* is what the search goes by. "
            f"*Expected* is what `plan` says of the plan it has chosen: by {LENGTH * scope.requests:,} simulated "
            f"requests (`plan`: {REQUESTS:,}), routed by the network's default policy. *Simulated* are other requests, "
            f"of {seeds} seed(s), as many of each, routed likewise, whose lengths are drawn by chance."
        ),
        tables=(
            PageTable(WITHIN, [_within_row(name, kept) for name in FIGURES]),
            PageTable(
                PLANS, [each.row() for each in kept],
                "As simulated (estimated, expected over that); requests/s and seconds.",
            ),
        ),
        remarks=_remark(kept),
    )  # fmt: skip


def _remark(kept: tuple[KeptExpectation, ...]) -> str:
    figures = [(name, each) for each in kept for name in FIGURES]
    estimated = _near(np.array([_over(each.estimated, each.simulated, name) for name, each in figures]))
    expected = _near(np.array([_over(each.expected, each.simulated, name) for name, each in figures]))
    whole = sum(all(abs(_over(each.expected, each.simulated, name) - 1.0) <= NEAR for name in FIGURES) for each in kept)
    return (
        f"- Expected and simulated are within 10 % in {expected} of {len(figures)} figures, in all six of {whole} of "
        f"{len(kept)} plans; estimated and simulated in {estimated} of {len(figures)}.\n{REMARKS}"
    )


REMARKS: Final = """\
- What is expected comes from the same simulator, so this says what other requests change, and what the
  estimate's formulas leave out. What the simulator itself is off by, a live network says
  ([live](live.md)).
"""
