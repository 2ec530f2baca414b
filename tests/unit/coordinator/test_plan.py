"""A plan that exists can be followed: every rule has a plan that breaks it, made here and read from bytes."""

import math
from dataclasses import dataclass, field

import msgspec
import pytest

from p2pserve.coordinator import Pairing, Phase, Plan, PlanError, Replica, Stage


def stage(peer: str, first: int = 0, last: int = 8, tp: int = 1) -> Stage:
    return Stage(peer=peer, tp=tp, first_layer=first, last_layer=last)


def replica(name: str, phase: Phase, *stages: Stage) -> Replica:
    return Replica(id=name, phase=phase, stages=stages or (stage(name),))


def pair(prefill: str, decode: str, weight: float = 1.0) -> Pairing:
    return Pairing(prefill=prefill, decode=decode, weight=weight)


@dataclass(frozen=True)
class Draft:
    """The parts of a plan, good unless said otherwise."""

    epoch: int = 3
    version: int = 7
    service: str = "llama"
    replicas: tuple[Replica, ...] = field(
        default_factory=lambda: (
            replica("p", Phase.PREFILL),
            replica("d", Phase.DECODE, stage("d1", 0, 5), stage("d2", 5, 8, tp=2)),
        )
    )
    pairings: tuple[Pairing, ...] = field(default_factory=lambda: (pair("p", "d"),))
    codec: str = "kv4"

    def plan(self) -> Plan:
        return Plan(
            epoch=self.epoch,
            version=self.version,
            service=self.service,
            replicas=self.replicas,
            pairings=self.pairings,
            codec=self.codec,
            why=(),
        )


P, D, M = replica("p", Phase.PREFILL), replica("d", Phase.DECODE), replica("m", Phase.MIXED)


@pytest.mark.parametrize(
    ("draft", "text"),
    [
        (Draft(epoch=-1), "epoch"),
        (Draft(version=-1), "version"),
        (Draft(service=""), "service"),
        (Draft(codec=""), "codec"),
        (Draft(replicas=()), "replicas is empty"),
        (Draft(replicas=(P, P)), "p twice"),
        (Draft(replicas=(P, replica("d", Phase.DECODE, stage("p")))), "box p is in replicas p and d"),
        (Draft(replicas=(P, replica("d", Phase.DECODE, stage("d", 0, 9)))), "9 layers"),
        (Draft(replicas=(P,)), "no replica of the plan decodes"),
        (Draft(replicas=(D,)), "no replica of the plan prefills"),
        (Draft(pairings=()), "sum to 0"),
        (Draft(pairings=(pair("p", "d", 0.5),)), "sum to 0.5"),
        (Draft(pairings=(pair("p", "d", 0.5), pair("p", "d", 0.5))), "there twice"),
        (Draft(pairings=(pair("p", "x"),)), "does not have"),
        (Draft(pairings=(pair("d", "d"),)), "d does not prefill"),
        (Draft(pairings=(pair("p", "p"),)), "p does not decode"),
    ],
)
def test_a_bad_plan_cannot_exist(draft: Draft, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        draft.plan()


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ((), "no stages"),
        ((stage("a", 1, 8),), "starts at layer 1, expected 0"),
        ((stage("a", 0, 4), stage("b", 5, 8)), "starts at layer 5, expected 4"),
        ((stage("a", 0, 4), stage("a", 4, 8)), "a box twice"),
    ],
)
def test_stages_cover_the_model_without_gap(stages: tuple[Stage, ...], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Replica(id="r", phase=Phase.MIXED, stages=stages)


@pytest.mark.parametrize(
    ("peer", "first", "last", "tp"), [("", 0, 8, 1), ("a", -1, 8, 1), ("a", 8, 8, 1), ("a", 0, 8, 0)]
)
def test_a_bad_stage_cannot_exist(peer: str, first: int, last: int, tp: int) -> None:
    with pytest.raises(PlanError, match="stage"):
        stage(peer, first, last, tp)


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan, math.inf])
def test_a_weight_is_a_share(weight: float) -> None:
    with pytest.raises(PlanError, match="weight"):
        pair("p", "d", weight)


def test_a_replica_needs_a_name() -> None:
    with pytest.raises(PlanError, match="id"):
        replica("", Phase.MIXED, stage("a"))


def test_lookups() -> None:
    plan = Draft().plan()
    assert plan.number == (3, 7)
    assert plan.peers == ("p", "d1", "d2")
    assert plan.layers == 8
    assert [item.id for item in plan.in_phase(Phase.DECODE)] == ["d"]
    assert plan.in_phase(Phase.MIXED) == ()
    assert plan.replica("d") is plan.replica_of("d2") is plan.replicas[1]
    unknown = [plan.replica("x"), plan.replica_of("x"), plan.phase_of("x")]
    assert unknown == [None] * 3
    assert plan.phase_of("d2") is Phase.DECODE
    assert plan.weight("p", "d") == 1.0
    assert plan.weight("d", "p") == 0.0
    second = plan.replicas[1].stages[1]
    assert (second.layers, second.tp) == (3, 2)
    assert plan.replicas[1].head == "d1"


def test_a_mixed_replica_is_paired_with_itself() -> None:
    Draft(replicas=(M,), pairings=(pair("m", "m"),)).plan()  # no error: the plan is valid
    assert M.prefills
    assert M.decodes


@pytest.mark.parametrize(
    ("number", "newer"),
    [((3, 8), True), ((4, 0), True), ((3, 7), False), ((3, 6), False), ((2, 99), False)],
)
def test_newer_than_goes_by_epoch_then_version(number: tuple[int, int], newer: bool) -> None:
    plan = Draft(epoch=number[0], version=number[1]).plan()
    assert plan.newer_than(Draft().plan()) is newer
    assert plan.newer_than(None)


def test_plans_of_two_services_have_no_order() -> None:
    with pytest.raises(PlanError, match="no order"):
        Draft().plan().newer_than(Draft(service="other").plan())


def test_a_plan_crosses_the_wire_unchanged() -> None:
    plan = Draft().plan()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize("change", [{"epoch": -1}, {"replicas": []}, {"codec": 4}, {"pairings": []}])
def test_bytes_that_break_a_rule_are_no_plan(change: dict[str, object]) -> None:
    good = msgspec.to_builtins(Draft().plan())
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | change, type=Plan)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Draft().plan().epoch = 9  # type: ignore[misc]  # the point of the test
