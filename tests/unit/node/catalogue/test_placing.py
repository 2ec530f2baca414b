"""What a coordinator asks the search for: which boxes, services and requests it makes of what members say."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Demand
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.services.assigner import FAILURES, Assigner
from p2pserve.coordinator.services.hosting import HostedModel, HostingOffer
from p2pserve.coordinator.services.replacing import SharingTask
from p2pserve.kvtransport.probing.figures import LinkFigures
from p2pserve.node.catalogue import placing
from p2pserve.node.catalogue.hosts import find_hosts
from p2pserve.node.catalogue.placing import SharingDesk, find_demands, find_task
from p2pserve.node.messages import Advert, EngineAdvert, LinkTable
from p2pserve.node.settings import WAN
from p2pserve.node.view import NetworkView

from ..planning.test_coordination import advert
from .test_assigning import LISTED, named

SHAPE = model_shape("llama-7b")
WHOLE = HostedModel(fits=SHAPE.layers, layers=SHAPE.layers, weight_bytes=SHAPE.weight_bytes, shape=SHAPE)
ASKED = Demand(requests_s=2.0, arrival_cv=1.0, lengths=((100, 10),))


def node(*beside: str, **changes: Any) -> Advert:
    offer = HostingOffer(models={"chat": WHOLE, "code": WHOLE}, beside=beside, room_bytes=9)
    return msgspec.structs.replace(
        advert("x"), **{"model": None, "engine": None, "hosting": offer, "demand": None, **changes}
    )


def network(**boxes: Advert) -> NetworkView:
    view = NetworkView(adverts={PeerId(name): each for name, each in boxes.items()})
    view.catalogue = LISTED
    return view


def asking() -> Advert:
    """A box that was started with chat's model, and is asked for it."""
    return msgspec.structs.replace(advert("x"), demand=ASKED)


def task_of(view: NetworkView, **given: str) -> SharingTask | None:
    return find_task(view, find_hosts(view), given, find_demands(view), 60.0, "raw")


def test_nodes_are_one_box_where_all_that_are_here_say_so() -> None:
    def told(**boxes: Advert) -> dict[str, tuple[str, ...]]:
        return {box.id: box.beside for box in find_hosts(network(**boxes))}

    both = ("p", "q")
    assert told(p=node(*both), q=node(*both)) == {"p": both, "q": both}
    assert told(p=node(*both)) == {"p": both}, "the other one is away for a moment"
    assert told(liar=node("liar", "p"), p=node()) == {"liar": (), "p": ()}
    assert told(p=node("q", "p"), q=node(*both)) == {"p": (), "q": ()}
    assert told(p=node("p", "p"), q=node("r", "s")) == {"p": (), "q": ()}
    halves = find_hosts(network(p=node(*both), q=node(*both)))
    assert sum(box.power for box in halves) == find_hosts(network(p=node()))[0].power


def test_boxes_services_and_requests_are_those_that_members_tell_of() -> None:
    pair = {name: node("p", "q") for name in "pq"}
    found = task_of(network(**pair, a=asking()), p="chat", q="code")
    assert found is not None
    assert [(box.id, box.most, box.hosts, box.able, box.room_bytes) for box in found.boxes] == [
        ("p", 2, ("chat", "code"), ("chat", "code"), 9),
        ("a", 1, ("chat",), ("chat",), 0),
    ]
    assert {service.name: service.demands for service in found.services} == {"chat": (ASKED,), "code": ()}


def test_links_between_boxes_are_as_their_nodes_have_measured_them() -> None:
    view = network(**{name: node("p", "q") for name in "pq"}, a=asking())
    figures = LinkFigures(rtt_s=0.05, one_stream_gbps=1.0, capacity_gbps=3.0)
    view.links_told = {PeerId(name): LinkTable(links={PeerId("a"): figures}) for name in "pq"}
    found = task_of(view, p="chat", q="code")
    assert found is not None
    (link,) = found.network.links
    assert (link.source, link.target, link.rtt_s, link.gbps) == ("p", "a", 0.05, 3.0)
    assert (found.network.codec, found.network.kv_bits) == ("raw", 16.0)


