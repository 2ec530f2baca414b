"""Which boxes a run orders to hold the model together, and to part again."""

import msgspec
import pytest

from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.plan import Regrouping, RegroupingStep
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.messages import Advert, NodeStatus
from p2pserve.node.models import WeightSizes
from p2pserve.sdk.chaos.regrouping import GroupChange, choose_groups

from ..client_world import MODEL

LAYERS = 4
HELD = msgspec.structs.replace(
    MODEL,
    shape=msgspec.structs.replace(MODEL.shape, layers=LAYERS),
    weights=WeightSizes(layers=(1,) * LAYERS, embeddings=1, head=1),
)
PHASES = {"a": Phase.PREFILL, "b": Phase.DECODE, "c": Phase.PREFILL, "d": Phase.DECODE, "e": Phase.PREFILL}


def node(peer: str, *, fits: int = LAYERS) -> NodeStatus:
    hardware = Hardware(cores=1, memory_gib=1.0, processor="x")
    advert = Advert(hardware=hardware, draining=False, model=HELD, fits=fits, phase=PHASES[peer])
    return NodeStatus(peer=peer, role="worker", state="alive", address="10.0.0.1:1", rtt_s=None, advert=advert)


def stages(*peers: str) -> tuple[Stage, ...]:
    share = LAYERS // len(peers)
    return tuple(
        Stage(peer=peer, tp=1, first_layer=number * share, last_layer=(number + 1) * share)
        for number, peer in enumerate(peers)
    )


def plan_of(*groups: tuple[Stage, ...], regrouping: Regrouping | None = None) -> Plan:
    replicas = tuple(Replica(id=group[0].peer, phase=Phase.MIXED, stages=group) for group in groups)
    pair = Pairing(prefill=replicas[0].id, decode=replicas[0].id, weight=1.0)
    plan = Plan(epoch=1, version=1, service="m-1", replicas=replicas, pairings=(pair,), codec="raw", why=())
    return msgspec.structs.replace(plan, regrouping=regrouping)


ALONE = plan_of(*(stages(peer) for peer in "abcd"))
NODES = [node(peer) for peer in "abcd"]


def test_two_boxes_of_a_phase_join_with_half_of_the_layers_each() -> None:
    assert choose_groups(ALONE, NODES, "abcd", 0.0) == GroupChange((stages("a", "c"),), ("a", "c"))
    assert choose_groups(ALONE, NODES, "abcd", 0.99) == GroupChange((stages("b", "d"),), ("b", "d"))


@pytest.mark.parametrize("here", ["ab", "cd", "a", ""])
def test_none_do_where_no_two_of_a_phase_are_here(here: str) -> None:
    assert choose_groups(ALONE, NODES, here, 0.0) is None


def test_boxes_that_could_each_hold_the_model_part_again_before_others_join() -> None:
    joined = plan_of(stages("a", "c"), stages("b"), stages("d"))
    assert choose_groups(joined, NODES, "abcd", 0.9) == GroupChange((), ("a", "c"))
    assert choose_groups(joined, NODES, "abd", 0.9) is None, "one of them is away"


def test_boxes_that_are_too_small_stay_together() -> None:
    nodes = [node("a", fits=2), node("c", fits=2), node("b"), node("d"), node("e")]
    plan = plan_of(stages("a", "c"), stages("b"), stages("d"), stages("e"))
    assert choose_groups(plan, nodes, "abcde", 0.0) == GroupChange((stages("b", "d"),), ("b", "d"))


def test_nothing_is_ordered_while_boxes_are_on_their_way_or_have_no_part() -> None:
    under_way = Regrouping(steps=(RegroupingStep(form=(stages("a", "c"),)),))
    assert choose_groups(plan_of(stages("b"), regrouping=under_way), NODES, "abcd", 0.0) is None
    assert choose_groups(plan_of(stages("a"), stages("b")), NODES, "abcd", 0.0) is None
