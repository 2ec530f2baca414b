"""Where trials look for the highest rate, what they count, and until when they simulate."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pserve.coordinator.planning.model.workload import Service, Slo
from p2pserve.coordinator.routing.interface import RoutingSettings
from p2pserve.sims.experiments.setting import PlannedCase
from p2pserve.sims.results import trials
from p2pserve.sims.results.trials import (
    HALVINGS,
    LEAST_REQUESTS,
    MOST_REQUESTS,
    REQUESTS,
    STRIDE,
    STRIDES,
    SimulatedTrial,
)
from p2pserve.sims.scenario import SimSettings

PROBLEM = PlannedCase(workload="coding", rate=10.0, boxes=2).problem()
TARGET = PROBLEM.services[0].slo.target


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that was simulated: rates, seeds and ends. A request is in time while fewer come than `carried`."""
    seen: list[Any] = []

    def simulate(cluster: Any, services: Any, settings: Any) -> Any:
        arrivals = [run.trace.arrival_s for run in services]
        seen.append(SimpleNamespace(arrivals=arrivals, seed=settings.seed, until=settings.until_s))
        return SimpleNamespace(
            services=[SimpleNamespace(outcomes=len(at) / float(at[-1]), service=run.service)
                      for at, run in zip(arrivals, services, strict=True)]
        )  # fmt: skip

    monkeypatch.setattr(trials, "simulate", simulate)
    return seen


def judge_by(monkeypatch: pytest.MonkeyPatch, share: Callable[[float], float]) -> None:
    """So many are in time at a rate."""
    monkeypatch.setattr(trials, "attainment", lambda rate, slo: share(rate))


def expecting(rate: float) -> list[Any]:
    return [SimpleNamespace(max_rate=rate, plan=None)]


@pytest.mark.parametrize("expected", [20.0, 8.0, 40.0])
def test_the_highest_rate_is_found_from_what_is_expected(
    expected: float, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, lambda rate: 1.0 if rate < 20.0 else 0.5)
    outcome = SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=200.0)(expecting(expected))
    assert outcome.attainment == 1.0, "at the rate that is asked for"
    assert outcome.capacity == pytest.approx(2.0, rel=STRIDE ** (1 / 2**HALVINGS) - 1.0 + 0.03)
    assert len(runs) <= 2 + STRIDES + HALVINGS


def test_it_is_found_sooner_from_where_it_is_known_to_be(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda rate: 1.0 if rate < 20.0 else 0.5)
    trial = SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=200.0)
    assert trial.find_capacity(expecting(5.0), near=2.1) == pytest.approx(2.0, rel=0.05)
    assert rates(runs[0]) == pytest.approx([21.0], rel=0.1)
    assert len(runs) == 2 + HALVINGS


def test_what_is_always_or_never_in_time_is_looked_for_no_further(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=20.0)
    judge_by(monkeypatch, lambda rate: 1.0)
    assert trial(expecting(10.0)).capacity == pytest.approx(STRIDE**STRIDES)
    judge_by(monkeypatch, lambda rate: 0.0)
    runs.clear()
    assert trial(expecting(10.0)) == (0.0, 0.0)
    assert len(runs) == 2 + STRIDES, "no halving of what was not found"


def test_where_nothing_is_expected_it_begins_at_the_rate_that_is_asked_for(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, lambda rate: 1.0 if rate < 10.0 * STRIDE**1.5 else 0.0)
    trial = SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=300.0)
    assert 1.0 < trial(expecting(0.0)).capacity < STRIDE**2
    assert rates(runs[1]) == pytest.approx([10.0], rel=0.1)


