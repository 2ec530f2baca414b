"""The coordinator moves a replica that stays borrowed by the other pool, and plans keep to that for a while."""

from __future__ import annotations

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Demand, Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.repair.repurposing import RepurposeSettings
from p2pserve.coordinator.routing.policies import NETWORK_POLICIES, lends_replicas
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.planning.coordination import PlanningTask
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.view import NetworkView

from .test_coordination import OWN, view_of

P, D = Phase.PREFILL, Phase.DECODE
LEADER = (OWN, 1)
SETTINGS = RepurposeSettings()
NOBODY = Demand(requests_s=0.0, arrival_cv=1.0, lengths=((100, 20),))
BUSY, CALM = 40, 1


def split_view() -> NetworkView:
    """Two prompt machines, a and b, and two token machines, c and d; nobody asks, so nobody plans for traffic."""
    view = view_of("x", "x", "x", "x")
    view.adverts = {peer: msgspec.structs.replace(each, demand=NOBODY) for peer, each in view.adverts.items()}
    phases = {"a": P, "b": P, "c": D, "d": D}
    plan = Plan(
        epoch=1,
        version=9,
        service="x",
        codec="raw",
        why=(),
        replicas=tuple(
            Replica(id=name, phase=phase, stages=(Stage(peer=name, tp=1, first_layer=0, last_layer=4),))
            for name, phase in phases.items()
        ),
        pairings=tuple(Pairing(prefill=one, decode=two, weight=0.25) for one in "ab" for two in "cd"),
    )
    view.plans["x"] = plan
    return view


def report(view: NetworkView, borrowed: str, requests: int) -> None:
    for peer, each in view.adverts.items():
        is_prompts = peer in "ab" or peer in borrowed
        stats = EngineStats(
            running=requests,
            waiting=0,
            kv_usage=0.1,
            kv_free_tokens=900,
            pending_prefill_tokens=100 * requests if is_prompts else requests,
            decodes=0 if peer in "ab" else requests,
        )
        view.adverts[peer] = msgspec.structs.replace(each, stats=stats)


def watch(coordinator: Coordinator, view: NetworkView, borrowed: str, until: float) -> PlanningTask | None:
    """Reports every ten seconds, busy ones and then a quiet one: what is planned then."""
    for second in range(0, int(until), 10):
        report(view, borrowed, BUSY)
        coordinator.next(view, LEADER, float(second))
    report(view, "", CALM)
    return coordinator.next(view, LEADER, until)


@pytest.mark.parametrize("leads", [True, False])
def test_a_replica_that_stays_borrowed_is_planned_with_its_other_phase_and_only_by_the_elected(leads: bool) -> None:
    coordinator, view = Coordinator(OWN, "raw", lends_replicas=True), split_view()
    if not leads:
        for second in range(0, 700, 10):
            report(view, "d" if second < 690 else "", BUSY if second < 690 else CALM)
            assert coordinator.next(view, (PeerId("b"), 1), float(second)) is None
        return
    task = watch(coordinator, view, "d", 700.0)
    assert task is not None
    assert {box.peer: box.phase for box in task.boxes} == {"a": None, "b": None, "c": None, "d": P}
    assert task.is_urgent
    plan = coordinator.settle(task, task.run(lambda: False), view, LEADER, 700.0)
    assert plan is not None
    assert plan.phase_of("d") is P
    assert plan.why[0] == "d is moved to prefill: 1 of 4 replicas stayed borrowed by the other pool"
    assert view.consider_plan(plan)
    held = coordinator.next(view, LEADER, 710.0)
    assert held is None, "the plan has it as it is to be"
    free = coordinator.next(view, LEADER, 700.0 + SETTINGS.hold_s)
    assert free is not None
    assert {box.phase for box in free.boxes} == {None}, "the planner may choose again"


def test_an_owners_pin_stands_above_the_pools() -> None:
    coordinator, view = Coordinator(OWN, "raw", lends_replicas=True), split_view()
    view.adverts[PeerId("d")] = msgspec.structs.replace(view.adverts[PeerId("d")], phase=D)
    task = watch(coordinator, view, "d", 700.0)
    assert task is None or {box.peer: box.phase for box in task.boxes}["d"] is D


def test_where_gateways_borrow_nobody_the_same_reports_move_nobody() -> None:
    coordinator, view = Coordinator(OWN, "raw"), split_view()
    task = watch(coordinator, view, "d", 700.0)
    assert task is None or all(box.phase is None for box in task.boxes)


def test_the_pools_of_splitwise_are_the_ones_that_lend() -> None:
    assert [name for name in NETWORK_POLICIES if lends_replicas(name)] == ["splitwise"]
    assert not lends_replicas("no such policy")
