"""The page of expectations: what is held against what, and how it is counted."""

from typing import Any

import pytest

from p2pserve.sims.experiments.load import expectations
from p2pserve.sims.experiments.load.expectations import FIGURES, KeptExpectation
from p2pserve.sims.experiments.setting import PlannedCase, Scope, planned
from p2pserve.sims.experiments.systems import TRIALS
from p2pserve.sims.results.expectations import DRAW
from p2pserve.sims.results.trials import SimulatedTrial

CASE = PlannedCase(workload="coding", rate=2.0, boxes=2)


def kept(estimated: float, expected: float) -> KeptExpectation:
    """Every figure of a plan, over simulated ones of 2."""
    figures = [dict.fromkeys(FIGURES, 2.0 * ratio) for ratio in (estimated, expected, 1.0)]
    return KeptExpectation(
        case=CASE, plan="2M", rate=1.5, estimated=figures[0], expected=figures[1], simulated=figures[2]
    )  # fmt: skip


def test_figures_within_a_tenth_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        expectations, "kept_expectations", lambda scope: (kept(1.2, 1.05), kept(0.95, 0.8), kept(1.3, 1.09))
    )
    page = expectations.expectations(Scope(seeds=(0, 1)))
    within, plans = (table.rows for table in page.tables)
    assert len(within) == len(FIGURES)
    first: Any = within[0]
    assert (first.figure, first.estimated, first.expected) == ("attainment", "1 of 3", "2 of 3")
    assert (first.least_expected, first.most_expected) == (pytest.approx(0.8), pytest.approx(1.09))
    row: Any = plans[0]
    assert (row.deadline, row.plan, row.rate) == ("10 x", "2M", 1.5)
    assert row.highest_rate == row.tpot_p90 == "2 (1.20, 1.05)"
    assert "within 10 % in 12 of 18 figures, in all six of 2 of 3 plans; estimated and simulated in 6 of 18" in (
        " ".join(page.markdown().split())
    )


def test_a_plan_is_asked_for_a_part_of_what_it_carries_and_simulated_with_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[bool, int]] = []

    class Trial(SimulatedTrial):
        def run(self, proposals: Any, factor: float, seed: int) -> Any:
            ran.append((self.is_even, seed))
            return SimulatedTrial.run(self, proposals, factor, seed)

    monkeypatch.setattr(expectations, "SimulatedTrial", Trial)
    monkeypatch.setattr("p2pserve.sims.results.expectations.SimulatedTrial", Trial)
    deployed = planned(CASE, 20)
    found = expectations.look_at(CASE, deployed, Scope(seeds=(0, 1), requests=40))
    assert found.rate == pytest.approx(0.8 * deployed.at().max_rate)
    assert {seed for is_even, seed in ran if is_even} == {DRAW}
    assert {seed for is_even, seed in ran if not is_even} == {TRIALS, TRIALS + 1}
    assert found.estimated["attainment"] == deployed.at(found.rate).attainment
    assert set(found.expected) == set(found.simulated) == set(FIGURES)
    assert all(value > 0.0 for value in found.simulated.values())
