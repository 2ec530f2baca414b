"""How much work a gateway gives to engines at once, by what they tell."""

import msgspec
import pytest

from p2pserve.bootstrap import PeerId
from p2pserve.coordinator import Pairing, Phase, Plan, Replica, Stage
from p2pserve.coordinator.costs.model_shape import ModelShape
from p2pserve.node.box.hardware import Hardware
from p2pserve.node.engine.protocol import EngineStats
from p2pserve.node.messages import Advert, EngineAdvert
from p2pserve.node.models import ModelInfo, WeightSizes
from p2pserve.node.requests.engine_room import EFFICIENCY, UNTOLD_REQUESTS, measure_room
from p2pserve.node.settings import ClientLimits
from p2pserve.node.view import NetworkView

SERVICE = "tiny-1234"
MODEL = ModelInfo(
    service=SERVICE,
    shape=ModelShape(
        name="tiny", layers=2, hidden=128, heads=2, kv_heads=2, head_dim=64, intermediate=128, vocabulary=4096
    ),
    max_model_len=512,
    weights=WeightSizes(layers=(1, 1), embeddings=1, head=1),
)
ONE, TWO = PeerId("one"), PeerId("two")
LIMITS = ClientLimits(queued_s=0.5, share=7.0)
PREFILLED = 0.5 * EFFICIENCY * 1e12 / (2 * MODEL.shape.layers * MODEL.shape.active_layer_parameters)


def advert(*, requests: int = 16, state: str = "ready", waiting: int | None = None) -> Advert:
    engine = EngineAdvert(state=state, tflops=1.0, memory_gbps=1.0, kv_tokens=1000, max_requests=requests, starts=1)
    stats = EngineStats(running=0, waiting=waiting, kv_usage=0.0, kv_free_tokens=1) if waiting is not None else None
    hardware = Hardware(cores=1, memory_gib=1.0, processor="x")
    return Advert(hardware=hardware, draining=False, model=MODEL, engine=engine, stats=stats)


def plan_of(service: str = SERVICE, **phases: Phase) -> Plan:
    replicas = tuple(
        Replica(id=peer, phase=phase, stages=(Stage(peer=peer, tp=1, first_layer=0, last_layer=2),))
        for peer, phase in phases.items()
    )
    pairs = [(p.id, d.id) for p in replicas for d in replicas if p.prefills and d.decodes]
    pairings = tuple(Pairing(prefill=p, decode=d, weight=1 / len(pairs), prefill_share=1.0) for p, d in pairs)
    return Plan(epoch=1, version=1, service=service, replicas=replicas, pairings=pairings, codec="raw", why=())


def view_of(plan: Plan | None, **adverts: Advert) -> NetworkView:
    plans = {plan.service: plan} if plan is not None else {}
    return NetworkView(adverts={PeerId(peer): each for peer, each in adverts.items()}, plans=plans)


@pytest.mark.parametrize(
    "view",
    [
        view_of(None, one=advert()),
        view_of(plan_of("other", one=Phase.MIXED), one=advert()),
        view_of(plan_of(one=Phase.MIXED)),
        view_of(plan_of(one=Phase.MIXED), one=advert(state="restarting")),
    ],
)
def test_without_a_replica_that_serves_there_is_no_room_to_speak_of(view: NetworkView) -> None:
    assert measure_room(view, SERVICE, LIMITS, {}, mixes_phases=False) is None


def test_a_mixed_replica_counts_for_both() -> None:
    room = measure_room(
        view_of(plan_of(one=Phase.MIXED), one=advert()), SERVICE, LIMITS, {}, mixes_phases=False, gateways=1.0
    )
    assert room is not None
    assert (room.requests, room.size, room.share) == (16, 1000, 7.0)
    assert room.unstarted == pytest.approx(PREFILLED)
    assert (room.mixed, room.replicas) == (1, 1)


def test_replicas_of_a_phase_count_for_that() -> None:
    plan = plan_of(one=Phase.PREFILL, two=Phase.DECODE, three=Phase.DECODE)
    room = measure_room(
        view_of(plan, one=advert(requests=4), two=advert(), three=advert(requests=5)),
        SERVICE,
        LIMITS,
        {},
        mixes_phases=False,
    )
    assert room is not None
    assert (room.requests, room.size) == (21, 2000)
    assert room.unstarted == pytest.approx(PREFILLED)
    assert (room.mixed, room.replicas) == (0, 1)


def test_where_only_one_phase_is_left_its_replicas_do_everything() -> None:
    plan = plan_of(one=Phase.PREFILL, two=Phase.DECODE)
    alone = measure_room(view_of(plan, one=advert(requests=4)), SERVICE, LIMITS, {}, mixes_phases=False)
    assert alone is not None
    assert alone.requests == 4
    other = measure_room(view_of(plan, two=advert()), SERVICE, LIMITS, {}, mixes_phases=False)
    assert other is not None
    assert other.unstarted == pytest.approx(PREFILLED)


