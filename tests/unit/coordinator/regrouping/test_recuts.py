"""Which machines a running network divides anew, and what that would gain and cost."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from p2pserve.coordinator import BoxView, Demand
from p2pserve.coordinator.costs.gpus import Specs, gpu_table
from p2pserve.coordinator.costs.loading import LoadRates
from p2pserve.coordinator.costs.model_shape import model_shape
from p2pserve.coordinator.network_problem import build_network_problem
from p2pserve.coordinator.plan import BoxRecut
from p2pserve.coordinator.regrouping.divisions import BoxDivision, CutOffer
from p2pserve.coordinator.regrouping.recuts import NetworkFigures, propose_recuts
from p2pserve.coordinator.regrouping.steps import RegroupProposal

from ..networks import KV4, box, fast, some_plan

CARD = gpu_table().find("A40-48GB", Specs.DENSE)
MODEL = model_shape("llama-7b")
ASKED = (Demand(requests_s=12.0, arrival_cv=1.0, lengths=((1000, 200),)),)
OFFERS = tuple(CutOffer(replicas=number, tp=4 // number, longest=32_768) for number in (1, 2, 4))
WHOLE = BoxDivision(head="a", nodes=("a",), offers=OFFERS)


def cards(peer: str, tp: int, **more: Any) -> BoxView:
    """A node with so many emulated cards."""
    return msgspec.structs.replace(
        box(peer, layers=MODEL.layers, memory_gib=CARD.memory_gib * tp, kv_tokens=70_000 * tp, tp=tp, emulated=True,
            card=CARD.name, specs=Specs.DENSE),
        model=MODEL, **more,
    )  # fmt: skip


FOUR_AND_FOUR = (cards("a", 4), cards("b", 4), cards("c", 4))


def propose(
    boxes: Sequence[BoxView] = FOUR_AND_FOUR, division: BoxDivision = WHOLE, *, asked: float = 12.0, **more: Any
) -> RegroupProposal | None:
    links = fast(*(each.peer for each in boxes))
    demands = tuple(msgspec.structs.replace(demand, requests_s=asked) for demand in ASKED)
    plan = some_plan(*boxes, links=links, demands=demands)
    network = build_network_problem(boxes, links, demands, service="llama", codec=KV4, previous=plan)
    assert network is not None
    return propose_recuts(network, plan, NetworkFigures(boxes, links, demands), {"a": division}, **more)


def test_a_machine_whose_cards_would_serve_more_apart_is_divided() -> None:
    found = propose()
    assert found is not None
    assert found.recuts == (BoxRecut(head="a", replicas=4, was=1),)
    expected = found.regrouping
    assert expected.after > 1.1 * expected.before
    assert expected.after <= found.rate
    # Two of three nodes go on while it is away.
    assert 0.3 * expected.before < found.meanwhile[0] < expected.before
    assert (found.pays, found.groups) == (True, ())
    assert found == propose()


def test_as_long_as_all_requests_are_in_time_it_stays_as_it_is() -> None:
    assert propose(asked=1.0, rate=1.0) is None


def test_what_would_not_win_back_its_reload_does_not_pay() -> None:
    found = propose(rates=LoadRates(disk_gb_s=0.001))
    assert found is not None
    assert not found.pays
    assert found.reload_s[0] > 3600.0


@pytest.mark.parametrize(
    "division",
    [
        msgspec.structs.replace(WHOLE, offers=OFFERS[:1]),  # nothing else is offered
        msgspec.structs.replace(  # others only for shorter requests
            WHOLE, offers=(OFFERS[0], *(msgspec.structs.replace(each, longest=4096) for each in OFFERS[1:]))
        ),
        msgspec.structs.replace(WHOLE, nodes=("a", "z")),  # a node is not there
        msgspec.structs.replace(WHOLE, nodes=("a", "b", "c", "z"), head="z"),
    ],
)
def test_what_the_owner_does_not_offer_is_not_proposed(division: BoxDivision) -> None:
    assert propose(division=division) is None


def test_a_cut_in_which_requests_do_not_fit_is_none() -> None:
    """One card has no room for KV beside the weights, two have."""
    tight = tuple(cards(peer, 4, memory_gib=4 * 13.0, kv_tokens=60_000) for peer in "abc")
    found = propose(tight)
    assert found is not None
    assert found.recuts[0].replicas == 2


def test_one_that_refused_keeps_its_cut() -> None:
    assert propose(keeping=("a",)) is None


def test_a_network_on_its_way_is_left_alone_and_a_look_ends_when_it_is_told_to() -> None:
    found = propose()
    assert found is not None
    links = fast("a", "b", "c")
    plan = some_plan(*FOUR_AND_FOUR, links=links, demands=ASKED)
    network = build_network_problem(FOUR_AND_FOUR, links, ASKED, service="llama", codec=KV4, previous=plan)
    assert network is not None
    figures = NetworkFigures(FOUR_AND_FOUR, links, ASKED)
    moving = msgspec.structs.replace(plan, regrouping=found.regrouping)
    assert propose_recuts(network, moving, figures, {"a": WHOLE}) is None
    assert propose_recuts(network, plan, figures, {"a": WHOLE}, spent=lambda: True) is None


def test_nodes_that_lack_room_each_are_gathered_again() -> None:
    """Four nodes with little KV each, asked for long requests: together their cards hold more of them."""
    nodes = tuple(cards(peer, 1, memory_gib=20.0, kv_tokens=6_000) for peer in ("a", "b", "c", "d"))
    four = BoxDivision(head="a", nodes=("a", "b", "c", "d"), offers=OFFERS)
    links = fast(*"abcd")
    long = (Demand(requests_s=4.0, arrival_cv=1.0, lengths=((3000, 500),)),)
    plan = some_plan(*nodes, links=links, demands=long)
    network = build_network_problem(nodes, links, long, service="llama", codec=KV4, previous=plan)
    assert network is not None
    found = propose_recuts(network, plan, NetworkFigures(nodes, links, long), {"a": four})
    assert found is not None
    assert found.recuts[0].was == 4
    assert found.recuts[0].replicas < 4


def test_engines_that_were_measured_count_by_their_share_of_the_cards() -> None:
    """Real cards have no column of the table: rates are what engines found, divided by GPU."""
    real = tuple(
        msgspec.structs.replace(each, emulated=False, specs=None, compute_tflops=4 * 75.0, memory_gbps=4 * 600.0)
        for each in FOUR_AND_FOUR
    )
    found = propose(real)
    assert found is not None
    assert found.recuts[0].replicas > 1
