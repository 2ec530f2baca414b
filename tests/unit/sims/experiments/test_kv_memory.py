"""The page of KV in 8 bits: which plans are compared with which, and by the same requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2pserve.coordinator.costs.model_shape import KV_CACHE_DTYPES, model_shape
from p2pserve.sims.experiments.load import kv_memory
from p2pserve.sims.experiments.setting import PlannedCase, Scope
from p2pserve.sims.policies import PLAN


def test_a_case_has_its_kv_and_the_deadlines_of_16_bits() -> None:
    plain, eight = (
        PlannedCase(workload="coding", rate=2.0, kv_cache_dtype=dtype).problem().services[0]
        for dtype in KV_CACHE_DTYPES[:2]
    )
    assert eight.model == model_shape("llama-30b").with_kv_cache_dtype("fp8")
    assert plain.model == model_shape("llama-30b")
    assert eight.slo == plain.slo


def test_ratios_are_of_the_same_requests_and_of_equal_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {
        ("colocated", "auto"): (2.0, 4.0), ("colocated", "fp8"): (3.0, 4.0),
        ("ours", "auto"): (4.0, 8.0), ("ours", "fp8"): (5.0, 6.0),
    }  # fmt: skip

    def deploy(system: str, dtype: str) -> Any:
        return SimpleNamespace(key=(system, dtype), at=lambda: SimpleNamespace(plan=f"{system} in {dtype}"))

    def highest_rate(deployed: Any, scope: Scope, seed: int, dispatch: str) -> float:
        assert dispatch == PLAN, "by the network's router"
        return rates[deployed.key][seed]

    def find_plans(case: PlannedCase, scope: Scope) -> tuple[Any, Any]:
        return deploy("colocated", case.kv_cache_dtype), deploy("ours", case.kv_cache_dtype)

    monkeypatch.setattr(kv_memory, "find_plans", find_plans)
    monkeypatch.setattr(kv_memory, "describe_phases", str)
    monkeypatch.setattr(kv_memory, "highest_rate", highest_rate)
    page = kv_memory.kv_memory(Scope(seeds=(0, 1), seconds=7.75))
    gains, over = (table.rows for table in page.tables)
    every = {(workload, f"{scale:g} x") for workload, scale in kv_memory.CASES}
    assert {(row.workload, row.deadline) for row in gains} == every  # type: ignore[attr-defined]
    assert {(row.workload, row.deadline) for row in over} == every  # type: ignore[attr-defined]
    colocated: Any = gains[0]
    assert (colocated.system, colocated.replicas_16, colocated.replicas_8) == (
        "colocated", "colocated in auto", "colocated in fp8",
    )  # fmt: skip
    assert (colocated.rate_16, colocated.rate_8) == ("3 (2-4)", "3.5 (3-4)")
    assert colocated.rate_8_over_16 == "1.25 (1-1.5)"
    ours: Any = gains[1]
    assert ours.rate_8_over_16 == "1 (0.75-1.25)"
    both: Any = over[0]
    assert (both.both_16, both.both_8) == ("2 (2-2)", "1.58 (1.5-1.67)")
    assert both.ours_8_over_colocated_16 == "2 (1.5-2.5)"


def test_ours_is_the_best_of_three_in_a_trial_and_may_be_colocated(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = {"colocated": 3.0, "expected": 2.0, "for more": 4.0}

    def plan(name: str) -> Any:
        return SimpleNamespace(name=name, at=lambda: SimpleNamespace(max_rate=2.0))

    def planned(case: PlannedCase, steps: int | None) -> Any:
        assert case.rate == 3.0, "half more than colocated serving is expected to carry"
        return plan("for more")

    def highest_rate(deployed: Any, scope: Scope, seed: int, dispatch: str) -> float:
        assert seed not in scope.seeds, "with other requests than those that are reported"
        return carried[deployed.name]

    monkeypatch.setattr(kv_memory, "most", lambda case, steps: plan("colocated" if case.mixed_only else "expected"))
    monkeypatch.setattr(kv_memory, "planned", planned)
    monkeypatch.setattr(kv_memory, "highest_rate", highest_rate)
    case = PlannedCase(workload="coding", rate=1.0)
    found: Any = kv_memory.find_plans(case, Scope(seeds=(0,)))
    assert [one.name for one in found] == ["colocated", "for more"]
    carried["colocated"] = 5.0
    found = kv_memory.find_plans(case, Scope(seeds=(0, 1)))
    assert [one.name for one in found] == ["colocated", "colocated"]