def test_nodes_that_a_box_was_started_with_are_one_engine_that_stays() -> None:
    both = ("a", "b")
    other = msgspec.structs.replace(named(advert("y"), "a/b"), beside=both)
    pair = {name: node("p", "q") for name in "pq"}
    started = {"a": msgspec.structs.replace(asking(), beside=both), "b": other}
    found = task_of(network(**pair, **started), p="chat", q="code")
    assert found is not None
    assert [(box.id, box.most, box.hosts, box.stays) for box in found.boxes] == [
        ("p", 2, ("chat", "code"), False),
        ("a", 2, ("chat", "code"), True),
    ]
    started["a"] = asking()
    found = task_of(network(**pair, **started), p="chat", q="code")
    assert found is not None
    assert [(box.id, box.hosts) for box in found.boxes[1:]] == [("a", ("chat",)), ("b", ("code",))], "only one says so"


def test_there_is_nothing_to_decide_without_requests_a_second_service_or_a_box_for_two() -> None:
    pair = {name: node("p", "q") for name in "pq"}
    assert task_of(network(**pair)) is None, "nobody asks"
    assert task_of(network(p=node(), a=asking())) is None, "no box hosts two"
    only = HostingOffer(models={"chat": WHOLE}, beside=("p", "q"), room_bytes=9)
    assert task_of(network(p=node(hosting=only), q=node(hosting=only), a=asking())) is None, "one service"
    plain = {"chat": WHOLE, "code": msgspec.structs.replace(WHOLE, shape=None)}
    earlier = HostingOffer(models=plain, beside=("p", "q"), room_bytes=9)
    assert task_of(network(p=node(hosting=earlier), q=node(hosting=earlier), a=asking())) is None


def test_boxes_that_hold_a_part_are_left_out() -> None:
    part = msgspec.structs.replace(WHOLE, fits=2)
    offer = HostingOffer(models={"chat": WHOLE, "code": part})
    pair = {name: node("p", "q") for name in "pq"}
    found = task_of(network(**pair, r=node(hosting=offer), a=asking()), p="chat", r="code")
    assert found is not None
    assert [box.id for box in found.boxes] == ["p", "a"]


def hosting(hosts: str, *beside: str, **engine: Any) -> Advert:
    """A node with an engine for what it hosts."""
    offer = HostingOffer(models={"chat": WHOLE, "code": WHOLE}, beside=beside, room_bytes=9, hosts=hosts)
    return node(hosting=offer, engine=EngineAdvert(**{"state": "ready", **engine}))


def test_what_a_node_says_changes_while_it_fetches_and_loads() -> None:
    def shows(advert: Advert) -> str:
        return find_hosts(network(p=advert))[0].shows

    fetches = HostingOffer(models={"chat": WHOLE}, prepares="chat", detail="downloads 1 %")
    steps = [
        node(hosting=fetches),
        node(hosting=msgspec.structs.replace(fetches, detail="downloads 2 %")),
        hosting("chat", state="starting", detail="imports vLLM"),
        hosting("chat", state="starting", detail="loads the model"),
        hosting("chat", state="restarting", starts=1),
    ]
    assert len({shows(each) for each in steps}) == len(steps)
    assert find_hosts(network(p=hosting("chat", state="restarting", failures=3)))[0].failures == 3


def test_services_are_placed_without_a_node_that_does_not_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, said = list[SharingTask](), list[str]()

    class AskedPlanner:
        async def place(self, task: SharingTask) -> None:
            tasks.append(task)

    @asynccontextmanager
    async def open_asked(_: object) -> AsyncIterator[AskedPlanner]:
        yield AskedPlanner()

    monkeypatch.setattr(placing, "open_planner", open_asked)
    one, two = ("p", "q"), ("r", "s")
    view = network(
        a=asking(), p=hosting("chat", *one), q=node(*one), s=node(*two),
        r=hosting("code", *two, state="restarting", failures=FAILURES - 1),
    )  # fmt: skip
    joined: Any = SimpleNamespace(view=view, settings=SimpleNamespace(tuning=WAN, codec="kv4"), say=said.append)
    desk, assigner = SharingDesk(joined), Assigner()

    async def look_twice() -> None:
        now = trio.current_time()
        assigner.assign(LISTED.entries, find_hosts(view), {}, now)
        await desk.look(assigner, now - 2.0 * WAN.replace_s)
        assert tasks == [], "it starts again, and may serve then"
        view.adverts[PeerId("r")] = hosting("code", *two, state="restarting", failures=FAILURES)
        assigner.assign(LISTED.entries, find_hosts(view), {}, now)
        await desk.look(assigner, now - 2.0 * WAN.replace_s)

    trio.run(look_twice)
    (task,) = tasks
    assert {box.id: (box.hosts, box.most) for box in task.boxes if box.id != "a"} == {"p": (("chat",), 2), "r": ((), 1)}
    assert "it does not get on with code" in said[0]
