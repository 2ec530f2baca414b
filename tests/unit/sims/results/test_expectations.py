"""What is expected of a plan: by which requests, of how many of them, and where the estimate stays."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.planning.lower.evaluator import LowerLevel
from p2pserve.coordinator.planning.model.problem import Problem, Proposal
from p2pserve.coordinator.planning.upper.search import search
from p2pserve.coordinator.planning.upper.settings import SearchSettings
from p2pserve.sims.experiments.setting import PlannedCase, at_rate
from p2pserve.sims.results import expectations
from p2pserve.sims.results.expectations import DRAW, expect_by_simulation
from p2pserve.sims.results.trials import SimulatedTrial

PROBLEM = PlannedCase(workload="conversation", rate=1.0, boxes=2).problem()


def plan_for(problem: Problem) -> Proposal:
    evaluator = LowerLevel(problem)
    found = search(problem, evaluator, rng=np.random.default_rng(0), settings=SearchSettings(steps=20))
    return evaluator.propose(found.solution, epoch=0, version=1)[0]


ESTIMATE = plan_for(PROBLEM)


def test_figures_are_those_of_simulated_requests_that_plans_are_not_tried_with() -> None:
    (found,) = expect_by_simulation(PROBLEM, (ESTIMATE,), 3, requests=120)
    trial = SimulatedTrial(problem=PROBLEM, seeds=(DRAW + 3,), seconds=0.0, requests=120, is_even=True)
    (outcome,) = trial.run((ESTIMATE,), 1.0, DRAW + 3)
    seen = outcome.outcomes
    assert found.simulated_requests == len(seen.ttft_s) == pytest.approx(120, rel=0.3)
    assert found.attainment == outcome.met().mean()
    assert found.ttft_s == tuple(np.percentile(seen.ttft_s, (50, 90, 99)))
    assert found.tpot_s == tuple(np.percentile(seen.tpot_s[seen.trace.output > 1], (50, 90, 99)))
    assert found.max_rate == 1.0 * trial.find_capacity((ESTIMATE,))
    assert found.plan.pairings == ESTIMATE.plan.pairings
    assert found.plan.why[1:] == ESTIMATE.plan.why[1:]
    assert found.plan.why[0].startswith(f"{found.attainment:.1%} of 1 requests/s are expected to be in time; up to ")
    assert ESTIMATE.simulated_requests == 0
    assert (found.score, found.replicas) == (ESTIMATE.score, ESTIMATE.replicas), "these are the search's"


def test_of_more_than_are_carried_those_beyond_are_missed_unless_all_do_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many are asked for as have their target; `share` of all would be in time."""
    (plenty,) = expect_by_simulation(PROBLEM, (ESTIMATE,), 0, requests=60)
    many = at_rate(PROBLEM, 2.0 * plenty.max_rate)
    ran: list[float] = []
    share = 0.3

    class Trial(SimulatedTrial):
        def find_capacity(self, proposals: Any, near: float | None = None) -> float:
            return 0.5

        def run(self, proposals: Any, factor: float, seed: int) -> Any:
            ran.append(factor)
            (outcome,) = SimulatedTrial.run(self, proposals, 0.1, seed)
            in_time = np.arange(100) < 100 * (share if factor == 1.0 else 0.9)
            return (SimpleNamespace(outcomes=outcome.outcomes, met=lambda: in_time),)

    monkeypatch.setattr(expectations, "SimulatedTrial", Trial)
    (found,) = expect_by_simulation(many, (ESTIMATE,), 0, requests=20)
    assert ran == [1.0, 0.5]
    assert found.attainment == pytest.approx(0.45), "0.9 of half of them"
    share = 0.6
    (found,) = expect_by_simulation(many, (ESTIMATE,), 0, requests=20)
    assert found.attainment == pytest.approx(0.6)
    assert found.max_rate == pytest.approx(plenty.max_rate), "half of the rate"


def test_where_no_request_ends_the_estimate_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trial(SimulatedTrial):
        def run(self, proposals: Any, factor: float, seed: int) -> Any:
            (outcome,) = SimulatedTrial.run(self, proposals, factor, seed)
            nothing = np.full(len(outcome.outcomes.ttft_s), np.nan)
            return (replace(outcome, outcomes=replace(outcome.outcomes, ttft_s=nothing, e2e_s=nothing)),)

    monkeypatch.setattr(expectations, "SimulatedTrial", Trial)
    assert expect_by_simulation(PROBLEM, (ESTIMATE,), 0, requests=20) == (ESTIMATE,)
