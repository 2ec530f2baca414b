"""What a coordinator tells boxes that host what they are given: whose word counts, and what it is made of."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.bootstrap.trust.entries import MAX_PAYLOAD
from p2pserve.coordinator import Demand
from p2pserve.coordinator.services.assigner import LATE_S
from p2pserve.coordinator.services.catalogue import CatalogueEntry, ServiceCatalogue
from p2pserve.coordinator.services.hosting import Brought, HostedModel, HostingOffer
from p2pserve.node.box.hardware import Gpu
from p2pserve.node.catalogue.assigning import HEARD_S, AssignmentDesk, find_brought, group_hosts
from p2pserve.node.catalogue.hosts import find_hosts
from p2pserve.node.catalogue.messages import HostedService, HostingPlan, read_hosting, read_hosting_number
from p2pserve.node.messages import Advert
from p2pserve.node.view import NetworkView

from ..planning.test_coordination import OWN, advert

ABLE = HostedModel(fits=4, layers=4, weight_bytes=100)
CHAT, CODE = CatalogueEntry(name="chat", model="tiny"), CatalogueEntry(name="code", model="a/b")
LISTED = ServiceCatalogue(version=1, entries=(CHAT, CODE))
OFFER = HostingOffer(models={"chat": ABLE, "code": ABLE})


def host(**changes: Any) -> Advert:
    return msgspec.structs.replace(advert("x"), **{"model": None, "engine": None, "hosting": OFFER, **changes})


def named(said: Advert, model: str) -> Advert:
    """With its model under this name."""
    assert said.model is not None
    shape = msgspec.structs.replace(said.model.shape, name=model)
    return msgspec.structs.replace(said, model=msgspec.structs.replace(said.model, shape=shape))


def network(**boxes: Advert) -> NetworkView:
    view = NetworkView(adverts={PeerId(name): each for name, each in boxes.items()})
    view.catalogue = LISTED
    return view


def desk_of(view: NetworkView, leader: tuple[PeerId, int] | None = (OWN, 3)) -> tuple[AssignmentDesk, Any]:
    joined: Any = SimpleNamespace(own=OWN, leader=leader, view=view)
    return AssignmentDesk(joined), joined


def first(desk: AssignmentDesk, at: float = 0.0) -> HostingPlan | None:
    assert desk.look(at) is None, "it has not heard of all boxes yet"
    return desk.look(at + HEARD_S)


def test_the_coordinator_gives_each_box_a_service_and_says_so_once() -> None:
    desk, _ = desk_of(network(p=host(), q=host()))
    plan = first(desk)
    assert plan is not None
    assert (plan.number, {each.name: each.boxes for each in plan.services}) == (
        (3, 1),
        {"chat": ("p",), "code": ("q",)},
    )
    assert [plan.entry_of(box) for box in "pqr"] == ["chat", "code", ""]
    assert desk.look(60.0) is None
    assert read_hosting_number(msgspec.msgpack.encode(plan)) == (3, 1)


def test_nobody_else_says_anything() -> None:
    for leader in (None, (PeerId("other"), 3)):
        desk, _ = desk_of(network(p=host()), leader)
        assert first(desk) is None


def test_a_network_without_such_boxes_is_told_nothing() -> None:
    desk, _ = desk_of(network(a=advert("x")))
    assert first(desk) is None


def test_each_change_is_one_more_and_the_last_box_that_is_gone_is_told_too() -> None:
    view = network(p=host())
    desk, _ = desk_of(view)
    assert first(desk) is not None
    view.adverts = {}
    plan = desk.look(100.0)
    assert plan is not None
    assert (plan.number, plan.services) == ((3, 2), ())


def test_the_next_coordinator_goes_on_with_what_the_last_one_gave() -> None:
    view = network(p=host(), q=host(), r=host())
    view.hosting = HostingPlan(epoch=2, serial=9, services=(HostedService(name="code", boxes=("p", "q")),))
    plan = first(desk_of(view)[0])
    assert plan is not None
    assert {each.name: each.boxes for each in plan.services} == {"chat": ("r",), "code": ("p", "q")}
    assert plan.number == (3, 1)


def test_an_epoch_that_this_node_leads_anew_is_told_anew() -> None:
    desk, joined = desk_of(network(p=host()))
    assert first(desk) is not None
    joined.leader = (OWN, 4)
    plan = desk.look(10.0)
    assert plan is not None
    assert plan.number == (4, 1)


def test_boxes_that_leave_host_nothing_new() -> None:
    view = network(p=host(draining=True), q=host(ends_in_s=5.0), r=host(), s=advert("x"))
    assert [box.id for box in find_hosts(view)] == ["r"]
    gpus = (Gpu(name="A40", memory_gib=45.0, uuid="1"), Gpu(name="A40", memory_gib=45.0, uuid="2"))
    strong = msgspec.structs.replace(host(), hardware=msgspec.structs.replace(host().hardware, gpus=gpus))
    assert [box.power for box in find_hosts(network(p=strong, q=host()))] == [90.0, 8.0]


def test_what_boxes_bring_and_clients_ask_counts_for_the_entry_of_their_model() -> None:
    asked = Demand(requests_s=2.0, arrival_cv=1.0, lengths=((100, 10), (300, 30)))
    bringing = msgspec.structs.replace(advert("x"), demand=asked)
    hosting = msgspec.structs.replace(advert("x"), demand=asked, hosting=OFFER)
    part = msgspec.structs.replace(advert("x"), fits=3, draining=True)
    found = find_brought(network(p=bringing, q=hosting, r=part))
    assert found == {"chat": Brought(power=8.0, fits=4, is_placed=True, is_served=True, tokens_s=880.0)}


def test_nodes_of_one_box_bring_what_it_has_once() -> None:
    both = ("p", "q")
    code = msgspec.structs.replace(named(advert("y"), "a/b"), beside=both)
    chat = msgspec.structs.replace(advert("x"), beside=both)
    found = find_brought(network(p=chat, q=code))
    assert (found["chat"].power, found["code"].power) == (4.0, 4.0)
    alone = find_brought(network(p=msgspec.structs.replace(chat, beside=()), q=code))
    assert (alone["chat"].power, alone["code"].power) == (8.0, 8.0), "who names another as of its box has no less"


def test_what_is_said_fits_one_entry_of_gossip() -> None:
    hosts = {f"{number:052}": f"s{number % 32}" for number in range(4000)}
    plan = HostingPlan(epoch=1, serial=1, services=group_hosts(hosts))
    assert MAX_PAYLOAD // 2 < len(msgspec.msgpack.encode(plan)) <= MAX_PAYLOAD
    assert read_hosting(msgspec.msgpack.encode(plan)) == plan


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"epoch": 1}),
        msgspec.msgpack.encode({"epoch": 1, "serial": -1}),
        msgspec.msgpack.encode({"epoch": 1, "serial": 1, "services": [{"name": "n" * 65}]}),
        msgspec.msgpack.encode({"epoch": 1, "serial": 1, "services": [{"name": "n"}] * 33}),
        msgspec.msgpack.encode({"epoch": 1, "serial": 1, "services": [{"name": "n", "boxes": ["b"] * 4097}]}),
    ],
)
def test_what_is_no_hosting_plan_is_nothing(said: bytes) -> None:
    assert (read_hosting(said), read_hosting_number(said)) == (None, None)


def test_a_box_that_says_it_can_do_anything_and_serves_nothing_keeps_no_service_for_itself() -> None:
    boast = HostedModel(fits=4096, layers=4, weight_bytes=1 << 48)
    models = {"chat": boast, "code": boast, "none": boast}
    view = network(liar=host(hosting=HostingOffer(hosts="code", models=models)), p=host(), q=host())
    view.catalogue = ServiceCatalogue(version=2, entries=(msgspec.structs.replace(CHAT, weight=9.0), CODE))
    desk, _ = desk_of(view)
    plan = first(desk)
    assert plan is not None
    assert {each.name: each.boxes for each in plan.services} == {"chat": ("p", "q"), "code": ("liar",)}
    for peer, entry in (("p", "chat"), ("q", "chat")):  # they serve
        view.adverts[PeerId(peer)] = msgspec.structs.replace(
            advert("x"), hosting=HostingOffer(hosts=entry, models=OFFER.models)
        )
    for now in range(10, int(LATE_S), 30):
        assert desk.look(float(now)) is None
    later = desk.look(HEARD_S + LATE_S + 1.0)
    assert later is not None
    honest = {each.name: set(each.boxes) - {"liar"} for each in later.services}
    assert all(honest.values()), honest
