"""Boxes that take other parts of the plan, one step after the other, with nothing but adverts."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Plan, PlanError, Stage
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import GroupStages, Regrouping, RegroupingStep
from p2pserve.coordinator.regrouping.adoption import AdoptionSettings
from p2pserve.coordinator.regrouping.refusals import RefusalSettings
from p2pserve.coordinator.regrouping.steps import FAILURES, RegroupProposal
from p2pserve.node.adverts import parts_of
from p2pserve.node.planning.manifest import describe_plan, read_plan
from p2pserve.node.planning.messages import RegroupOrder
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.planning.worker import PlannerAnswer, PlannerTask, answer
from p2pserve.node.view import NetworkView

from .test_coordination import OWN, view_of
from .test_repair import LEADER, publish, started

LAYERS = 4
PEERS = ("a", "b", "c", "d")


def group(*peers: str) -> GroupStages:
    share = LAYERS // len(peers)
    return tuple(
        Stage(peer=peer, tp=1, first_layer=number * share, last_layer=(number + 1) * share)
        for number, peer in enumerate(peers)
    )


A, B, C, D = (group(peer) for peer in PEERS)
AB, CD = group("a", "b"), group("c", "d")


def groups_of(plan: Plan) -> set[GroupStages]:
    return {replica.stages for replica in plan.replicas}


def take_part(view: NetworkView, *groups: GroupStages, state: str = "ready", **engine: Any) -> None:
    """The boxes of these groups say that their engines are a part of them."""
    for each in groups:
        for stage in each:
            advert = view.adverts[PeerId(stage.peer)]
            assert advert.engine is not None
            told = {"stages": each if len(each) > 1 else (), "state": state, "starts": advert.engine.starts + 1}
            changed = msgspec.structs.replace(advert.engine, **(told | engine))
            view.adverts[PeerId(stage.peer)] = msgspec.structs.replace(advert, engine=changed)


def served(plan: Plan) -> set[str]:
    """The replicas that get requests."""
    return {end for pair in plan.pairings for end in (pair.prefill, pair.decode)}


def order(coordinator: Coordinator, view: NetworkView, *groups: GroupStages) -> None:
    coordinator.order(RegroupOrder(service="x", groups=groups, before=1.0, after=2.0, reload_s=30.0), view, LEADER)


def followed(coordinator: Coordinator, view: NetworkView, now: float) -> Plan:
    plan = publish(coordinator, view, now)
    assert plan is not None
    return plan


def test_one_step_loads_at_a_time_and_the_others_serve_meanwhile() -> None:
    coordinator, view = started(*"xxxx")
    order(coordinator, view, AB, CD)
    first = followed(coordinator, view, 1.0)
    assert groups_of(first) == {AB, C, D}
    assert served(first) == {"c", "d"}
    take_part(view, AB, state="loading", failures=1)
    assert publish(coordinator, view, 2.0) is None
    take_part(view, AB)
    second = followed(coordinator, view, 3.0)
    assert second.regrouping is not None
    assert (second.regrouping.done, groups_of(second)) == (1, {AB, CD})
    assert "a" in served(second)
    assert "c" not in served(second)
    take_part(view, CD)
    last = followed(coordinator, view, 4.0)
    assert (last.regrouping, groups_of(last), served(last)) == (None, {AB, CD}, {"a", "c"})
    # Nothing goes back: the groups are what runs now, and nobody is held for having been started anew.
    for now in (5.0, 30.0, 60.0):
        again = publish(coordinator, view, now)
        assert again is None or groups_of(again) == {AB, CD}


def test_a_pipeline_becomes_replicas_again() -> None:
    coordinator, view = started(*"xxx")
    order(coordinator, view, AB)
    followed(coordinator, view, 1.0)
    take_part(view, AB)
    assert groups_of(followed(coordinator, view, 2.0)) == {AB, C}
    order(coordinator, view, A, B, C)
    split = followed(coordinator, view, 3.0)
    assert (groups_of(split), served(split)) == ({A, B, C}, {"c"})
    take_part(view, A, B, state="restarting")
    assert publish(coordinator, view, 4.0) is None
    take_part(view, A, B)
    assert served(followed(coordinator, view, 5.0)) == {"a", "b", "c"}


def test_all_boxes_may_load_at_once_and_requests_wait() -> None:
    coordinator, view = started(*"xx")
    order(coordinator, view, AB)
    plan = followed(coordinator, view, 1.0)
    assert (groups_of(plan), served(plan)) == ({AB}, {"a"})
    # Before either box has even begun: they finish what they have.
    assert view.hopeful("x")
    assert not view.serving(plan.replicas[0], "x")
    take_part(view, AB, state="loading")
    assert publish(coordinator, view, 2.0) is None
    take_part(view, AB)
    assert followed(coordinator, view, 3.0).regrouping is None


def test_a_box_that_cannot_take_its_part_says_why_and_is_planned_around() -> None:
    coordinator, view = started(*"xxxx")
    order(coordinator, view, AB, CD)
    followed(coordinator, view, 1.0)
    take_part(view, AB, state="restarting", failures=FAILURES, detail="no memory for that")
    back = followed(coordinator, view, 2.0)
    assert groups_of(back) == {A, B, C, D}
    assert served(back) == {"c", "d"}
    take_part(view, A, B)
    done = followed(coordinator, view, 3.0)
    assert (done.regrouping, groups_of(done), served(done)) == (None, {A, B, C, D}, set(PEERS))
    assert any("no memory for that" in line and name_of("a") in line for line in done.why)
    assert publish(coordinator, view, 4.0) is None
    # It is told of in the plan, and looked around by whoever coordinates, until it may be asked again or has left.
    (refused,) = done.refused
    assert (refused.peer, "no memory for that" in refused.reason) == ("b", True)
    later = Coordinator(OWN, "raw")
    for each, leader in ((coordinator, LEADER), (later, (OWN, 2))):
        each.seek(view, leader, 3600.0)
        task = each.seek(view, leader, 7200.0)
        assert task is not None
        assert task.keeping == ("b",)
    hold_s = RefusalSettings().first_s
    assert coordinator.wake_at(1.0 + hold_s) == 2.0 + hold_s
    free = followed(coordinator, view, 2.0 + hold_s)
    assert (free.refused, groups_of(free)) == ((), {A, B, C, D})


@pytest.mark.parametrize("leaves", [False, True])
def test_a_box_that_is_lost_on_the_way_leaves_the_others_as_they_were(leaves: bool) -> None:
    coordinator, view = started(*"xxx")
    order(coordinator, view, AB)
    followed(coordinator, view, 1.0)
    take_part(view, AB, state="loading")
    if leaves:
        view.adverts[PeerId("b")] = msgspec.structs.replace(view.adverts[PeerId("b")], draining=True)
    else:
        del view.adverts[PeerId("b")]
    followed(coordinator, view, 2.0)
    take_part(view, A)
    for now in (3.0, 4.0):
        publish(coordinator, view, now)
    assert view.plan is not None
    assert (view.plan.regrouping, groups_of(view.plan)) == (None, {A, C})


def test_a_pipeline_whose_box_is_lost_later_becomes_replicas_that_load_by_themselves() -> None:
    coordinator, view = started(*"xxx")
    order(coordinator, view, AB)
    followed(coordinator, view, 1.0)
    take_part(view, AB)
    followed(coordinator, view, 2.0)
    take_part(view, AB, state="restarting")  # one that is a stage starts again with its head
    assert publish(coordinator, view, 3.0) is None
    del view.adverts[PeerId("b")]
    assert groups_of(followed(coordinator, view, 4.0)) == {A, C}


def test_a_coordinator_that_is_elected_on_the_way_goes_on() -> None:
    coordinator, view = started(*"xxxx")
    order(coordinator, view, AB, CD)
    followed(coordinator, view, 1.0)
    take_part(view, AB)
    next_one = Coordinator(OWN, "raw")
    task = next_one.next(view, (OWN, 2), 2.0)
    assert task is not None
    plan = next_one.settle(task, task.run(lambda: False), view, (OWN, 2), 2.0)
    assert plan is not None
    assert (plan.epoch, groups_of(plan)) == (2, {AB, CD})
    assert plan.regrouping is not None
    assert plan.regrouping.done == 1


def test_an_order_is_refused_by_who_does_not_lead_and_while_another_is_under_way() -> None:
    coordinator, view = started(*"xxxx")
    wanted = RegroupOrder(service="x", groups=(AB,))
    with pytest.raises(PlanError, match="does not coordinate"):
        coordinator.order(wanted, view, (PeerId("b"), 1))
    with pytest.raises(PlanError, match="no plan for y"):
        coordinator.order(msgspec.structs.replace(wanted, service="y"), view, LEADER)
    coordinator.order(wanted, view, LEADER)
    for _ in range(2):
        with pytest.raises(PlanError, match="on their way"):
            coordinator.order(wanted, view, LEADER)
        publish(coordinator, view, 1.0)


def test_a_plan_with_its_regrouping_survives_the_wire_and_one_of_an_older_release_has_none() -> None:
    coordinator, view = started(*"xxxx")
    without = view.plan
    order(coordinator, view, AB)
    plan = followed(coordinator, view, 1.0)
    assert read_plan(*describe_plan(plan)) == plan
    assert without is not None
    told = msgspec.to_builtins(without)
    del told["regrouping"]
    assert msgspec.convert(told, Plan) == without


def test_only_boxes_that_are_ready_alone_count_for_themselves() -> None:
    """One that loads in a regrouping is neither a box that has failed nor one that is ready."""
    coordinator, view = started(*"xxx")
    order(coordinator, view, AB)
    followed(coordinator, view, 1.0)
    take_part(view, AB, state="loading")
    signs = view.signs()
    assert [signs[peer].leaving for peer in "abc"] == [True, True, False]
    assert parts_of(view_of("x").adverts)["a"].is_ready


def proposal(*groups: GroupStages, after: float = 9.0) -> RegroupProposal:
    undo = tuple(each for each in (A, B, C, D) if any(each[0].peer == stage.peer for one in groups for stage in one))
    way = Regrouping(steps=(RegroupingStep(form=groups, undo=undo),), before=5.0, after=after)
    return RegroupProposal(
        regrouping=way, groups=groups, rate=10.0, light=5.0, meanwhile=(5.0,), reload_s=(30.0,), pays=True
    )


def test_a_gain_that_lasts_is_begun_with_by_itself_and_then_nothing_for_long() -> None:
    coordinator, view = started(*"xxxx")
    settings, now = AdoptionSettings(), 0.0
    for look in range(settings.looks):
        assert coordinator.seek(view, LEADER, now) is None
        now += settings.look_s
        task = coordinator.seek(view, LEADER, now)
        assert task is not None
        assert task.demands
        begun = coordinator.consider("x", proposal(AB), view, LEADER, now)
        assert (begun is not None) == (look == settings.looks - 1)
    assert groups_of(followed(coordinator, view, now)) == {AB, C, D}
    assert coordinator.seek(view, LEADER, now + 10.0 * settings.look_s) is None  # while it is under way
    take_part(view, AB)
    followed(coordinator, view, now + 1.0)
    assert coordinator.seek(view, LEADER, now + settings.rest_s) is None
    assert coordinator.seek(view, LEADER, now + 1.0 + settings.rest_s) is not None


def test_who_does_not_lead_and_who_is_not_asked_does_not_look() -> None:
    coordinator, view = started(*"xxxx")
    coordinator.seek(view, LEADER, 0.0)
    assert coordinator.seek(view, (PeerId("b"), 1), 1000.0) is None
    assert coordinator.seek(view, None, 1000.0) is None
    view.adverts[OWN] = msgspec.structs.replace(view.adverts[OWN], demand=None)
    assert coordinator.seek(view, LEADER, 1000.0) is None


def test_what_is_looked_at_is_what_is_asked_for() -> None:
    """Of four boxes with room for all that is asked nothing is joined; and the look ends when it is told to."""
    coordinator, view = started(*"xxxx")
    coordinator.seek(view, LEADER, 0.0)
    task = coordinator.seek(view, LEADER, 1000.0)
    assert task is not None
    assert task.propose(lambda: True) is None
    assert answer(PlannerTask(task=task, search_s=5.0, seeks_groups=True), lambda: False) == PlannerAnswer()
