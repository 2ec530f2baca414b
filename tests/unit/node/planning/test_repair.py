"""When the coordinator plans at once, without whom, and what it says of that."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Demand, Plan
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.repair.damping import DampingSettings
from p2pserve.coordinator.repair.ending import PLAN_WITHOUT_S
from p2pserve.node.messages import Advert
from p2pserve.node.planning.coordination import LOOK_S, REFINE_S, URGENT_S
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.settings import WAN
from p2pserve.node.view import NetworkView

from .test_coordination import OWN, advert, view_of

LEADER = (OWN, 1)
B, C = PeerId("b"), PeerId("c")
ASKED = Demand(requests_s=5.0, arrival_cv=1.0, lengths=((100, 20),))


def changed(each: Advert, **changes: Any) -> Advert:
    """With other figures of its engine, or other fields."""
    assert each.engine is not None
    engine = {name: changes.pop(name) for name in ("state", "starts", "tflops") if name in changes}
    return msgspec.structs.replace(each, engine=msgspec.structs.replace(each.engine, **engine), **changes)


def publish(coordinator: Coordinator, view: NetworkView, now: float) -> Plan | None:
    """What the agent does: plan what there is to plan, and follow it."""
    task = coordinator.next(view, LEADER, now)
    if task is None:
        return None
    plan = coordinator.settle(task, task.run(lambda: False), view, LEADER, now)
    if plan is not None:
        assert view.consider_plan(plan)
    return plan


def started(*services: str) -> tuple[Coordinator, NetworkView]:
    """A coordinator, and a network that has a plan since 0 s and is asked."""
    coordinator, view = Coordinator(OWN, "raw"), view_of(*services)
    view.adverts[OWN] = msgspec.structs.replace(view.adverts[OWN], demand=ASKED)
    assert publish(coordinator, view, 0.0) is not None
    return coordinator, view


def flap(coordinator: Coordinator, view: NetworkView, peer: PeerId, now: float) -> float:
    """The engine of a box ends and serves again; returns the moment after that."""
    engine = view.adverts[peer].engine
    assert engine is not None
    view.adverts[peer] = changed(view.adverts[peer], state="restarting")
    publish(coordinator, view, now)
    view.adverts[peer] = changed(view.adverts[peer], state="ready", starts=engine.starts + 1)
    publish(coordinator, view, now + 1.0)
    return now + 2.0


@pytest.mark.parametrize(
    ("news", "said"),
    [
        ({"tflops": 0.5}, "takes 2.0 times as long as before"),
        ({"demand": msgspec.structs.replace(ASKED, requests_s=50.0)}, "requests/s"),
        ({"usd_per_hour": 3.0}, "costs $3/h"),
    ],
)
def test_urgent_news_is_planned_with_a_second_after_the_last_plan(news: dict[str, Any], said: str) -> None:
    coordinator, view = started("x", "x", "x")
    view.adverts[OWN] = changed(view.adverts[OWN], **news)
    assert coordinator.next(view, LEADER, URGENT_S / 2) is None
    assert coordinator.wake_at(URGENT_S / 2) == URGENT_S  # the look is made up for
    task = coordinator.next(view, LEADER, URGENT_S)
    assert task is not None
    assert said in task.news
    assert coordinator.next(view, LEADER, 2.5 * URGENT_S) is None  # it is known now


def test_noise_waits_for_its_turn_and_looks_are_not_made_all_the_time() -> None:
    coordinator, view = started("x", "x")
    view.adverts[B] = changed(view.adverts[B], tflops=0.9)
    assert coordinator.next(view, LEADER, URGENT_S) is None
    assert coordinator.wake_at(URGENT_S) == WAN.quiet_s
    view.adverts[B] = changed(view.adverts[B], tflops=0.4)
    assert coordinator.next(view, LEADER, URGENT_S + LOOK_S / 2) is None
    assert coordinator.wake_at(URGENT_S + LOOK_S / 2) == URGENT_S + LOOK_S
    assert coordinator.next(view, LEADER, URGENT_S + LOOK_S) is not None


def test_who_leads_no_more_is_not_woken_for_looks_of_the_past() -> None:
    coordinator, view = started("x", "x")
    view.adverts[B] = changed(view.adverts[B], tflops=0.4)
    assert coordinator.next(view, LEADER, URGENT_S / 2) is None
    assert coordinator.next(view, (B, 2), 2 * URGENT_S) is None
    assert coordinator.wake_at(2 * URGENT_S) > 2 * URGENT_S
    assert coordinator.wake_at(2 * WAN.quiet_s) > 2 * WAN.quiet_s


def test_after_a_plan_that_was_made_at_once_it_is_searched_for_longer_once() -> None:
    coordinator, view = started("x", "x")
    view.adverts[C] = advert("x")
    task = coordinator.next(view, LEADER, 10.0)
    assert task is not None
    assert task.is_urgent
    plan = coordinator.settle(task, task.run(lambda: True), view, LEADER, 10.5)
    assert plan is not None
    view.plans[plan.service] = plan
    assert coordinator.next(view, LEADER, 11.0) is None
    assert coordinator.wake_at(11.0) == 10.0 + REFINE_S
    again = coordinator.next(view, LEADER, 10.0 + REFINE_S)
    assert again is not None
    assert not again.is_urgent
    assert coordinator.settle(again, plan, view, LEADER, 15.0) is None
    assert coordinator.next(view, LEADER, 10.0 + 2 * REFINE_S + WAN.quiet_s) is None


def test_while_nobody_asks_no_figure_is_urgent() -> None:
    coordinator, view = started("x", "x")
    quiet = msgspec.structs.replace(ASKED, requests_s=0.0)
    view.adverts[OWN] = changed(view.adverts[OWN], demand=quiet, tflops=0.1)
    assert coordinator.next(view, LEADER, URGENT_S) is None


def test_a_plan_that_is_made_at_once_says_why() -> None:
    coordinator, view = started("x", "x", "x")
    view.adverts[OWN] = changed(view.adverts[OWN], tflops=0.01)
    plan = publish(coordinator, view, URGENT_S)
    assert plan is not None
    assert plan.why[0].startswith(f"planned at once: the engine of {name_of(OWN)} takes 100.0 times as long")


def test_a_box_whose_engine_flaps_gets_no_requests_for_a_while_and_the_plan_says_why() -> None:
    coordinator, view = started("x", "x", "x")
    now = flap(coordinator, view, B, 10.0)
    assert view.plan is not None
    assert B in view.plan.peers  # once is no flapping
    now = flap(coordinator, view, B, now)
    assert view.plan is not None
    assert B not in view.plan.peers
    (line,) = (why for why in view.plan.why if "failed repeatedly" in why)
    assert line.startswith(f"{name_of(B)} gets no requests for ")
    held_s = DampingSettings().held_for_s(2.0)
    while now < 20.0 + held_s:  # as the agent does
        now = coordinator.wake_at(now)
        publish(coordinator, view, now)
    assert B in view.plan.peers
    assert not any("failed repeatedly" in why for why in view.plan.why)


def test_a_box_that_is_lost_and_back_again_and_again_is_held_and_one_that_leaves_is_not() -> None:
    for leaves in (False, True):
        coordinator, view = started("x", "x", "x")
        for now in (10.0, 20.0, 30.0):
            if leaves:
                view.adverts[C] = msgspec.structs.replace(view.adverts[C], draining=True)
                publish(coordinator, view, now)
            del view.adverts[C]
            publish(coordinator, view, now + 1.0)
            view.adverts[C] = advert("x")
            publish(coordinator, view, now + 2.0)
        assert view.plan is not None
        assert (C in view.plan.peers) is leaves


def test_the_only_box_is_used_however_often_it_fails() -> None:
    coordinator, view = started("x")
    now = 10.0
    for _ in range(6):
        now = flap(coordinator, view, OWN, now)
    task = Coordinator(OWN, "raw").next(view, LEADER, now)
    assert task is not None
    assert task.held == ()


def test_boxes_that_are_held_are_planned_with_where_no_others_can_serve() -> None:
    coordinator, view = started("x", "x")
    task = coordinator.next(view, LEADER, WAN.quiet_s) or Coordinator(OWN, "raw").next(view, LEADER, 0.0)
    assert task is not None
    held = msgspec.structs.replace(task, held=(OWN, B), previous=None).run(lambda: False)
    assert held is not None
    assert set(held.peers) == {OWN, B}


def test_a_box_that_did_not_answer_twice_is_held() -> None:
    coordinator, view = started("x", "x", "x")
    for now in (5.0, 6.0):
        coordinator.on_fault(B, "it did not answer", now)
    plan = publish(coordinator, view, 7.0)
    assert plan is not None
    assert B not in plan.peers
    assert any("at last: it did not answer" in why for why in plan.why)


def test_a_box_whose_engine_hangs_is_planned_without_at_once() -> None:
    coordinator, view = started("x", "x")
    view.adverts[B] = msgspec.structs.replace(view.adverts[B], hung=True)
    plan = publish(coordinator, view, 0.1)
    assert plan is not None
    assert B not in plan.peers


def test_a_box_that_is_about_to_end_is_planned_without_before_it_drains() -> None:
    coordinator, view = started("x", "x")
    for ends_in_s, is_used in ((3600.0, True), (PLAN_WITHOUT_S + 4.0, True), (PLAN_WITHOUT_S, False)):
        view.adverts[B] = msgspec.structs.replace(view.adverts[B], ends_in_s=ends_in_s)
        publish(coordinator, view, 0.1)
        assert view.plan is not None
        assert (B in view.plan.peers) is is_used
        assert view.serving(view.plan.replicas[0], "x")


def test_a_task_is_out_of_date_when_boxes_come_or_go_and_not_when_figures_move() -> None:
    coordinator, view = Coordinator(OWN, "raw"), view_of("x", "x")
    task = coordinator.next(view, LEADER, 0.0)
    assert task is not None
    assert not coordinator.is_outdated(task, view, LEADER, 0.1)
    view.adverts[B] = changed(view.adverts[B], tflops=0.1)
    assert not coordinator.is_outdated(task, view, LEADER, 0.2)
    del view.adverts[B]
    assert coordinator.is_outdated(task, view, LEADER, 0.3)
    assert coordinator.is_outdated(task, view, None, 0.3)


def test_faults_are_forgotten_at_the_latest_after_the_longest_hold() -> None:
    settings = DampingSettings()
    coordinator, view = started("x", "x", "x")
    now = 10.0
    for _ in range(20):
        now = flap(coordinator, view, B, now)
    assert coordinator.wake_at(now) <= now + WAN.quiet_s
    now += settings.held_for_s(settings.most)
    publish(coordinator, view, now)
    assert view.plan is not None
    assert B in view.plan.peers
