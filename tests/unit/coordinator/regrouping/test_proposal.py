"""Which other groups a running network is told of, and what they would gain and cost."""

from typing import Any

import msgspec

from p2pserve.coordinator import BoxView, Demand, LinkView, Plan
from p2pserve.coordinator.costs.loading import LoadRates
from p2pserve.coordinator.network_problem import build_network_problem
from p2pserve.coordinator.plan import Pairing, Replica
from p2pserve.coordinator.planning.upper.settings import SearchSettings
from p2pserve.coordinator.regrouping.proposal import propose_regrouping
from p2pserve.coordinator.regrouping.steps import RegroupProposal

from ..networks import KV4, M, box, fast, some_plan

FEW = SearchSettings(steps=60)
LONG = (Demand(requests_s=5.0, arrival_cv=1.0, lengths=((1500, 300),)),)


def propose(
    boxes: list[BoxView], links: tuple[LinkView, ...], plan: Plan | None = None, **more: Any
) -> RegroupProposal | None:
    plan = plan or some_plan(*boxes, links=links, demands=LONG)
    network = build_network_problem(boxes, links, LONG, service="llama", codec=KV4, previous=plan)
    assert network is not None
    return propose_regrouping(network, plan, boxes, search=FEW, **more)


def cramped(peers: str, **changes: Any) -> list[BoxView]:
    """Boxes that hold the model, and KV for two requests or so beside it."""
    return [box(peer, layers=32, kv_tokens=4000, **changes) for peer in peers]


def test_boxes_without_room_for_requests_are_joined_and_that_pays() -> None:
    found = propose(cramped("abcd"), fast(*"abcd"))
    assert found is not None
    assert sorted(len(group) for group in found.groups) == [2, 2]
    expected = found.regrouping
    assert expected.after > 1.5 * expected.before
    assert expected.after > found.light
    assert len(expected.steps) == len(found.meanwhile) == len(found.reload_s) == 2
    # Two of four boxes go on while the others load.
    assert all(0.3 * expected.before < rate < expected.before for rate in found.meanwhile)
    assert found.pays


def test_a_reload_beside_what_boxes_serve_pays_where_one_instead_of_it_does_not() -> None:
    slow = LoadRates(disk_gb_s=0.005)  # 24 minutes for each of two steps
    away, beside = (propose(cramped("abcd", beside=room), fast(*"abcd"), rates=slow) for room in (15, 16))
    short = propose([*cramped("abc", beside=16), *cramped("d", beside=15)], fast(*"abcd"), rates=slow)
    assert away is not None
    assert beside is not None
    assert short is not None
    assert beside.pays
    assert not away.pays
    assert not short.pays  # one box without room, and its group loads instead of serving
    # What is served while they go over is as little, and what an order of the coordinator's own must not fall below.
    assert msgspec.structs.replace(beside, pays=False) == away


def test_a_box_that_keeps_its_part_stays_as_it_is_and_its_share_is_counted() -> None:
    whole, around = (propose(cramped("abcd"), fast(*"abcd"), keeping=keeping) for keeping in ((), ("a",)))
    assert whole is not None
    assert around is not None
    assert next(group for group in around.groups if any(stage.peer == "a" for stage in group))[0].layers == 32
    assert not any("a" in step.boxes for step in around.regrouping.steps)
    assert 0.0 < around.regrouping.before < around.regrouping.after < whole.regrouping.after
    assert min(around.meanwhile) > 0.0
    assert propose(cramped("abcd"), fast(*"abcd"), keeping="abcd") is None
    assert propose(cramped("abcd"), fast(*"abcd"), keeping=("a", "b", "c")) is None  # one alone joins nobody


def test_the_same_network_is_proposed_the_same() -> None:
    one, two = (propose(cramped("abcd"), fast(*"abcd")) for _ in range(2))
    assert one is not None
    assert one == two


def test_at_few_requests_there_is_nothing_to_gain() -> None:
    assert propose(cramped("abcd"), fast(*"abcd"), rate=0.1) is None


def test_boxes_with_room_stay_alone() -> None:
    assert propose([box(peer) for peer in "abc"], fast(*"abc")) is None


def test_boxes_far_from_each_other_stay_alone() -> None:
    far = tuple(LinkView(source=one, target=two, rtt_s=2.0, gbps=0.01) for one in "ab" for two in "ab" if one != two)
    assert propose(cramped("ab"), far) is None


def test_a_reload_that_takes_longer_than_it_could_win_back_does_not_pay() -> None:
    slow = LoadRates(disk_gb_s=0.001, download_gbps=0.001)
    found = propose(cramped("abcd"), fast(*"abcd"), rates=slow)
    assert found is not None
    assert not found.pays
    assert min(found.reload_s) > 3600.0


def test_a_network_that_is_on_its_way_already_is_left_alone() -> None:
    boxes, links = cramped("abcd"), fast(*"abcd")
    plan = some_plan(*boxes, links=links, demands=LONG)
    found = propose(boxes, links, plan)
    assert found is not None
    assert propose(boxes, links, msgspec.structs.replace(plan, regrouping=found.regrouping)) is None


def test_pipelines_that_need_not_be_are_split() -> None:
    """They were made when there was room for little."""
    boxes, links = cramped("abcd"), fast(*"abcd")
    found = propose(boxes, links)
    assert found is not None
    replicas = tuple(Replica(id=group[0].peer, phase=M, stages=group) for group in found.groups)
    pairings = tuple(Pairing(prefill=each.id, decode=each.id, weight=1.0 / len(replicas)) for each in replicas)
    joined = msgspec.structs.replace(some_plan(*boxes), replicas=replicas, pairings=pairings)
    parts = {stage.peer: group for group in found.groups for stage in group}
    roomy = [box(peer, layers=32, kv_tokens=300_000, stages=parts[peer], phase=M) for peer in "abcd"]
    far = tuple(
        LinkView(source=one, target=two, rtt_s=0.3, gbps=0.05) for one in "abcd" for two in "abcd" if one != two
    )
    split = propose(roomy, far, joined)
    assert split is not None
    assert sorted(len(group) for group in split.groups) == [1, 1, 1, 1]


def test_emulated_boxes_are_joined_only_where_all_are_to_do_both_phases() -> None:
    """Stages that are emulated transfer no KV to others."""
    assert propose(cramped("abcd", emulated=True), fast(*"abcd")) is None
    pinned = cramped("abc", emulated=True, phase=M)
    assert propose([*pinned, *cramped("d", emulated=True)], fast(*"abcd")) is None
    found = propose([*pinned, *cramped("d", emulated=True, phase=M)], fast(*"abcd"))
    assert found is not None
    assert sorted(len(group) for group in found.groups) == [2, 2]