def test_what_other_gateways_have_there_is_not_room() -> None:
    for waiting, left in ((5, 11), (16, 1), (1000, 1)):
        view = view_of(plan_of(one=Phase.MIXED), one=advert(waiting=waiting))
        view.weigh_reports({})
        room = measure_room(view, SERVICE, LIMITS, {}, mixes_phases=False)
        assert room is not None
        assert room.requests == left


def test_an_engine_of_an_earlier_release_does_not_tell_its_places() -> None:
    room = measure_room(
        view_of(plan_of(one=Phase.MIXED), one=advert(requests=0)), SERVICE, LIMITS, {}, mixes_phases=False
    )
    assert room is not None
    assert room.requests == UNTOLD_REQUESTS


def test_the_stages_of_a_replica_compute_together() -> None:
    stages = tuple(Stage(peer=peer, tp=1, first_layer=at, last_layer=at + 1) for at, peer in enumerate((ONE, TWO)))
    plan = msgspec.structs.replace(
        plan_of(one=Phase.MIXED), replicas=(Replica(id=ONE, phase=Phase.MIXED, stages=stages),)
    )
    here = advert()
    assert here.engine is not None
    head = msgspec.structs.replace(here, engine=msgspec.structs.replace(here.engine, stages=stages))
    room = measure_room(view_of(plan, one=head, two=advert()), SERVICE, LIMITS, {}, mixes_phases=False)
    assert room is not None
    assert room.requests == 16
    assert room.unstarted == pytest.approx(2 * PREFILLED)


def test_a_pipeline_starts_a_prompt_for_each_of_its_stages() -> None:
    stages = tuple(Stage(peer=str(peer), tp=1, first_layer=at, last_layer=at + 1) for at, peer in enumerate((ONE, TWO)))
    pipeline = Replica(id=str(ONE), phase=Phase.MIXED, stages=stages)
    pairing = Pairing(prefill=pipeline.id, decode=pipeline.id, weight=1.0, prefill_share=1.0)
    plan = Plan(epoch=1, version=1, service=SERVICE, replicas=(pipeline,), pairings=(pairing,), codec="raw", why=())
    head = advert()
    assert head.engine is not None
    head = msgspec.structs.replace(head, engine=msgspec.structs.replace(head.engine, stages=stages))
    room = measure_room(view_of(plan, one=head, two=advert()), SERVICE, LIMITS, {}, mixes_phases=False)
    assert room is not None
    assert (room.mixed, room.replicas) == (1, 2)


def test_what_other_gateways_have_prompts_computed_is_told_of_the_replica_that_is_free_first() -> None:
    def busy(tokens: int) -> Advert:
        stats = EngineStats(running=1, waiting=0, kv_usage=0.0, kv_free_tokens=1, pending_prefill_tokens=tokens)
        return msgspec.structs.replace(advert(), stats=stats)

    view = view_of(plan_of(one=Phase.MIXED, two=Phase.MIXED), one=busy(4000), two=busy(1000))
    view.weigh_reports({})
    room = measure_room(view, SERVICE, LIMITS, {}, mixes_phases=False)
    assert room is not None
    assert room.backlog_s == pytest.approx(1000 * 0.5 / PREFILLED)
    assert room.start_s(100) == pytest.approx(100 * 0.5 / PREFILLED)
    assert (
        measure_room(
            view_of(plan_of(one=Phase.MIXED), one=advert()), SERVICE, LIMITS, {}, mixes_phases=False, gateways=1.0
        )
        is not None
    )


def test_prompts_of_services_that_share_its_gpus_keep_a_replica_from_being_free() -> None:
    def sharing(tokens: int) -> Advert:
        stats = EngineStats(running=1, waiting=0, kv_usage=0.0, kv_free_tokens=1, pending_prefill_tokens=tokens)
        return msgspec.structs.replace(advert(), stats=stats, beside=("one", "two"))

    view = view_of(plan_of(one=Phase.MIXED), one=sharing(1000), two=sharing(3000))
    view.weigh_reports({})
    room = measure_room(view, SERVICE, LIMITS, {}, mixes_phases=False)
    assert room is not None
    assert room.backlog_s == pytest.approx(4000 * 0.5 / PREFILLED)


def test_a_replica_is_as_fast_as_its_profile_says_where_there_is_one() -> None:
    view = view_of(plan_of(one=Phase.MIXED, two=Phase.MIXED), one=advert(), two=advert())
    alone = measure_room(
        view_of(plan_of(one=Phase.MIXED), one=advert()), SERVICE, LIMITS, {}, mixes_phases=False, gateways=1.0
    )
    room = measure_room(view, SERVICE, LIMITS, {"one": 100.0}, mixes_phases=False)
    assert room is not None
    assert alone is not None
    assert room.rate == pytest.approx(100.0 + alone.rate)
    assert room.unstarted == pytest.approx(LIMITS.queued_s * room.rate)
