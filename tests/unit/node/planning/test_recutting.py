"""A machine of the network that is divided anew, with nothing but adverts."""

from typing import Any

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Demand, PlanError
from p2pserve.coordinator.costs.gpus import Specs
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.names import name_of
from p2pserve.coordinator.plan import BoxRecut
from p2pserve.coordinator.regrouping.adoption import AdoptionSettings
from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer
from p2pserve.coordinator.regrouping.steps import RegroupProposal, make_recutting
from p2pserve.node.adverts import divided_boxes
from p2pserve.node.box.hardware import Gpu, Hardware
from p2pserve.node.messages import Advert, EngineAdvert
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.planning.manifest import describe_plan, read_plan
from p2pserve.node.planning.messages import RegroupOrder
from p2pserve.node.planning.plan_intake import find_conflict
from p2pserve.node.planning.services import Coordinator
from p2pserve.node.planning.worker import PlannerTask, answer
from p2pserve.node.view import NetworkView

from .test_coordination import OWN, advert
from .test_regrouping import A, followed, served
from .test_repair import LEADER, publish, started

OFFERS = tuple(CutOffer(replicas=number, tp=2 // number, longest=512) for number in (1, 2))
NODES = {1: ("b",), 2: ("b", "b2")}


def node(tp: int, division: BoxDivision | None, **changes: Any) -> Advert:
    each = advert("x")
    gpus = tuple(Gpu(name="imagined", memory_gib=8.0, uuid=str(number)) for number in range(tp))
    hardware = msgspec.structs.replace(each.hardware, gpus=gpus)
    return msgspec.structs.replace(each, hardware=hardware, tp=tp, division=division, **changes)


def divide(view: NetworkView, replicas: int, **changes: Any) -> None:
    """The machine of `b` runs in this cut."""
    division = BoxDivision(head="b", nodes=NODES[replicas], offers=OFFERS, **changes)
    view.adverts[PeerId("b")] = node(2 // replicas, division)
    view.adverts.pop(PeerId("b2"), None)
    if replicas == 2:
        view.adverts[PeerId("b2")] = node(1, BoxDivision(head="b"))


def network(*services: str) -> tuple[Coordinator, NetworkView]:
    """One with boxes that each have one node, of which that of `b` lets itself be divided."""
    coordinator, view = started(*services)
    divide(view, 1)
    followed(coordinator, view, 1.0)
    return coordinator, view


def order(coordinator: Coordinator, view: NetworkView, was: int, replicas: int) -> None:
    recut = BoxRecut(head="b", replicas=replicas, was=was)
    coordinator.order(RegroupOrder(service="x", recuts=(recut,), before=1.0, after=2.0, reload_s=30.0), view, LEADER)


def is_moving(view: NetworkView) -> bool:
    assert view.plan is not None
    return view.plan.regrouping is not None


def heads(view: NetworkView) -> set[str]:
    assert view.plan is not None
    return {replica.id for replica in view.plan.replicas}


def test_its_nodes_get_no_requests_until_all_of_the_new_cut_serve() -> None:
    coordinator, view = network(*"xxx")
    order(coordinator, view, 1, 2)
    first = followed(coordinator, view, 2.0)
    assert served(first) == {"a", "c"}
    assert first.regrouping is not None
    assert first.regrouping.steps[0].recut == BoxRecut(head="b", replicas=2, was=1)
    del view.adverts[PeerId("b")]  # it has left, to come back with another node
    publish(coordinator, view, 3.0)
    assert is_moving(view)
    divide(view, 2)
    del view.adverts[PeerId("b2")]
    publish(coordinator, view, 4.0)
    assert is_moving(view)
    divide(view, 2)
    publish(coordinator, view, 5.0)
    publish(coordinator, view, 25.0)
    assert not is_moving(view)
    assert heads(view) == {"a", "b", "b2", "c"}
    assert view.plan is not None
    assert not any("held" in line or "given up" in line for line in view.plan.why)
    # And back: the second node goes.
    order(coordinator, view, 2, 1)
    again = followed(coordinator, view, 30.0)
    assert served(again) == {"a", "c"}
    divide(view, 1)
    publish(coordinator, view, 31.0)
    publish(coordinator, view, 60.0)
    assert not is_moving(view)
    assert heads(view) == {"a", "b", "c"}


def test_the_only_box_of_a_network_is_divided_while_requests_wait() -> None:
    coordinator, view = started("x")
    division = BoxDivision(head="a", nodes=("a",), offers=OFFERS)
    view.adverts[PeerId("a")] = node(2, division)
    followed(coordinator, view, 1.0)
    recut = BoxRecut(head="a", replicas=2, was=1)
    coordinator.order(RegroupOrder(service="x", recuts=(recut,)), view, LEADER)
    plan = followed(coordinator, view, 2.0)
    assert plan.regrouping is not None
    assert view.hopeful("x")
    # Its nodes come back with one GPU each, and do not object to a plan that names them with two.
    half = node(1, msgspec.structs.replace(division, nodes=("a", "a2")))
    assert find_conflict(plan, PeerId("a"), half) == ""
    assert "2 GPUs" in find_conflict(msgspec.structs.replace(plan, regrouping=None), PeerId("a"), half)
    view.adverts[PeerId("a")] = half
    view.adverts[PeerId("a2")] = node(1, BoxDivision(head="a"))
    publish(coordinator, view, 3.0)
    assert view.plan is not None
    assert view.plan.regrouping is None
    assert {replica.id for replica in view.plan.replicas} == {"a", "a2"}


def test_a_machine_that_could_not_says_why_and_keeps_its_cut() -> None:
    coordinator, view = network(*"xxx")
    order(coordinator, view, 1, 2)
    followed(coordinator, view, 2.0)
    divide(view, 1, refused=2, why="node-2: no memory for that")
    done = followed(coordinator, view, 3.0)
    assert done.regrouping is None
    (refused,) = done.refused
    assert (refused.peer, refused.reason) == ("b", "node-2: no memory for that")
    assert any(f"the box of {name_of('b')} cannot be 2 nodes" in line for line in done.why)
    coordinator.seek(view, LEADER, 3600.0)
    task = coordinator.seek(view, LEADER, 7200.0)
    assert task is not None
    assert (task.keeping, set(task.divided)) == (("b",), {"b"})


def test_an_order_for_both_or_for_what_is_not_offered_is_refused() -> None:
    coordinator, view = network(*"xxx")
    recut = BoxRecut(head="b", replicas=2, was=1)
    with pytest.raises(PlanError, match="either grouped or divided anew"):
        coordinator.order(RegroupOrder(service="x", groups=(A,), recuts=(recut,)), view, LEADER)
    with pytest.raises(PlanError, match="not the first node of a box"):
        coordinator.order(
            RegroupOrder(service="x", recuts=(msgspec.structs.replace(recut, head="a"),)), view, LEADER
        )  # fmt: skip
    view.adverts[PeerId("b")] = node(2, None)  # its owner has fixed the cut
    with pytest.raises(PlanError, match="not the first node of a box"):
        coordinator.order(RegroupOrder(service="x", recuts=(recut,)), view, LEADER)


def test_nodes_of_another_service_are_not_of_the_machine() -> None:
    _, view = network(*"xxx")
    divide(view, 2)
    assert set(divided_boxes(view.adverts, "x")) == {"b"}
    assert divided_boxes(view.adverts, "y") == {}
    del view.adverts[PeerId("b2")]
    assert divided_boxes(view.adverts, "x") == {}


def test_a_gain_that_lasts_is_begun_with_by_itself() -> None:
    coordinator, view = network(*"xxx")
    plan = view.plan
    assert plan is not None
    recut = BoxRecut(head="b", replicas=2, was=1)
    way = make_recutting(
        plan, (recut,), divided_boxes(view.adverts, "x"), view.boxes("x"), before=5.0, after=9.0, reload_s=30.0
    )
    found = RegroupProposal(
        regrouping=way, recuts=(recut,), rate=10.0, light=5.0, meanwhile=(5.0,), reload_s=(30.0,), pays=True
    )
    settings, now, begun = AdoptionSettings(), 10.0, []
    for _ in range(settings.looks):
        coordinator.seek(view, LEADER, now)
        now += settings.look_s
        assert coordinator.seek(view, LEADER, now) is not None
        begun.append(coordinator.consider("x", found, view, LEADER, now))
    assert begun[:-1] == [None] * (settings.looks - 1)
    assert begun[-1] == way
    plan = followed(coordinator, view, now)
    assert plan.regrouping == way
    assert read_plan(*describe_plan(plan)) == plan


def emulating(cards: int, **changes: Any) -> Advert:
    """A node whose engine models so many cards."""
    shape = model_shape("llama-7b")
    card = Gpu(name="A40-48GB", memory_gib=48.0, uuid="u")
    hardware = Hardware(cores=4, memory_gib=8.0, processor="x", gpus=(card,) * cards, emulated_as=Specs.DENSE)
    engine = EngineAdvert(state="ready", tflops=100.0, memory_gbps=600.0, kv_tokens=70_000 * cards, starts=1)
    weights = WeightSizes(layers=(1,) * shape.layers, embeddings=1, head=1)
    model = ModelInfo(service="x", shape=shape, max_model_len=32_768, weights=weights)
    return Advert(
        hardware=hardware, draining=False, model=model, engine=engine, fits=shape.layers, tp=cards, **changes
    )  # fmt: skip


def test_a_look_finds_the_machine_of_emulated_cards_that_would_serve_more() -> None:
    asked = Demand(requests_s=12.0, arrival_cv=1.0, lengths=((1000, 200),))
    offers = tuple(CutOffer(replicas=number, tp=4 // number, longest=32_768) for number in (1, 2, 4))
    coordinator = Coordinator(OWN, "kv4")
    whole = BoxDivision(head="b", nodes=("b",), offers=offers)
    view = NetworkView(adverts={
        OWN: emulating(4, demand=asked), PeerId("b"): emulating(4, division=whole), PeerId("c"): emulating(4),
    })  # fmt: skip
    followed(coordinator, view, 0.0)
    coordinator.seek(view, LEADER, 0.0)
    task = coordinator.seek(view, LEADER, 1000.0)
    assert task is not None
    said = answer(PlannerTask(task=task, search_s=30.0, seeks_groups=True), lambda: False)
    assert said.proposal is not None
    (recut,) = said.proposal.recuts
    assert (recut.head, recut.was) == ("b", 1)
    assert said.proposal.regrouping.after > said.proposal.light
    assert said.proposal.meanwhile[0] < said.proposal.regrouping.before
