"""Boxes that host several services: what their nodes are given, and how they get from one placement to the next."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from p2pserve.coordinator import Demand
from p2pserve.coordinator.costs.gpus import gpu_table
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.placement.values import PlacementError
from p2pserve.coordinator.services.assigner import FAILURES, SETTLED_S, SILENT_S, STUCK_S, Assigner
from p2pserve.coordinator.services.catalogue import CatalogueEntry
from p2pserve.coordinator.services.hosting import HostedModel, HostingBox, HostingOffer
from p2pserve.coordinator.services.replacing import (
    MAX_DRAWN,
    MAX_LENGTH,
    BoxToPlace,
    ServiceToPlace,
    SharingTask,
    assign_slots,
    draw_period,
)

GIB = 1 << 30
CHAT, CODE, TALK = (CatalogueEntry(name=name, model=f"a/{name}") for name in ("chat", "code", "talk"))
ALL = (CHAT, CODE, TALK)
MODEL = HostedModel(fits=4, layers=4, weight_bytes=10 * GIB)


def pair(box: str, room: int = 30 * GIB, **hosts: str) -> list[HostingBox]:
    """The two nodes of a box, `x` and `y`, which serve what they host."""
    names = tuple(f"{box}{node}" for node in "xy")
    return [
        HostingBox(
            id=name,
            offer=HostingOffer(
                models={entry.name: MODEL for entry in ALL},
                hosts=hosts.get(name[-1], ""),
                beside=names,
                room_bytes=room,
            ),
            power=12.0,
            serves=hosts.get(name[-1], ""),
            beside=names,
        )
        for name in names
    ]


def serve(boxes: list[HostingBox], given: Mapping[str, str]) -> list[HostingBox]:
    """They have come back with what they were given."""
    return [
        replace(
            box, serves=given.get(box.id, ""), offer=msgspec.structs.replace(box.offer, hosts=given.get(box.id, ""))
        )
        for box in boxes
    ]


def test_a_second_node_is_given_what_has_no_box_and_nothing_else() -> None:
    assert Assigner().assign((CHAT,), pair("a"), {}, 0.0) == {"ax": "chat"}
    assert Assigner().assign((CHAT, CODE), pair("a"), {}, 0.0) == {"ax": "chat", "ay": "code"}
    both = Assigner().assign((CHAT, CODE), [*pair("a"), *pair("b")], {}, 0.0)
    assert both == {"ax": "chat", "bx": "code"}, "each on a box of its own while there are enough"
    three = Assigner().assign(ALL, [*pair("a"), *pair("b")], {}, 0.0)
    assert sorted(three.values()) == ["chat", "code", "talk"]


def test_what_has_no_room_beside_the_other_is_not_put_there() -> None:
    assert Assigner().assign((CHAT, CODE), pair("a", room=19 * GIB), {}, 0.0) == {"ax": "chat"}
    whole = replace(pair("a")[0], beside=())
    part = HostedModel(fits=3, layers=4, weight_bytes=GIB)
    offer = msgspec.structs.replace(whole.offer, models={"chat": MODEL, "code": part})
    stages = [replace(box, offer=offer) for box in [*pair("a"), *pair("b")]]
    found = Assigner().assign((CHAT, CODE), stages, {}, 0.0)
    assert found == {"ax": "chat", "bx": "chat"}, "a part of a model has a process of its own"


def test_no_node_leaves_a_service_before_another_has_served_it_for_a_while() -> None:
    assigner, now = Assigner(), 0.0
    boxes = [*pair("a"), *pair("b")]
    given = assigner.assign((CHAT, CODE), boxes, {}, now)
    boxes = serve(boxes, given)
    wanted = assign_slots(boxes, given, {"ax": ("code",), "bx": ("chat",)})
    assert wanted == {"ax": "", "ay": "code", "bx": "", "by": "chat"}, "what is new loads beside what serves"
    assigner.place(wanted, now)
    both = {"ax": "chat", "ay": "code", "bx": "code", "by": "chat"}
    for now in (1.0, 2.0, 500.0):
        assert assigner.assign((CHAT, CODE), boxes, {}, now) == both
    boxes = serve(boxes, both)
    assert assigner.assign((CHAT, CODE), boxes, {}, 501.0) == both
    after = {"ay": "code", "by": "chat"}
    for now in (501.0 + SETTLED_S, 502.0 + SETTLED_S):
        assert assigner.assign((CHAT, CODE), boxes, {}, now) == after
        assert assigner.idle == ("ax", "bx"), "they are told until they have let go"
    assert assigner.assign((CHAT, CODE), serve(boxes, after), {}, 600.0) == after, "nothing comes back by itself"
    assert assigner.idle == ()
    assert assigner.is_in_place
    assert assigner.is_settled(600.0)


def test_where_there_is_no_room_beside_it_goes_first_if_others_serve_it() -> None:
    boxes = [*pair("a", 19 * GIB), *pair("b", 19 * GIB)]
    assigner = Assigner()
    given = assigner.assign((CHAT,), boxes, {}, 0.0)
    assert given == {"ax": "chat", "bx": "chat"}
    boxes = serve(boxes, given)
    assigner.assign((CHAT,), boxes, {}, 1.0)
    wanted = assign_slots(boxes, given, {"ax": ("code",), "bx": ("chat",)})
    assert wanted["ax"] == "code"
    assigner.place(wanted, 1.0)
    assert assigner.assign((CHAT, CODE), boxes, {}, 20.0)["ax"] == "code"
    alone = Assigner()
    alone.assign((CHAT,), boxes[:2], {}, 0.0)
    alone.place({"ax": "code", "ay": ""}, 0.0)
    for now in (1.0, 60.0, 600.0):
        assert alone.assign((CHAT, CODE), boxes[:2], {}, now) == {"ax": "chat"}, "nobody else serves it"
        assert alone.is_settled(now) == (now > STUCK_S)


def test_a_box_that_has_left_holds_up_no_placement() -> None:
    assigner = Assigner()
    boxes = [*pair("a"), *pair("b")]
    boxes = serve(boxes, assigner.assign((CHAT, CODE), boxes, {}, 0.0))
    assigner.assign((CHAT, CODE), boxes, {}, 1.0)
    assert assigner.is_settled(1.0)
    here = [box for box in boxes if box.id.startswith("a")]
    for now in (2.0, 60.0):
        given = assigner.assign((CHAT, CODE), here, {}, now)
        here = serve(here, given)
    assigner.assign((CHAT, CODE), here, {}, 61.0)
    assert assigner.is_settled(61.0)


def test_a_box_that_does_not_get_on_holds_up_no_placement() -> None:
    boxes = [*pair("a"), *pair("b")]
    assigner = Assigner()
    given = assigner.assign((CHAT, CODE), boxes, {}, 0.0)
    assert given == {"ax": "chat", "bx": "code"}
    boxes = serve(boxes, given)
    loading = [replace(box, serves="", shows="loads 1 %") if box.id == "bx" else box for box in boxes]
    for at, shows in ((1.0, "loads 1 %"), (SILENT_S, "loads 2 %"), (2 * SILENT_S - 1.0, "loads 2 %")):
        loading = [replace(box, shows=shows) if box.id == "bx" else box for box in loading]
        assigner.assign((CHAT, CODE), loading, {}, at)
        assert not assigner.is_settled(at), "it gets on"
    assert assigner.find_stuck(2 * SILENT_S + 1.0) == {"bx": "code"}
    assert assigner.is_settled(2 * SILENT_S + 1.0)
    assert assigner.assign((CHAT, CODE), loading, {}, 2 * SILENT_S + 1.0) == given, "what it was given it keeps"
    assigner.assign((CHAT, CODE), boxes, {}, 2 * SILENT_S + 2.0)
    assert assigner.find_stuck(2 * SILENT_S + 2.0) == {}, "it serves after all"


def test_a_box_whose_engine_fails_again_is_not_waited_for() -> None:
    boxes = [*pair("a"), *pair("b")]
    assigner = Assigner()
    boxes = serve(boxes, assigner.assign((CHAT, CODE), boxes, {}, 0.0))
    for failures in range(1, FAILURES + 1):
        failed = [replace(box, serves="", failures=failures) if box.id == "bx" else box for box in boxes]
        assigner.assign((CHAT, CODE), failed, {}, float(failures))
        assert assigner.is_settled(float(failures)) == (failures == FAILURES)


def test_a_node_that_was_to_come_to_what_is_no_more_takes_something_else() -> None:
    assigner = Assigner()
    boxes = pair("a")[:1]
    assigner.place({"ax": "code"}, 0.0)
    assert assigner.assign((CHAT,), boxes, {}, 0.0) == {"ax": "chat"}


def test_two_that_would_each_leave_what_the_other_leaves_do_not_both_go() -> None:
    boxes = [*pair("a", 19 * GIB), *pair("b", 19 * GIB)]
    assigner = Assigner()
    boxes = serve(boxes, assigner.assign((CHAT,), boxes, {}, 0.0))
    assigner.assign((CHAT,), boxes, {}, 1.0)
    assigner.place({"ax": "code", "ay": "", "bx": "code", "by": ""}, 1.0)
    found = assigner.assign((CHAT, CODE), boxes, {}, 60.0)
    assert sorted(found.values()) == ["chat", "code"], "the entry without a box took one; the last one stays"


def test_a_node_that_is_away_for_a_moment_keeps_what_it_was_given() -> None:
    assigner, boxes = Assigner(), [*pair("a"), *pair("b")]
    given = assigner.assign(ALL, boxes, {}, 0.0)
    boxes = serve(boxes, given)
    for missing in boxes:
        rest = [box for box in boxes if box is not missing]
        assert assigner.assign(ALL, rest, {}, 10.0) == given


A40 = gpu_table().find("A40")
SHAPE = model_shape("llama-7b")


def demand(rate: float, *lengths: tuple[int, int]) -> Demand:
    return Demand(requests_s=rate, arrival_cv=1.0, lengths=lengths or ((600, 60),))


def service(name: str, *demands: Demand) -> ServiceToPlace:
    return ServiceToPlace(name=name, shape=SHAPE, demands=demands)


def place(name: str, *hosts: str, room: int = 0, able: tuple[str, ...] = ("chat", "code", "talk")) -> BoxToPlace:
    return BoxToPlace(id=name, card=A40, most=2, able=able, ready=able, hosts=hosts, room_bytes=room)


def run(boxes: list[BoxToPlace], *services: ServiceToPlace) -> dict[str, tuple[str, ...]]:
    task = SharingTask(boxes=tuple(boxes), services=services, period_s=120.0)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=SharingTask)
    return sent.run(lambda: False).hosts


def test_boxes_follow_what_is_asked_for_and_stay_where_that_is_no_gain() -> None:
    both = ("chat", "code")
    boxes = [place("a", "chat", able=both), place("b", "code", able=both), place("c", "code", able=both)]
    asked = (service("chat", demand(4.0)), service("code", demand(0.02)))
    found = run(boxes, *asked)
    assert sum("chat" in hosts for hosts in found.values()) > 1
    assert any("code" in hosts for hosts in found.values())
    stays = [place(name, *hosts, able=both) for name, hosts in found.items()]
    assert run(stays, *asked) == {}, "what was found is not moved again"


def test_a_box_that_stays_counts_with_all_that_it_has_and_is_not_moved() -> None:
    stays = msgspec.structs.replace(place("s", "chat", "code", able=("chat", "code")), stays=True)
    both = ("chat", "code")
    asked = (service("chat", demand(4.0)), service("code", demand(0.02)))
    found = run([place("a", "code", able=both), stays], *asked)
    assert "chat" in found["a"]
    assert found["s"] == both
    task = SharingTask(boxes=(stays,), services=asked, period_s=120.0)
    shared = task.run(lambda: False).running
    lone = [msgspec.structs.replace(place(name, name, able=(name,)), stays=True) for name in both]
    apart = SharingTask(
        boxes=tuple(lone), services=(service("chat", demand(4.0)), service("code", demand(4.0))), period_s=120.0
    )
    crowded = SharingTask(boxes=(stays,), services=apart.services, period_s=120.0)
    assert shared < crowded.run(lambda: False).running
    assert apart.run(lambda: False).running < crowded.run(lambda: False).running, "one card is not two"


def test_room_for_weights_bounds_what_shares_a_box() -> None:
    asked = tuple(service(name, demand(0.1)) for name in ("chat", "code", "talk"))
    found = run([place("a", "chat"), place("b", "code")], *asked)
    assert {name for hosts in found.values() for name in hosts} == {"chat", "code", "talk"}
    small = [place(name, host, room=SHAPE.weight_bytes) for name, host in (("a", "chat"), ("b", "code"))]
    assert run(small, *asked) == {}
    with pytest.raises(PlacementError):
        run([place("a", room=1)], *asked)


def test_requests_are_drawn_as_they_are_told_and_no_lie_makes_them_many_or_long() -> None:
    services = [service("chat", demand(2.0, (100, 10), (300, 30))), service("code"), service("talk", demand(0.01))]
    period = draw_period(services, 100.0, np.random.default_rng(0))
    assert np.bincount(period.service).tolist() == [498, 1, 2], "over 249 s: as many as what is decided is to hang on"
    assert 150 < period.prompt[period.service == 0].mean() < 250
    liar = service("talk", *[demand(1e6, (1 << 31, 1 << 31))] * 100)
    lied = draw_period([*services[:2], liar], 100.0, np.random.default_rng(0))
    assert len(lied) <= MAX_DRAWN + 20
    assert lied.prompt.max() <= MAX_LENGTH
