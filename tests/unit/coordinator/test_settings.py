"""Settings of network plans pull the way that their description says."""

from typing import Any

import pytest

from p2pserve.coordinator import BoxView, Plan
from p2pserve.coordinator.capacity import KvCodec
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.coordinator.network_plan import plan_network
from p2pserve.coordinator.settings import NetworkPlanSettings

MODEL = ModelShape(
    name="m", layers=8, hidden=512, heads=8, kv_heads=8, head_dim=64, intermediate=2048, vocabulary=32000
)  # fmt: skip


def box(peer: str, tflops: float, gbps: float) -> BoxView:
    return BoxView(
        peer=peer, service="s", model=MODEL, fits=8, ready=True, draining=False, compute_tflops=tflops,
        memory_gbps=gbps, memory_gib=24.0, kv_tokens=50_000,
    )  # fmt: skip


def plan_of(*boxes: BoxView, previous: Plan | None = None, **settings: Any) -> Plan:
    found = plan_network(
        boxes, (), (), service="s", epoch=1, version=1 if previous else 0, previous=previous, codec=KvCodec("kv4", 4.5),
        settings=NetworkPlanSettings(**settings) if settings else None,
    )  # fmt: skip
    assert found is not None
    return found


def weights(plan: Plan) -> dict[str, float]:
    return {
        replica.id: sum(pair.weight for pair in plan.pairings if pair.decode == replica.id) for replica in plan.replicas
    }


BEFORE = (box("a", 50.0, 500.0), box("b", 50.0, 500.0), box("c", 50.0, 500.0))
AFTER = (box("a", 50.0, 500.0), box("b", 50.0, 500.0), box("c", 10.0, 100.0))  # one of them is five times slower now


def test_without_settings_the_defaults_hold() -> None:
    assert plan_of(*BEFORE) == plan_of(*BEFORE, margin=NetworkPlanSettings().margin)


def test_shares_move_only_by_more_than_is_worth_a_plan() -> None:
    before = plan_of(*BEFORE)
    patient = {"share_change": 2.0, "margin": 2.0, "budget_factor": 100.0}
    assert plan_of(*AFTER, previous=before, **patient) is before
    moved = plan_of(*AFTER, previous=before)
    assert moved is not before
    assert weights(moved)["c"] < weights(before)["c"]


def test_with_no_hysteresis_a_plan_of_the_same_boxes_is_still_the_same() -> None:
    before = plan_of(*BEFORE)
    assert plan_of(*BEFORE, previous=before) is before
    assert plan_of(*BEFORE, previous=before, share_change=0.0) is before


def test_a_margin_that_nothing_gains_keeps_every_phase() -> None:
    before = plan_of(*BEFORE)
    kept = plan_of(*AFTER, previous=before, margin=10.0)
    assert [replica.phase for replica in kept.replicas] == [replica.phase for replica in before.replicas]


@pytest.mark.parametrize("factor", [1.01, 1000.0])
def test_budgets_follow_when_they_are_off_by_the_factor(factor: float) -> None:
    before = plan_of(*BEFORE)
    after = plan_of(*AFTER, previous=before, budget_factor=factor, margin=10.0)
    budgets = [next(item.step_tokens for item in plan.replicas if item.id == "c") for plan in (before, after)]
    assert (budgets[1] == budgets[0]) is (factor > 10.0)


def test_fewer_steps_find_a_plan_all_the_same() -> None:
    assert plan_of(*BEFORE, least_steps=1, most_steps=1, climbed_starts=1).replicas
