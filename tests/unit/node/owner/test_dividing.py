"""What a node makes of a plan that wants its machine divided anew."""

from typing import Any

import msgspec
import pytest

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.plan import BoxRecut, Regrouping, RegroupingStep
from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer
from p2pserve.node.owner.dividing import DividedBox, DivisionDesk, find_wanted, refuse_cut

OFFERS = tuple(CutOffer(replicas=number, tp=4 // number, longest=8192) for number in (1, 2, 4))
DIVISION = BoxDivision(head="a", nodes=("a",), offers=OFFERS)
ALONE = (Stage(peer="a", tp=4, first_layer=0, last_layer=8),)


def plan_of(recut: BoxRecut | None) -> Plan:
    way = Regrouping(steps=(RegroupingStep(form=(ALONE,), recut=recut),)) if recut is not None else None
    return Plan(
        epoch=1, version=1, service="x", replicas=(Replica(id="a", phase=Phase.MIXED, stages=ALONE),),
        pairings=(Pairing(prefill="a", decode="a", weight=1.0),), codec="raw", why=(), regrouping=way,
    )  # fmt: skip


def wanting(replicas: int) -> Plan:
    return plan_of(BoxRecut(head="a", replicas=replicas, was=8))


class Heard:
    """A node, what it tells the command that runs it, and how often it has news for others."""

    def __init__(self, own: str = "a", **changes: Any) -> None:
        self.told: list[dict[str, Any]] = []
        self.news = 0
        box = msgspec.structs.replace(DividedBox(division=DIVISION), **changes)
        self.desk = DivisionDesk(own, box, self.told.append, self._note_news)

    def _note_news(self) -> None:
        self.news += 1


def test_a_cut_that_is_offered_is_wanted_once() -> None:
    node = Heard()
    node.desk.follow(None, 0.0)
    node.desk.follow(plan_of(None), 0.0)
    assert node.told == []
    for now in (1.0, 2.0):
        node.desk.follow(wanting(4), now)
    assert node.told == [{"recut": 4}]
    assert node.desk.division == DIVISION
    node.desk.follow(plan_of(None), 3.0)
    node.desk.follow(wanting(4), 4.0)  # another step of another plan
    assert node.told == [{"recut": 4}, {"recut": 4}]


def test_what_runs_already_and_what_others_are_to_do_is_no_wish() -> None:
    assert find_wanted(wanting(1), "a", DIVISION) is None
    assert find_wanted(wanting(4), "b", DIVISION) is None
    assert find_wanted(wanting(4), "b", BoxDivision(head="a")) is None
    wanted = find_wanted(wanting(4), "a", DIVISION)
    assert wanted is not None
    assert wanted.replicas == 4


@pytest.mark.parametrize(
    ("replicas", "now", "why"),
    [
        (3, 1000.0, "its owner does not offer 3 nodes"),
        (4, 400.0, "may be again in 100 s"),
        (4, 500.0, ""),
    ],
)
def test_the_owner_bounds_what_a_plan_can_want(replicas: int, now: float, why: str) -> None:
    found = refuse_cut(DividedBox(division=DIVISION, not_before=500.0), replicas, now)
    assert found.endswith(why)
    assert bool(found) == bool(why)


def test_a_wish_that_is_refused_is_told_to_others_until_the_step_is_over() -> None:
    node = Heard(not_before=500.0)
    for now in (400.0, 401.0):
        node.desk.follow(wanting(4), now)
    assert (node.told, node.news, node.desk.division.refused) == ([], 1, 4)
    assert "a short while ago" in node.desk.division.why
    node.desk.follow(plan_of(None), 402.0)
    assert (node.desk.division, node.news) == (DIVISION, 2)


def test_a_cut_that_has_just_failed_is_not_tried_again_before_that_is_known() -> None:
    failed = msgspec.structs.replace(DIVISION, refused=4, why="node-3: no memory")
    node = Heard(division=failed)
    node.desk.follow(None, 0.0)
    node.desk.follow(wanting(4), 1.0)
    assert (node.told, node.desk.division) == ([], failed)


def test_that_the_engine_serves_is_told_once() -> None:
    node = Heard()
    for _ in range(2):
        node.desk.note_ready()
    assert node.told == [{"ready": True}]
