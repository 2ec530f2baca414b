"""The page of equal options: what is compared with what, that plans are kept, and what the page says of itself."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.coordinator.costs.model_shape import KV_CACHE_DTYPES, model_shape
from p2pserve.coordinator.plan import Phase
from p2pserve.coordinator.planning.model.problem import Group, Slice, Solution
from p2pserve.sims.experiments.load import options
from p2pserve.sims.experiments.load.options import COLOCATED, EIGHT, OPTION_SETS, OURS, SIXTEEN, make_case
from p2pserve.sims.experiments.page import KeptResults
from p2pserve.sims.experiments.setting import Deployed, PlannedCase, Scope
from p2pserve.sims.experiments.systems import IN_HOUSE_SYSTEMS
from p2pserve.sims.policies import PLAN, PREDICTED

SOLUTION: Solution = (Group((Slice(0, 2), Slice(3, 1)), Phase.MIXED),)


def test_a_case_has_its_kv_and_the_deadlines_of_16_bits() -> None:
    found = {dtype: make_case("coding", 5.0, dtype).problem().services[0] for dtype in (SIXTEEN, EIGHT)}
    whole_steps = make_case("coding", 5.0, EIGHT, 2048).problem().services[0]
    assert (found[EIGHT].step_tokens, whole_steps.step_tokens, whole_steps.slo) == (0, 2048, found[EIGHT].slo)
    assert found[EIGHT].model == model_shape("llama-30b").with_kv_cache_dtype(KV_CACHE_DTYPES[1])
    assert found[SIXTEEN].model == model_shape("llama-30b")
    assert found[EIGHT].slo == found[SIXTEEN].slo


def test_a_plan_is_chosen_once_and_kept_with_the_case_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, Scope]] = []

    def choose(system: str) -> Any:
        def chosen(case: PlannedCase, *rest: Any) -> Any:
            asked.append((system, rest[-1]))
            return SimpleNamespace(solution=SOLUTION, is_colocated=len(asked) > 5)

        return chosen

    for name in ("chosen", "best_colocated", "best_in_house"):
        monkeypatch.setattr(options, name, choose(name))
    scope, case = Scope(seeds=(0, 1), seconds=100.0), make_case("coding", 5.0, EIGHT)
    systems = (OURS, COLOCATED, *IN_HOUSE_SYSTEMS)

    def choose_all(kept: KeptResults) -> dict[str, Deployed]:
        return {system: options.choose_plan(case, system, scope, kept) for system in systems}

    plans = choose_all(KeptResults(tmp_path / "kept"))
    assert [name for name, _ in asked] == ["chosen", "chosen", "best_colocated", "best_in_house", "best_in_house"]
    assert all(each.seeds == (0,) and each.seconds < scope.seconds for _, each in asked)
    assert all((each.policy, each.challengers) == (PREDICTED, options.MORE_CHALLENGERS) for _, each in asked)
    assert all((each.starts, each.most_losses) == (options.MORE_STARTS, options.MOST_LOSSES) for _, each in asked)
    assert all(plan.solution == SOLUTION for plan in plans.values())
    assert [box.gpus for box in plans["vLLM-like"].problem.cluster.boxes] == [8]
    assert len(plans[COLOCATED].problem.cluster.boxes) > 1
    kept = KeptResults(tmp_path / "kept")
    assert {name: plan.solution for name, plan in choose_all(kept).items()} == dict.fromkeys(systems, SOLUTION)
    assert len(asked) == 5
    for system in (OURS, COLOCATED):  # what is found for ours is a colocated plan now, and counts as the best of them
        options.choose_plan(make_case("coding", 5.0, SIXTEEN), system, scope, kept)
    assert [name for name, _ in asked[5:]] == ["chosen", "chosen"]
    assert all(each.challengers == options.CHALLENGERS and each.requests == scope.requests for _, each in asked[5:])
    assert all(each.starts == 1 for _, each in asked[5:])


@pytest.mark.parametrize(("workload", "scale", "at_least"), [("coding", 3.0, 30.0), ("conversation", 10.0, 200.0)])
def test_a_trial_lasts_longer_than_answers_may_take(
    workload: str, scale: float, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []

    def chosen(case: PlannedCase, scope: Scope) -> Any:
        seconds.append(scope.seconds)
        return SimpleNamespace(solution=SOLUTION, is_colocated=True)

    monkeypatch.setattr(options, "chosen", chosen)
    case, kept = make_case(workload, scale, EIGHT), KeptResults(None)
    for most in (1000.0, 20.0):
        options.choose_plan(case, OURS, Scope(seconds=most), kept)
    assert seconds == [max(30.0, 2.0 * case.problem().services[0].slo.e2e_s), 20.0]
    assert seconds[0] >= at_least


class CountingDeployed:
    """A plan whose highest rates are made up; `key`: system and options."""

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.problem = SimpleNamespace(cluster=SimpleNamespace(usd_per_hour=14.0 if "like" in key[0] else 10.0))

    def at(self) -> Any:
        return SimpleNamespace(plan=self.key[0])


RATES: dict[tuple[str, str, str], Sequence[float]] = {
    (COLOCATED, "0 fp8", PLAN): (4.0, 8.0), (COLOCATED, "0 fp8", PREDICTED): (3.0, 3.0),
    (OURS, "0 fp8", PLAN): (12.0, 12.0), (OURS, "0 fp8", PREDICTED): (8.0, 12.0),
    (COLOCATED, "0 auto", PLAN): (1.0, 1.0), (COLOCATED, "0 auto", PREDICTED): (2.0, 2.0),
    (OURS, "0 auto", PLAN): (9.0, 9.0), (OURS, "0 auto", PREDICTED): (4.0, 4.0),
    ("DistServe-like", "0 fp8", PLAN): (28.0, 28.0), ("vLLM-like", "0 fp8", PLAN): (7.0, 7.0),
    (OURS, "2048 auto cached", PREDICTED): (3.0, 6.0), (COLOCATED, "2048 auto cached", PLAN): (1.5, 1.5),
}  # fmt: skip


def test_ours_is_by_the_default_and_what_it_is_compared_with_by_its_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def choose_plan(case: PlannedCase, system: str, *_: Any) -> Any:
        return CountingDeployed((system, f"{case.step_tokens} {case.kv_cache_dtype}"))

    def highest_rate(deployed: Any, scope: Scope, seed: int, policy: str, *, prefix_caches: bool) -> float:
        system, of = deployed.key
        return RATES.get((system, of + " cached" * prefix_caches, policy), (1.0, 1.0))[seed]

    monkeypatch.setattr(options, "choose_plan", choose_plan)
    monkeypatch.setattr(options, "describe_phases", str)
    monkeypatch.setattr(options, "highest_rate", highest_rate)
    scope = Scope(seeds=(0, 1), seconds=7.75, kept=tmp_path / "kept")
    page = options.options(scope)
    RATES.clear()
    assert options.options(scope) == page, "what was measured before is not measured again"
    equal, each, kv, dollars = (table.rows for table in page.tables)
    assert len(equal) == len(dollars) == 6
    assert len(each) == 6 * len(OPTION_SETS)
    cells: list[Any] = [row for row in each if (row.workload, row.deadline) == ("coding", "3 x")]  # type: ignore[attr-defined]
    rows = {row.options: row for row in cells}
    assert (rows["none"].colocated_rate, rows["none"].our_rate) == ("1 (1-1)", "1 (1-1)")
    caches, chunks = rows["prefix caches"], rows["chunks by deadline"]
    assert (caches.over_none, caches.ours_over_none, caches.ours_over_colocated) == (
        "1.5 (1.5-1.5)",
        "4.5 (3-6)",
        "3 (2-4)",
    )
    assert (chunks.over_none, chunks.ours_over_none, chunks.ours_over_colocated) == ("2 (2-2)", "4 (4-4)", "2 (2-2)")
    assert rows["all three"].our_rate == "1 (1-1)", "with caches is another run than without"
    first: Any = equal[0]
    assert (first.workload, first.deadline, first.target) == ("coding", "3 x", 2.0)
    assert (first.colocated, first.ours) == (COLOCATED, OURS)
    assert (first.colocated_rate, first.default_rate) == ("6 (4-8)", "10 (8-12)")
    assert first.default_over_colocated == "1.75 (1.5-2)"
    assert first.plan_over_colocated == "2.25 (1.5-3)"
    assert len(kv) == 4
    for row, rates in zip(
        kv[:2], (("2 (2-2)", "6 (4-8)", "3 (2-4)"), ("4 (4-4)", "10 (8-12)", "2.5 (2-3)")), strict=True
    ):
        shown: Any = row
        assert (shown.workload, shown.deadline) == ("coding", "10 x")
        assert (shown.rate_16, shown.rate_8, shown.rate_8_over_16) == rates
    dollar: Any = dollars[0]
    assert (dollar.ours, dollar.colocated) == pytest.approx((0.9 * 3600, 0.9 * 3600 * 6 / 10))
    assert (dollar.distserve_like, dollar.vllm_like) == pytest.approx((0.9 * 7200, 0.9 * 1800))
    assert dollar.ours_over_better_a100 == pytest.approx(0.5)