def test_a_plan_that_carries_less_than_is_asked_for_is_looked_for_below(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 requests/s of 10: strides down, and the last one is halved."""
    judge_by(monkeypatch, lambda rate: 1.0 if rate < 3.0 else 0.0)
    outcome = SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=300.0)(expecting(4.0))
    assert outcome.attainment == 0.0
    assert outcome.capacity == pytest.approx(0.3, rel=0.05)
    assert len(runs) == 2 + 3 + HALVINGS


def test_draws_of_several_seeds_count_together(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([TARGET + 0.03, TARGET - 0.02, TARGET + 0.01, TARGET - 0.02])
    judge_by(monkeypatch, lambda rate: next(shares))
    trial = SimulatedTrial(problem=PROBLEM, seeds=(4, 9), seconds=30.0)
    assert trial.carries(expecting(10.0), 1.0)
    assert not trial.carries(expecting(10.0), 1.0)
    assert [run.seed for run in runs] == [4, 9, 4, 9]
    first, second, third, _ = (run.arrivals[0] for run in runs)
    assert first.tolist() == third.tolist(), "all plans meet the same requests"
    assert first.tolist() != second.tolist()


def test_so_many_requests_come_at_least_and_nobody_waits_for_those_that_are_late(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, lambda rate: 1.0)
    trial = SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=30.0)
    trial.carries(expecting(1.0), 0.1)
    trial.carries(expecting(1.0), 2.0)
    slow, fast = (run.arrivals[0] for run in runs)
    assert len(slow) == pytest.approx(REQUESTS, rel=0.2)
    assert len(fast) == pytest.approx(600, rel=0.2)
    e2e_s = PROBLEM.services[0].slo.e2e_s
    assert [run.until for run in runs] == pytest.approx([slow[-1] + e2e_s, fast[-1] + e2e_s])


def test_every_service_has_to_keep_its_own_target(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    service = PROBLEM.services[0]
    other = replace(
        service, name="other", slo=Slo(tpot_s=1.0, target=0.5), workload=replace(service.workload, rate=30.0)
    )
    trial = SimulatedTrial(problem=replace(PROBLEM, services=(service, other)), seeds=(0,), seconds=60.0)
    proposals = [*expecting(10.0), *expecting(30.0)]
    judge_by(monkeypatch, lambda rate: 0.95 if rate < 20.0 else 0.6)
    assert trial.carries(proposals, 1.0)
    judge_by(monkeypatch, lambda rate: 0.85 if rate < 20.0 else 0.6)
    assert not trial.carries(proposals, 1.0)
    asked = trial(proposals).attainment
    assert asked == pytest.approx((10.0 * 0.85 + 30.0 * 0.6) / 40.0), "of all requests of both"
    assert np.isinf(runs[-1].until), "the other service has no deadline for its end"


def two_services(faster: float) -> list[Service]:
    """That of PROBLEM, and one with so many times its requests."""
    service = PROBLEM.services[0]
    workload = replace(service.workload, rate=faster * service.workload.rate)
    return [service, replace(service, name="other", workload=workload)]


def rates(run: Any) -> list[float]:
    return [len(at) / float(at[-1]) for at in run.arrivals]


def test_the_share_that_is_wanted_is_enough(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trial = SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=20.0)
    judge_by(monkeypatch, lambda rate: TARGET)
    assert trial.carries(expecting(10.0), 1.0)
    judge_by(monkeypatch, lambda rate: TARGET - 1e-9)
    assert not trial.carries(expecting(10.0), 1.0)


def test_services_have_draws_of_their_own(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda rate: 1.0)
    trial = SimulatedTrial(problem=replace(PROBLEM, services=tuple(two_services(1.0))), seeds=(0,), seconds=30.0)
    trial.carries([*expecting(10.0), *expecting(10.0)], 1.0)
    first, second = runs[0].arrivals
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize(("expected", "factor"), [((40.0, 90.0), 3.0), ((20.0, 90.0), 2.0), ((70.0, 60.0), 2.0)])
def test_it_begins_at_the_rate_that_is_expected_of_the_service_where_that_is_least(
    expected: tuple[float, float], factor: float, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its own: the services are asked 10 and 30 requests/s."""
    judge_by(monkeypatch, lambda rate: 0.0)
    trial = SimulatedTrial(problem=replace(PROBLEM, services=tuple(two_services(3.0))), seeds=(0,), seconds=60.0)
    trial([proposal for rate in expected for proposal in expecting(rate)])
    assert rates(runs[0]) == pytest.approx([10.0, 30.0], rel=0.1)
    assert rates(runs[1]) == pytest.approx([10.0 * factor, 30.0 * factor], rel=0.1)


def test_the_last_stride_is_halved_so_often(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """20 requests/s as expected are carried, and a stride more are not."""
    judge_by(monkeypatch, lambda rate: 1.0 if rate < 20.0 * STRIDE**0.5 else 0.0)
    SimulatedTrial(problem=PROBLEM, seeds=(0,), seconds=300.0)(expecting(20.0))
    assert len(runs) == 3 + HALVINGS


def test_the_service_with_the_fewest_requests_has_enough_of_them(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_by(monkeypatch, lambda rate: 1.0)
    trial = SimulatedTrial(problem=replace(PROBLEM, services=tuple(two_services(5.0))), seeds=(0,), seconds=1.0)
    trial.carries([*expecting(10.0), *expecting(50.0)], 1.0)
    few, many = runs[0].arrivals
    assert len(few) == pytest.approx(REQUESTS, rel=0.2)
    assert len(many) == pytest.approx(5 * REQUESTS, rel=0.2)


def test_requests_are_routed_by_the_networks_policy_or_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def simulate(cluster: Any, services: Any, settings: Any) -> Any:
        seen.append(settings.routing.policy)
        return SimpleNamespace(services=[SimpleNamespace(outcomes=0.0, service=run.service) for run in services])

    monkeypatch.setattr(trials, "simulate", simulate)
    judge_by(monkeypatch, lambda rate: 1.0)
    SimulatedTrial(problem=PROBLEM, seeds=(0,)).carries(expecting(1.0), 1.0)
    SimulatedTrial(problem=PROBLEM, seeds=(0,), settings=SimSettings()).carries(expecting(1.0), 1.0)
    assert seen == [RoutingSettings().policy, "plan"]


def test_a_service_that_is_asked_seldom_makes_no_run_long(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, lambda rate: 1.0)
    (asked,) = PROBLEM.services
    often, seldom = (replace(asked, workload=replace(asked.workload, rate=rate)) for rate in (50.0, 0.01))
    trial = SimulatedTrial(problem=replace(PROBLEM, services=(often, seldom)), seeds=(0,), seconds=20.0)
    trial.carries(2 * expecting(1.0), 1.0)
    many, few = runs[0].arrivals
    assert len(many) == pytest.approx(MOST_REQUESTS, rel=0.1)
    assert len(few) == LEAST_REQUESTS
